"""Workers that are told to go, engines that draw the same completion whoever asks, and what is saved."""

import asyncio
import hashlib
import time
from typing import Any

from bucketrl.bucket import keys, partials
from bucketrl.bucket.partials import PartialGroup
from bucketrl.bucket.store import Store
from bucketrl.rollout_worker.engine import SamplingRequest

from .conftest import World
from .fake_engine import FakeEngine
from .fakes import until

GROUP_SIZE, MAX_TOKENS = 3, 8


def whole(request: SamplingRequest) -> tuple[int, ...]:
    """The one completion that a sample of a prompt has, whoever draws it: a token depends on its place."""
    sample = request.request_id.rpartition("-")[2]
    name = f"{request.prompt_token_ids}/{sample}"
    length = 2 + hashlib.sha256(name.encode()).digest()[0] % (MAX_TOKENS - 1)
    return tuple(hashlib.sha256(f"{name}/{n}".encode()).digest()[0] for n in range(length))


def rest(request: SamplingRequest) -> tuple[int, ...]:
    """`FakeEngine.tokens`: what follows `prior`, which must begin the completion."""
    full = whole(request)
    assert request.prior == full[: len(request.prior)]
    assert request.max_tokens == MAX_TOKENS - len(request.prior)
    return full[len(request.prior) :]


async def never(request: SamplingRequest) -> None:
    """For `FakeEngine.before_draw`."""
    await asyncio.Event().wait()


def saved(store: Store, run_id: str, newest: int = 0) -> dict[str, PartialGroup]:
    """Every partial object, by group id."""
    found = {}
    for info in store.list(keys.PARTIAL_PREFIX):
        parsed = keys.parse_partial(info.key)
        assert parsed is not None, info.key
        group_id, attempt = parsed
        found[str(group_id)] = partials.decode(
            store.get(info.key), run_id=run_id, group_id=str(group_id), attempt=attempt, max_version=newest
        )
    return found


def another_engine(world: World, **attributes: Any) -> FakeEngine:
    """Replaces the world's, for the next worker."""
    world.engine = FakeEngine()
    for name, value in ({"tokens": rest} | attributes).items():
        setattr(world.engine, name, value)
    return world.engine


async def preempted(world: World, groups: int = 2, **options: Any) -> float:
    """Starts a worker, stops it in the middle of `groups` groups; how long it takes to end."""
    world.proxy.limit = groups
    async with world.working(**options) as working:
        await until(lambda: len(world.engine.running) == GROUP_SIZE * groups)
        working.worker.stop("drained")
        start = time.monotonic()
        assert await working.task == "drained"
        return time.monotonic() - start
