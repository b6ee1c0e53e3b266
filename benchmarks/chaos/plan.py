"""Which role is hit by which signal, and when: pure, and the same for the same seed."""

import random
import signal
from collections.abc import Sequence
from dataclasses import dataclass

PROXY, LEARNER = "proxy", "learner"
LAST_SHARE = 0.95
"""The last signal falls before this part of the run's steps; the rest is undisturbed."""
LONGEST_WAIT_S = 2.5
"""A signal falls within so many seconds after the step it belongs to."""
_WEIGHTS = ((signal.SIGKILL, 45), (signal.SIGTERM, 25), (signal.SIGSTOP, 30))
_SHORT_S, _LONG_S = (0.2, 3.0), (6.0, 20.0)
"""A long freeze outlasts what the roles take for silence (10 s of the proxy, 15 s of a worker), or not."""
LONG_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Strike:
    """One signal."""

    role: str
    signal: signal.Signals
    at_step: int
    """Not before the run has committed this step."""
    after_s: float
    """From then on."""
    frozen_s: float = 0.0
    """Of a SIGSTOP: until the SIGCONT."""
    second_after_s: float | None = None
    """Of a learner's long freeze: when a second learner is started, which fences the frozen one."""


def draw(seed: int, *, kills: int, steps: int, workers: int) -> list[Strike]:
    """`kills` signals over a run of `steps` steps, in the order in which they fall. The roles are named as in
    `tests.e2e.roles.fleet`."""
    rng = random.Random(f"chaos {seed}")
    roles = [PROXY, LEARNER, *(f"rollout-{number}" for number in range(workers))]
    return [_strike(rng, int(LAST_SHARE * steps * number / kills), roles) for number in range(kills)]


def _strike(rng: random.Random, at_step: int, roles: Sequence[str]) -> Strike:
    role = rng.choice(roles)
    [kind] = rng.choices([kind for kind, _ in _WEIGHTS], [weight for _, weight in _WEIGHTS])
    after_s = rng.uniform(0.0, LONGEST_WAIT_S)
    if kind is not signal.SIGSTOP:
        return Strike(role, kind, at_step, after_s)
    if rng.random() >= LONG_SHARE:
        return Strike(role, kind, at_step, after_s, rng.uniform(*_SHORT_S))
    frozen_s = rng.uniform(*_LONG_S)
    # From long before the thaw to just before it, when the old learner may commit once more.
    second = rng.uniform(0.0, frozen_s) if role == LEARNER else None
    return Strike(role, kind, at_step, after_s, frozen_s, second)
