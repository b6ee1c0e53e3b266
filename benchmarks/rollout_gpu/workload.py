"""What is drawn: which model, which prompts, completions of which lengths."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bucketrl.bucket.config import ModelConfig
from bucketrl.jobs.models import resolve_model

MODELS = ("smollm2", "qwen3-1.7b", "tiny")
"""`qwen3-1.7b`: its shape with random weights, and SmolLM2's tokenizer. `tiny`: to try the script without a GPU."""

_QWEN3_1P7B = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

CONFIG = """
name = "rollout-gpu"
seed = {seed}
[model]
id = "{model}"
dtype = "{dtype}"
[lora]
rank = {rank}
[task]
kind = "arithmetic"
terms = {terms}
max_operand = {max_operand}
train_size = 20000
[sampling]
group_size = 8
max_tokens = {longest}
[algorithm]
steps = 100000
groups_per_step = {groups}
max_staleness = {staleness}
filter_zero_variance = false
[rollout]
max_model_len = {model_len}
"""


@dataclass(frozen=True)
class Lengths:
    """Log-normal, cut at `longest`: a few completions are many times longer than most."""

    median: int = 160
    sigma: float = 0.8
    longest: int = 1024

    def of(self, seed: int) -> int:
        """Tokens of the completion that is drawn with `seed`."""
        drawn = random.Random(seed).gauss(math.log(self.median), self.sigma)
        return min(self.longest, max(1, round(math.exp(drawn))))


@dataclass(frozen=True)
class Workload:
    """Of one model."""

    model: str
    lengths: Lengths
    round_groups: int
    """Of a round of the throughput measurement."""
    step_groups: int
    """Of a commit of the other one."""
    kv_cache_bytes: int
    on_cpu: bool = False

    @classmethod
    def of(cls, model: str) -> "Workload":
        if model == "tiny":
            return cls(model, Lengths(median=12, longest=64), 4, 2, 256 << 20, on_cpu=True)
        if model == "smollm2":
            return cls(model, Lengths(), 128, 10, 24 << 30)
        return cls(model, Lengths(), 128, 7, 40 << 30)

    def config(self, model: Path, *, groups: int, staleness: int, seed: int) -> str:
        """The TOML text of a run."""
        return CONFIG.format(
            seed=seed,
            model=model,
            dtype="float32" if self.on_cpu else "bfloat16",
            rank=8 if self.on_cpu else 16,
            terms=2 if self.on_cpu else 8,
            max_operand=99 if self.on_cpu else 999_999,
            longest=self.lengths.longest,
            model_len=self.lengths.longest + (32 if self.on_cpu else 256),
            groups=groups,
            staleness=staleness,
        )

    def model_folder(self, folder: Path, say: Callable[[str], None]) -> Path:
        """Made below `folder` if it is not built in."""
        built_in = {"tiny": "tiny-arithmetic"}.get(self.model, "smollm2-135m-instruct")
        base = resolve_model(ModelConfig(id=built_in), progress=say)
        return base if self.model != "qwen3-1.7b" else _random_qwen3(folder / "model", base)


def _random_qwen3(folder: Path, tokenizer: Path) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    stop = json.loads((tokenizer / "config.json").read_text())["eos_token_id"]
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**_QWEN3_1P7B, eos_token_id=stop)).to(torch.bfloat16)
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        if path.name.startswith(("token", "vocab", "merges", "special", "chat_template")):
            shutil.copy(path, folder)
    return folder
