"""Several engines as one: requests go where there is room, and one engine may end while the others work.

    request ─► choose ─┬─► engine 0 ── drawn ──────────────────────────────────────────────► caller
               ▲       └─► engine 1 ── dies: drawn again; emptied: what is left is drawn ─┐
               └──────────────────────────────────────────────────────────────────────────┘

While no engine serves, requests wait for one to come back.
"""

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.background import Background, in_time
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    Engine,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines.checks import CLOSED
from bucketrl.rollout_worker.engines.member import CLOSE_S, Judge, MakeEngine, Member, Served

NOTHING_DRAWN = SampledCompletion((), (), (), "abort")


@dataclass(slots=True, eq=False)
class _Course:
    """Where one request is."""

    engine: Engine | None = None
    """That runs it now."""
    aborted: bool = False
    moving: bool = False
    """Its engine is being emptied: what it has drawn by then is continued elsewhere."""


class EnginePool:
    """An `Engine` over engines that are all alike."""

    def __init__(self, make: MakeEngine, engines: int, *, group_size: int) -> None:
        """`make` is asked again for every restart. Up to `group_size` requests of one prompt stay on one
        engine though another is less busy."""
        self._slack = group_size
        self._changed = asyncio.Event()
        self._closing = False
        self._defect: BaseException | None = None
        self._background = Background(self._broke)
        self._served = Served()
        self._members = [
            Member(index, make, self._served, self._background, self._notify) for index in range(engines)
        ]
        self._courses: dict[str, _Course] = {}
        self._sharing: Counter[tuple[int, ...]] = Counter()
        """Requests of each prompt."""
        self._homes: dict[tuple[int, ...], int] = {}
        """Index of the engine that has the prompt in its cache."""
        self.name = self._named()
        self.stop_token_ids = self._members[0].engine.stop_token_ids
        self.redrawn = 0
        """Requests whose engine died and took what it had drawn along."""

    def _named(self) -> str:
        name, engines = self._members[0].engine.name, len(self._members)
        return f"{engines} x {name}" if engines > 1 else name

    @property
    def note(self) -> str:
        """Which engines do not serve, for people; empty if all do."""
        away = [member for member in self._members if member.state != "serving"]
        if not away:
            return ""
        count = len(self._members)
        return f"{count - len(away)} of {count} engines serve; engine {away[0].index}: {away[0].trouble}"

    @property
    def capacity(self) -> EngineCapacity:
        """Of the engines that serve now, together."""
        each = [member.engine.capacity for member in self._serving() or self._members]
        tokens = [one.kv_tokens for one in each if one.kv_tokens is not None]
        return EngineCapacity(
            kv_tokens=sum(tokens) if len(tokens) == len(each) else None,
            max_requests=sum(one.max_requests for one in each),
        )

    async def start(self) -> None:
        """Raises the error of the first engine if none starts, and UserError if any is refused."""
        starts = [member.engine.start() for member in self._members]
        outcomes = await asyncio.gather(*starts, return_exceptions=True)
        errors = [outcome for outcome in outcomes if outcome is not None]
        refused = [error for error in errors if isinstance(error, UserError)]
        if refused or len(errors) == len(self._members):
            raise (refused or errors)[0]
        self.name = self._named()  # Some know theirs only now.
        for member in self._members:
            member.state = "serving"
        for member, outcome in zip(self._members, outcomes, strict=True):
            if outcome is not None:
                member.take_out(member.engine, f"did not start: {outcome}")

    async def add_adapter(self, version: int, folder: Path) -> None:
        """An engine that alone cannot load it is restarted. Raises IntegrityError if none can."""
        # An engine that has come back meanwhile lacks it: until none does.
        while lacking := [(m, m.engine) for m in await self._some() if m.adapters.get(version) != folder]:
            errors = await asyncio.gather(*(member.load(version, folder) for member, _ in lacking))
            first = next((error for error in errors if error is not None), None)
            if first is not None and not any(m.adapters.get(version) == folder for m in self._serving()):
                raise first
            for (member, engine), error in zip(lacking, errors, strict=True):
                if error is not None:
                    member.take_out(engine, str(error))
        self._served.adapters[version] = folder

    async def remove_adapter(self, version: int) -> None:
        del self._served.adapters[version]
        self._served.proofs.pop(version, None)
        await asyncio.gather(*(m.unload(version) for m in self._members if m.state != "down"))

    async def prove(self, version: int, token_ids: tuple[int, ...], judge: Judge) -> str | None:
        """Shows for every engine, and later for every one that is restarted, that it serves `version`: `judge`
        is asked about its logprobs of `token_ids`. One that fails alone is restarted.

        What is wrong if all fail, else None.
        """
        while unproved := [(m, m.engine) for m in await self._some() if version not in m.proved]:
            failures = await asyncio.gather(*(m.prove(version, token_ids, judge) for m, _ in unproved))
            first = next((failure for failure in failures if failure is not None), None)
            if first is not None and not any(version in m.proved for m in self._serving()):
                return first
            for (member, engine), failure in zip(unproved, failures, strict=True):
                if failure is not None:
                    member.take_out(engine, f"does not serve version {version}: {failure}")
        self._served.proofs[version] = (token_ids, judge)
        return None

    # ---- requests

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        course = self._courses[request.request_id] = _Course()
        prompt = request.prompt_token_ids
        self._sharing[prompt] += 1
        drawn: SampledCompletion | None = None
        try:
            while not course.aborted:
                rest = request if drawn is None else remainder(request, drawn)
                if (member := await self._place(rest, course)) is None:
                    break
                if (part := await self._draw(member, rest, course)) is None:
                    continue
                drawn = part if drawn is None else joined(drawn, part)
                moved = course.moving and part.finish_reason == "abort"
                if not moved or len(drawn.token_ids) >= request.max_tokens:
                    return drawn
            return drawn or NOTHING_DRAWN
        finally:
            del self._courses[request.request_id]
            self._sharing[prompt] -= 1
            if not self._sharing[prompt]:
                del self._sharing[prompt]
                self._homes.pop(prompt, None)

    async def _place(self, request: SamplingRequest, course: _Course) -> Member | None:
        """The engine that is to draw it, as soon as there is one; None if it is aborted before."""
        version, prompt = request.policy_version, request.prompt_token_ids
        while not course.aborted:
            if self._closing:
                raise DroppedCompletion(CLOSED)
            if version not in self._served.adapters:
                raise KeyError(version)
            loads = {m.index: len(m.requests) for m in self._serving() if version in m.adapters}
            if loads:
                index = self._homes[prompt] = choose(loads, self._homes.get(prompt), self._slack)
                return self._members[index]
            await self._change()
        return None

    async def _draw(
        self, member: Member, request: SamplingRequest, course: _Course
    ) -> SampledCompletion | None:
        """None if the engine died meanwhile."""
        engine = member.engine
        course.engine, course.moving = engine, False
        member.requests.add(request.request_id)
        try:
            return await engine.generate(request)
        except EngineDied as error:
            member.take_out(engine, str(error))
        except DroppedCompletion:
            if self._closing or member.up(engine):
                raise
        finally:
            course.engine = None
            member.requests.discard(request.request_id)
            self._notify()
        self.redrawn += 1
        return None

    async def abort(self, request_id: str) -> None:
        course = self._courses.get(request_id)
        if course is None:
            return
        course.aborted = True
        self._notify()
        if course.engine is not None:
            await _abort(course.engine, request_id)

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        """By one engine; see `prove` for all."""
        while True:
            if version is not None and version not in self._served.adapters:
                raise KeyError(version)
            member = min(await self._some(), key=lambda m: (len(m.requests), m.index))
            engine = member.engine
            try:
                return await engine.score(token_ids, version)
            except (EngineDied, DroppedCompletion) as error:
                member.take_out(engine, str(error))

    async def close(self) -> None:
        self._closing = True
        for member in self._members:
            member.state = "down"  # None is replaced any more.
        self._notify()
        await self._background.cancel()
        await asyncio.gather(*(member.engine.close() for member in self._members))

    # ---- one engine at a time

    async def drain(self, index: int, seconds: float) -> None:
        """Empties one engine, which gets no more requests until it is restarted. Those that have not ended
        after `seconds` are cut, and continued by the others."""
        member = self._members[index]
        if member.state == "serving":
            member.state, member.trouble = "draining", "being emptied"
        if not await in_time(self._emptied(member), seconds):
            for request_id in member.requests:
                self._courses[request_id].moving = True
            await asyncio.gather(*(_abort(member.engine, one) for one in tuple(member.requests)))
            # What it does not give back even now is lost when it is closed, and drawn again.
            await in_time(self._emptied(member), CLOSE_S)

    async def restart(self, index: int, seconds: float, make: MakeEngine | None = None) -> None:
        """Drains one engine and puts a new one in its place, by `make` if it is given; returns when that
        serves."""
        member = self._members[index]
        member.make = make or member.make
        while member.state == "down":
            await self._change()
        await self.drain(index, seconds)
        member.take_out(member.engine, "being restarted", failed=False)
        while member.state != "serving":
            await self._change()

    async def _emptied(self, member: Member) -> None:
        while member.requests:
            await self._change()

    # ---- waiting

    def _serving(self) -> list[Member]:
        return [member for member in self._members if member.state == "serving"]

    async def _some(self) -> list[Member]:
        """The engines that serve, as soon as there is one."""
        while not (serving := self._serving()):
            await self._change()
        return serving

    async def _change(self) -> None:
        """Until anything is different. Raises DroppedCompletion if the pool is closed, EngineDied if no engine
        is left."""
        if self._closing:
            raise DroppedCompletion(CLOSED)
        if self._defect is not None:
            raise self._defect
        if all(member.resting for member in self._members):
            raise EngineDied(f"no engine is left: all failed too often; engine 0: {self._members[0].trouble}")
        await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _broke(self, error: BaseException) -> None:
        self._defect = error
        self._notify()


def choose(loads: Mapping[int, int], home: int | None, slack: int) -> int:
    """Index of the engine that is to draw a request: `home`, which has its prompt in the cache, unless it has
    more than `slack` requests more than the least busy one."""
    least = min(loads, key=lambda index: (loads[index], index))
    if home is None or home not in loads or loads[home] - loads[least] > slack:
        return least
    return home


def remainder(request: SamplingRequest, drawn: SampledCompletion) -> SamplingRequest:
    """What is left of `request`. With its seed the new tokens would repeat the random numbers of the first."""
    tokens = len(drawn.token_ids)
    return replace(
        request,
        max_tokens=request.max_tokens - tokens,
        seed=request.seed ^ tokens,
        prior=request.prior + drawn.token_ids,
    )


def joined(first: SampledCompletion, rest: SampledCompletion) -> SampledCompletion:
    return SampledCompletion(
        first.token_ids + rest.token_ids,
        first.logprobs + rest.logprobs,
        first.policy_versions + rest.policy_versions,
        rest.finish_reason,
        first.accepted_draft_tokens + rest.accepted_draft_tokens,
    )


async def _abort(engine: Engine, request_id: str) -> None:
    try:
        await engine.abort(request_id)
    except EngineDied:
        pass  # Its `generate` says so too.
