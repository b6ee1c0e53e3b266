"""The engine over HTTP keeps the engine contract on a real vLLM server, and reads its answers aright. One server
start (about 40 s) for the whole module; faults are tested in test_http_engine.py."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine
from bucketrl.rollout_worker.engines.http_engine import HttpEngine
from bucketrl.rollout_worker.engines.http_server import KEY_VARIABLE

from .engine_contract import EngineContract, Setting, close_under_way, make_setting, make_settings, request
from .fake_vllm import free_port
from .tiny_model import RANK, TARGETS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed here"),
    pytest.mark.asyncio(loop_scope="module"),
]

KEY = "key-of-the-server"


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    return make_setting(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def url(setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Of a real server. The module is what `vllm serve` runs; that command itself looks for a distribution
    named vllm, which the CPU build is not."""
    port, log = free_port(), tmp_path_factory.mktemp("server") / "log"
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(setting.model),
        "--host", "127.0.0.1", "--port", str(port), "--api-key", KEY, "--skip-tokenizer-init",
        "--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "64",
        "--enable-lora", "--max-loras", "3", "--max-lora-rank", str(RANK), "--max-cpu-loras", "5",
        "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm",
        # As VllmEngine does on CPU, for its reasons.
        "--lora-target-modules", *TARGETS, "--no-enable-chunked-prefill", "--max-num-batched-tokens", "4096",
        "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20),
    ]  # fmt: skip
    environment = os.environ | {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        while not _healthy(url):
            assert process.poll() is None, log.read_text()[-3000:]
            time.sleep(0.5)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).is_success
    except httpx.HTTPError:
        return False


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(
    setting: Setting, url: str, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, KEY)
        cache_dir = tmp_path_factory.mktemp("cache")
        engine = create_engine("http", make_settings(setting.model), url=url, cache_dir=cache_dir)
        await engine.start()
        for version in (1, 2):
            await engine.add_adapter(version, setting.adapters[version])
        yield engine
        await close_under_way(engine)


class TestRealServer(EngineContract):
    # Of vLLM more than of the way to it, and shown in process.
    test_tokens_are_drawn_from_the_distribution_that_is_reported = None  # type: ignore[assignment]
    test_scores_are_right_while_requests_run = None  # type: ignore[assignment]
    test_more_prompt_tokens_than_one_step_computes = None  # type: ignore[assignment]
    test_a_version_added_under_way_neither_waits_nor_disturbs = None  # type: ignore[assignment]
    test_a_request_alone_gets_the_same_logprobs_as_in_a_batch = None  # type: ignore[assignment]
    test_temperature_zero_takes_the_most_likely_tokens = None  # type: ignore[assignment]
    test_cancelling_aborts_one_request_only = None  # type: ignore[assignment]

    async def test_an_adapter_that_the_server_lost_is_loaded_again(
        self, engine: Engine, setting: Setting, url: str
    ) -> None:
        before = await engine.score((1, 2, 3, 4), 2)
        async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}) as client:
            cards = (await client.get("/v1/models")).json()["data"]
            names = [card["id"] for card in cards if card["root"] == str(setting.adapters[2])]
            assert names
            for name in names:
                await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        drawn = await asyncio.gather(*(engine.generate(request(2, seed=n)) for n in range(8)))
        assert all(one.policy_versions[0] == 2 for one in drawn)
        assert await engine.score((1, 2, 3, 4), 2) == pytest.approx(before, abs=1e-4)

    async def test_what_the_server_cannot_do_is_refused_by_the_flag_to_set(
        self, engine: Engine, setting: Setting, url: str, tmp_path: Path
    ) -> None:
        served = make_settings(setting.model)
        for wanted, flag in (
            (replace(served, lora_rank=2 * RANK), "--max-lora-rank 16"),
            (replace(served, adapter_slots=4), "--max-loras 4"),
            (replace(served, max_model_len=513), "--max-model-len 513"),
        ):
            other = HttpEngine(wanted, url, cache_dir=tmp_path)
            with pytest.raises(UserError, match=flag):
                await other.start()
            await other.close()
