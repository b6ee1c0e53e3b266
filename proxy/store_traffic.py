"""How much the members of a run ask of the bucket, from what each says it has sent since it started. Pure."""

from collections import Counter, deque
from dataclasses import dataclass, field

WINDOW_S = 300.0
"""What the rate is taken over: the window of the Hugging Face limit."""
SAMPLE_S = 5.0
LEAST_S = 60.0
"""A shorter history is not extrapolated: every start asks much at once."""
MAX_MEMBERS = 4096
"""Whose last report is kept: each worker that starts has a new name, for as long as the run lasts."""


@dataclass
class StoreTraffic:
    """Counts from the first report of each member on. Times are monotonic seconds, never decreasing."""

    totals: Counter[str] = field(default_factory=Counter)
    """By role."""
    _reported: dict[str, int] = field(default_factory=dict)
    _samples: deque[tuple[float, int]] = field(default_factory=deque)

    def reported(self, member: str, role: str, requests: int, now: float) -> None:
        """`requests`: sent since the member started. A smaller number than before: it has started again."""
        before = self._reported.pop(member, requests)
        self._reported[member] = requests
        if len(self._reported) > MAX_MEMBERS:
            del self._reported[next(iter(self._reported))]  # the one that was heard of longest ago
        self.totals[role] += requests - before if requests >= before else requests
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((now, self.totals.total()))
        while len(self._samples) > 1 and self._samples[1][0] <= now - WINDOW_S:
            self._samples.popleft()

    def per_minute(self, now: float) -> float:
        """Over the last WINDOW_S, or since the first report."""
        if not self._samples:
            return 0.0
        since, then = self._samples[0]
        return (self.totals.total() - then) / max(now - since, LEAST_S) * 60.0
