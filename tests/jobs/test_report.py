"""Summary, plot and record of a run, from its bucket alone."""

import json
from pathlib import Path
from uuid import uuid4

import pytest
from tests.bucket.builders import Learner, group, run_record, skip, upload

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import EvaluationRecord, RunRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.jobs import report

STEPS = 12
REWARDS = [0.1, 0.1, 0.2, 0.3, 0.3, 0.4, 0.5, 0.6, 0.7, 0.7, 0.8, 0.9]


@pytest.fixture
def store() -> Store:
    return open_store(f"memory://{uuid4().hex}")


def train(store: Store, steps: int = STEPS) -> RunRecord:
    """A run of `steps` steps of two groups each; the second step also drops a stale group."""
    run = run_record(steps=STEPS)
    learner = Learner(store, run, "a")
    learner.start()
    learner.commit()
    ordinal = 0
    for step in range(1, steps + 1):
        groups = [upload(store, group(ordinal + i)) for i in range(2)]
        ordinal += 2
        skipped = []
        if step == 2:
            skipped = [skip(upload(store, group(ordinal)), "stale")]
            ordinal += 1
        metrics = {
            "reward_mean": REWARDS[step - 1],
            "staleness_mean": 0.5,
            "staleness_max": 1.0,
            "tokens": 100.0,
        }
        learner.commit(learner.write_batch(groups, skipped), metrics=metrics)
    return run


def evaluated(store: Store, version: int, reward: float, problems: int = 200) -> None:
    record = EvaluationRecord(
        run_id="demo-4f1c2a", version=version, problems=problems, temperature=1.0, mean_reward=reward,
        engine="e", seconds=1.0, written_at="t",
    )  # fmt: skip
    store.put(keys.evaluation(version, f"heldout-{problems}"), record.encode())


def test_figures_are_those_of_the_benchmarks_table(store: Store) -> None:
    """First and last five steps, held-out before and after; each under its agreed name."""
    run = train(store)
    evaluated(store, 0, 0.25)
    evaluated(store, STEPS, 0.75)
    evaluated(store, STEPS, 0.99, problems=8)  # a quick look counts less than the evaluation
    figures = report.summarise(store, run).figures()
    assert figures["reward_first5"] == pytest.approx(0.2)
    assert figures["reward_last5"] == pytest.approx(0.74)
    assert (figures["heldout_before"], figures["heldout_after"]) == (0.25, 0.75)
    assert (figures["steps"], figures["heldout_problems"]) == (STEPS, 200)
    assert (figures["groups_trained"], figures["groups_skipped"], figures["dropped"]) == (2 * STEPS, 1, 1)
    assert (figures["staleness_mean"], figures["staleness_max"]) == (0.5, 1.0)
    assert figures["tokens"] == 100 * STEPS


def test_a_figure_that_was_not_measured_is_absent(store: Store) -> None:
    """Nine steps have no first five and last five that are apart; no evaluation, no held-out figure."""
    figures = report.summarise(store, train(store, 9)).figures()
    assert not {"reward_first5", "reward_last5", "heldout_before", "heldout_after"} & set(figures)


def test_one_evaluation_is_no_comparison(store: Store) -> None:
    run = train(store)
    evaluated(store, STEPS, 0.75)
    assert "heldout_after" not in report.summarise(store, run).figures()


def test_a_foreign_evaluation_is_left_out(store: Store) -> None:
    run = train(store)
    evaluated(store, 0, 0.25)
    store.put(keys.evaluation(3, "foreign"), b"not json")
    assert [item.version for item in report.summarise(store, run).evaluations] == [0]


def test_a_run_without_a_step_has_no_summary(store: Store) -> None:
    with pytest.raises(UserError, match="no optimizer step yet"):
        report.summarise(store, run_record())


def test_the_text_has_the_figures(store: Store) -> None:
    run = train(store)
    evaluated(store, 0, 0.25)
    evaluated(store, STEPS, 0.75)
    text = report.text(report.summarise(store, run))
    for words in (
        "0.200",
        "0.740",
        "version 0 0.250",
        "version 12 0.750",
        "200 problems",
        "bound 1",
        "1 of them",
    ):
        assert words in text, words


def test_the_plot_is_a_png(store: Store, tmp_path: Path) -> None:
    """Also where some steps lack a metric, and in a folder that does not exist yet."""
    run = train(store)
    evaluated(store, 0, 0.25)
    evaluated(store, STEPS, 0.75)
    path = tmp_path / "plots" / "reward.png"
    report.plot(report.summarise(store, run), path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size > 10_000


def test_a_record_has_what_it_takes_to_repeat_it(store: Store, tmp_path: Path) -> None:
    summary = report.summarise(store, train(store))
    path = report.record(
        summary, "demo", command="bucketrl run x", notes="quiet", folder=tmp_path / "results"
    )
    assert path == tmp_path / "results" / "demo.json"
    document = json.loads(path.read_text())
    for field in ("name", "when", "commit", "machine", "command", "seeds", "figures", "notes"):
        assert document[field] or document[field] == [0], field
    assert document["figures"] == summary.figures()
    assert document["reward_per_step"] == REWARDS
    assert "cores" in document["machine"]
