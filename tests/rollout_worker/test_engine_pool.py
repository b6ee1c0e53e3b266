"""Several engines as one: no request is lost or answered by the wrong engine, whatever dies meanwhile."""

import asyncio
import contextlib
import itertools
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.rollout_worker.engine import (
    DroppedCompletion,
    EngineCapacity,
    EngineDied,
    SampledCompletion,
    SamplingRequest,
)
from bucketrl.rollout_worker.engines import create_engine, member, vllm_engine
from bucketrl.rollout_worker.engines.member import Judge, restart_delay
from bucketrl.rollout_worker.engines.pool import EnginePool, choose

from .engine_contract import PROMPT, TOLERANCE, Setting, make_setting, make_settings, mismatch, request
from .fakes import until

LENGTH = 6
"""Tokens of every completion of the fake engine."""
PROBE = (1, 2, 3)


@pytest.fixture(autouse=True)
def _hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RESTART_S", 0.001)


class FakeEngine:
    """Draws the tokens 0, 1, ... LENGTH - 1, one for each `advance`; the first after `prior` is the next of
    them, so that a completion shows whether anything of it was lost, drawn twice or put together wrongly."""

    name = "fake 1"
    stop_token_ids: tuple[int, ...] = (0,)
    capacity = EngineCapacity(kv_tokens=100, max_requests=4)

    def __init__(self, index: int) -> None:
        self.index = index
        self.adapters: dict[int, Path] = {}
        self.running: dict[str, tuple[SamplingRequest, list[int], asyncio.Future[SampledCompletion]]] = {}
        self.served: list[SamplingRequest] = []
        self.start_error: Exception | None = None
        self.broken_adapter = False
        self.serves_base = False
        self.start_steps = 1 + 11 * index
        self.dead = False
        self.closed = False

    async def start(self) -> None:
        for _ in range(self.start_steps):
            await asyncio.sleep(0)
        if self.start_error is not None:
            raise self.start_error

    async def add_adapter(self, version: int, folder: Path) -> None:
        await self._pass()
        assert version not in self.adapters
        if self.broken_adapter:
            raise IntegrityError(f"cannot load {version}")
        self.adapters[version] = folder

    async def remove_adapter(self, version: int) -> None:
        assert not any(request.policy_version == version for request, _, _ in self.running.values())
        await self._pass()
        del self.adapters[version]

    async def score(self, token_ids: tuple[int, ...], version: int | None) -> list[float]:
        await self._pass()
        served = None if version is None or self.serves_base else self.adapters[version]
        return [float(served.name) if served else -1.0] * (len(token_ids) - 1)

    async def _pass(self) -> None:
        """What a call to a real engine is: it takes a while, and either may end meanwhile."""
        for _ in range(2):
            if self.closed:
                raise DroppedCompletion("engine closed")
            if self.dead:
                raise EngineDied("fake death")
            await asyncio.sleep(0)

    async def generate(self, request: SamplingRequest) -> SampledCompletion:
        assert request.policy_version in self.adapters, "served by an engine without its version"
        if self.closed:
            raise DroppedCompletion("engine closed")
        if self.dead:
            raise EngineDied("fake death")
        assert request.request_id not in self.running
        future: asyncio.Future[SampledCompletion] = asyncio.get_running_loop().create_future()
        self.running[request.request_id] = (request, [], future)
        self.served.append(request)
        try:
            return await future
        finally:
            del self.running[request.request_id]

    def advance(self, steps: int = 1) -> None:
        for asked, tokens, future in self.running.values():
            for _ in range(steps):
                if not future.done():
                    tokens.append(len(asked.prior) + len(tokens))
                    if tokens[-1] == LENGTH - 1:
                        self._answer(asked, tokens, future, "stop")

    def _answer(self, request: SamplingRequest, tokens: list[int], future: Any, reason: Any) -> None:
        count = len(tokens)
        future.set_result(
            SampledCompletion(tuple(tokens), (-1.0,) * count, (request.policy_version,) * count, reason)
        )

    async def abort(self, request_id: str) -> None:
        if request_id in self.running:
            request, tokens, future = self.running[request_id]
            if not future.done():
                self._answer(request, tokens, future, "abort")
        await asyncio.sleep(0)

    def kill(self) -> None:
        self.dead = True
        self._fail(EngineDied("fake death"))

    def _fail(self, error: Exception) -> None:
        for _, _, future in self.running.values():
            if not future.done():
                future.set_exception(error)

    async def close(self) -> None:
        self.closed = True
        self._fail(DroppedCompletion("engine closed"))
        await asyncio.sleep(0)


class Bench:
    """A pool of fake engines, all of which are kept in view."""

    def __init__(self, engines: int, group_size: int = 2) -> None:
        self.made: list[FakeEngine] = []
        self.prepare: Callable[[FakeEngine], None] = lambda engine: None
        self.pool = EnginePool(self._make, engines, group_size=group_size)

    def _make(self, index: int) -> FakeEngine:
        engine = FakeEngine(index)
        self.prepare(engine)
        self.made.append(engine)
        return engine

    def now(self, index: int) -> FakeEngine:
        return [engine for engine in self.made if engine.index == index][-1]

    async def start(self, *versions: int) -> None:
        await self.pool.start()
        for version in versions:
            await self.pool.add_adapter(version, Path(f"/adapters/{version}"))
            assert await self.pool.prove(version, PROBE, judge_of(version)) is None

    def draw(self, name: str, version: int = 1, prompt: tuple[int, ...] = (7,)) -> asyncio.Task[Any]:
        asked = SamplingRequest(name, prompt, 100, 1.0, 5, version)
        return asyncio.create_task(self.pool.generate(asked))

    def finish(self) -> None:
        for engine in self.made:
            engine.advance(LENGTH)

    async def drawn(self, *tasks: asyncio.Task[Any]) -> list[SampledCompletion]:
        """All of them, the engines working as they should."""
        async with asyncio.timeout(10):
            while not all(task.done() for task in tasks):
                self.finish()
                await asyncio.sleep(0.001)
        return [task.result() for task in tasks]


def judge_of(version: int) -> Judge:
    def judge(measured: Sequence[float]) -> str | None:
        return None if list(measured) == [float(version)] * 2 else "it serves the base model"

    return judge


def whole(completion: SampledCompletion, version: int) -> bool:
    return completion == SampledCompletion(
        tuple(range(LENGTH)), (-1.0,) * LENGTH, (version,) * LENGTH, "stop"
    )


@pytest.fixture
async def two() -> AsyncIterator[Bench]:
    bench = Bench(2)
    await bench.start(1)
    yield bench
    await bench.pool.close()


# ---- where requests go


@given(
    st.dictionaries(st.integers(0, 7), st.integers(0, 20), min_size=1), st.integers(0, 7), st.integers(0, 9)
)
def test_a_request_goes_home_unless_others_are_much_less_busy(
    loads: dict[int, int], home: int, slack: int
) -> None:
    least = min(loads.values())
    first = min(index for index, load in loads.items() if load == least)
    assert choose(loads, None, slack) == first
    near = home in loads and loads[home] <= least + slack
    assert choose(loads, home, slack) == (home if near else first)


async def test_groups_stay_together_and_spread_over_the_engines(two: Bench) -> None:
    tasks = [two.draw(f"{group}-{n}", prompt=(group,)) for group in range(4) for n in range(2)]
    await asyncio.sleep(0)
    where = [{request.prompt_token_ids[0] for request in two.now(index).served} for index in (0, 1)]
    assert where[0] & where[1] == set()
    assert [len(two.now(index).served) for index in (0, 1)] == [4, 4]
    assert all(whole(one, 1) for one in await two.drawn(*tasks))


async def test_a_large_group_does_not_fill_one_engine_alone(two: Bench) -> None:
    tasks = [two.draw(str(n)) for n in range(20)]
    await asyncio.sleep(0)
    busy = [len(two.now(index).running) for index in (0, 1)]
    assert abs(busy[0] - busy[1]) <= 3
    await two.drawn(*tasks)


def test_the_name_and_the_capacity_are_those_of_all_engines() -> None:
    assert (Bench(1).pool.name, Bench(3).pool.name) == ("fake 1", "3 x fake 1")
    assert Bench(3).pool.capacity == EngineCapacity(kv_tokens=300, max_requests=12)


# ---- one engine ends


@pytest.mark.parametrize("engines", [1, 2])
async def test_requests_of_a_dead_engine_are_drawn_again(engines: int) -> None:
    """By another one, or by itself when it is back. Nothing drawn before its death is in the answer."""
    bench = Bench(engines)
    await bench.start(1, 2)
    tasks = [bench.draw(str(n), version=1 + n % 2, prompt=(n,)) for n in range(4)]
    await asyncio.sleep(0)
    bench.now(0).advance(2)
    lost = len(bench.now(0).running)
    bench.now(0).kill()
    completions = await bench.drawn(*tasks)
    assert all(whole(one, 1 + n % 2) for n, one in enumerate(completions))
    assert bench.pool.redrawn == lost > 0
    await until(lambda: bench.pool.note == "")
    assert sorted(bench.now(0).adapters) == [1, 2]
    assert [engine.closed for engine in bench.made] == [True] + [False] * engines
    await bench.pool.close()


async def test_an_engine_that_is_down_shows_and_gets_no_requests(two: Bench) -> None:
    def refuse(engine: FakeEngine) -> None:
        engine.start_error = RuntimeError("no memory") if engine.index == 1 else None

    two.prepare = refuse
    two.now(1).kill()
    assert two.pool.note == ""  # Nobody has asked it for anything yet.
    first = [two.draw(str(n), prompt=(n,)) for n in range(4)]
    await two.drawn(*first)
    await until(lambda: "no memory" in two.pool.note)
    assert two.pool.note.startswith("1 of 2 engines serve; engine 1: cannot be restarted")
    assert two.pool.capacity.max_requests == 4
    before = len(two.now(0).served)
    await two.drawn(*(two.draw(f"again-{n}", prompt=(n,)) for n in range(4)))
    assert len(two.now(0).served) == before + 4


async def test_an_engine_that_cannot_come_back_ends_the_pool() -> None:
    bench = Bench(1)
    await bench.start(1)

    def refuse(engine: FakeEngine) -> None:
        engine.start_error = RuntimeError("no memory")

    bench.prepare = refuse
    task = bench.draw("a")
    await asyncio.sleep(0)
    bench.now(0).kill()
    with pytest.raises(EngineDied, match=r"no engine is left.*no memory"):
        await asyncio.wait_for(task, 10)
    assert len(bench.made) == 1 + member.MAX_FAILURES - 1
    with pytest.raises(EngineDied, match="no engine is left"):
        await bench.pool.add_adapter(2, Path("/adapters/2"))
    await asyncio.wait_for(bench.pool.close(), 5)


def test_attempts_come_later_each_time_and_rest_after_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member, "RESTART_S", 1.0)
    assert [restart_delay([0.0] * n, 10.0) for n in range(5)] == [0.0, 0.0, 1.0, 2.0, 4.0]
    assert restart_delay([5.0, 6.0, 7.0, 8.0, 9.0], 10.0) == 5.0 + member.WINDOW_S - 10.0


async def test_the_worker_stops_as_ever_while_an_engine_is_down(two: Bench) -> None:
    """Waiting requests can be aborted, and closing answers them."""
    gate = asyncio.Event()

    def slow(engine: FakeEngine) -> None:
        async def start() -> None:
            await gate.wait()

        engine.start = start  # type: ignore[method-assign]

    two.prepare = slow
    tasks = [two.draw(str(n), prompt=(n,)) for n in range(4)]
    await asyncio.sleep(0)
    two.now(0).kill()
    two.now(1).kill()
    await until(lambda: two.pool.note.startswith("0 of 2"))
    await two.pool.abort("0")
    assert await asyncio.wait_for(tasks[0], 1) == SampledCompletion((), (), (), "abort")
    await two.pool.abort("0")  # has ended: no error
    await asyncio.wait_for(two.pool.close(), 5)
    outcomes = await asyncio.gather(*tasks[1:], return_exceptions=True)
    assert all(isinstance(outcome, DroppedCompletion) for outcome in outcomes)
    assert all(engine.closed for engine in two.made)


async def test_an_abort_reaches_the_engine_that_runs_the_request(two: Bench) -> None:
    tasks = [two.draw(str(n), prompt=(n,)) for n in range(2)]
    await asyncio.sleep(0)
    for engine in two.made:
        engine.advance(2)
    await two.pool.abort("1")
    cut = await asyncio.wait_for(tasks[1], 1)
    assert (cut.token_ids, cut.finish_reason) == ((0, 1), "abort")
    assert not tasks[0].done()
    await two.drawn(tasks[0])


async def test_an_unknown_version_is_refused(two: Bench) -> None:
    with pytest.raises(KeyError):
        await two.draw("a", version=99)
    with pytest.raises(KeyError):
        await two.pool.score(PROBE, 99)


# ---- start


async def test_the_pool_starts_without_the_engine_that_fails_alone() -> None:
    bench = Bench(3)
    bench.now(1).start_error = RuntimeError("port in use")
    await bench.start(1)
    await until(lambda: bench.pool.note == "")
    assert len(bench.made) == 4
    assert bench.now(1).adapters.keys() == {1}
    await bench.pool.close()


@pytest.mark.parametrize("error", [UserError("bad model"), RuntimeError("no memory")])
async def test_what_no_engine_can_do_is_raised_at_start(error: Exception) -> None:
    bench = Bench(2)
    for engine in bench.made:
        engine.start_error = error
    with pytest.raises(type(error)):
        await bench.pool.start()
    await bench.pool.close()
    assert len(bench.made) == 2


# ---- versions


async def test_an_engine_that_alone_cannot_load_or_serve_a_version_is_replaced(two: Bench) -> None:
    two.now(1).broken_adapter = True
    await two.pool.add_adapter(2, Path("/adapters/2"))
    await until(lambda: two.pool.note == "")
    two.now(0).serves_base = True
    assert await two.pool.prove(2, PROBE, judge_of(2)) is None
    await until(lambda: two.pool.note == "")
    assert len(two.made) == 4
    assert [sorted(two.now(index).adapters) for index in (0, 1)] == [[1, 2], [1, 2]]


async def test_a_version_that_no_engine_can_load_or_serve_is_the_callers_trouble(two: Bench) -> None:
    for engine in two.made:
        engine.broken_adapter = True
    with pytest.raises(IntegrityError, match="cannot load 2"):
        await two.pool.add_adapter(2, Path("/adapters/2"))
    for engine in two.made:
        engine.broken_adapter, engine.serves_base = False, True
    await two.pool.add_adapter(2, Path("/adapters/2"))
    assert await two.pool.prove(2, PROBE, judge_of(2)) == "it serves the base model"
    await two.pool.remove_adapter(2)
    assert (two.pool.note, len(two.made)) == ("", 2)
    assert all(engine.adapters.keys() == {1} for engine in two.made)


async def test_a_restarted_engine_that_serves_the_wrong_policy_gets_no_request() -> None:
    bench = Bench(1)
    await bench.start(1)
    wrong = iter([True, True, False])

    def lie(engine: FakeEngine) -> None:
        engine.serves_base = next(wrong)

    bench.prepare = lie
    task = bench.draw("a")
    await asyncio.sleep(0)
    bench.now(0).kill()
    assert whole((await bench.drawn(task))[0], 1)
    assert [len(engine.served) for engine in bench.made] == [1, 0, 0, 1]
    await bench.pool.close()


# ---- drain and restart


async def test_a_drained_engine_ends_its_requests_while_the_others_work(two: Bench) -> None:
    tasks = [two.draw(str(n), prompt=(n,)) for n in range(2)]
    await asyncio.sleep(0)
    restart = asyncio.create_task(two.pool.restart(0, 60.0))
    await asyncio.sleep(0.01)
    assert not restart.done()
    later = [two.draw(f"later-{n}", prompt=(n,)) for n in range(4)]
    await asyncio.sleep(0)
    assert [len(two.now(index).served) for index in (0, 1)] == [1, 5]
    two.now(1).advance(LENGTH)
    await asyncio.gather(*later)
    assert not tasks[0].done()
    two.now(0).advance(LENGTH)
    await asyncio.wait_for(restart, 5)
    assert whole(await tasks[0], 1)
    assert len(two.made) == 3
    assert two.pool.redrawn == 0


async def test_what_a_drained_engine_does_not_end_in_time_is_continued_by_another(two: Bench) -> None:
    tasks = [two.draw(str(n), prompt=(n,)) for n in range(2)]
    await asyncio.sleep(0)
    two.now(0).advance(4)
    await asyncio.wait_for(two.pool.restart(0, 0.01), 5)
    moved = two.now(1).served[-1]
    assert (moved.prior, moved.max_tokens) == ((0, 1, 2, 3), 96)
    assert moved.seed != 5
    assert all(whole(one, 1) for one in await two.drawn(*tasks))


async def test_a_restart_may_bring_another_engine(two: Bench) -> None:
    def larger(index: int) -> FakeEngine:
        engine = FakeEngine(index)
        engine.capacity = EngineCapacity(kv_tokens=900, max_requests=8)
        two.made.append(engine)
        return engine

    await two.pool.restart(1, 1.0, larger)
    assert two.pool.capacity == EngineCapacity(kv_tokens=1000, max_requests=12)
    assert two.now(1).adapters.keys() == {1}


# ---- anything in any order

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


# ---- real engines


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("model"))


def judge_policy(setting: Setting, version: int, tokens: tuple[int, ...]) -> Judge:
    expected = setting.policies[version](tokens).logprobs

    def judge(measured: Sequence[float]) -> str | None:
        off = max(abs(a - b) for a, b in zip(expected, measured, strict=True))
        return None if off < TOLERANCE else f"off by {off:.2g}"

    return judge


async def serve(pool: EnginePool, setting: Setting) -> None:
    tokens = tuple(range(5, 29))
    for version in (1, 2):
        await pool.add_adapter(version, setting.adapters[version])
        assert await pool.prove(version, tokens, judge_policy(setting, version, tokens)) is None


@pytest.mark.slow
async def test_a_real_engine_breaks_and_the_answers_stay_right(setting: Setting) -> None:
    """One of two transformers engines fails in mid-generation, as it would for lack of memory."""
    made: list[Any] = []

    def make(index: int) -> Any:
        made.append(create_engine("transformers", make_settings(setting.model)))
        return made[-1]

    pool = EnginePool(make, 2, group_size=4)
    await pool.start()
    await serve(pool, setting)
    asked = [
        request(1 + n % 2, seed=n, prompt=(*PROMPT, 3 + n), max_tokens=200, temperature=0.0) for n in range(8)
    ]
    forward, steps = made[0]._model.forward, itertools.count()

    def fail(*arguments: Any, **named: Any) -> Any:
        if next(steps) == 20:
            raise RuntimeError("out of memory")
        return forward(*arguments, **named)

    made[0]._model.forward = fail
    running = [asyncio.create_task(pool.generate(one)) for one in asked]
    drawn = await asyncio.wait_for(asyncio.gather(*running), 60)
    assert 0 < pool.redrawn < 8
    await until(lambda: pool.note == "", 30)
    again = await asyncio.gather(*(pool.generate(request(2, seed=n)) for n in range(8)))
    assert len(made) == 3
    assert made[2]._versions == {1, 2}
    for one, got in zip(asked, drawn, strict=True):
        assert got.policy_versions == (one.policy_version,) * len(got.token_ids)
        policy = setting.policies[one.policy_version]
        assert mismatch(policy, one.prompt_token_ids, got, 1.0) < TOLERANCE
    for got in again:
        assert mismatch(setting.policies[2], PROMPT, got, 1.0) < TOLERANCE
    await pool.close()


def children(pid: int) -> list[int]:
    listed = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for line in listed for child in line.split()]


def engine_processes() -> list[int]:
    """vLLM's, with their own children."""
    started = multiprocessing.active_children()
    mine = [child.pid for child in started if child.pid and child.name.startswith("EngineCore")]
    return mine + [below for pid in mine for below in children(pid)]


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here")
async def test_a_vllm_process_that_hangs_is_started_again_and_the_request_answered(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "HANG_CHECK_S", 0.5)
    pool = EnginePool(lambda index: create_engine("vllm", make_settings(setting.model)), 1, group_size=4)
    await pool.start()
    await serve(pool, setting)
    before = engine_processes()
    monkeypatch.setattr(vllm_engine, "HANG_S", 2.0)
    os.kill(before[0], signal.SIGSTOP)
    running = asyncio.create_task(pool.generate(request(2, seed=1, max_tokens=400, temperature=0.0)))
    await until(lambda: not alive(before[0]), 30)
    monkeypatch.undo()  # the next process may take its time
    got = await asyncio.wait_for(running, 200)
    assert pool.redrawn == 1
    assert got.policy_versions == (2,) * len(got.token_ids)
    assert mismatch(setting.policies[2], PROMPT, got, 1.0) < TOLERANCE
    assert not any(alive(pid) for pid in before)
    await pool.close()
