"""`bucketrl doctor`: a configuration is checked before a run, and its task measured."""

from pathlib import Path

import pytest

from bucketrl.jobs.cli import main

TINY = str(Path(__file__).parents[2] / "examples" / "tiny.toml")


def test_doctor_checks_without_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    """Configuration, model and task load; memory is told; nothing is started."""
    assert main(["doctor", TINY]) == 0
    said = capsys.readouterr().out
    assert "the configuration, the model and the task load" in said
    assert "an engine needs at least" in said
    assert "the learner needs at least" in said
    assert "--probe-task" in said


@pytest.mark.slow
def test_doctor_measures_the_signal_of_the_demo(capsys: pytest.CaptureFixture[str]) -> None:
    """With the real engine, prompts and rewards: the demo's task teaches its model."""
    assert main(["doctor", TINY, "--probe-task", "--engine", "transformers", "--prompts", "8"]) == 0
    said = capsys.readouterr().out
    assert "8 groups, 32 completions, 0 dropped" in said
    assert "mixed groups" in said
    assert "signal: none" not in said


@pytest.mark.slow
def test_doctor_finds_no_signal_where_every_answer_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sums that the model has never seen: exit code 1, and a line of advice."""
    path = tmp_path / "hard.toml"
    path.write_text(Path(TINY).read_text().replace("terms = 2", "terms = 7"))
    assert main(["doctor", str(path), "--probe-task", "--engine", "transformers", "--prompts", "8"]) == 1
    assert "signal: none; too hard" in capsys.readouterr().out
