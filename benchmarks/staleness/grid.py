"""Which runs are made: studies, methods, lags and seeds."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.staleness.play import Drawing
from bucketrl.bucket.config import RunConfig
from bucketrl.jobs.config_file import load_config

EXAMPLES = Path(__file__).parents[2] / "examples"
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
OUTER_LAGS = (0, 4, 16)
"""A study that runs out of time has made these: no lag, `max_staleness`, the largest."""


@dataclass(frozen=True)
class Study:
    """What all runs of a study have in common."""

    record: str
    """Name of its record."""
    example: Path
    drawing: Drawing
    steps: int = 60
    seeds: int = 3
    problems: int = 200
    """Held-out ones that a policy is judged by."""
    is_trial: bool = False
    """Shows that everything runs, and nothing else."""
    changes: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By section of the configuration: settings that replace the example's."""

    def config(self, method: str, seed: int, steps: int) -> RunConfig:
        settings = load_config(self.example).model_dump()
        kept = ("groups_per_step", "learning_rate", "warmup_steps")
        algorithm = {name: settings["algorithm"][name] for name in kept} | METHODS[method]
        settings |= {"seed": seed, "algorithm": algorithm | {"steps": steps, "minibatches": MINIBATCHES}}
        for section, values in self.changes.items():
            settings[section] = settings[section] | values
        return RunConfig.model_validate(settings)


STUDIES = {
    ("tiny", "cpu"): Study("staleness", EXAMPLES / "tiny.toml", Drawing(groups=16, times=4)),
    # Two of three groups are mixed, or more: 32 give the 16 that a step trains on. Right answers have 2 to 13
    # tokens.
    ("smollm2", "cuda"): Study(
        "staleness_smollm2",
        EXAMPLES / "smollm2_mixture.toml",
        Drawing(groups=32, times=1),
        changes={"sampling": {"max_tokens": 16}},
    ),
    ("smollm2", "cpu"): Study(
        "staleness_smollm2",
        EXAMPLES / "smollm2_mixture.toml",
        Drawing(groups=4, times=1),
        steps=2,
        seeds=1,
        problems=4,
        is_trial=True,
        changes={"sampling": {"group_size": 4, "max_tokens": 12}, "algorithm": {"groups_per_step": 2}},
    ),
}
"""By model and device."""


def in_order(methods: Sequence[str], lags: Sequence[int], seeds: int) -> list[Key]:
    """What says most comes first: the outer lags of every method, then those between, then the next seed."""
    keys = [(method, lag, seed) for seed in range(seeds) for lag in lags for method in methods]
    return sorted(keys, key=lambda key: (key[2], key[1] not in OUTER_LAGS))
