"""vLLM keeps the engine contract. One engine start (about 30 s) for the whole module."""

import os
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine

from .engine_contract import EngineContract, Setting, close_under_way, make_setting, make_settings

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

    async def test_a_broken_adapter_is_refused_and_the_others_stay(
        self, engine: Engine, tmp_path: Path
    ) -> None:
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(IntegrityError, match="version 8"):
            await engine.add_adapter(8, tmp_path)
        with pytest.raises(KeyError):
            await engine.score((1, 2, 3), 8)
        assert len(await engine.score((1, 2, 3), 1)) == 2
