"""Several engines as one: where requests go, and what becomes of them when an engine ends, starts or lies."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.rollout_worker.engine import DroppedCompletion, EngineCapacity, EngineDied, SampledCompletion
from bucketrl.rollout_worker.engines import member
from bucketrl.rollout_worker.engines.member import restart_delay
from bucketrl.rollout_worker.engines.pool import choose

from .fakes import until
from .pool_bench import LENGTH, PROBE, Bench, FakeEngine, judge_of, whole


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


async def test_a_probe_that_cannot_be_scored_is_what_is_wrong_with_the_version(
    two: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller removes it then. Left behind, an engine started later would be given it for ever."""

    async def score(token_ids: tuple[int, ...], version: int) -> list[float]:
        raise IntegrityError("cannot score: NaN")

    for index in (0, 1):
        monkeypatch.setattr(two.now(index), "score", score)
    await two.pool.add_adapter(2, Path("/adapters/2"))
    assert "cannot score: NaN" in str(await two.pool.prove(2, PROBE, judge_of(2)))


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
