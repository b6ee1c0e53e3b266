"""`bucketrl gc`: what it says, what it removes, and what the other commands say afterwards."""

from pathlib import Path

import pytest
from tests.bucket.builders import Learner, group, run_record, upload
from tests.jobs.worlds import snapshot

from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.jobs.cli import main
from bucketrl.jobs.replay import replay


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    """A run of 10 steps; at least 3 commits must be kept."""
    store = open_store(str(tmp_path / "bucket"))
    learner = Learner(store, run_record(), "a")
    store.put(keys.RUN, learner.run.encode())
    learner.start()
    for step in range(11):
        ref = upload(store, group(step, version=max(0, step - 1))) if step else None
        learner.commit(learner.write_batch([ref]) if ref else None)
    return tmp_path / "bucket"


def test_a_dry_run_shows_and_removes_nothing(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(bucket)
    assert main(["gc", str(bucket), "--keep", "4", "--dry-run"]) == 0
    assert snapshot(bucket) == before
    said = capsys.readouterr().out.splitlines()
    # Of steps 1 to 6: 2 files of an adapter, a batch and a group each; the checkpoints of steps 1 to 8.
    assert said[0] == "would remove 32 objects, 0.0 MB; steps 1 to 6 would be collected"
    assert [line.split()[:2] for line in said[1:]] == [
        ["batches/", "6"], ["checkpoints/", "8"], ["policy/", "12"], ["trajectories/", "6"],
    ]  # fmt: skip


def test_it_removes_and_the_audit_says_what_is_gone(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(bucket), "--keep", "4"]) == 0
    assert "removed 32 objects" in capsys.readouterr().out
    assert main(["audit", str(bucket)]) == 0
    said = capsys.readouterr().out
    assert "garbage collection: steps 1 to 6; 24 objects that they name are gone" in said
    assert main(["gc", str(bucket), "--keep", "4"]) == 0
    assert "removed 0 objects" in capsys.readouterr().out


def test_too_few_to_keep_is_one_line(bucket: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(bucket)
    assert main(["gc", str(bucket), "--keep", "2"]) == 2
    assert snapshot(bucket) == before
    assert capsys.readouterr().err == (
        "error: --keep 2: a run with max_staleness 1 needs 3 commits or more\n"
    )


def test_a_bucket_without_a_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gc", str(tmp_path / "nothing")]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_a_collected_run_cannot_be_replayed_and_says_so(bucket: Path) -> None:
    main(["gc", str(bucket), "--keep", "4"])
    with pytest.raises(UserError, match="steps 1 to 6 trained on, and a replay begins with step 1"):
        replay(open_store(str(bucket)), MemoryStore(), run_record(), model_path=bucket, progress=print)
