"""One run under signals: a supervisor that starts again whatever ends, and the strikes of a plan.

plan ──► strike ──► role ──► ends ──► started again with the same command
           │ SIGSTOP                        ▲
           └──► SIGCONT later; of a learner, a second one may have been started in between
"""

import heapq
import itertools
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from tests.e2e.roles import Fleet, Role

from benchmarks.chaos.plan import LEARNER, PROXY, Strike
from bucketrl.bucket import keys
from bucketrl.bucket.records import StepRecord, decode_log, sha256_hex
from bucketrl.bucket.store import Store

PATIENCE_S = 30.0
"""A strike whose step does not come falls after so long all the same: a run that stands still is hit too."""
TERM_LIMIT_S = 30.0
"""From SIGTERM to SIGKILL, as a supervisor does it; a worker's own grace period is 10 s."""
CRASH_DELAY_S = 1.0
"""Before a role that ended by an error of its own is started again."""
FENCED = 3
"""Exit code."""
REPLACED = "replaced learner"
"""One that another was started beside; in the counts of exits."""
TICK_S = 0.05
LOG_PERIOD_S = 0.3


@dataclass
class LogWatch:
    """Reads each log record as soon as it is there, to see at the end whether one has changed."""

    store: Store
    digests: dict[int, str] = field(default_factory=dict)
    """By sequence number."""
    step: int = -1
    """Newest committed."""

    def look(self) -> None:
        newest = keys.log(max(self.digests)) if self.digests else ""
        for info in self.store.list(keys.LOG_PREFIX, start_after=newest):
            seq = keys.parse_log(info.key)
            assert seq is not None, info.key
            data = self.store.get(info.key)
            record = decode_log(data)
            self.digests[seq] = sha256_hex(data)
            if isinstance(record, StepRecord):
                self.step = record.step

    def changed(self) -> list[int]:
        """Records that are not what they were, or gone, and gaps."""
        expected = range(max(self.digests, default=-1) + 1)
        now = {keys.parse_log(info.key) for info in self.store.list(keys.LOG_PREFIX)}
        return [
            seq
            for seq in expected
            if seq not in now or sha256_hex(self.store.get(keys.log(seq))) != self.digests.get(seq)
        ]


@dataclass
class Outcome:
    """What happened to the roles."""

    strikes: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By (role, signal)."""
    exits: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By (role, exit code); -9 is SIGKILL."""
    restarts: int = 0
    second_learners: int = 0
    fenced: int = 0
    """Learners that ended because a newer one had taken over."""
    crashes: list[str] = field(default_factory=list)
    """Last line of each role that ended by an error of its own."""
    overdue: int = 0
    """Roles that had to be killed after SIGTERM."""
    seconds: float = 0.0


class Chaos:
    """Strikes a fleet, which it has started, and keeps it running until its learner is done."""

    def __init__(self, run: Fleet, watch: LogWatch, *, steps: int, say: Callable[[str], None]) -> None:
        self._run = run
        self._watch = watch
        self._steps = steps
        self._say = say
        self._slots = {role.name: role for role in run.roles}
        self._old: list[Role] = []
        """Learners that another one was started beside."""
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._tickets = itertools.count()
        self._back: dict[str, float] = {}
        """When a role that crashed is started again."""
        self._looked = 0.0
        self.outcome = Outcome()

    def go(self, strikes: Sequence[Strike], *, quiet_s: float) -> Outcome:
        """All of `strikes`, then no more trouble: the run has `quiet_s` seconds to reach its last step."""
        start = time.monotonic()
        try:
            for role in self._slots.values():
                role.start()
            for number, strike in enumerate(strikes):
                self._wait_for(strike)
                self._strike(strike)
                self._say(f"signal {number + 1} of {len(strikes)}, {self._progress()}")
            self._settle(quiet_s)
        finally:
            for role in self._old:
                role.kill()
        self.outcome.seconds = time.monotonic() - start
        return self.outcome

    def _wait_for(self, strike: Strike) -> None:
        patience = time.monotonic() + PATIENCE_S
        while self._watch.step < strike.at_step and time.monotonic() < patience:
            self._tick()
        until = time.monotonic() + strike.after_s
        role = self._slots[strike.role]
        while (time.monotonic() < until or not role.alive) and not self._done():
            self._tick()
            role = self._slots[strike.role]

    def _settle(self, quiet_s: float) -> None:
        deadline = time.monotonic() + quiet_s
        while not (self._done() and not any(role.alive for role in self._ending())):
            if time.monotonic() > deadline:
                raise AssertionError(f"the run does not end: {self._progress()}\n{self._run.tails()}")
            self._tick()
            self._say(f"no more signals, {self._progress()}")
        for role in self._ending():
            self._ended(role)

    def _ending(self) -> list[Role]:
        """Those that end by themselves when the run does."""
        return [*(role for name, role in self._slots.items() if name != PROXY), *self._old]

    def _progress(self) -> str:
        return f"step {self._watch.step} of {self._steps}, {self.outcome.restarts} restarts"

    def _done(self) -> bool:
        return self._watch.step >= self._steps

    # -- the supervisor

    def _tick(self) -> None:
        now = time.monotonic()
        while self._agenda and self._agenda[0][0] <= now:
            heapq.heappop(self._agenda)[2]()
        if now - self._looked >= LOG_PERIOD_S:
            self._watch.look()
            self._looked = now
        for name, role in self._slots.items():
            if not role.alive:
                self._restart(name, role, now)
        for role in [role for role in self._old if not role.alive]:
            self._ended(role)
            self._old.remove(role)
        time.sleep(TICK_S)

    def _restart(self, name: str, role: Role, now: float) -> None:
        if name not in self._back:
            code = self._ended(role)
            if self._done() and code == 0 and name != PROXY:
                return
            self._back[name] = now + (0.0 if code in (0, -signal.SIGKILL) else CRASH_DELAY_S)
        if now >= self._back[name]:
            del self._back[name]
            self.outcome.restarts += 1
            role.start()

    def _ended(self, role: Role) -> int:
        """Counts its exit, once, and returns the code."""
        if role.process is None:
            return 0
        code = role.wait(5)
        role.process = None
        name = role.name if self._slots[role.name] is role else REPLACED
        self.outcome.exits[name, code] += 1
        self.outcome.fenced += code == FENCED
        if code > 0 and code != FENCED:
            self.outcome.crashes.append(f"{role.name}: {role.tail(1)}")
        return code

    # -- the trouble

    def _strike(self, strike: Strike) -> None:
        role = self._slots[strike.role]
        if not role.alive:
            return
        self.outcome.strikes[strike.role, strike.signal.name] += 1
        process = role.process
        role.send(strike.signal)
        if strike.signal is signal.SIGTERM:
            self._at(TERM_LIMIT_S, lambda: self._kill_overdue(role, process))
        if strike.signal is signal.SIGSTOP:
            if strike.second_after_s is not None:
                self._at(strike.second_after_s, lambda: self._second_learner(role, process))
            self._at(strike.frozen_s, lambda: self._thaw(role, process))

    def _at(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time.monotonic() + seconds, next(self._tickets), action))

    @staticmethod
    def _thaw(role: Role, process: object) -> None:
        if role.process is process and role.alive:
            role.send(signal.SIGCONT)

    def _kill_overdue(self, role: Role, process: object) -> None:
        if role.process is process and role.alive:
            self.outcome.overdue += 1
            role.send(signal.SIGKILL)

    def _second_learner(self, old: Role, process: object) -> None:
        """The supervisor takes the frozen one for dead."""
        if self._slots[LEARNER] is not old or old.process is not process or not old.alive:
            return
        self._old.append(old)
        second = replace(old, process=None)
        self._slots[LEARNER] = self._run.learner = second
        self.outcome.second_learners += 1
        second.start()
