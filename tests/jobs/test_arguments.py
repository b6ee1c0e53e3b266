"""Wrong arguments are one line and exit code 2."""

import pytest

from bucketrl.jobs.arguments import parse


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "x.toml", "--workers", "0"], ("--workers", "'0'", "above 0")),
        (["run", "x.toml", "--port", "70000"], ("--port", "70000")),
        (["run", "x.toml", "--engine", "jax"], ("--engine", "jax", "transformers")),
        (["run"], ("config",)),
        (["rollout", "--bucket", "b"], ("--proxy",)),
        (["rollout", "--bucket", "b", "--proxy", "p", "--worker-id", "A b"], ("--worker-id", "'A b'")),
        (["rollout", "--bucket", "b", "--proxy", "p", "--grace", "nan"], ("--grace", "'nan'")),
        (["rollout", "--bucket", "b", "--proxy", "p", "--gpu-memory-utilization", "1.5"], ("'1.5'",)),
        (["evaluate", "--bucket", "b", "--version", "newest"], ("--version", "latest")),
        (["learner", "--bucket", "b", "--keep", "-1"], ("--keep", "'-1'")),
        (["gc", "b", "--keep", "0"], ("--keep", "'0'", "above 0")),
        (["status"], ("--proxy", "--bucket")),
        (["rum", "x.toml"], ("rum", "run")),
        ([], ("COMMAND",)),
    ],
)
def test_one_line_names_the_argument(
    arguments: list[str], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """No usage text in front: the line says what is wrong and where help is."""
    with pytest.raises(SystemExit) as stopped:
        parse(arguments)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert said.count("\n") == 1
    assert "--help" in said
    for word in words:
        assert word in said


def test_versions_are_numbers_or_the_newest() -> None:
    arguments = parse(["evaluate", "--bucket", "b", "--version", "0", "--version", "latest"])
    assert arguments.version == [0, None]


def test_every_command_names_a_function_that_exists() -> None:
    """The table of commands cannot point to nowhere: it is only followed when a command runs."""
    import importlib

    commands = {
        "run": ["x"], "create": ["x", "--bucket", "b"], "proxy": ["--bucket", "b"],
        "rollout": ["--bucket", "b", "--proxy", "p"], "learner": ["--bucket", "b"], "doctor": ["x"],
        "evaluate": ["--bucket", "b"], "status": ["--bucket", "b"], "audit": ["b"], "gc": ["b"], "report": ["b"],
        "replay": ["a", "b"],
    }  # fmt: skip
    for verb, rest in commands.items():
        module, _, function = parse([verb, *rest]).command.partition(":")
        assert callable(getattr(importlib.import_module(f"bucketrl.jobs.{module}"), function))
