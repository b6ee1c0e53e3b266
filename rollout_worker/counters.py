"""What a worker counts, for heartbeats and for its last log line."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(slots=True)
class Counters:
    """Since the worker started."""

    running_requests: int = 0
    tokens_generated: int = 0
    completions: int = 0
    """Generated, whether or not they could be used."""
    groups_uploaded: int = 0
    groups_failed: int = 0
    """Given back: fewer than two completions survived, or the prompt is too long."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Completions dropped, by reason. The reasons are few: what varies is cut off."""
    last_problem: str = ""
    """The newest reason, in full."""
    last_drop: str = ""
    """The newest reason why a completion was dropped."""

    def drop(self, reason: str) -> None:
        self.dropped[reason.split(":")[0]] += 1
        self.last_problem = self.last_drop = reason

    def mean_completion_tokens(self) -> float:
        return self.tokens_generated / self.completions if self.completions else 0.0

    def summary(self) -> str:
        """One line for people."""
        dropped = ", ".join(f"{count} x {reason}" for reason, count in self.dropped.most_common()) or "none"
        return (
            f"{self.groups_uploaded} groups uploaded, {self.groups_failed} failed, "
            f"{self.tokens_generated} tokens; completions dropped: {dropped}"
        )
