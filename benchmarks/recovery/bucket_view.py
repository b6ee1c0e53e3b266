"""What the bucket of a run shows of commits and tokens."""

import statistics
from collections.abc import Container, Iterable
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from benchmarks.recovery.counted_worker import tokens_drawn
from bucketrl.bucket import keys, partials, trajectories
from bucketrl.bucket.completions import ANY_VERSION, Completion
from bucketrl.bucket.log import LogReader
from bucketrl.bucket.records import RunRecord, StartRecord, StepRecord
from bucketrl.bucket.store import Store


class BucketView:
    """Reads; never writes."""

    def __init__(self, store: Store, run: RunRecord) -> None:
        self.store = store
        self.run = run
        self._reader = LogReader(store, run)
        self._records: list[StartRecord | StepRecord] = []

    def log(self) -> list[StartRecord | StepRecord]:
        while fresh := self._reader.refresh():
            self._records += fresh
        return self._records

    def commits(self) -> list[StepRecord]:
        return [record for record in self.log() if isinstance(record, StepRecord)]

    @property
    def step(self) -> int:
        """Newest committed, -1 before the first."""
        commits = self.commits()
        return commits[-1].step if commits else -1

    def uploaded(self) -> list[tuple[keys.GroupId, str, str]]:
        """(group, attempt, key) of every trajectory object."""
        parsed = ((keys.parse_trajectory(i.key), i.key) for i in self.store.list(keys.TRAJECTORY_PREFIX))
        return [(found[0], found[1], key) for found, key in parsed if found]

    def attempts(self, group: str) -> list[str]:
        """Objects of one group."""
        return [info.key for info in self.store.list(f"{keys.TRAJECTORY_PREFIX}{group}/")]

    def attempts_of(self, worker_id: str) -> list[str]:
        """Objects of one worker."""
        return [key for _, attempt, key in self.uploaded() if _is_of(attempt, worker_id)]

    def waiting(self) -> int:
        """Groups uploaded and not consumed."""
        commits = self.commits()
        consumed = commits[-1].consumed
        size = self.run.prompts_per_epoch
        return len({group for group, _, _ in self.uploaded() if group.ordinal(size) not in consumed})

    def tokens_of(self, key: str) -> int:
        group, attempt = keys.parse_trajectory(key) or (None, "")
        found = trajectories.decode(
            self.store.get(key), run_id=self.run.run_id, group_id=str(group), attempt=attempt,
            max_version=ANY_VERSION,
        )  # fmt: skip
        return _tokens(found.trajectories)

    def mean_tokens(self, sample: int = 20) -> float:
        """Of the newest groups."""
        newest = self.uploaded()[-sample:]
        return sum(self.tokens_of(key) for _, _, key in newest) / len(newest)

    def step_seconds(self) -> float:
        """Median between commits."""
        times = [datetime.fromisoformat(commit.written_at) for commit in self.commits()]
        return statistics.median((after - before).total_seconds() for before, after in pairwise(times))

    def wasted(self) -> int:
        """Tokens of second attempts, and of groups skipped for their age."""
        attempts: dict[keys.GroupId, list[str]] = {}
        for group, _, key in self.uploaded():
            attempts.setdefault(group, []).append(key)
        tokens = 0
        for several in attempts.values():
            if len(several) > 1:
                each = sorted(map(self.tokens_of, several))
                tokens += sum(each[:-1])
        skipped = [ref for commit in self.commits() for ref in commit.skipped if ref.reason == "stale"]
        return tokens + sum(self.tokens_of(ref.file.key) for ref in skipped)

    def lost_by(self, worker_id: str, drawn: Path, log: str) -> int:
        """Tokens that this worker drew and that are in no object of the bucket."""
        mine = {
            (str(group), attempt): key
            for group, attempt, key in self.uploaded()
            if _is_of(attempt, worker_id)
        }
        kept = sum(map(self.tokens_of, mine.values())) + sum(self._partial_tokens(worker_id, mine))
        return tokens_drawn(drawn) - (kept - _taken_over(log))

    def _partial_tokens(self, worker_id: str, whole: Container[tuple[str, str]]) -> Iterable[int]:
        """Of what it left; not of groups that it could upload `whole` after all."""
        for info in self.store.list(keys.PARTIAL_PREFIX):
            parsed = keys.parse_partial(info.key)
            if parsed is None or not _is_of(parsed[1], worker_id) or (str(parsed[0]), parsed[1]) in whole:
                continue
            found = partials.decode(
                self.store.get(info.key), run_id=self.run.run_id, group_id=str(parsed[0]), attempt=parsed[1],
                max_version=ANY_VERSION,
            )  # fmt: skip
            yield _tokens(found.completions)


def _is_of(attempt: str, worker_id: str) -> bool:
    """Attempts are named `<worker id>-<incarnation>-<number>`."""
    return attempt.rsplit("-", 2)[0] == worker_id


def _tokens(completions: Iterable[Completion]) -> int:
    return sum(len(completion.completion_token_ids) for completion in completions)


def _taken_over(log: str) -> int:
    """Tokens of others that the worker went on from, by its own log."""
    lines = [line for line in log.splitlines() if " goes on from attempt " in line]
    return sum(int(line.split(": ")[2].split(" ")[0]) for line in lines)
