"""How much memory a role needs is said before it loads anything, and what cannot fit is refused."""

import json
from pathlib import Path

import pytest
from tests.jobs.worlds import save_model_files

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.jobs import memory_check

GIB = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model_files(tmp_path)


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine whose memory the test sets."""
    memory = [16 * GIB]
    monkeypatch.setattr(memory_check, "_memory", lambda: (memory[0], "this machine"))
    return memory


def config(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate(
        {"name": "x", "model": {"id": "m"}, "task": {"kind": "arithmetic"}} | sections
    )


def test_a_tiny_model_needs_what_its_libraries_need(folder: Path) -> None:
    assert memory_check.check_engine(config(), folder) == (
        "an engine needs at least 2.0 of the 16.0 GiB of this machine"
    )
    assert memory_check.check_learner(config(), folder).startswith("the learner needs at least 0.")


def test_what_cannot_fit_is_refused_with_a_way_out(folder: Path, machine: list[int]) -> None:
    machine[0] = 1 * GIB
    with pytest.raises(UserError, match=r"an engine needs at least 2\.0 GiB and this machine has 1\.0 GiB"):
        memory_check.check_engine(config(), folder)


def test_the_roles_of_one_machine_are_added_up(folder: Path, machine: list[int]) -> None:
    """Each fits alone, but not all together."""
    machine[0] = 4 * GIB
    memory_check.check_all(config(), folder, workers=1, kv_cache_bytes=None)
    with pytest.raises(UserError, match=r"2 engine\(s\) and the learner"):
        memory_check.check_all(config(), folder, workers=2, kv_cache_bytes=None)


def test_a_cache_that_the_user_asked_for_counts(folder: Path, machine: list[int]) -> None:
    machine[0] = 3 * GIB
    memory_check.check_engine(config(), folder)
    with pytest.raises(UserError):
        memory_check.check_engine(config(), folder, kv_cache_bytes=2 * GIB)


def test_a_batch_smaller_than_the_token_budget_sets_the_need(folder: Path, machine: list[int]) -> None:
    """A generous budget must not refuse a run whose steps can never fill it."""
    machine[0] = 2 * GIB
    small = {"steps": 1, "groups_per_step": 1}
    generous = config(
        algorithm=small,
        sampling={"group_size": 2, "max_tokens": 8},
        rollout={"max_model_len": 16},
        learner={"tokens_per_microbatch": 10**9},
    )
    memory_check.check_learner(generous, folder)


def test_an_architecture_in_other_words_is_not_refused(folder: Path, machine: list[int]) -> None:
    """Unknown is unknown: it is said, and nothing is guessed."""
    machine[0] = 1
    (folder / "config.json").write_text(json.dumps({"n_embd": 64}))
    assert "cannot be told" in memory_check.check_engine(config(), folder)
    assert "cannot be told" in memory_check.check_all(config(), folder, workers=2, kv_cache_bytes=None)


def test_this_machines_memory_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between what could run nothing and what nobody has."""
    monkeypatch.undo()
    amount, where = memory_check._memory()
    assert 1 * GIB < amount < 1 << 50
    assert where in ("this machine", "the GPU")
