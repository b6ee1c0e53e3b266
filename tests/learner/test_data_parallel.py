"""Two processes make the trajectory of one; whatever ends, nobody hangs and nothing is half done."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import active_children
from pathlib import Path
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from tests.learner.worlds import (
    CPU,
    make_config,
    make_run,
    never,
    perturbed,
    put_group,
    untrained_groups,
)

from bucketrl.bucket import keys
from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.jobs.arguments import parse
from bucketrl.learner import checkpoint
from bucketrl.learner.data_parallel import DataParallel, PeerLost, Peers, share_out
from bucketrl.learner.main import LearnerOptions, run_learner
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.parts import Stopped
from bucketrl.learner.trainer import Trainer

GROUPS = 6
TOLERANCE = 1e-6


def load_double(folder: Path, config: RunConfig, device: torch.device) -> PolicyModel:
    """In float64: AdamW makes a step of full length from a gradient that is rounding alone. Both LoRA factors are
    non-zero, so that both have gradients."""
    assert device == CPU
    policy = perturbed(folder, config)
    policy._peft.double()
    return policy


@pytest.fixture(scope="module")
def groups(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[TrajectoryGroup]:
    return untrained_groups(model_folder, tmp_path_factory.mktemp("adapter"), GROUPS)


class Side:
    """A policy that is trained, and all that moves in it."""

    def __init__(self, policy: PolicyModel, peers: Peers | None = None) -> None:
        self.policy = policy
        self.optimizer = Optimizer(policy.parameters, policy.config.algorithm)
        self.trainer = Trainer(policy, self.optimizer, DataParallel(policy, peers) if peers else None)

    def state(self) -> dict[str, torch.Tensor]:
        moments = self.optimizer.moments().items()
        return {name: value.detach().clone() for name, value in self.policy.parameters.items()} | {
            f"{name} {i}": moment.clone() for name, pair in moments for i, moment in enumerate(pair)
        }


def assert_near(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor], tolerance: float) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(value, two[name], rtol=0, atol=tolerance, msg=name)


def assert_same_metrics(one: dict[str, float], two: dict[str, float]) -> None:
    assert one.keys() == two.keys()
    for name in one.keys() - {"tokens_per_second"}:
        assert one[name] == pytest.approx(two[name], rel=TOLERANCE, abs=TOLERANCE), name


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9))
def test_micro_batches_are_shared_out_evenly(tokens: list[int], ranks: int) -> None:
    shares = share_out(tokens, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(tokens)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(tokens[index] for index in share) for share in shares]
    # Whoever got the last one had the least before it.
    assert max(loads) - min(loads) <= max(tokens, default=0)
    assert sum(map(bool, shares)) == min(ranks, len(tokens))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=7))
def test_no_split_in_two_is_much_better(tokens: list[int]) -> None:
    best = min(
        max(load, sum(tokens) - load)
        for chosen in range(1 << len(tokens))
        for load in [sum(t for i, t in enumerate(tokens) if chosen >> i & 1)]
    )
    assert max(sum(tokens[i] for i in share) for share in share_out(tokens, 2)) <= 7 / 6 * best


EVERYTHING = {
    "name": "gspo",
    "groups_per_step": 3,
    "minibatches": 2,
    "proximal": "recomputed",
    "importance_weight": "sequence",
    "kl_coefficient": 0.1,
    "entropy_coefficient": 0.1,
}
"""Means over completions, several updates in a row, log-probabilities of three policies."""


@dataclass(frozen=True)
class Started:
    """Two ranks that are up; each test gives them a fresh policy, which only rank 0 makes."""

    make: Callable[[torch.device], PolicyModel]
    peers: Peers
    dies: Literal["in a collective", "at work"]
    """How the last test ends the second rank."""

    def alone(self) -> Side:
        return Side(self.make(CPU))

    def two(self) -> Side:
        return Side(self.make(CPU), self.peers)


@pytest.fixture(
    scope="module", params=[({}, "in a collective"), (EVERYTHING, "at work")], ids=["default", "everything"]
)
def started(
    model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Started]:
    algorithm, dies = request.param
    config = make_config(algorithm=algorithm, learner={"tokens_per_microbatch": 30})
    make = partial(load_double, model_folder, config)
    torch.set_num_threads(1)
    with Peers(2, make, CPU, tmp_path_factory.mktemp("ranks") / "store") as peers:
        peers.wait_until_up(never)
        yield Started(make, peers, dies)


@pytest.mark.slow
def test_two_processes_make_the_trajectory_of_one(started: Started, groups: list[TrajectoryGroup]) -> None:
    alone, two = started.alone(), started.two()
    before = two.state()
    for step in range(1, 6):
        batch = groups[step % 2 * 3 :][:3] if step < 5 else groups[:1]  # the last has less than is to share
        want = alone.trainer.train(batch, step, never)
        assert_same_metrics(two.trainer.train(batch, step, never), want)
        assert_near(two.state(), alone.state(), TOLERANCE)
    assert max(float((value - two.state()[name]).abs().max()) for name, value in before.items()) > 0.01


@pytest.mark.slow
def test_a_stop_at_any_moment_leaves_every_rank_as_it_was(
    started: Started, groups: list[TrajectoryGroup]
) -> None:
    alone, two = started.alone(), started.two()
    two.trainer.train(groups[3:], 1, never)
    before, asked = two.state(), 0
    while True:
        calls = iter(range(asked))
        try:
            two.trainer.train(groups[:3], 2, lambda calls=calls: next(calls, None) is None)  # type: ignore[misc]
        except Stopped:
            assert_near(two.state(), before, 0.0)
            asked += 1
        else:
            break
    assert asked > 2
    for step, batch in enumerate((groups[3:], groups[:3]), start=1):
        alone.trainer.train(batch, step, never)
    assert_near(two.state(), alone.state(), TOLERANCE)


@pytest.mark.slow
def test_a_checkpoint_that_rank_0_reads_is_the_state_of_all(
    started: Started, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    two = started.two()
    two.trainer.train(groups[:3], 1, never)
    checkpoint.save(tmp_path, two.policy, two.optimizer, run_id="r", step=1)
    two.trainer.train(groups[3:], 2, never)
    once = two.state()
    two.trainer.train(groups[:3], 3, never)
    checkpoint.load(tmp_path, two.policy, two.optimizer, run_id="r", step=1)
    two.trainer.train(groups[3:], 2, never)
    assert_near(two.state(), once, 0.0)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_step_at_once(started: Started, groups: list[TrajectoryGroup]) -> None:
    two = started.two()
    two.trainer.train(groups[:3], 1, never)
    before, [process] = two.state(), active_children()

    def dying() -> bool:
        assert process.pid is not None
        if process.exitcode is None:
            os.kill(process.pid, signal.SIGSTOP)  # rank 0 is waiting for it when it dies
            threading.Timer(0.5, process.kill).start()
        return False

    if started.dies == "in a collective":
        dying()
    for stopping in (dying, never):  # and once more, when it is dead
        begun = time.monotonic()
        with pytest.raises(PeerLost, match=r"process 1 of --data-parallel 2 has died \(exit code -9\)"):
            two.trainer.train(groups[:3], 2, stopping)
        assert time.monotonic() - begun < 10
        assert_near(two.state(), before, 0.0)


@pytest.mark.slow
def test_a_process_that_cannot_load_says_why(model_folder: Path, tmp_path: Path) -> None:
    load = partial(PolicyModel.load, model_folder, make_config(lora={"target_modules": ["q_proj", "nope"]}))
    with (
        pytest.raises(
            UserError, match=r"process 1 of --data-parallel 2: lora\.target_modules: .* layer nope"
        ),
        Peers(2, load, CPU, tmp_path / "store") as peers,
    ):
        peers.wait_until_up(never)


def learn(store: Store, model_folder: Path, cache: Path, config: RunConfig, **options: object) -> None:
    choices = {
        "learner_id": "l",
        "cache_dir": cache,
        "device": "cpu",
        "poll_s": 0.001,
    } | options
    run_learner(
        store,
        make_run(config),
        model_path=model_folder,
        client=None,
        options=LearnerOptions(**choices),  # type: ignore[arg-type]
    )


def commits(store: Store, config: RunConfig) -> list[StepRecord]:
    return [r for r in LogReader(store, make_run(config)).refresh() if isinstance(r, StepRecord)]


def adapter(store: Store, commit: StepRecord) -> dict[str, torch.Tensor]:
    [file] = [file for file in commit.policy.files if file.key.endswith(".safetensors")]
    tensors: dict[str, torch.Tensor] = load_tensors(store.get(file.key))
    return tensors


KILLED = """
if __name__ == "__main__":
    import multiprocessing, os, signal, sys
    from pathlib import Path
    from bucketrl.bucket.config import RunConfig
    from bucketrl.bucket.stores import open_store
    from bucketrl.learner.main import LearnerOptions, run_learner
    from tests.learner.worlds import EventStore, make_run

    def is_commit_of_2(_operation: str, key: str, data: bytes) -> bool:
        return key.startswith("log/") and b'"step": 2,' in data

    def die() -> None:
        print(*[child.pid for child in multiprocessing.active_children()], flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    url, model, cache, config = sys.argv[1:]
    options = LearnerOptions("l", Path(cache), device="cpu", poll_s=0.001, threads=2, data_parallel=2)
    store = EventStore(open_store(url), is_commit_of_2, die)
    run = make_run(RunConfig.model_validate_json(config))
    run_learner(store, run, model_path=Path(model), client=None, options=options)
"""


@pytest.mark.slow
def test_a_killed_learner_takes_its_processes_along_and_the_next_goes_on(
    model_folder: Path, groups: list[TrajectoryGroup], tmp_path: Path
) -> None:
    """SIGKILL at the commit of step 2. A step has two micro-batches, and a + b = b + a also where numbers are
    rounded: bit for bit the run of one process."""
    config = make_config(algorithm={"steps": 3}, learner={"tokens_per_microbatch": 30})
    alone, two = MemoryStore(), open_store(str(tmp_path / "bucket"))
    for store in (alone, two):
        store.put(keys.RUN, make_run(config).encode())
        for group in groups:
            put_group(store, group)
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    killed = subprocess.run(
        [sys.executable, script, two.url, model_folder, tmp_path, config.model_dump_json()],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    stat = Path(f"/proc/{int(killed.stdout)}/stat")
    deadline = time.monotonic() + 5
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.05)

    learn(alone, model_folder, tmp_path, config, threads=1)
    learn(two, model_folder, tmp_path, config, threads=2, data_parallel=2)
    made, want = commits(two, config), commits(alone, config)
    assert [commit.step for commit in made] == [0, 1, 2, 3]
    for one, other in zip(made, want, strict=True):
        assert one.groups == other.groups
        assert_near(adapter(two, one), adapter(alone, other), 0.0)
        assert_same_metrics(one.metrics, other.metrics)


def test_numbers_of_processes_that_do_not_fit_are_refused(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit) as exit_:
        parse(["learner", "--bucket", "b", "--data-parallel", "0"])
    assert exit_.value.code == 2
    with pytest.raises(UserError, match="--data-parallel 0: want"):
        learn(MemoryStore(), model_folder, tmp_path, make_config(), data_parallel=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(
        UserError, match="--data-parallel 3: each process needs a GPU, and this machine has 2"
    ):
        learn(MemoryStore(), model_folder, tmp_path, make_config(), data_parallel=3, device="cuda")
