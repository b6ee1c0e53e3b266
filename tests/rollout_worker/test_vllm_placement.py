"""Two GPUs: one engine over both by tensors or by layers, or an engine on each."""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from bucketrl.rollout_worker.engine import Engine
from bucketrl.rollout_worker.engines import create_engine
from bucketrl.rollout_worker.engines.placement import place, visible_gpus
from bucketrl.rollout_worker.engines.pool import EnginePool

from .engine_contract import PROMPT, make_setting, make_settings, request

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("vllm") is None or torch.cuda.device_count() < 2, reason="needs vLLM and two GPUs"
    ),
]
TOLERANCE = 0.15
"""Mean of |difference| in nats, in bfloat16; between two adapters it is above 0.5."""


@pytest.mark.asyncio
@pytest.mark.parametrize(("engines", "tensor", "pipeline"), [(1, 2, 1), (1, 1, 2), (2, 1, 1)])
async def test_engines_over_two_gpus_serve_each_version(
    tmp_path: Path, engines: int, tensor: int, pipeline: int
) -> None:
    setting = make_setting(tmp_path)
    placed = place(engines, tensor, pipeline, visible_gpus())
    settings = replace(
        make_settings(setting.model),
        dtype="bfloat16",
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        kv_cache_bytes=1 << 30,
        gpu_memory_utilization=0.2,
    )

    def make(index: int) -> Engine:
        return create_engine("vllm", replace(settings, devices=placed[index] if engines > 1 else ()))

    pool = EnginePool(make, engines, group_size=2)
    await pool.start()
    try:
        for version in (1, 2):
            await pool.add_adapter(version, setting.adapters[version])
        for version in (1, 2):
            for seed in range(2 * engines):
                drawn = await pool.generate(request(version, seed=seed))
                assert drawn.policy_versions == (version,) * len(drawn.token_ids)
                distances = {}
                for candidate in (1, 2):
                    expected = setting.policies[candidate](PROMPT + drawn.token_ids).logprobs
                    pairs = zip(expected[len(PROMPT) - 1 :], drawn.logprobs, strict=True)
                    distances[candidate] = sum(abs(a - b) for a, b in pairs) / len(drawn.token_ids)
                assert distances[version] < TOLERANCE
                assert min(distances, key=lambda each: distances[each]) == version
    finally:
        await pool.close()
