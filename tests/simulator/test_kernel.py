"""Virtual time: who runs when, who dies how, and that asyncio's own machinery works on it."""

import asyncio
import threading
from collections.abc import Callable

import pytest

from bucketrl.bucket.pause import pause
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.simulator.kernel import Crash, Kernel, Process, VirtualEvent, VirtualThread
from bucketrl.simulator.loop import VirtualLoop


@pytest.fixture
def kernel() -> Kernel:
    return Kernel("tests")


def play(kernel: Kernel, *bodies: Callable[[], None], until: float = 1e6) -> list[Process]:
    processes = [Process(f"p{n}", 0) for n in range(len(bodies))]
    for process, body in zip(processes, bodies, strict=True):
        kernel.spawn(process, body, main=True)
    kernel.run(until, lambda: False)
    return processes


def test_time_passes_only_by_waiting(kernel: Kernel) -> None:
    seen: list[tuple[str, float]] = []

    def body(name: str, seconds: float) -> None:
        for _ in range(3):
            kernel.sleep(seconds)
            seen.append((name, kernel.now))

    play(kernel, lambda: body("a", 1.0), lambda: body("b", 1.6))
    assert seen == [("a", 1.0), ("b", 1.6), ("a", 2.0), ("a", 3.0), ("b", 3.2), ("b", pytest.approx(4.8))]


def test_pause_is_virtual_in_simulated_threads(kernel: Kernel) -> None:
    play(kernel, lambda: pause(3600.0))
    assert kernel.now == 3600.0


def test_an_event_ends_a_wait(kernel: Kernel) -> None:
    event = VirtualEvent(kernel)
    times: list[tuple[bool, float]] = []

    def waits() -> None:
        times.append((event.wait(2.0), kernel.now))
        times.append((event.wait(50.0), kernel.now))

    def sets() -> None:
        kernel.sleep(10.0)
        event.set()

    play(kernel, waits, sets)
    assert times == [(False, 2.0), (True, 10.0)]


def test_a_kill_unwinds_every_thread_and_nothing_waits_again(kernel: Kernel) -> None:
    left: list[str] = []
    ends: list[tuple[str, BaseException | None]] = []

    def waits_for_ever(name: str) -> None:
        try:
            kernel.sleep(1e9)
        finally:
            left.append(name)
            with pytest.raises(Crash):
                kernel.sleep(1.0)

    def main() -> None:
        VirtualThread(kernel, lambda: waits_for_ever("second")).start()
        waits_for_ever("main")

    process = Process("p", 0, on_end=lambda process, error: ends.append((process.role, error)))
    kernel.spawn(process, main, main=True)
    kernel.at(5.0, lambda: kernel.kill(process))
    kernel.run(100.0, lambda: False)
    assert sorted(left) == ["main", "second"]
    assert [(role, type(error)) for role, error in ends] == [("p", Crash)]
    assert kernel.now < 100.0


def test_a_frozen_process_goes_on_where_it_was(kernel: Kernel) -> None:
    woke: list[float] = []

    def body() -> None:
        kernel.sleep(10.0)
        woke.append(kernel.now)

    process = Process("p", 0)
    kernel.spawn(process, body, main=True)
    kernel.at(5.0, lambda: setattr(process, "frozen_until", 3605.0))
    kernel.run(1e6, lambda: False)
    assert woke == [3605.0]


def test_a_thawed_process_wakes_early(kernel: Kernel) -> None:
    woke: list[float] = []
    process = Process("p", 0)

    def body() -> None:
        kernel.sleep(1.0)
        woke.append(kernel.now)

    process.frozen_until = 500.0
    kernel.spawn(process, body, main=True)
    kernel.at(20.0, lambda: kernel.thaw(process))
    kernel.run(1e6, lambda: False)
    assert woke == [21.0]


def test_asyncio_runs_in_virtual_time(kernel: Kernel) -> None:
    results: list[object] = []

    def blocking() -> str:
        pause(7.0)
        return "done"

    async def main() -> None:
        loop = asyncio.get_running_loop()
        results.append(await in_thread(blocking))
        results.append(loop.time())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.Event().wait(), 100.0)
        results.append(loop.time())
        results.append(await asyncio.gather(asyncio.sleep(5.0, "a"), asyncio.sleep(3.0, "b")))
        results.append(loop.time())

    play(kernel, lambda: VirtualLoop(kernel).run(main()))
    assert results == ["done", 7.0, 107.0, ["a", "b"], 112.0]


def test_an_error_in_a_thread_is_raised_where_it_is_awaited(kernel: Kernel) -> None:
    caught: list[str] = []

    def fails() -> None:
        raise ValueError("no")

    async def main() -> None:
        try:
            await in_thread(fails)
        except ValueError as error:
            caught.append(str(error))

    play(kernel, lambda: VirtualLoop(kernel).run(main()))
    assert caught == ["no"]


def test_no_thread_is_left_over(kernel: Kernel) -> None:
    before = threading.active_count()
    [process] = play(kernel, lambda: kernel.sleep(1e9), until=1.0)
    kernel.kill(process)
    kernel.drain()
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.daemon:
            thread.join(0.5)
    assert threading.active_count() <= before
