"""A pool of real engines, one of which fails or hangs: the requests are answered, and right."""

import asyncio
import itertools
import multiprocessing
import os
import signal
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from bucketrl.rollout_worker.engines import create_engine, vllm_engine
from bucketrl.rollout_worker.engines.member import Judge
from bucketrl.rollout_worker.engines.pool import EnginePool

from .engine_contract import PROMPT, TOLERANCE, Setting, make_setting, make_settings, mismatch, request
from .fakes import until


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
    # A look that began before has the old limit; it is answered before this request.
    await pool.generate(request(1, seed=0, max_tokens=1))
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
