"""Which runs are made: methods, lags and seeds."""

from pathlib import Path
from typing import Any

import torch
from transformers.utils.logging import disable_progress_bar

from benchmarks.staleness.play import Curve, Run
from bucketrl.bucket.config import RunConfig
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.models import resolve_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny.toml"
EVALUATIONS = 12
"""In the course of a run."""

Key = tuple[str, int, int]
"""Method, lag, seed."""
METHODS: dict[str, dict[str, Any]] = {
    "none": {"surrogate": "reinforce"},
    "clip": {},
    "decoupled": {"proximal": "recomputed", "importance_weight": "token", "importance_cap": 5.0},
    "tis": {"surrogate": "reinforce", "importance_weight": "token", "importance_cap": 2.0},
    "mis": {"surrogate": "reinforce", "importance_mask": "sequence"},
    "icepop": {"surrogate": "reinforce", "importance_weight": "token", "importance_mask": "token"},
    "cispo": {"name": "cispo", "advantage_scale": "none"},
}
"""By the name of the correction: settings of `[algorithm]`. `clip` is the default algorithm."""
MINIBATCHES = 2
"""Of every method: with a single update a proximal policy would be the policy itself."""


def config_of(method: str, seed: int, steps: int) -> RunConfig:
    base = load_config(EXAMPLE)
    kept = ("groups_per_step", "learning_rate")
    algorithm = {name: getattr(base.algorithm, name) for name in kept} | METHODS[method]
    algorithm |= {"steps": steps, "minibatches": MINIBATCHES}
    settings = base.model_dump() | {"seed": seed, "algorithm": algorithm}
    return RunConfig.model_validate(settings)


def play(key: Key, steps: int, problems: int) -> tuple[Key, Curve]:
    torch.set_num_threads(1)
    disable_progress_bar()
    method, lag, seed = key
    config = config_of(method, seed, steps)
    folder = resolve_model(config.model, progress=lambda _: None)
    return key, Run(config, folder, problems).play(lag, max(1, steps // EVALUATIONS))
