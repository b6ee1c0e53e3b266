"""Simulated processes: threads of which exactly one runs at a time, in virtual time.

A thread runs until it sleeps, waits or ends; then the clock advances to the earliest thing that is due, and
the turn goes straight to the thread that waited for it. The order in which threads run depends on nothing
but the seed, so a seed is one history.
"""

import heapq
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bucketrl.bucket.pause import sleeper


class Crash(BaseException):
    """Unwinds the threads of a process that is dead. Nothing catches it."""


@dataclass(eq=False)
class Process:
    """What a kill hits: some threads that die together."""

    role: str
    """`proxy`, `learner-0`, `worker-1`: the same for every incarnation."""
    incarnation: int
    alive: bool = True
    frozen_until: float = 0.0
    """SIGSTOP until then."""
    threads: list["_Thread"] = field(default_factory=list)
    on_end: Callable[["Process", BaseException | None], None] = lambda process, error: None
    """Told once, with Crash after a kill, else with what the main thread raised."""

    @property
    def name(self) -> str:
        return f"{self.role}#{self.incarnation}"


class _Thread:
    def __init__(
        self, kernel: "Kernel", process: Process, function: Callable[[], None], *, main: bool
    ) -> None:
        self.process = process
        self.ticket = 0
        """Of the newest sleep or wait; an older wake-up is void."""
        self.done = False
        self.go = threading.Lock()
        """Released when it is this thread's turn."""
        self.go.acquire()
        self.main = main
        self._kernel = kernel
        self._function = function
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        self.go.acquire()
        self._kernel.enter(self)
        error: BaseException | None = None
        try:
            if self.process.alive:
                self._function()
        except BaseException as raised:  # noqa: BLE001 - a process may end with anything
            error = raised
        self.done = True
        self.process.threads.remove(self)
        if self.main and self.process.alive:
            self._kernel.end(self.process, error)
        self._kernel.leave()


class Kernel:
    """The clock, the queue of what is due, and the history."""

    def __init__(self, seed: str) -> None:
        self.now = 0.0
        """Seconds since the simulation began."""
        self.history: list[tuple[float, str, str]] = []
        """(time, process, what happened)."""
        self._rng = random.Random(seed)
        self._queue: list[tuple[float, float, int, Any, int]] = []
        self._count = 0
        self._local = threading.local()
        self._over = threading.Lock()
        """Released when nothing is left to run for `run` or `drain`."""
        self._over.acquire()
        self._until = 0.0
        self._finished: Callable[[], bool] = lambda: True
        self._draining = False
        self._failure: Exception | None = None

    # -- seen from outside --------------------------------------------------------------------------

    def run(self, until: float, finished: Callable[[], bool]) -> None:
        """Runs what is due, in order, until `finished()` or the clock would pass `until`."""
        self._until, self._finished = until, finished
        self._begin()
        if self._failure is not None:
            raise self._failure

    def drain(self) -> None:
        """Lets the threads of dead processes unwind."""
        self._draining = True
        self._begin()

    def _begin(self) -> None:
        first = self._next()
        if first is not None:
            first.go.release()
            self._over.acquire()

    def _next(self) -> _Thread | None:
        """Advances the clock to the next thread whose turn it is; None if nothing is left to run."""
        while self._queue and (self._draining or not self._finished()):
            at, _, _, what, ticket = heapq.heappop(self._queue)
            if isinstance(what, _Thread):
                if what.done or ticket != what.ticket or (self._draining and what.process.alive):
                    continue
                if what.process.alive and what.process.frozen_until > at:
                    self._push(what.process.frozen_until, what, ticket)
                    continue
                if at > self._until and what.process.alive:
                    return None
                self.now = max(self.now, min(at, self._until))
                return what
            if at > self._until:
                return None
            if not self._draining:
                self.now = max(self.now, at)
                try:
                    what()
                except Exception as error:  # noqa: BLE001 - raised again by `run`
                    self._failure = error
                    return None
        return None

    def _hand_over(self, me: _Thread | None) -> None:
        """Whose turn it is now runs, straight from the thread whose turn ends."""
        following = self._next()
        if following is me and me is not None:
            return
        (following.go if following is not None else self._over).release()
        if me is not None:
            me.go.acquire()

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Calls `action` at that time, outside of any process."""
        self._push(seconds, action, 0)

    def spawn(self, process: Process, function: Callable[[], None], *, main: bool = False) -> None:
        """A new thread of `process`, which begins now. The process ends when its main thread does."""
        thread = _Thread(self, process, function, main=main)
        process.threads.append(thread)
        self._push(self.now, thread, thread.ticket)

    def kill(self, process: Process) -> None:
        """SIGKILL: no thread of it gets any further."""
        if process.alive:
            self.note(process.name, "killed")
            self.end(process, Crash())

    def thaw(self, process: Process) -> None:
        """SIGCONT: its threads go on where they were."""
        process.frozen_until = self.now
        for thread in process.threads:
            self._push(self.now, thread, thread.ticket)

    def end(self, process: Process, error: BaseException | None) -> None:
        process.alive = False
        for thread in process.threads:
            thread.ticket += 1
            self._push(self.now, thread, thread.ticket)
        process.on_end(process, error)

    def note(self, who: str, what: str) -> None:
        self.history.append((round(self.now, 3), who, what))

    # -- called by simulated threads ----------------------------------------------------------------

    @property
    def process(self) -> Process | None:
        """That of the calling thread; None outside of the simulation."""
        thread = getattr(self._local, "thread", None)
        return thread.process if thread is not None else None

    def sleep(self, seconds: float) -> None:
        self.wait(seconds)

    def wait(self, seconds: float | None) -> None:
        """Until `wake` is called with `waiter()` as it is now, or for `seconds`."""
        thread = self._local.thread
        if not thread.process.alive:
            raise Crash
        if seconds is not None:
            self._push(self.now + max(0.0, seconds), thread, thread.ticket)
        self._hand_over(thread)
        thread.ticket += 1
        if not thread.process.alive:
            raise Crash

    def waiter(self) -> Callable[[], None]:
        """A function that ends the calling thread's next (or present) wait; void once that is over."""
        thread = self._local.thread
        ticket = thread.ticket

        def wake() -> None:
            self._push(self.now, thread, ticket)

        return wake

    def enter(self, thread: _Thread) -> None:
        self._local.thread = thread
        thread.ticket += 1
        sleeper.set(self.sleep)

    def leave(self) -> None:
        self._hand_over(None)

    def _push(self, at: float, what: Any, ticket: int) -> None:
        self._count += 1
        heapq.heappush(self._queue, (at, self._rng.random(), self._count, what, ticket))


class VirtualEvent(threading.Event):
    """threading.Event for simulated threads."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._wakers: list[Callable[[], None]] = []

    def set(self) -> None:
        super().set()
        wakers, self._wakers = self._wakers, []
        for wake in wakers:
            wake()

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set():
            self._wakers.append(self._kernel.waiter())
            self._kernel.wait(timeout)
        return self.is_set()


class VirtualThread:
    """The part of threading.Thread that is used of a daemon thread."""

    def __init__(self, kernel: Kernel, function: Callable[[], None]) -> None:
        self._kernel = kernel
        self._function = function
        self._ended: VirtualEvent | None = None

    def start(self) -> None:
        process = self._kernel.process
        assert process is not None
        ended = self._ended = VirtualEvent(self._kernel)

        def run() -> None:
            try:
                self._function()
            finally:
                ended.set()

        self._kernel.spawn(process, run)

    def is_alive(self) -> bool:
        return self._ended is not None and not self._ended.is_set()

    def join(self, timeout: float | None = None) -> None:
        if self._ended is not None:
            self._ended.wait(timeout)
