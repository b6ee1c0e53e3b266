"""Garbage collection: removes what `retention.py` says nobody needs. `bucket_layout.md` 7.9 specifies it.

A pass may be killed at any operation and started again, and several may run at once: what one removes was
collectable before it looked, and stays so. Readers learn from `gc/<step>.json`, which is written before
anything is removed, what may be absent.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from bucketrl.bucket import keys, snapshots
from bucketrl.bucket.errors import IntegrityError, NotFound, StoreError
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import BoundaryRecord, RunRecord, StartRecord, StepRecord, decode, decode_log
from bucketrl.bucket.retention import LISTED, Retained
from bucketrl.bucket.store import ObjectInfo, Store

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 500
PROBE_AGE_S = 600.0
"""A probe takes seconds: objects under `probe/` that two passes so far apart have seen belong to nobody."""
UNFINISHED_AGE_S = 24 * 3600.0
"""Uploads that were begun so long ago are not being written any more."""
LOOKS = 5
"""For the newest boundary, while passes replace it."""


class Tally(NamedTuple):
    objects: int = 0
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Report:
    """What a pass removed, or would remove."""

    boundary: int = 0
    """Step up to which commits are collected; 0: none is."""
    removed: dict[str, Tally] = field(default_factory=dict)
    """By prefix."""
    unfinished: int = 0
    """Uploads of dead writers that the store has dropped."""

    @property
    def total(self) -> Tally:
        return Tally(
            sum(tally.objects for tally in self.removed.values()),
            sum(tally.bytes for tally in self.removed.values()),
        )


class GarbageCollector:
    """Passes over one run. Not thread-safe. `clock` is monotonic seconds, `now` an RFC 3339 time."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        *,
        keep: int,
        collector_id: str,
        now: Callable[[], str],
        clock: Callable[[], float],
    ) -> None:
        """`keep`: commits, as `retention.resolve_keep` returns it, not 0."""
        self._store = store
        self._run = run
        self._keep = keep
        self._collector_id = collector_id
        self._now = now
        self._clock = clock
        self._first: StepRecord | None = None
        self._commits: list[StepRecord] = []
        """The newest ones seen, in order, `keep + 1` at most."""
        self._probes: dict[str, float] = {}
        """Objects under `probe/` and when this collector saw them first."""

    def collect(
        self,
        state: LogState,
        *,
        dry_run: bool = False,
        progress: Callable[[int, int], None] | None = None,
    ) -> Report:
        """One pass, by a verified `state` of the log, which may be old. `progress(done, total)` counts
        objects. Raises StoreError, or IntegrityError if the log is not what `state` was made from."""
        if state.step is None:
            return Report()
        retained = Retained.of(self._run, *self._commits_of(state.step), self._keep)
        listed = [info for prefix in LISTED for info in self._store.list(prefix)]
        doomed = [*retained.collectable(listed), *self._abandoned_probes()]
        boundaries = _boundaries(self._store)
        if dry_run:
            return Report(retained.boundary, _tallies(doomed))
        if retained.boundary > max(boundaries, default=0):
            self._announce(retained.boundary)
            boundaries.append(retained.boundary)
        for start in range(0, len(doomed), DELETED_AT_ONCE):
            part = doomed[start : start + DELETED_AT_ONCE]
            self._store.delete([info.key for info in part])
            if progress:
                progress(start + len(part), len(doomed))
        # The newest one that anybody has seen is never deleted, so readers always find one.
        self._store.delete([keys.boundary(step) for step in sorted(boundaries)[:-1]])
        unfinished = self._store.sweep(UNFINISHED_AGE_S)
        return Report(max(boundaries, default=0), _tallies(doomed), unfinished)

    def _announce(self, step: int) -> None:
        record = BoundaryRecord(
            run_id=self._run.run_id, step=step, collector_id=self._collector_id, written_at=self._now()
        )
        self._store.put(keys.boundary(step), record.encode())

    def _commits_of(self, newest: StepRecord) -> tuple[StepRecord, list[StepRecord]]:
        """Step 0, and the newest commits up to `newest`. Reads only what earlier passes have not read."""
        known = self._commits[-1].seq if self._commits else -1
        fresh = [newest] if newest.seq > known else []
        oldest: StartRecord | StepRecord = newest
        while len(fresh) <= self._keep and (missing := oldest.seq - known - 1) > 0:
            records = snapshots.history(self._store, oldest, min(missing, self._keep + 1))
            fresh = [record for record in records if isinstance(record, StepRecord)] + fresh
            oldest = records[0]
        self._commits = (self._commits + fresh)[-self._keep - 1 :]
        if self._first is None:
            self._first = self._read_first()
        return self._first, self._commits

    def _read_first(self) -> StepRecord:
        """Step 0 follows the first learner's `start`, and those of learners that died before it."""
        seq = 0
        while not isinstance(record := decode_log(self._store.get(keys.log(seq))), StepRecord):
            seq += 1
        return record

    def _abandoned_probes(self) -> list[ObjectInfo]:
        now = self._clock()
        present = list(self._store.list(keys.PROBE_PREFIX))
        self._probes = {info.key: self._probes.get(info.key, now) for info in present}
        return [info for info in present if now - self._probes[info.key] >= PROBE_AGE_S]


def newest_boundary(store: Store, run: RunRecord) -> int:
    """Step up to which commits may have been collected; 0 if none.

    Raises StoreError, or IntegrityError for a record that is none of this run's: then what is absent is
    missing.
    """
    for _ in range(LOOKS):
        step = max(_boundaries(store), default=0)
        if step == 0:
            return 0
        try:
            record = decode(BoundaryRecord, store.get(keys.boundary(step)))
        except NotFound:
            continue  # a newer one has replaced it since the listing
        if (record.run_id, record.step) != (run.run_id, step):
            raise IntegrityError(
                f"{keys.boundary(step)}: of run {record.run_id} step {record.step}, want {run.run_id} {step}"
            )
        return step
    raise StoreError(f"{store.url}: records under {keys.BOUNDARY_PREFIX} are listed, but none can be read")


def _boundaries(store: Store) -> list[int]:
    listed = [keys.parse_boundary(info.key) for info in store.list(keys.BOUNDARY_PREFIX)]
    return [step for step in listed if step is not None]


def _tallies(removed: Sequence[ObjectInfo]) -> dict[str, Tally]:
    tallies: dict[str, Tally] = {}
    for info in removed:
        prefix = info.key.partition("/")[0] + "/"
        before = tallies.get(prefix, Tally())
        tallies[prefix] = Tally(before.objects + 1, before.bytes + info.size)
    return tallies
