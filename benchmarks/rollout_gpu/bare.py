"""vLLM alone, offline, in a process of its own: `LLM.generate` on requests that a worker has drawn before."""

import multiprocessing
import time
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.rollout_gpu.measured_engine import Drawn
from bucketrl.rollout_worker.engines.settings import EngineSettings
from bucketrl.rollout_worker.engines.vllm_setup import EXTENSION, engine_arguments, set_environment


class BareVllm:
    """Has the worker's engine's settings. `ready` before the first `run`."""

    def __init__(self, settings: EngineSettings) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, settings))
        self._process.start()

    def ready(self) -> None:
        """Blocks until it has started. Raises RuntimeError if it does not."""
        self._answer()

    def run(self, drawn: Sequence[Drawn], adapter: Path, *, logprobs: bool) -> float:
        """Seconds for all of them. With `logprobs`, it samples as a worker has to: seeded, with logprobs."""
        self._connection.send(([(d.prompt_token_ids, d.tokens, d.seed) for d in drawn], adapter, logprobs))
        return float(self._answer())

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, str):
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        self._connection.close()
        self._process.join(20)
        self._process.kill()


def _serve(connection: Connection, settings: EngineSettings) -> None:
    try:
        _answer_all(connection, settings)
    except EOFError:
        return
    except Exception:  # noqa: BLE001 - told to the process that waits for an answer
        connection.send(traceback.format_exc())


def _answer_all(connection: Connection, settings: EngineSettings) -> None:
    set_environment()
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    arguments = engine_arguments(settings)
    for own in ("max_num_batched_tokens", "compilation_config"):
        arguments.pop(own, None)  # vLLM's own choice
    llm = LLM(**arguments, worker_extension_cls=EXTENSION)
    connection.send(True)
    lora_ids: dict[Path, int] = {}
    while True:
        drawn, adapter, logprobs = connection.recv()
        lora_id = lora_ids.setdefault(adapter, len(lora_ids) + 1)
        params = [
            SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                detokenize=False,
                seed=seed if logprobs else None,
                logprobs=0 if logprobs else None,
            )
            for _, tokens, seed in drawn
        ]
        prompts = [{"prompt_token_ids": list(prompt)} for prompt, _, _ in drawn]
        llm.reset_prefix_cache()
        begun = time.perf_counter()
        request = LoRARequest(f"adapter-{lora_id}", lora_id, str(adapter))
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        seconds = time.perf_counter() - begun
        got, wanted = sum(len(o.outputs[0].token_ids) for o in outputs), sum(d[1] for d in drawn)
        if got != wanted:
            raise AssertionError(f"vLLM drew {got} tokens, not {wanted}")
        connection.send(seconds)
