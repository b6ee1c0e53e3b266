"""Which groups the next step trains on, and which it consumes untrained. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import GroupRef
from bucketrl.learner.advantages import has_zero_variance

SkipReason = Literal["zero_variance", "stale"]

NO_SIGNAL_FACTOR = 10
"""Times `max_outstanding_groups`: so many groups without a mixed one, and the run cannot learn."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A valid group, without its tokens: what selection and statistics need to know."""

    ordinal: int
    ref: GroupRef
    rewards: tuple[float, ...]
    """[G] one per completion."""
    min_version: int
    """The oldest policy version that sampled one of its tokens."""
    truncated: int
    """Completions that ended by length."""
    completed_correct: int | None
    """Completions that ended by themselves and are correct; None if the task reports no `correct`."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What the next step would consume, given the groups that are there."""

    trained: tuple[Candidate, ...]
    """In ascending order of ordinals, at most `groups_per_step`."""
    skipped: tuple[tuple[Candidate, SkipReason], ...]
    """Consumed untrained, ascending."""
    ready: bool
    """False: wait for more groups."""


def select(candidates: Iterable[Candidate], step: int, config: RunConfig) -> Selection:
    """The oldest groups first, until `groups_per_step` of them can be trained on.

    Skipped on the way: groups with equal rewards (if filtered) and groups with a token older than
    `max_staleness`, where staleness = (step - 1) - version: the policy that step `step` starts from is
    version step - 1. With as many skipped as may be outstanding, a smaller batch has to do: waiting for
    a full one would only let its groups grow stale.

    `candidates` have distinct ordinals, none of them consumed. Raises UserError if so many groups were
    skipped without a trainable one that the run has no learning signal.
    """
    trained: list[Candidate] = []
    skipped: list[tuple[Candidate, SkipReason]] = []
    for candidate in sorted(candidates, key=lambda one: one.ordinal):
        reason = _skip_reason(candidate, step, config)
        if reason is None:
            trained.append(candidate)
        else:
            skipped.append((candidate, reason))
        starved = len(skipped) >= config.max_outstanding_groups and len(trained) > 0
        if len(trained) == config.algorithm.groups_per_step or starved:
            return Selection(tuple(trained), tuple(skipped), ready=True)
        if not trained and len(skipped) >= NO_SIGNAL_FACTOR * config.max_outstanding_groups:
            raise UserError(_no_signal(step, skipped))
    return Selection(tuple(trained), tuple(skipped), ready=False)


def _skip_reason(candidate: Candidate, step: int, config: RunConfig) -> SkipReason | None:
    # Variance first: such a group carries no gradient, so its age has cost nothing and is not counted.
    if config.algorithm.filter_zero_variance and has_zero_variance(candidate.rewards):
        return "zero_variance"
    if (step - 1) - candidate.min_version > config.algorithm.max_staleness:
        return "stale"
    return None


def _no_signal(step: int, skipped: list[tuple[Candidate, SkipReason]]) -> str:
    stale = sum(reason == "stale" for _, reason in skipped)
    rewards = [reward for candidate, _ in skipped for reward in candidate.rewards]
    return (
        f"no learning signal: step {step} found no group to train on among {len(skipped)} "
        f"({len(skipped) - stale} with equal rewards, {stale} stale; mean reward "
        f"{sum(rewards) / len(rewards):.3f}); make the task easier or harder: "
        "run `bucketrl doctor CONFIG --probe-task`"
    )
