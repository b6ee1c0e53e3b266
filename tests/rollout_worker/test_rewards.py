"""A reward that raises, hangs or kills its process costs its completion only."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.rewards import RewardFailed, RewardPool
from bucketrl.tasks.base import FinishReason, Prompt, Reward

from .fakes import FakeTask

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = Prompt(4, ({"role": "user", "content": "4"},), reference="four")


class TroubleTask(FakeTask):
    """Does what the completion says."""

    def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        if completion == "hang":
            time.sleep(600)
        if completion == "raise":
            raise ValueError("no number in it")
        if completion == "start a program":
            subprocess.run(["sleep", f"600.{os.getppid()}"], check=False)
        if completion == "fork":
            if os.fork() == 0:
                raise ValueError("in the child")
            time.sleep(0.1)
        if completion == "processes":
            with multiprocessing.get_context("fork").Pool(1) as workers:
                return Reward(float(workers.apply(len, (completion,))), {})
        if completion == "terminate":
            child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,))
            child.start()
            child.terminate()
            child.join()
            return Reward(float(len(completion)), {})
        if completion == "a reason that is no text":
            raise ValueError("\ud83d")
        if completion == "no text":
            return Reward(1.0, {"\ud800": 1.0})
        if completion == "unpicklable":
            return Reward(Unsendable(1.0), {})
        if completion == "huge":
            return Reward(1.0, {"x" * (1 << 21): 1.0})
        if completion == "unreadable":
            return Reward(Unreadable(1.0), {})
        if completion == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if completion == "nan":
            return Reward(float("nan"))
        if completion == "number":
            return 1.0  # type: ignore[return-value]
        if completion == "alarm":
            # What math-verify does; works in a main thread only.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
        return Reward(float(len(completion)), {"reference": float(prompt.reference == "four")})


class Unsendable(float):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


class Unreadable(float):
    """Pickles, and cannot be made again: as exceptions of many libraries."""

    def __reduce__(self) -> Any:
        return float, ("no number",)


class UnloadableTask(FakeTask):
    def __setstate__(self, state: object) -> None:
        raise ImportError("no module named mytask")

    def __getstate__(self) -> dict[str, int]:
        return {"x": 1}


@asynccontextmanager
async def started(processes: int, timeout_s: float) -> AsyncIterator[RewardPool]:
    pool = RewardPool(TroubleTask(), processes=processes, timeout_s=timeout_s)
    await pool.start()
    yield pool
    await pool.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool() -> AsyncIterator[RewardPool]:
    async with started(processes=2, timeout_s=0.5) as pool:
        yield pool


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient() -> AsyncIterator[RewardPool]:
    async with started(processes=1, timeout_s=30.0) as pool:
        yield pool


def reward_processes() -> set[BaseProcess]:
    return {child for child in multiprocessing.active_children() if child.name == "reward"}


async def test_a_signal_to_the_whole_process_group_costs_no_reward(pool: RewardPool) -> None:
    processes = reward_processes()
    assert len(processes) == 2
    for process in processes:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(process.pid or 0, number)
    rewards = await asyncio.gather(*(pool.score(PROMPT, "x" * n, "stop") for n in range(10)))
    assert [reward.total for reward in rewards] == list(range(10))
    assert all(process.is_alive() for process in processes)


async def test_rewards_are_those_of_the_task(pool: RewardPool) -> None:
    rewards = await asyncio.gather(*(pool.score(PROMPT, "x" * n, "stop") for n in range(10)))
    assert [reward.total for reward in rewards] == [float(n) for n in range(10)]
    assert all(reward.parts == {"reference": 1.0} for reward in rewards)
    assert (await pool.score(PROMPT, "alarm", "stop")).total == 5.0


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("raise", "raised ValueError: no number"),
        ("die", "process died"),
        ("nan", "not finite"),
        ("number", "is a float, not a Reward"),
        ("hang", r"more than 0\.5 s"),
        ("unpicklable", "cannot be sent"),
        ("unreadable", "cannot be read"),
        ("huge", "more than 262144 bytes"),
        ("no text", "name is no text.*surrogates"),
        ("a reason that is no text", r"raised ValueError: \\ud83d"),
    ],
)
async def test_trouble_costs_its_completion_only(pool: RewardPool, completion: str, reason: str) -> None:
    texts = ["a", completion, "bb", completion, "ccc", completion, "dddd"]
    outcomes = await asyncio.gather(
        *(pool.score(PROMPT, text, "stop") for text in texts), return_exceptions=True
    )
    for text, outcome in zip(texts, outcomes, strict=True):
        if text == completion:
            assert isinstance(outcome, RewardFailed)
            with pytest.raises(RewardFailed, match=reason):
                raise outcome
        else:
            assert isinstance(outcome, Reward)
            assert outcome.total == len(text)


async def test_a_reward_may_have_processes_of_its_own(patient: RewardPool) -> None:
    for text in ("processes", "terminate"):
        assert (await patient.score(PROMPT, text, "stop")).total == len(text)


def processes_with(command: bytes) -> list[Path]:
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has just ended
            if command in file.read_bytes():
                found.append(file)
    return found


@pytest.mark.skipif(
    not Path("/proc/self/cmdline").exists(), reason="looks for it in Linux's list of processes"
)
async def test_a_program_that_a_reward_has_started_ends_with_it(pool: RewardPool) -> None:
    with pytest.raises(RewardFailed, match="more than"):
        await pool.score(PROMPT, "start a program", "stop")
    sleeping = f"sleep\x00600.{os.getpid()}\x00".encode()
    assert not await asyncio.to_thread(processes_with, sleeping)


async def test_a_fork_that_a_reward_forgot_does_not_answer_for_others(patient: RewardPool) -> None:
    texts = ["fork", "fork", *("x" * n for n in range(8))]
    rewards = [await patient.score(PROMPT, text, "stop") for text in texts]
    assert [reward.total for reward in rewards] == [float(len(text)) for text in texts]


async def test_a_cancelled_score_does_not_answer_the_next(pool: RewardPool) -> None:
    hanging = [asyncio.create_task(pool.score(PROMPT, "hang", "stop")) for _ in range(2)]
    await asyncio.sleep(0.1)
    assert pool.waiting == 2
    for task in hanging:
        task.cancel()
    assert (await pool.score(PROMPT, "abc", "stop")).total == 3.0
    assert pool.waiting == 0


async def test_a_task_that_other_processes_cannot_load_is_one_clear_line() -> None:
    pool = RewardPool(UnloadableTask(), processes=1, timeout_s=1.0)
    with pytest.raises(UserError, match="cannot be loaded in a reward process"):
        await pool.start()
    await pool.close()


async def test_closing_it_while_it_starts_leaves_no_process(pool: RewardPool) -> None:
    before = reward_processes()
    for wait_s in (0.0, 0.001, 0.01, 0.1):
        other = RewardPool(TroubleTask(), processes=2, timeout_s=0.5)
        starting = asyncio.create_task(other.start())
        await asyncio.sleep(wait_s)
        starting.cancel()
        await other.close()
        await asyncio.gather(starting, return_exceptions=True)
    await asyncio.sleep(0.3)
    assert reward_processes() == before
