"""What is installed, and what the command loads before it does anything."""

import json
import subprocess
import sys
import tomllib
from importlib.metadata import distributions, version
from itertools import chain
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "cpu.txt"
HEAVY = (
    "torch",
    "vllm",
    "transformers",
    "peft",
    "numpy",
    "pydantic",
    "httpx",
    "fastapi",
    "matplotlib",
    "rich",
)

BROKEN = {"torchvision", "torchaudio", "torchcodec"}


def locked() -> dict[str, str]:
    """Package name -> pinned version."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    pins = {}
    for line in lines:
        requirement = Requirement(line)
        [pin] = requirement.specifier
        assert pin.operator == "==", f"{line}: not a pin"
        pins[canonicalize_name(requirement.name)] = pin.version
    return pins


def installed() -> dict[str, str]:
    return {canonicalize_name(found.metadata["Name"]): found.version for found in distributions()}


def test_the_lock_is_sorted_and_names_nothing_twice() -> None:
    """Two people's changes of the lock do not meet in the same place by accident."""
    lines = [line for line in LOCK.read_text().splitlines() if line and not line.startswith("#")]
    names = [canonicalize_name(Requirement(line).name) for line in lines]
    assert lines == sorted(lines)
    assert len(names) == len(set(names))


def test_the_environment_is_the_lock() -> None:
    """Every pin is installed in its version: what the tests show holds for what `make setup` makes."""
    have = installed()
    wrong = {name: (pin, have.get(name)) for name, pin in locked().items() if have.get(name) != pin}
    assert not wrong


def test_every_requirement_of_ours_is_locked_and_satisfied() -> None:
    """An extra cannot name a package that the lock lacks, nor one in a version that it forbids."""
    pins = locked()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in [*project["dependencies"], *chain(*project["optional-dependencies"].values())]:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        # Ourselves; installed by a rule of its own; only for GPUs; what cannot be beside the CPU's engine.
        if name in ("bucketrl", "torch", "vllm", "flash-attn-4", "verifiers"):
            continue
        assert name in pins, text
        assert requirement.specifier.contains(pins[name]), f"{text}: locked is {pins[name]}"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
def test_the_lock_is_whole_for_both_pythons(python: str) -> None:
    """Installed without dependency resolution, it must hold all that its packages require, in versions that
    they allow. Exceptions: torch, which is installed first, and what must stay out."""
    environment = {**default_environment(), "python_version": python, "python_full_version": f"{python}.9"}
    pins = locked() | {"torch": version("torch")}
    wrong = []
    for found in distributions():
        if canonicalize_name(found.metadata["Name"]) not in pins:
            continue
        for text in found.requires or []:
            requirement = Requirement(text)
            name = canonicalize_name(requirement.name)
            if requirement.marker and not requirement.marker.evaluate({**environment, "extra": ""}):
                continue
            if name not in BROKEN and not requirement.specifier.contains(
                pins.get(name, ""), prereleases=True
            ):
                wrong.append(f"{found.metadata['Name']} wants {text}, locked is {pins.get(name)}")
    assert not wrong


def test_packages_that_break_beside_the_cpu_build_of_torch_are_absent() -> None:
    """PyPI's torchvision, torchaudio and torchcodec are CUDA builds: with them, `import peft` fails."""
    assert not BROKEN & set(installed())
    assert not BROKEN & set(locked())


def test_help_loads_nothing_heavy() -> None:
    """`bucketrl --help` and every command's help answer at once, on a box that has only the proxy's packages."""
    code = (
        "import contextlib, io, json, sys\n"
        "from bucketrl.jobs.cli import main\n"
        "for arguments in (['--help'], ['run', '--help'], ['learner', '--help'], ['audit', '--help']):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):\n"
        "        main(arguments)\n"
        "    assert 'usage: bucketrl' in text.getvalue()\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = {name.partition(".")[0] for name in json.loads(done.stdout)}
    assert not loaded & set(HEAVY)


def test_help_answers_at_once() -> None:
    """Under 0.3 s of processor time; wall time would measure the machine's other work."""
    code = "import sys, time\nfrom bucketrl.jobs.cli import main\ntry: main(['--help'])\n"
    code += "except SystemExit: print(time.process_time(), file=sys.stderr)"
    best = min(
        float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr)
        for _ in range(3)
    )
    assert best < 0.3


def test_import_rules_hold() -> None:
    """Roles never import each other; the foundations import nothing of ours (`[tool.importlinter]`)."""
    done = subprocess.run(
        [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    assert "0 broken" in done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.name)
def test_every_example_loads(path: Path) -> None:
    """Each TOML file under examples/ is a valid configuration."""
    from bucketrl.jobs.config_file import load_config

    assert load_config(path).name


def test_there_are_examples() -> None:
    """Otherwise the test above would hold for nothing."""
    names = {path.name for path in (ROOT / "examples").glob("*.toml")}
    assert {"tiny.toml", "smollm2.toml"} <= names
