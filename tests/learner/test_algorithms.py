"""`[algorithm]` by name: what a name means, what is refused, and that each of them trains."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.learner.worlds import make_config, make_group

from bucketrl.bucket.algorithm_config import PARAMETERS, PRESETS
from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.bucket.records import FileRef, GroupRef
from bucketrl.learner.metrics import group_metrics
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.select import Candidate
from bucketrl.learner.trainer import Trainer

OLD_DOCUMENT = {
    "adam_beta1": 0.9,
    "adam_beta2": 0.95,
    "clip_high": 0.28,
    "clip_low": 0.2,
    "filter_zero_variance": True,
    "groups_per_step": 8,
    "learning_rate": 0.0001,
    "max_grad_norm": 1.0,
    "max_staleness": 4,
    "steps": 100,
    "warmup_steps": 0,
    "weight_decay": 0.0,
}
"""`algorithm` of a `run.json` from before there were names."""


def made(**settings: Any) -> AlgorithmConfig:
    return AlgorithmConfig.model_validate(settings)


def test_a_run_from_before_there_were_names_keeps_its_meaning() -> None:
    assert made(**OLD_DOCUMENT) == AlgorithmConfig()
    assert made(**OLD_DOCUMENT | {"clip_low": 0.1}).clip_low == 0.1
    algorithm = AlgorithmConfig()
    assert (algorithm.surrogate, algorithm.ratio_level, algorithm.clip_low, algorithm.clip_high) == (
        "ppo_clip", "token", 0.2, 0.28,
    )  # fmt: skip
    assert (algorithm.baseline, algorithm.advantage_scale, algorithm.aggregation) == (
        "group_mean", "none", "token_mean",
    )  # fmt: skip
    assert (algorithm.proximal, algorithm.importance_weight, algorithm.importance_mask) == ("none",) * 3
    assert (algorithm.kl_coefficient, algorithm.entropy_coefficient, algorithm.minibatches) == (0.0, 0.0, 1)


@pytest.mark.parametrize("name", PRESETS)
def test_a_run_document_says_all_that_its_name_meant(name: str) -> None:
    """It loads to the same run, also where the name would mean something else by then."""
    algorithm = made(name=name)
    document = algorithm.model_dump(mode="json")
    assert made(**document) == algorithm
    assert made(**document | {"name": "default"}) == algorithm.model_copy(update={"name": "default"})


def test_the_file_replaces_what_the_name_chose() -> None:
    assert made(name="grpo", clip_high=0.3).clip_high == 0.3
    assert made(name="grpo", aggregation="token_mean").advantage_scale == "group_std"
    cheap = made(name="grpo", kl_coefficient=0)
    assert (cheap.kl_coefficient, cheap.kl_estimator) == (0.0, None)
    assert made(name="dapo", overlong_buffer=0).overlong_penalty is None
    assert made(name="gspo", surrogate="reinforce").ratio_level is None


@pytest.mark.parametrize("field", PARAMETERS)
def test_a_setting_without_effect_is_refused(field: str) -> None:
    """Each parameter, where the choice that it belongs to was not made."""
    unmade = {"surrogate": "reinforce"} if field in ("ratio_level", "clip_low", "clip_high") else {}
    value = {"ratio_level": "token", "kl_estimator": "k2"}.get(field, 0.5)
    with pytest.raises(ValidationError, match=rf"{field} .* has no effect: .*; remove it"):
        made(**unmade, **{field: value})


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"surrogate": "cispo", "clip_low": 0.2}, "clip_low 0.2 has no effect: only surrogate ppo_clip"),
        ({"name": "cispo", "dual_clip": 3.0}, "dual_clip 3.0 bounds surrogate ppo_clip only, not cispo"),
        ({"importance_weight": "token"}, "importance_weight 'token' would count .* twice.*set proximal"),
        (
            {"name": "rloo", "proximal": "recomputed"},
            "proximal 'recomputed': surrogate reinforce has no ratio",
        ),
        (
            {"importance_mask": "token", "importance_mask_low": 1.5},
            "importance_mask_low 1.5 .* put 1 between",
        ),
        ({"minibatches": 9}, "minibatches 9 cannot be made of groups_per_step 8"),
        ({"dual_clip": 1.0}, "dual_clip"),
        ({"importance_cap": 0.5, "name": "rloo"}, "importance_cap"),
        ({"kl_coefficient": 0.1, "kl_estimator": "k1"}, "'k2' or 'k3'"),
        ({"name": "ppo"}, "'default', 'grpo'"),
        ({"name": ["grpo"]}, "'default', 'grpo'"),
        ({"surrogate": 3}, "'ppo_clip', 'cispo' or 'reinforce'"),
        ({"kl_coefficient": "much"}, "valid number"),
    ],
)
def test_what_contradicts_itself_is_refused_by_field(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(ValidationError, match=line) as caught:
        made(**settings)
    assert len(caught.value.errors()) == 1


EVERYTHING = {
    "name": "grpo",
    "groups_per_step": 2,
    "minibatches": 2,
    "proximal": "interpolated",
    "importance_weight": "sequence",
    "importance_mask": "token",
    "dual_clip": 3.0,
    "entropy_coefficient": 0.01,
    "overlong_buffer": 0.5,
}


def test_every_algorithm_trains_and_its_metrics_are_explained(model_folder: Path) -> None:
    """Three steps each, on groups of mixed lengths and ages: the policy moves, everything stays finite, and
    `docs/algorithms.md` has each name that was written, and no other."""
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    glossary = set(re.findall(r"`([a-z0-9_]+)`", text.split("| name | meaning |")[1]))
    written = set()
    candidate = Candidate(
        ordinal=0,
        ref=GroupRef(group_id="0000-00000000", attempt="w", file=FileRef(key="k", size=1, sha256="0" * 64)),
        rewards=(0.0, 1.0),
        min_version=0,
        truncated=0,
        completed_correct=1,
    )
    for settings in ({"name": name} for name in PRESETS), [EVERYTHING]:
        for algorithm in settings:
            config = make_config(algorithm=algorithm)
            policy = PolicyModel.load(model_folder, config, torch.device("cpu"))
            trainer = Trainer(policy, Optimizer(policy.parameters, config.algorithm))
            for step in (1, 2, 3):
                groups = [
                    make_group(
                        ordinal,
                        completions=[(8, 9, 1), (10, 11, 12, 13, 14, 15), (16, 1)],
                        rewards=[1.0, 0.0, float(ordinal)],
                        logprobs=[[-4.0] * 3, [-4.5] * 6, [-3.5] * 2],
                        version=max(0, step - 1 - ordinal),
                    )
                    for ordinal in range(2)
                ]
                before = {name: value.detach().clone() for name, value in policy.parameters.items()}
                metrics = trainer.train(groups, step, lambda: False) | group_metrics(
                    [candidate], [], group_size=8
                )
                assert all(map(math.isfinite, metrics.values())), algorithm
                assert all(torch.isfinite(value).all() for value in policy.parameters.values())
                assert any(not torch.equal(value, before[name]) for name, value in policy.parameters.items())
                written |= {re.sub(r"(?<!tokens)_lag_\d+$", "", name) for name in metrics}
    assert {re.sub(r"\d+$", "0", name) if "_lag_" in name else name for name in written} == glossary - {
        "kl_coefficient", "cispo", "importance_cap", "correct",
    }  # fmt: skip
