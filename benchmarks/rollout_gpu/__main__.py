"""python -m benchmarks.rollout_gpu [--model smollm2] [--rounds 3] [--commits 100] [--pace 1]

(a) The worker's tokens/s over those of vLLM alone, offline, on the same requests; rounds take turns. (b) From the
learner's commit to the first token of the new version. (c) The longest gap between decode steps around a switch of
versions, over that of a window without. (d) The sampler's log-probabilities against the learner's.
"""

import argparse
import asyncio
import logging
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.s3 import S3Server, moto_server

from benchmarks.live import live
from benchmarks.rollout_gpu.analysis import switch_figures
from benchmarks.rollout_gpu.bare import BareVllm
from benchmarks.rollout_gpu.fleet import Fleet
from benchmarks.rollout_gpu.measured_engine import EndlessVllm, MeasuredEngine, Seen
from benchmarks.rollout_gpu.workload import MODELS, Workload
from bucketrl.bucket.config import RunConfig
from bucketrl.jobs import benchmark_record
from bucketrl.jobs.config_file import load_config
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.rollout_worker.engines.settings import EngineSettings, engine_settings
from bucketrl.rollout_worker.loading import GPU_REQUESTS
from bucketrl.rollout_worker.prompts import Tokenizer

RESULTS = Path(__file__).parents[1] / "results"
SAMPLES = ("commit_to_token_s", "switch_gaps_ms")
"""One value for each version."""
STALENESS = 4
"""Of the run with many commits: the engine holds two versions more."""


class Benchmark:
    """One model, its two engines, and the runs that are made with them."""

    def __init__(
        self, workload: Workload, folder: Path, server: S3Server, options: argparse.Namespace
    ) -> None:
        from transformers import AutoTokenizer

        self.say = live("rollout_gpu")
        self._workload = workload
        self._folder = folder
        self._server = server
        self._options = options
        self.say("preparing the model")
        self._model = workload.model_folder(folder, self.say)
        self._tokenizer: Tokenizer = AutoTokenizer.from_pretrained(self._model)
        self._settings = self._engine_settings()
        self._engine = MeasuredEngine(EndlessVllm(self._settings), workload.lengths)
        self._figures: dict[str, Any] = {}

    def _config(self, groups: int, staleness: int) -> str:
        return self._workload.config(self._model, groups=groups, staleness=staleness, seed=self._options.seed)

    def _engine_settings(self) -> EngineSettings:
        """As `loading.load_engine` makes them; the KV cache is smaller, so that two engines fit on the GPU."""
        path = self._folder / "engine.toml"
        path.write_text(self._config(1, STALENESS))
        config: RunConfig = load_config(path)
        settings = engine_settings(
            config,
            self._model,
            self._tokenizer,
            max_requests=64 if self._workload.on_cpu else GPU_REQUESTS,
            kv_cache_bytes=self._workload.kv_cache_bytes,
            gpu_memory_utilization=0.3,
        )
        return replace(settings, stop_token_ids=())

    async def run(self) -> AsyncIterator[dict[str, Any]]:
        """The figures so far, after each part."""
        bare = BareVllm(self._settings)
        try:
            self.say("starting both engines")
            begun = time.monotonic()
            await self._engine.start()
            self._figures["engine_start_s"] = round(time.monotonic() - begun, 1)
            await in_thread(bare.ready)
            await self._switches()
            yield self._figures
            throughput = await self._throughput(bare)
            yield self._figures
        finally:
            bare.close()
        await self._engine.stop()
        await self._mismatch(throughput)
        yield self._figures

    async def _throughput(self, bare: BareVllm) -> Fleet:
        groups = self._workload.round_groups
        fleet = Fleet(self._config(groups, 0), self._folder / "throughput", self._server, pace_s=None)
        rounds: list[dict[str, float]] = []
        async with fleet.working(self._engine, self._tokenizer):
            for number in range(self._options.rounds + 1):
                seen = self._engine.seen = Seen(folders=self._engine.seen.folders)
                self.say(f"throughput, round {number} of {self._options.rounds} (0 warms up): the worker")
                await fleet.until_uploaded(groups * (number + 1))
                seconds = time.time() - seen.first_sent
                tokens = sum(one.tokens for one in seen.drawn)
                adapter = seen.folders[max(seen.folders)]
                times = {"worker": seconds}
                for name, logprobs in (("vllm", True), ("vllm_without_logprobs", False)):
                    self.say(f"throughput, round {number} of {self._options.rounds}: {name}")
                    times[name] = await in_thread(lambda: bare.run(seen.drawn, adapter, logprobs=logprobs))  # noqa: B023
                if number > 0:
                    rounds.append({name: tokens / spent for name, spent in times.items()})
                self.say(" ".join(f"{name} {tokens / spent:.0f} tokens/s" for name, spent in times.items()))
                fleet.go(number + 1)
        for name in rounds[0]:
            self._figures[f"tokens_per_s_{name}"] = round(statistics.median(r[name] for r in rounds))
        ratios = [r["worker"] / r["vllm"] for r in rounds]
        self._figures |= {
            "ratio_vs_vllm": round(statistics.median(ratios), 3),
            "ratio_vs_vllm_spread": [round(min(ratios), 3), round(max(ratios), 3)],
            "ratio_vs_vllm_without_logprobs": round(
                statistics.median(r["worker"] / r["vllm_without_logprobs"] for r in rounds), 3
            ),
            "completions_per_round": groups * 8,
            "mean_tokens": round(tokens / len(seen.drawn), 1),
        }
        return fleet

    async def _switches(self) -> None:
        config = self._config(self._workload.step_groups, STALENESS)
        fleet = Fleet(config, self._folder / "switches", self._server, pace_s=self._options.pace)
        seen = self._engine.seen = Seen()
        async with fleet.working(self._engine, self._tokenizer):
            await fleet.until(lambda: len(fleet.commits()) > 2, "the first commits")
            async with self._engine.stepping():
                first = max(fleet.commits())
                while (done := max(fleet.commits()) - first) < self._options.commits:
                    self.say(f"commit {done} of {self._options.commits}")
                    before = done
                    await fleet.until(lambda: max(fleet.commits()) - first > before, "a commit")  # noqa: B023
        measured = {v: s for v, s in seen.switches.items() if v > first}
        self._figures |= switch_figures(fleet.commits(), measured, seen.steps)

    async def _mismatch(self, fleet: Fleet) -> None:
        import torch

        from benchmarks.rollout_gpu.mismatch import mismatch

        self.say("the learner's log-probabilities")
        device = torch.device("cpu" if self._workload.on_cpu else "cuda")
        self._figures |= await in_thread(
            lambda: mismatch(fleet.store, fleet.run, fleet.folder, device, groups=16)
        )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rollout_gpu")
    parser.add_argument("--model", choices=MODELS, default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--commits", type=int, default=100)
    parser.add_argument("--pace", type=float, default=1.0, help="seconds between commits, at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory(prefix="bucketrl-rollout-") as folder, moto_server() as server:
        asyncio.run(_measure(Benchmark(Workload.of(options.model), Path(folder), server, options), options))
    return 0


async def _measure(benchmark: Benchmark, options: argparse.Namespace) -> None:
    async for figures in benchmark.run():
        path = _record(figures, options)
    print()
    for name, value in figures.items():
        if name not in SAMPLES:
            print(f"{name:34} {value}")
    print(f"record: {path}")


def _record(figures: dict[str, Any], options: argparse.Namespace) -> Path:
    suffix = "" if options.model == "smollm2" else f"_{options.model.replace('.', 'p').replace('-', '_')}"
    return benchmark_record.write(
        f"rollout_gpu{suffix}",
        {name: value for name, value in figures.items() if name not in SAMPLES},
        command=f"python -m benchmarks.rollout_gpu --model {options.model} --rounds {options.rounds} "
        f"--commits {options.commits} --pace {options.pace:g} --seed {options.seed}",
        seeds=[options.seed],
        notes=NOTES,
        folder=RESULTS,
        samples={name: figures[name] for name in SAMPLES if name in figures},
    )


NOTES = (
    "ratio_vs_vllm: tokens/s of the worker, from its first request of a round to the last upload, over those of "
    "LLM.generate on the same prompts, lengths, seeds and adapter, logprobs on, in a process of its own; median "
    "and spread of the rounds, which take turns. Completion lengths are log-normal, cut at 1024. "
    "commit_to_token: from the moment the learner's commit is in the bucket (an S3 server on the same machine) to "
    "the end of the new version's first one-token request, canary included. read_p50_s: of load_p50_s, reading the "
    "adapter beside the requests. switch_gap_ms: longest gap between "
    "tokens of a request that runs all the time, around a switch, less that of an equally long window just "
    "before; median over the switches. logprob_…: |learner - sampler| per token, learner's head in float32; "
    "_rounded_head: logits rounded to the model's type, as vLLM rounds them."
)


if __name__ == "__main__":
    sys.exit(main())
