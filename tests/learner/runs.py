"""Whole runs of the learner on a memory store, whose trajectories are prepared."""

from pathlib import Path

from tests.learner.worlds import Trigger, make_config, make_run

from bucketrl.bucket import keys
from bucketrl.bucket.audit import audit
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord, StartRecord, StepRecord
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.memory import MemoryStore
from bucketrl.learner.main import LearnerOptions, run_learner

STEPS = 4
CONFIG = make_config(algorithm={"steps": STEPS})


class World:
    """One bucket with prepared trajectories, and learners on it."""

    def __init__(
        self, model_folder: Path, cache: Path, sampled: Store | None, run: RunRecord | None = None
    ) -> None:
        self.store = MemoryStore()
        self.run = run or make_run(CONFIG)
        self.store.put(keys.RUN, self.run.encode())
        for info in sampled.list(keys.TRAJECTORY_PREFIX) if sampled else ():
            self.store.put(info.key, sampled.get(info.key))
        self._model_folder = model_folder
        self._cache = cache

    def learn(
        self,
        store: Store | None = None,
        client: object = None,
        learner_id: str = "learner-0",
        keep: int | None = None,
    ) -> None:
        run_learner(
            store or self.store,
            self.run,
            model_path=self._model_folder,
            client=client,  # type: ignore[arg-type]
            options=LearnerOptions(
                learner_id=learner_id,
                cache_dir=self._cache,
                device="cpu",
                poll_s=0.001,
                threads=1,
                keep=keep,
            ),
        )

    @property
    def log(self) -> list[StartRecord | StepRecord]:
        return LogReader(self.store, self.run).refresh()

    @property
    def commits(self) -> list[StepRecord]:
        return [record for record in self.log if isinstance(record, StepRecord)]

    def fingerprint(self) -> list[tuple[object, ...]]:
        """Per step: what it consumed and the digests of what it made. Equal for equal trainings."""
        return [
            (
                commit.step,
                commit.groups,
                commit.skipped,
                [file.sha256 for file in commit.policy.files],
                [file.sha256 for file in commit.checkpoint.files],
                commit.canary,
                {name: value for name, value in commit.metrics.items() if name != "tokens_per_second"},
            )
            for commit in self.commits
        ]

    def assert_sound(self) -> None:
        assert audit(self.store).violations == ()


def is_commit_of(step: int) -> Trigger:
    return lambda _, key, data: (
        key.startswith(keys.LOG_PREFIX) and b'"kind": "step"' in data and f'"step": {step},'.encode() in data
    )


def is_write_to(prefix: str) -> Trigger:
    return lambda _, key, __: key.startswith(prefix)
