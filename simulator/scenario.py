"""What happens to a simulated run: all of it follows from one seed, and is a plain list that can be cut."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal[
    # to an operation on the store
    "crash_before", "crash_after", "crash_late", "fail", "lost_reply", "slow", "corrupt_read", "corrupt_write",
    # to a process
    "kill", "terminate", "freeze", "cut_from_store", "cut_from_proxy", "second_learner", "preempt",
    # to the bucket
    "foreign_object",
]  # fmt: skip

TROUBLE_S = 60.0
"""No fault begins later. From then on everything is restarted and must come to its end."""

_ON_WRITE: tuple[Kind, ...] = (
    "crash_before", "crash_after", "crash_late", "crash_after", "fail", "lost_reply", "lost_reply", "slow",
    "corrupt_write",
)  # fmt: skip
_ON_READ: tuple[Kind, ...] = ("crash_before", "crash_after", "fail", "slow", "corrupt_read", "corrupt_read")
_ON_PROCESS: tuple[Kind, ...] = (
    "kill", "kill", "terminate", "terminate", "freeze", "freeze", "cut_from_store", "cut_from_proxy",
    "second_learner", "foreign_object",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    kind: Kind
    role: str
    """Whom it hits."""
    at: float = 0.0
    """When, in seconds; without meaning for a fault on an operation."""
    nth: int = -1
    """Which read or write of the role, over all of its incarnations."""
    on_write: bool = False
    seconds: float = 0.0
    """How long it lasts, or how late something lands."""

    @property
    def on_operation(self) -> bool:
        return self.nth >= 0

    def __str__(self) -> str:
        if self.on_operation:
            operation = "write" if self.on_write else "read"
            return f"{self.kind} at {self.role}'s {operation} {self.nth} ({self.seconds:.1f} s)"
        return f"{self.kind} {self.role} at {self.at:.1f} s ({self.seconds:.1f} s)"


@dataclass(frozen=True, slots=True)
class Scenario:
    seed: int
    workers: int
    tier: int
    steps: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    prompts: int
    keep: int
    """Commits whose objects garbage collection leaves; 0: none is collected."""
    list_lag_s: float
    """A new object shows in listings after up to that long."""
    clock_error_s: float
    """Between the clocks of two machines."""
    turns: bool
    """The task is an environment of several turns."""
    chunk_tokens: int
    """Of `[rollout]`."""
    faults: tuple[Fault, ...]

    def without(self, faults: set[Fault]) -> "Scenario":
        return replace(self, faults=tuple(fault for fault in self.faults if fault not in faults))


def scenario(seed: int) -> Scenario:
    rng = random.Random(f"scenario/{seed}")
    episodes = random.Random(f"episodes/{seed}")
    workers = rng.choice((1, 2, 2, 3))
    roles = ["proxy", "learner-0", *(f"worker-{n}" for n in range(workers))]
    faults = tuple(_fault(rng, roles) for _ in range(rng.choice((0, 2, 4, 6, 9, 12))))
    if rng.random() < 0.25:
        faults += tuple(_spot_trace(rng, roles[2:]))
    return Scenario(
        seed=seed,
        workers=workers,
        tier=rng.choice((1, 1, 1, 0)),
        steps=rng.choice((4, 6, 8)),
        groups_per_step=rng.choice((1, 2, 3)),
        group_size=rng.choice((2, 3)),
        max_staleness=(max_staleness := rng.choice((0, 1, 2, 4))),
        prompts=rng.choice((3, 5, 50)),
        keep=rng.choice((0, max_staleness + 2)),
        list_lag_s=rng.choice((0.0, 0.0, 2.0, 15.0)),
        clock_error_s=rng.choice((0.0, 3600.0)),
        # Drawn apart, so that a seed has the faults that it had before there were episodes.
        turns=episodes.random() < 0.3,
        chunk_tokens=episodes.choice((0, 0, 2)),
        faults=faults,
    )


def _spot_trace(rng: random.Random, workers: list[str]) -> Iterator[Fault]:
    """Each worker lives on a spot instance: taken away with notice, back after a while, again and again."""
    for role in workers:
        at = rng.expovariate(1 / 15)
        while at < TROUBLE_S:
            away = rng.uniform(2.0, 30.0)
            yield Fault("preempt", role, at, seconds=away)
            at += away + 5.0 + rng.expovariate(1 / 20)


def _fault(rng: random.Random, roles: list[str]) -> Fault:
    at = rng.uniform(0.0, TROUBLE_S)
    if rng.random() < 0.6:
        # The learner's writes are where the protocol lives.
        on_write = rng.random() < 0.7
        role = rng.choice(["learner-0", *roles]) if on_write else rng.choice(roles)
        return Fault(
            kind=rng.choice(_ON_WRITE if on_write else _ON_READ),
            role=role,
            nth=int(rng.expovariate(1 / 25)) if on_write else int(rng.expovariate(1 / 60)),
            on_write=on_write,
            seconds=rng.choice((0.5, 5.0, 30.0)),
        )
    kind = rng.choice(_ON_PROCESS)
    if kind == "second_learner":
        return Fault(kind, "learner-1", at)
    if kind == "terminate":
        return Fault(kind, rng.choice([role for role in roles if role != "proxy"]), at)
    if kind == "freeze":
        # An hour in which nothing happens, without the proxy or the only worker, would teach nothing.
        role = rng.choice(roles)
        longest = 20.0 if role == "proxy" or (len(roles) == 3 and role == roles[-1]) else 3600.0
        return Fault(kind, role, at, seconds=rng.choice((3.0, 20.0, longest)))
    if kind == "foreign_object":
        return Fault(kind, "", at, seconds=rng.uniform(0.0, 1.0))
    return Fault(kind, rng.choice(roles), at, seconds=rng.uniform(1.0, 25.0))
