"""Tells the proxy what the learner does, from a background thread; training never waits for it."""

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, Self

from bucketrl.api.client import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Heartbeat, HeartbeatReply, LearnerState, QuarantinedAttempt
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.pause import pause

logger = logging.getLogger(__name__)

HEARTBEAT_S = 5.0
MIN_GAP_S = 0.2
"""Between two heartbeats, however often the phase changes. Workers hear of a commit no later than this."""
URGENT = ("phase", "pending_skips", "log_seq")
"""Fields whose change the proxy acts on."""


class HeartbeatClient(Protocol):
    """The part of `api.client.ProxyClient` that is used here."""

    def heartbeat(self, beat: Heartbeat, /) -> HeartbeatReply:
        """Raises ProxyUnavailable or ProxyRefused."""


class Heartbeats:
    """A context manager. Without a client it only keeps the state."""

    def __init__(
        self,
        client: HeartbeatClient | None,
        learner_id: str,
        *,
        on_drain: Callable[[], None],
        store_requests: Callable[[], int] = lambda: 0,
        interval_s: float = HEARTBEAT_S,
        min_gap_s: float = MIN_GAP_S,
    ) -> None:
        self._client = client
        self._on_drain = on_drain
        self._store_requests = store_requests
        self._interval_s = interval_s
        self._min_gap_s = min_gap_s
        self._lock = threading.Lock()
        self._state = LearnerState(learner_id=learner_id, epoch=0, step=0, phase="starting")
        self._quarantined: tuple[QuarantinedAttempt, ...] = ()
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self._silent = False

    @property
    def state(self) -> LearnerState:
        """As the next heartbeat will report it."""
        with self._lock:
            return self._state.model_copy(update={"quarantined": self._quarantined})

    def update(self, **changes: Any) -> None:
        """Changes fields of the LearnerState; the proxy hears of a new phase, record or skips at once."""
        with self._lock:
            before = self._state
            self._state = before.model_copy(update=changes)
            urgent = any(getattr(before, name) != getattr(self._state, name) for name in URGENT)
        if urgent:
            self._changed.set()

    def quarantined(self, group_id: str, attempt: str) -> None:
        """Reported until a heartbeat has arrived: the group must be issued again."""
        with self._lock:
            self._quarantined += (QuarantinedAttempt(group_id=group_id, attempt=attempt),)
        self._changed.set()

    def __enter__(self) -> Self:
        """Sends the first heartbeat from the caller's thread.

        Raises UserError if the proxy refuses this learner, so that it stops before it changes anything.
        An absent proxy is no obstacle.
        """
        if self._client is not None:
            try:
                self._send(self._client)
            except ProxyRefused as error:
                hint = (
                    "; set BUCKETRL_WORKER_TOKEN to the value that the proxy was started with"
                    if error.status in (401, 403)
                    else ""
                )
                raise UserError(f"the proxy refuses this learner: {error}{hint}") from None
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the thread after a last heartbeat."""
        self._closing.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        assert self._client is not None
        closing = False
        while not closing:
            pause(self._min_gap_s)
            self._changed.wait(self._interval_s - self._min_gap_s)
            self._changed.clear()
            closing = self._closing.is_set()  # before sending: the last state must get out
            try:
                self._send(self._client)
            except ProxyRefused as error:
                logger.error("the proxy refuses the learner's heartbeat: %s", error)

    def _send(self, client: HeartbeatClient) -> None:
        with self._lock:
            reported = self._quarantined
            state = self._state.model_copy(
                update={"quarantined": reported, "store_requests": self._store_requests()}
            )
        try:
            reply = client.heartbeat(Heartbeat(state=state))
        except ProxyUnavailable as error:
            if not self._silent:
                logger.warning("the proxy does not answer (%s); training goes on without it", error)
            self._silent = True
            return
        if self._silent:
            logger.warning("the proxy answers again")
        self._silent = False
        with self._lock:
            self._quarantined = self._quarantined[len(reported) :]
        if "drain" in reply.directives:
            self._on_drain()
