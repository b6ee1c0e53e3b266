"""The watch over vLLM's engine process goes on until that is silent."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bucketrl.rollout_worker.engines import vllm_engine
from bucketrl.rollout_worker.engines.vllm_engine import VllmEngine

from .engine_contract import make_settings


async def test_an_answer_that_is_an_error_is_a_sign_of_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_engine, "HANG_CHECK_S", 0.01)
    monkeypatch.setattr(vllm_engine, "HANG_S", 0.05)
    engine = VllmEngine(make_settings(tmp_path))
    killed: list[int] = []
    process = SimpleNamespace(kill=lambda: killed.append(len(asked)))
    manager = SimpleNamespace(processes=[process])
    engine._llm = SimpleNamespace(
        list_loras=lambda: None,
        engine_core=SimpleNamespace(resources=SimpleNamespace(engine_manager=manager)),
    )
    asked: list[Any] = []

    async def answer(call: Any) -> None:
        asked.append(call)
        if len(asked) < 3:
            raise RuntimeError("All workers should have the same LORAs.")
        await asyncio.Event().wait()

    monkeypatch.setattr(engine, "_answer", answer)
    await asyncio.wait_for(engine._watch(), 5)
    assert killed == [3]
