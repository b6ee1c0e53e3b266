"""The learner's background pass: log snapshots and garbage collection, in a thread that no step waits for.

Nothing depends on it. Killed at any point it leaves a bucket that readers understand, and whoever looks next
(another learner, `bucketrl gc`) goes on.
"""

import logging
import math
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from bucketrl.bucket import snapshots
from bucketrl.bucket.errors import BucketrlError
from bucketrl.bucket.gc import GarbageCollector
from bucketrl.bucket.log_state import LogState
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store

logger = logging.getLogger(__name__)

LOOK_S = 1.0
"""Between looks at the log's state, which cost no request."""
MIN_GAP_S = 60.0
"""Between two passes, whether the first one succeeded or not."""
EXIT_S = 5.0
"""How long a stopping learner waits for a pass under way."""


class Housekeeping:
    """A context manager: the thread runs inside it. `state` is the log's, asked from the thread."""

    def __init__(
        self,
        store: Store,
        run: RunRecord,
        state: Callable[[], LogState],
        *,
        keep: int,
        learner_id: str,
        now: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`keep`: commits, as `retention.resolve_keep` returns it; 0 collects nothing."""
        self._store = store
        self._run = run
        self._state = state
        self._clock = clock
        self._collector = (
            GarbageCollector(store, run, keep=keep, collector_id=learner_id, now=now, clock=clock)
            if keep
            else None
        )
        self._interval = max(1, keep // 2)
        """Commits from one pass to the next, so that there are never many more than 1.5 * keep."""
        self._pass: tuple[int, float] | None = None
        """Newest step and time of the last one; None before the first."""
        self._snapshot: int | None = None
        """Sequence number of the newest snapshot; None before it is known."""
        self._pause_until = -math.inf
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name="housekeeping", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.set()
        self._thread.join(EXIT_S)

    def look(self) -> None:
        """Does what is due; what fails is logged and tried again."""
        state = self._state()
        if state.step is None or self._clock() < self._pause_until:
            return
        try:
            self._write_snapshot(state)
            if self._collector:
                self._collect(self._collector, state, state.step.step)
        except BucketrlError as error:
            self._pause_until = self._clock() + MIN_GAP_S
            logger.warning("housekeeping: %s; trying again in %.0f s", error, MIN_GAP_S)

    def _run_thread(self) -> None:
        while not self._closing.wait(LOOK_S):
            self.look()

    def _write_snapshot(self, state: LogState) -> None:
        if self._snapshot is None:
            self._snapshot = snapshots.newest(self._store)
        if state.step_seq - self._snapshot >= snapshots.EVERY:
            snapshots.write(self._store, self._run.run_id, state.step_seq, state.step_sha256)
            self._snapshot = state.step_seq

    def _collect(self, collector: GarbageCollector, state: LogState, step: int) -> None:
        now = self._clock()
        if self._pass and (step - self._pass[0] < self._interval or now - self._pass[1] < MIN_GAP_S):
            return
        report = collector.collect(state)
        self._pass = step, now
        objects, size = report.total
        if objects:
            logger.info("collected %d objects, %.1f MB; steps to %d", objects, size / 1e6, report.boundary)
