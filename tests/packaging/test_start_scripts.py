"""jobs/start_*.py: what each role's script says that it needs, without running it."""

import ast
import re
import tomllib
from importlib.metadata import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from bucketrl.jobs.arguments import parse

JOBS = Path(__file__).parents[2] / "jobs"
ROLES = ("proxy", "rollout", "learner")
"""Each has a command and an extra of its name."""


def inline_metadata(source: str) -> dict[str, object]:
    """The PEP 723 block, by the expression that the PEP gives."""
    [match] = re.finditer(r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$", source)
    assert match["type"] == "script"
    lines = match["content"].splitlines(keepends=True)
    return tomllib.loads("".join(line[2:] if line.startswith("# ") else line[1:] for line in lines))


def test_there_is_a_script_for_each_role() -> None:
    assert {path.stem for path in JOBS.glob("start_*.py")} == {f"start_{role}" for role in ROLES}


@pytest.mark.parametrize("role", ROLES)
class TestEachScript:
    def test_it_names_its_roles_packages(self, role: str) -> None:
        """One requirement: this package with the role's extra and the buckets that machines can share."""
        block = inline_metadata((JOBS / f"start_{role}.py").read_text())
        assert SpecifierSet(str(block["requires-python"])) == SpecifierSet(
            metadata("bucketrl")["Requires-Python"]
        )
        dependencies = block["dependencies"]
        assert isinstance(dependencies, list)
        [requirement] = map(Requirement, dependencies)
        assert requirement.name == "bucketrl"
        assert requirement.extras == {role, "s3", "hf"}
        assert requirement.extras <= set(metadata("bucketrl").get_all("Provides-Extra") or [])

    def test_it_can_be_imported_by_the_processes_that_an_engine_starts(self, role: str) -> None:
        """They import the main module again: without a guard each would start another worker."""
        tree = ast.parse((JOBS / f"start_{role}.py").read_text())
        [guard] = [node for node in tree.body if isinstance(node, ast.If)]
        assert ast.unparse(guard.test) == "__name__ == '__main__'"
        others = [node for node in tree.body if node is not guard]
        assert all(isinstance(node, ast.Import | ast.ImportFrom | ast.Expr) for node in others)

    def test_the_command_in_its_text_parses(self, role: str) -> None:
        """What the docstring tells people to type is what the command takes."""
        text = ast.get_docstring(ast.parse((JOBS / f"start_{role}.py").read_text()))
        assert text is not None
        [line] = [line for line in text.splitlines() if line.strip().startswith("uv run")]
        arguments = line.split(f"start_{role}.py", 1)[1].split()
        assert parse([role, *arguments]).bucket.startswith("s3://")
        for variable in ("BUCKETRL_WORKER_TOKEN", "AWS_ACCESS_KEY_ID", "HF_TOKEN"):
            assert variable in text
