"""Which groups a step trains on, and which it consumes untrained."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.learner.worlds import make_config

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import FileRef, GroupRef
from bucketrl.learner.select import Candidate, select

CONFIG = make_config(algorithm={"groups_per_step": 2, "max_staleness": 1})
BOUND = CONFIG.max_outstanding_groups  # 4


def candidate(ordinal: int, *, mixed: bool = True, version: int = 0) -> Candidate:
    ref = GroupRef(
        group_id=f"0000-{ordinal:08d}", attempt="w-1", file=FileRef(key="k", size=1, sha256="0" * 64)
    )
    rewards = (0.0, 1.0) if mixed else (1.0, 1.0)
    return Candidate(
        ordinal=ordinal,
        ref=ref,
        rewards=rewards,
        min_version=version,
        truncated=0,
        completed_correct=None,
    )


def ordinals(candidates: tuple[Candidate, ...]) -> list[int]:
    return [one.ordinal for one in candidates]


def test_the_oldest_groups_are_trained_in_ordinal_order() -> None:
    chosen = select([candidate(9), candidate(3), candidate(5)], 1, CONFIG)
    assert chosen.ready
    assert ordinals(chosen.trained) == [3, 5]
    assert chosen.skipped == ()


def test_too_few_groups_wait() -> None:
    chosen = select([candidate(3), candidate(4, mixed=False)], 1, CONFIG)
    assert not chosen.ready
    assert ordinals(chosen.trained) == [3]
    assert [(one.ordinal, reason) for one, reason in chosen.skipped] == [(4, "zero_variance")]


def test_only_groups_older_than_the_batch_are_skipped() -> None:
    groups = [candidate(0, mixed=False), candidate(1), candidate(2), candidate(3, mixed=False)]
    chosen = select(groups, 1, CONFIG)
    assert ordinals(chosen.trained) == [1, 2]
    assert [one.ordinal for one, _ in chosen.skipped] == [0]


@pytest.mark.parametrize(("step", "version", "trained"), [(3, 1, True), (4, 1, False), (4, 2, True)])
def test_staleness_is_counted_from_the_version_that_the_step_starts_from(
    step: int, version: int, trained: bool
) -> None:
    """Step 3 starts from version 2: a token of version 1 has staleness 1, the bound here."""
    chosen = select([candidate(0, version=version)], step, CONFIG)
    assert (ordinals(chosen.trained) == [0]) == trained
    assert [reason for _, reason in chosen.skipped] == ([] if trained else ["stale"])


def test_zero_variance_groups_are_trained_if_not_filtered() -> None:
    config = make_config(algorithm={"groups_per_step": 2, "filter_zero_variance": False})
    assert ordinals(select([candidate(0, mixed=False), candidate(1)], 1, config).trained) == [0, 1]


def test_with_as_many_skips_as_may_be_outstanding_a_smaller_batch_is_trained() -> None:
    flat = [candidate(i, mixed=False) for i in range(BOUND)]
    assert not select([*flat[1:], candidate(50)], 1, CONFIG).ready
    chosen = select([*flat, candidate(50)], 1, CONFIG)
    assert chosen.ready
    assert ordinals(chosen.trained) == [50]
    assert len(chosen.skipped) == BOUND


def test_a_run_without_any_signal_ends_with_advice() -> None:
    flat = [candidate(i, mixed=False) for i in range(10 * BOUND)]
    assert not select(flat[1:], 1, CONFIG).ready
    with pytest.raises(UserError, match=r"no learning signal.*doctor CONFIG --probe-task"):
        select(flat, 1, CONFIG)


@given(
    st.lists(st.tuples(st.integers(0, 60), st.booleans(), st.integers(0, 3)), unique_by=lambda one: one[0]),
    st.integers(1, 4),
    st.randoms(use_true_random=False),
)
def test_selection_is_an_oldest_first_partition(
    drawn: list[tuple[int, bool, int]], step: int, rng: "object"
) -> None:
    """Whatever is consumed is a prefix of what is there, each group once, in an order-free way."""
    groups = [candidate(ordinal, mixed=mixed, version=version) for ordinal, mixed, version in drawn]
    try:
        chosen = select(groups, step, CONFIG)
    except UserError:
        return
    taken = sorted(ordinals(chosen.trained) + [one.ordinal for one, _ in chosen.skipped])
    assert taken == sorted(ordinal for ordinal, _, _ in drawn)[: len(taken)]
    assert len(chosen.trained) <= CONFIG.algorithm.groups_per_step
    if not chosen.ready:
        assert len(taken) == len(groups)
    shuffled = list(groups)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]
    assert select(shuffled, step, CONFIG) == chosen
