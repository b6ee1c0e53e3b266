"""How much a worker takes on, decided without engine or proxy; times are made up."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.rollout_worker.engine import EngineCapacity
from bucketrl.rollout_worker.flow import (
    DEVIATIONS,
    KV_SHARE,
    LEASE_BATCH,
    Flow,
    GroupInFlight,
    TrackedRequest,
    groups_that_fit,
    horizons,
    survival,
)

GROUP_SIZE, LIMIT, PROMPT = 4, 64, 10


def make_flow(
    kv_tokens: int | None, max_requests: int, *, max_ahead: int = 8, max_groups: int | None = None
) -> Flow:
    return Flow(
        lambda: EngineCapacity(kv_tokens, max_requests),
        group_size=GROUP_SIZE,
        max_tokens=LIMIT,
        max_prompt=PROMPT,
        max_ahead=max_ahead,
        max_groups=max_groups,
    )


def send(flow: Flow, group: GroupInFlight, now: float) -> TrackedRequest:
    return flow.begin_request(group, prompt_tokens=PROMPT, prior=0, max_tokens=LIMIT, now=now)


# ---- the length distribution

spans = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, 30), st.booleans()).map(lambda s: (s[0], s[0] + s[1], s[2]))
)


def test_the_share_that_goes_on_is_the_product_limit_estimate() -> None:
    """Of 3 and the imaginary one, 1 of 4 ends at 3; one is lost sight of at 5; 1 of 2 ends at 7."""
    table = survival([(0, 3, True), (0, 5, False), (0, 7, True)], 10)
    assert table == [1.0] * 3 + [0.75] * 4 + [0.375] * 3 + [0.0]


@settings(max_examples=60)
@given(spans)
def test_shares_only_fall_and_reach_nought_at_the_limit(spans: list[tuple[int, int, bool]]) -> None:
    table = survival(spans, 60)
    assert len(table) == 61
    assert table == sorted(table, reverse=True)
    assert (table[0], table[60]) == (1.0, 0.0)
    assert table[59] > 0.0


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(2, 40), st.integers(1, 10))))
def test_a_completion_drawn_in_chunks_counts_like_one_drawn_at_once(drawn: list[tuple[int, int]]) -> None:
    chunked = [
        (entry, min(entry + chunk, length), entry + chunk >= length)
        for length, chunk in drawn
        for entry in range(0, length, chunk)
    ]
    assert survival(chunked, 50) == survival([(0, length, True) for length, _ in drawn], 50)


def test_the_short_ones_that_end_first_do_not_make_all_look_short() -> None:
    """4000 completions after 300 tokens of each: those that have ended are half, with a third of the mean."""
    rng = random.Random(1)
    lengths = [min(4096, math.ceil(rng.lognormvariate(5.7, 1.0))) for _ in range(4000)]
    table = survival([(0, min(length, 300), length <= 300) for length in lengths], 4096)
    for tokens in (50, 150, 299):
        assert table[tokens] == pytest.approx(sum(n > tokens for n in lengths) / len(lengths), abs=0.001)
    # Nobody has lived longer: the rest counts as full length.
    assert table[4095] == table[300] > 0.45


# ---- what fits


@settings(max_examples=60)
@given(
    spans, st.dictionaries(st.integers(0, 59), st.integers(1, 5)), st.integers(0, 20000), st.integers(0, 9)
)
def test_no_group_more_fits_and_none_less(
    spans: list[tuple[int, int, bool]], lengths: dict[int, int], kv_tokens: int, prompt: int
) -> None:
    alive = survival(spans, 60)

    def overflows(groups: int) -> bool:
        """By the definition, at any time that is looked at."""
        now = Counter(lengths) + Counter({0: groups * 4})
        for step in horizons(alive):
            shares = {n: alive[n + step] / alive[n] if n + step < 60 else 0.0 for n in now}
            mean = groups * prompt + sum(now[n] * shares[n] * (n + step) for n in now)
            variance = sum(now[n] * shares[n] * (1 - shares[n]) * (n + step) ** 2 for n in now)
            if mean + DEVIATIONS * math.sqrt(variance) > kv_tokens + 1e-6:
                return True
        return False

    fit = groups_that_fit(
        alive, lengths, prompt_tokens=0, group_prompt=prompt, group_size=4, kv_tokens=kv_tokens
    )
    if fit >= 0:
        assert not overflows(fit)
    if prompt >= 1:  # a group without any tokens would fit for ever
        assert overflows(max(0, fit + 1))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    step = st.tuples(st.sampled_from(["begin", "send", "end", "wait"]), st.integers(1, LIMIT))
    return draw(st.lists(step, max_size=60))


def replay(flow: Flow, history: list[tuple[str, int]]) -> float:
    """What happens to a worker whether or not it was its own decision; the time at the end."""
    now, groups, requests = 0.0, [], []
    for event, number in history:
        if event == "begin":
            groups.append(flow.begin_group(now))
        elif event == "send" and groups and groups[-1].unsent:
            requests.append(send(flow, groups[-1], now))
        elif event == "end" and requests:
            flow.end_request(requests.pop(number % len(requests)), number, now, stopped=number % 2 == 0)
        elif event == "wait":
            now += number / 50
            flow.target(now)
    return now + 1.0


capacities = st.builds(
    EngineCapacity, kv_tokens=st.none() | st.integers(1, 20000), max_requests=st.integers(1, 200)
)


@settings(max_examples=60)
@given(histories(), capacities, st.integers(0, 10), st.none() | st.integers(1, 5))
def test_the_bounds_hold_whatever_has_happened(
    history: list[tuple[str, int]], capacity: EngineCapacity, waiting: int, max_groups: int | None
) -> None:
    flow = make_flow(capacity.kv_tokens, capacity.max_requests, max_groups=max_groups)
    now = replay(flow, history)
    assert GROUP_SIZE <= flow.target(now) <= max(GROUP_SIZE, capacity.max_requests)
    begin = flow.groups_to_begin(now)
    assert begin >= 0
    assert begin == 0 or flow.requests + begin * GROUP_SIZE <= flow.target(now)
    if max_groups is not None:
        assert begin <= max_groups
    lease = flow.groups_to_lease(waiting, now)
    assert 0 <= lease <= LEASE_BATCH
    assert lease == 0 or lease + waiting <= begin + 8


@settings(max_examples=60)
@given(histories(), st.integers(1, 20000), st.integers(1, 200), st.integers(0, 20000), st.integers(0, 200))
def test_a_larger_engine_never_gets_less(
    history: list[tuple[str, int]], kv_tokens: int, max_requests: int, more_tokens: int, more_requests: int
) -> None:
    small = make_flow(kv_tokens, max_requests)
    large = make_flow(kv_tokens + more_tokens, max_requests + more_requests)
    assert large.target(replay(large, history)) >= small.target(replay(small, history))


@pytest.mark.parametrize("kv_tokens", [None, 1, 10**6])
@pytest.mark.parametrize("max_requests", [1, 100])
def test_a_group_begins_when_nothing_runs(kv_tokens: int | None, max_requests: int) -> None:
    assert make_flow(kv_tokens, max_requests).groups_to_begin(0.0) >= 1


def test_before_anything_is_known_completions_are_taken_for_as_long_as_they_may_be() -> None:
    group = PROMPT + GROUP_SIZE * (LIMIT - 1)
    for groups in (1, 3, 10):
        assert make_flow(math.ceil(groups * group / KV_SHARE), 1000).target(0.0) == groups * GROUP_SIZE


def test_the_longest_completion_of_a_group_keeps_one_place_only() -> None:
    flow = make_flow(None, 2 * GROUP_SIZE)
    groups = [flow.begin_group(0.0) for _ in range(2)]
    _, *others = [send(flow, group, 0.0) for group in groups for _ in range(GROUP_SIZE)]
    assert flow.groups_to_begin(1.0) == 0
    for request in others[: GROUP_SIZE - 1]:
        flow.end_request(request, 9, 1.0, stopped=True)
    assert flow.groups_to_begin(1.0) == 0
    flow.end_request(others[-1], 9, 1.0, stopped=True)
    assert flow.groups_to_begin(1.0) == 1


# ---- leases


def test_leases_ahead_cover_the_way_to_the_proxy() -> None:
    """10 groups that take 2 s each: 5 begin in a second, 2.5 in a round trip of 0.5 s; twice that and one."""
    flow = make_flow(None, 10 * GROUP_SIZE, max_ahead=100)
    for group in [flow.begin_group(0.0) for _ in range(10)]:
        flow.end_group(group, 2.0)
    for _ in range(10):
        flow.begin_group(2.0)
    for seconds in (9.0, 0.5, 0.7):
        flow.leased(seconds)
    assert flow.groups_to_lease(0, 2.0) == 6
    assert flow.groups_to_lease(4, 2.0) == 2
    assert flow.groups_to_lease(7, 2.0) == 0


def test_leases_ahead_are_no_more_than_a_step_consumes() -> None:
    flow = make_flow(None, GROUP_SIZE, max_ahead=3)
    flow.end_group(flow.begin_group(0.0), 0.001)
    flow.begin_group(0.001)
    flow.leased(60.0)
    assert flow.groups_to_lease(0, 1.0) == 3


# ---- all of it, against a model of an engine

STEP_S = 0.02


class ModelEngine:
    """Each running completion gains a token in a step. Counts the KV tokens; prompts are shared in a group."""

    def __init__(self, flow: Flow, lengths: random.Random, scale: float) -> None:
        self._flow = flow
        self._rng = lengths
        self._scale = scale
        self._left: dict[GroupInFlight, int] = {}
        self._running: list[tuple[TrackedRequest, int, int]] = []
        """With the step at which it began, and its length."""

    def step(self, number: int) -> int:
        """KV tokens in use afterwards."""
        now = number * STEP_S
        for entry in [entry for entry in self._running if number - entry[1] >= entry[2]]:
            self._running.remove(entry)
            request, _, length = entry
            self._flow.end_request(request, length, now, stopped=length < LIMIT * 16)
            self._left[request.group] -= 1
            if not self._left[request.group]:
                del self._left[request.group]
                self._flow.end_group(request.group, now)
        for _ in range(self._flow.groups_to_begin(now)):
            group = self._flow.begin_group(now)
            self._left[group] = GROUP_SIZE
            for _ in range(GROUP_SIZE):
                length = min(math.ceil(self._rng.lognormvariate(math.log(self._scale), 1.0)), LIMIT * 16)
                request = self._flow.begin_request(
                    group, prompt_tokens=PROMPT, prior=0, max_tokens=LIMIT * 16, now=now
                )
                self._running.append((request, number, length))
        return PROMPT * len(self._left) + sum(number - begun for _, begun, _ in self._running)


@pytest.mark.parametrize("seed", [0, 1])
def test_long_tailed_completions_fill_the_cache_and_do_not_overflow_it(seed: int) -> None:
    """Median 60, mean 99, limit 1024 tokens."""
    kv_tokens = 8000
    flow = Flow(
        lambda: EngineCapacity(kv_tokens, 512),
        group_size=GROUP_SIZE,
        max_tokens=LIMIT * 16,
        max_prompt=PROMPT,
        max_ahead=8,
    )
    engine = ModelEngine(flow, random.Random(seed), scale=60.0)
    used = [engine.step(number) / kv_tokens for number in range(2500)]
    late = used[1000:]
    assert sum(late) / len(late) > 0.75
    assert sum(share > 1.0 for share in used) / len(used) < 0.01
    assert max(used) < 1.1
