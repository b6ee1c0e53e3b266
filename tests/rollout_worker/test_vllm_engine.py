"""vLLM keeps the engine contract. One engine start (about 30 s) for the whole module."""

import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, get_args

import pytest
import pytest_asyncio

from bucketrl.bucket.config import VLLM_LORA_RANKS
from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine

from . import engine_contract
from .engine_contract import (
    TOLERANCE,
    EngineContract,
    Setting,
    close_under_way,
    make_setting,
    make_settings,
    mismatch,
    request,
)
from .learned import Learned
from .test_engine_faults import AdapterFaults, changed, check_served
from .test_exactness import PROMPT, Exactness

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.asyncio(loop_scope="module"),
]


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(setting: Setting) -> AsyncIterator[Engine]:
    engine = create_engine("auto", make_settings(setting.model))
    assert engine.name.startswith("vllm ")
    await engine.start()
    for version in (1, 2):
        await engine.add_adapter(version, setting.adapters[version])
    yield engine
    await close_under_way(engine)


def watched_by() -> set[int]:
    """Processes that hold a pidfd of this one: those that notice its death."""
    found = set()
    for info in Path("/proc").glob("[0-9]*/fdinfo/*"):
        try:
            if f"Pid:\t{os.getpid()}\n" in info.read_text():
                found.add(int(info.parts[2]))
        except OSError:
            continue
    return found


class TestVllmEngine(EngineContract):
    async def test_the_engine_notices_when_this_process_is_killed(self, engine: Engine) -> None:
        """See test_parent_watch.py for what it does then."""
        assert watched_by() - {os.getpid()}

    async def test_an_adapter_that_was_read_ahead_is_served(self, engine: Any, setting: Setting) -> None:
        """As it is on a GPU, where requests go on meanwhile."""
        ahead = engine._lora_request("ahead", setting.adapters[3])
        await engine._read_ahead(ahead)
        await engine._llm.add_lora(ahead)
        engine._adapters[3] = ahead
        got = await engine.generate(request(3, seed=1))
        assert mismatch(setting.policies[3], engine_contract.PROMPT, got, 1.0) < TOLERANCE
        await engine.remove_adapter(3)

    async def test_a_removed_version_has_left_the_engine(self, engine: Any, setting: Setting) -> None:
        assert engine._llm.vllm_config.lora_config.max_loras == make_settings(setting.model).adapter_slots
        await engine.add_adapter(3, setting.adapters[3])
        lora_id = engine._adapters[3].lora_int_id
        assert lora_id in await engine._llm.list_loras()
        await engine.remove_adapter(3)
        assert lora_id not in await engine._llm.list_loras()

    async def test_a_broken_adapter_is_refused_and_the_others_stay(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(IntegrityError, match="version 8"):
            await engine.add_adapter(8, tmp_path)
        with pytest.raises(KeyError):
            await engine.score((1, 2, 3), 8)
        assert len(await engine.score((1, 2, 3), 1)) == 2


class TestVllmExactness(Exactness):
    async def test_a_prefix_is_taken_from_its_own_version_only(
        self, engine: Engine, learned: Learned, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The first request of a version computes all of the prompt, the second takes blocks over; and what
        both sample is the learner's. A version that is added again shares nothing with what had its number."""
        cached = []
        collect = engine._collect  # type: ignore[attr-defined]

        async def watched(*arguments: Any) -> Any:
            output = await collect(*arguments)
            cached.append(output.num_cached_tokens)
            return output

        monkeypatch.setattr(engine, "_collect", watched)
        prompt = PROMPT[::-1]
        for source in (11, 12):
            await engine.add_adapter(30, learned.adapters[source])
            for seed in (1, 2):
                # Neither wipes the cache.
                await engine.add_adapter(31, learned.adapters[13])
                await engine.remove_adapter(31)
                drawn = await engine.generate(request(30, seed=seed, prompt=prompt))
                scores = learned.policies[1.0][source].score(prompt + drawn.token_ids)[len(prompt) - 1 :]
                assert drawn.logprobs == pytest.approx(scores, abs=1e-3)
            await engine.remove_adapter(30)
        assert cached[0] == cached[2] == 0
        assert cached[1] == cached[3] >= 128


class TestVllmFaults(AdapterFaults):
    @pytest.mark.parametrize(
        ("settings", "reason"),
        [
            ({"r": 16}, "rank 16 is greater than max_lora_rank 8"),
            ({"use_dora": True}, "DoRA"),
            ({"bias": "all"}, "bias"),
            ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ],
    )
    async def test_settings_that_it_cannot_serve_are_refused_by_name(
        self, engine: Engine, learned: Learned, tmp_path: Path, settings: dict[str, Any], reason: str
    ) -> None:
        """The worker's own check comes first; this is why it is right."""
        folder = changed(learned.adapters[11], tmp_path / "changed", **settings)
        with pytest.raises(IntegrityError, match=reason):
            await engine.add_adapter(22, folder)
        await check_served(engine, learned, 11, 11)

    async def test_the_ranks_of_the_configuration_are_vllms(self) -> None:
        from vllm.config.lora import MaxLoRARanks

        assert get_args(MaxLoRARanks) == VLLM_LORA_RANKS
