"""How much a worker takes on: the requests that the KV cache has room for, the leases that cover the way to
the proxy. No I/O, and times are passed in (seconds of one monotonic clock).

    requests ended, running ──► survival ──► forecast of KV use ──► target ──► groups to begin
    groups ended, round trips ──► groups per second ──────────────► ahead ───► groups to lease
"""

import math
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from operator import neg
from statistics import fmean

from bucketrl.rollout_worker.engine import EngineCapacity

KV_SHARE = 0.95
"""Of the KV cache, to be used at most; the rest are blocks that are not full."""
DEVIATIONS = 2.0
"""Room for chance above the use that is expected. A preempted request is computed again from its prompt on: that
costs more than the little room that idles."""
GENERATIONS = 16
"""Requests remembered, in multiples of those that can run. A completion many times longer than the mean is seen
to its end only if so many have begun after it."""
MIN_REMEMBERED = 1024
_REFRESH_S = 0.1
"""A target is good for so long; ends of requests come far more often."""
LEASE_BATCH = 16
"""Groups asked for at once, at most: workers that start together take turns at the proxy."""
ROUND_TRIPS = 2.0
"""Covered by what is leased ahead: of late the shortest took so long, the next one may take longer."""
_HORIZONS = 16
"""Of the forecast, for each of three parts of the length distribution."""


@dataclass(slots=True, eq=False)
class GroupInFlight:
    """A group whose completions are being drawn."""

    began: float
    unsent: int
    """Requests that it has not sent yet."""
    prompt_tokens: int | None = None
    """None before the first request."""
    running: int = 0


@dataclass(slots=True, eq=False)
class TrackedRequest:
    """One request to the engine, with its place in the life of its completion."""

    group: GroupInFlight
    began: float
    entry: int
    """Tokens of the completion that were drawn before."""
    longest: int
    """Tokens that the completion may have when the request ends."""
    exit: int | None = None
    """Tokens of the completion when the request ended; None while it runs."""
    completed: bool = False
    """The completion ended there. If not, it was cut or goes on in another request."""


def survival(spans: Iterable[tuple[int, int, bool]], limit: int) -> list[float]:
    """[limit + 1] share of completions longer than n tokens, from (entry, exit, completed) of requests.

    The product-limit estimator (Kaplan and Meier 1958): at each length that ended a completion, S *= 1 - ended /
    at risk. Running requests are at risk up to their present length, so that a start, when only short ones have
    ended, does not look like short completions. Requests that began with tokens are at risk only beyond those
    (delayed entry: Tsai, Jewell and Wang 1987). The prior is one more request, which reaches the limit: what
    nobody has lived through yet counts as full length.
    """
    entries: list[int] = []
    exits: list[int] = []
    ends: Counter[int] = Counter()
    for entry, exit_, completed in spans:
        entries.append(entry)
        exits.append(exit_)
        if completed:
            ends[min(exit_, limit)] += 1
    entries.sort()
    exits.sort()
    share = 1.0
    table: list[float] = []
    for length in sorted(ends):
        table += [share] * (length - len(table))
        at_risk = 1 + bisect_left(entries, length) - bisect_left(exits, length)
        share *= 1.0 - ends[length] / at_risk
    table += [share] * (limit - len(table))
    return [*table[:limit], 0.0]


def groups_that_fit(
    alive: list[float],
    lengths: Mapping[int, int],
    *,
    prompt_tokens: float,
    group_prompt: float,
    group_size: int,
    kv_tokens: float,
) -> int:
    """Groups that may begin now so that the KV use forecast for any later time stays below `kv_tokens`;
    negative if it will not even without them.

    `lengths` counts the running completions by present length, `prompt_tokens` are those of all their prompts.
    A request with a tokens holds a + t after t more with probability p = S(a + t) / S(a), else nothing: mean
    p (a + t), variance p (1 - p) (a + t)^2. A new group holds its prompt and G requests with a = 0. `kv_tokens`
    has to be no less than the mean of all of them and DEVIATIONS of their standard deviation. Requests that
    begin later are judged later. To forecast the peak and not only the present use follows the Past-Future
    scheduler (Gong et al., ASPLOS 2025): requests that began together reach their peak together.
    """
    fit = math.inf
    for step in horizons(alive):
        mean, variance = prompt_tokens, 0.0
        for length, count in lengths.items():
            if length + step < len(alive):
                share = alive[length + step] / alive[length]
                held = count * share * (length + step)
                mean += held
                variance += held * (1.0 - share) * (length + step)
        each = group_prompt + group_size * alive[step] * step
        spread = group_size * alive[step] * (1.0 - alive[step]) * step**2
        fit = min(fit, _fit(kv_tokens - mean, variance, max(each, 1.0), spread))
    return math.floor(fit)


def _fit(room: float, variance: float, each: float, spread: float) -> float:
    """The k with k each + DEVIATIONS sqrt(variance + k spread) = room: a quadratic equation for the root."""
    if spread <= 0.0:
        return (room - DEVIATIONS * math.sqrt(variance)) / each
    slope = each / spread
    inside = DEVIATIONS**2 + 4.0 * slope * (room + slope * variance)
    if inside < 0.0:
        return -1.0
    root = (math.sqrt(inside) - DEVIATIONS) / (2.0 * slope)
    return (root**2 - variance) / spread if root >= 0.0 else -1.0


def horizons(alive: list[float]) -> list[int]:
    """Tokens ahead, ascending from 0: evenly up to where half, a tenth and none of all completions go on."""
    ends = (bisect_left(alive, -share, key=neg) - 1 for share in (0.5, 0.1, 0.0))
    return sorted({end * n // _HORIZONS for end in ends for n in range(_HORIZONS + 1)})


def _rounded(length: int) -> int:
    """To four binary digits, so that a thousand lengths become a hundred: at most 1/16 off."""
    unit = 1 << max(0, length.bit_length() - 4)
    return (length + unit // 2) // unit * unit


class Flow:
    """The decisions of one worker, from what its groups, requests and leases have done so far."""

    def __init__(
        self,
        capacity: Callable[[], EngineCapacity],
        *,
        group_size: int,
        max_tokens: int,
        max_prompt: int,
        max_ahead: int,
        max_groups: int | None = None,
    ) -> None:
        """`max_tokens` are those of a completion, `max_prompt` those of a prompt. `max_ahead` bounds the groups
        leased and not begun: with as many as a learner's step has, none waits longer than about one step.
        `max_groups` bounds the groups in flight."""
        self._capacity = capacity
        self._group_size = group_size
        self._max_tokens = max_tokens
        self._max_prompt = max_prompt
        self._max_ahead = max_ahead
        self._max_groups = max_groups
        # Dictionaries for sets in a fixed order: sums of floats depend on it.
        self._groups: dict[GroupInFlight, None] = {}
        self._running: dict[TrackedRequest, None] = {}
        self._recent: deque[TrackedRequest] = deque()
        """Those begun last, ended or not. Chosen by their end, the short ones would be too many."""
        self._unseen = 0
        """Requests ended since `_alive` was estimated."""
        self._alive = survival((), max_tokens)
        self._drawn: deque[tuple[int, float]] = deque(maxlen=256)
        """(tokens, seconds) of the requests that ended last."""
        self._prompts: deque[int] = deque(maxlen=256)
        self._sojourns: deque[float] = deque(maxlen=64)
        """Seconds that the groups which ended last were in flight."""
        self._round_trips: deque[float] = deque(maxlen=16)
        self._target = 0
        self._decided = -math.inf

    # ---- what happens

    def begin_group(self, now: float) -> GroupInFlight:
        group = GroupInFlight(began=now, unsent=self._group_size)
        self._groups[group] = None
        return group

    def end_group(self, group: GroupInFlight, now: float) -> None:
        """All that it sent has ended."""
        del self._groups[group]
        self._sojourns.append(now - group.began)

    def begin_request(
        self, group: GroupInFlight, *, prompt_tokens: int, prior: int, max_tokens: int, now: float
    ) -> TrackedRequest:
        """`prior` tokens of the completion are drawn already, up to `max_tokens` more are asked for."""
        request = TrackedRequest(group, began=now, entry=prior, longest=prior + max_tokens)
        if group.prompt_tokens is None:
            group.prompt_tokens = prompt_tokens
            self._prompts.append(prompt_tokens)
        group.unsent = max(0, group.unsent - 1)
        group.running += 1
        self._running[request] = None
        self._recent.append(request)
        remembered = max(MIN_REMEMBERED, GENERATIONS * self._capacity().max_requests)
        while len(self._recent) > remembered:
            self._recent.popleft()
        return request

    def end_request(self, request: TrackedRequest, tokens: int, now: float, *, stopped: bool) -> None:
        """It drew `tokens`; `stopped` by an end-of-turn token, not by a limit or an abort."""
        del self._running[request]
        request.group.running -= 1
        request.exit = request.entry + tokens
        request.completed = tokens > 0 and (stopped or request.exit >= self._max_tokens)
        if tokens:
            self._drawn.append((tokens, now - request.began))
        self._unseen += 1

    def leased(self, seconds: float) -> None:
        """The proxy took so long to grant groups."""
        self._round_trips.append(seconds)

    # ---- what to do

    @property
    def requests(self) -> int:
        """Running, and those that the groups in flight have still to send."""
        return len(self._running) + sum(group.unsent for group in self._groups)

    def target(self, now: float) -> int:
        """Requests that may run: at least one group, at most what the engine takes."""
        if now - self._decided >= _REFRESH_S:
            self._decided = now
            self._target = self._decide(now)
        return self._target

    def groups_to_begin(self, now: float) -> int:
        free = (self.target(now) - self.requests) // self._group_size
        if self._max_groups is not None:
            free = min(free, self._max_groups - len(self._groups))
        return max(0, free)

    def groups_to_lease(self, waiting: int, now: float) -> int:
        """With `waiting` groups leased and not begun."""
        return max(0, min(self.groups_to_begin(now) + self._ahead() - waiting, LEASE_BATCH))

    # ---- inside

    def _ahead(self) -> int:
        """Groups that begin during a round trip. By Little's law (1961), as many begin in a second as are in
        flight, divided by the seconds that each of them is."""
        if not (self._round_trips and self._sojourns):
            return 1
        begun = len(self._groups) / max(fmean(self._sojourns), 1e-9) * min(self._round_trips)
        return max(1, min(1 + math.ceil(ROUND_TRIPS * begun), self._max_ahead))

    def _decide(self, now: float) -> int:
        capacity = self._capacity()
        target = capacity.max_requests
        if capacity.kv_tokens is not None:
            lengths = self._present_lengths(now)
            if self._unseen > len(self._recent) // 32:
                self._alive, self._unseen = self._survival(lengths), 0
            prompt = fmean(self._prompts) if self._prompts else float(self._max_prompt)
            fit = groups_that_fit(
                self._alive,
                self._histogram(lengths),
                prompt_tokens=sum(
                    prompt if group.prompt_tokens is None else group.prompt_tokens
                    for group in self._groups
                    if group.running or group.unsent
                ),
                group_prompt=prompt,
                group_size=self._group_size,
                kv_tokens=KV_SHARE * capacity.kv_tokens,
            )
            target = min(target, self.requests + fit * self._group_size)
        return max(target, self._group_size)

    def _present_lengths(self, now: float) -> dict[TrackedRequest, int]:
        """Engines tell a completion's length when it ends: until then it grows as fast as others did."""
        seconds = sum(seconds for _, seconds in self._drawn)
        rate = sum(tokens for tokens, _ in self._drawn) / seconds if seconds > 0 else 0.0
        return {
            request: min(request.entry + int(rate * (now - request.began)), request.longest - 1)
            for request in self._running
        }

    def _survival(self, lengths: Mapping[TrackedRequest, int]) -> list[float]:
        spans = (
            (request.entry, lengths[request] if request.exit is None else request.exit, request.completed)
            for request in self._recent
        )
        return survival(spans, self._max_tokens)

    def _histogram(self, lengths: Mapping[TrackedRequest, int]) -> Counter[int]:
        histogram = Counter(min(_rounded(length), self._max_tokens - 1) for length in lengths.values())
        histogram[0] += sum(group.unsent for group in self._groups)
        return histogram
