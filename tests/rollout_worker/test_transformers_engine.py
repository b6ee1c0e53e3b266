"""The transformers engine keeps the engine contract, and fails in the open."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from bucketrl.bucket.errors import IntegrityError, UserError
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine

from .engine_contract import EngineContract, Setting, close_under_way, make_setting, make_settings

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(setting: Setting) -> AsyncIterator[Engine]:
    engine = create_engine("transformers", make_settings(setting.model))
    await engine.start()
    for version in (1, 2):
        await engine.add_adapter(version, setting.adapters[version])
    yield engine
    await engine.close()


class TestTransformersEngine(EngineContract):
    async def test_a_broken_adapter_is_refused_and_the_others_stay(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(IntegrityError, match="version 8"):
            await engine.add_adapter(8, tmp_path)
        with pytest.raises(KeyError):
            await engine.score((1, 2, 3), 8)
        assert len(await engine.score((1, 2, 3), 1)) == 2


async def test_the_last_version_may_go_and_another_come(setting: Setting) -> None:
    """A first version that fails its canary leaves no version at all."""
    engine = create_engine("transformers", make_settings(setting.model))
    await engine.start()
    await engine.add_adapter(1, setting.adapters[1])
    await engine.remove_adapter(1)
    tokens = tuple(range(5, 29))
    assert await engine.score(tokens, None) == pytest.approx(setting.base(tokens).logprobs, abs=1e-3)
    await engine.add_adapter(2, setting.adapters[2])
    assert await engine.score(tokens, 2) == pytest.approx(setting.policies[2](tokens).logprobs, abs=1e-3)
    await engine.close()


async def test_closing_answers_everybody_who_waits(setting: Setting) -> None:
    engine = create_engine("transformers", make_settings(setting.model))
    await engine.start()
    await engine.add_adapter(1, setting.adapters[1])
    await close_under_way(engine)


async def test_a_folder_without_a_model_is_one_clear_line(tmp_path: Path) -> None:
    engine = create_engine("transformers", make_settings(tmp_path))
    with pytest.raises(UserError, match="cannot load the model"):
        await engine.start()
