"""An engine pool, whatever happens in whatever order: no request is lost, or answered by the wrong engine."""

import asyncio
import contextlib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import SampledCompletion

from .fakes import until
from .pool_bench import PROBE, Bench, judge_of, whole

OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("draw"), st.integers(0, 3)),
        st.tuples(st.just("advance"), st.integers(0, 2)),
        st.tuples(st.just("kill"), st.integers(0, 2)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("restart"), st.integers(0, 2)),
        st.tuples(st.just("load"), st.integers(0, 30)),
        st.tuples(st.just("spoil"), st.integers(0, 2)),
        st.tuples(st.just("settle"), st.integers(1, 30)),
    ),
    min_size=5,
    max_size=60,
)


@settings(max_examples=150)
@given(engines=st.integers(1, 3), operations=OPERATIONS)
def test_no_request_is_lost_whatever_happens(engines: int, operations: list[tuple[str, int]]) -> None:
    """Each is answered once, whole, with the version that it asked for, by an engine that has it; one that
    was aborted with what it had drawn of it. In the end every engine has the versions that are left."""
    asyncio.run(_any_order(engines, operations))


async def _any_order(engines: int, operations: list[tuple[str, int]]) -> None:
    bench = Bench(engines)
    await bench.start(1)
    newest = 1
    tasks: list[tuple[int, asyncio.Task[SampledCompletion]]] = []
    aborted: set[int] = set()
    others: list[asyncio.Task[None]] = []
    loading: asyncio.Task[None] | None = None

    def may_fail(index: int) -> bool:
        """Not so often that the pool gives up, which it may then."""
        return sum(engine.index == index for engine in bench.made) <= 3

    async def load(version: int) -> None:
        """As the worker does, one after the other: the newest two stay, older ones when they are unused."""
        nonlocal newest
        while True:
            # While the sound engine is down, those that are left may all be unable to.
            with contextlib.suppress(IntegrityError):
                await bench.pool.add_adapter(version, Path(f"/adapters/{version}"))
                if await bench.pool.prove(version, PROBE, judge_of(version)) is None:
                    break
                await bench.pool.remove_adapter(version)
            await asyncio.sleep(0.001)
        newest = version
        for old in range(1, version - 1):
            if old in kept and all(task.done() for used, task in tasks if used == old):
                kept.discard(old)
                await bench.pool.remove_adapter(old)
        kept.add(version)

    kept = {1}
    for operation, n in operations:
        if operation == "draw":
            tasks.append((newest, bench.draw(str(len(tasks)), newest, prompt=(n,))))
            await asyncio.sleep(0)
        elif operation == "advance":
            bench.now(n % engines).advance()
        elif operation == "kill":
            if may_fail(n % engines):
                bench.now(n % engines).kill()
        elif operation == "abort" and n < len(tasks):
            aborted.add(n)
            others.append(asyncio.create_task(bench.pool.abort(str(n))))
        elif operation == "restart":
            others.append(asyncio.create_task(bench.pool.restart(n % engines, 0.0)))
        elif operation == "spoil" and n < engines - 1 and may_fail(n + 1):
            # Engine 0 stays sound, and the version can be served.
            bench.now(n + 1).broken_adapter, bench.now(n + 1).serves_base = n == 0, n == 1
        elif operation == "load" and (loading is None or loading.done()):
            loading = asyncio.create_task(load(newest + 1))
            others.append(loading)
        if operation in ("settle", "load"):
            for _ in range(n):
                await asyncio.sleep(0)
    completions = await bench.drawn(*(task for _, task in tasks))
    await asyncio.wait_for(asyncio.gather(*others), 10)
    for number, ((version, _), completion) in enumerate(zip(tasks, completions, strict=True)):
        if number in aborted and completion.finish_reason == "abort":
            assert completion.token_ids == tuple(range(len(completion.token_ids)))
            assert set(completion.policy_versions) <= {version}
        else:
            assert whole(completion, version)
    await until(lambda: bench.pool.note == "")
    assert all(bench.now(index).adapters.keys() == kept for index in range(engines))
    await bench.pool.close()
    assert all(engine.closed for engine in bench.made)
