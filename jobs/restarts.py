"""When a role that died is started again. Pure."""

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
HEALTHY_S = 300.0
"""A role that lived this long had started well: its death says nothing about the next start."""
MAX_QUICK_DEATHS = 20
"""In a row; a role that keeps dying has a cause that restarts do not cure."""


class RestartPolicy:
    """Of one role."""

    def __init__(self) -> None:
        self.total = 0
        """Deaths so far."""
        self._quick = 0

    def died(self, lived_s: float) -> float | None:
        """Seconds until the next start, doubled with each quick death; None to give up."""
        self.total += 1
        self._quick = 1 if lived_s >= HEALTHY_S else self._quick + 1
        if self._quick > MAX_QUICK_DEATHS:
            return None
        return float(min(FIRST_DELAY_S * 2 ** (self._quick - 1), LONGEST_DELAY_S))
