"""Algorithms by name, and which settings have an effect together. Pure; `config.AlgorithmConfig` applies it.

A name stands for a set of orthogonal choices; whatever the file sets itself replaces the name's choice.
`run.json` holds the outcome, every choice spelt out, so that a run keeps its meaning.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

PRESETS: dict[str, dict[str, Any]] = {
    # The defaults of AlgorithmConfig: GRPO's group mean without the standard deviation (as Dr. GRPO), DAPO's
    # asymmetric clip and token mean, around the behaviour policy. No paper's algorithm, so no paper's name.
    "default": {},
    # arXiv 2402.03300, eq. 3 and 4, coefficient of its section 4.2.
    "grpo": {
        "clip_high": 0.2,
        "advantage_scale": "group_std",
        "aggregation": "sequence_mean",
        "kl_coefficient": 0.04,
        "kl_estimator": "k3",
    },
    # arXiv 2503.20783, section 3.2.
    "dr_grpo": {"clip_high": 0.2, "aggregation": "constant"},
    # arXiv 2503.14476, eq. 8 to 13; 0.2 is its 4096 of 20480 tokens. Dynamic sampling: filter_zero_variance.
    "dapo": {"advantage_scale": "group_std", "overlong_buffer": 0.2},
    # arXiv 2507.18071, eq. 5 to 7, clip of its section 5.1.
    "gspo": {
        "ratio_level": "sequence",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "advantage_scale": "group_std",
        "aggregation": "sequence_mean",
    },
    # arXiv 2506.13585, eq. 4 and 5. It does not publish its bound.
    "cispo": {"surrogate": "cispo", "advantage_scale": "group_std"},
    # arXiv 2402.14740: the completion is one action, hence the sum over its tokens. The weight is
    # 1 on policy, where the paper is.
    "rloo": {
        "surrogate": "reinforce",
        "baseline": "leave_one_out",
        "aggregation": "constant",
        "importance_weight": "token",
    },
    # arXiv 2501.03262, without its penalty on the reward. A group with equal rewards has a gradient here.
    "reinforce_pp": {
        "clip_high": 0.2,
        "baseline": "batch_mean",
        "advantage_scale": "batch_std",
        "filter_zero_variance": False,
    },
}


class _Parameter(NamedTuple):
    """Of a choice: without effect unless `applies` holds for the settings."""

    applies: Callable[[Mapping[str, Any]], bool]
    default: Callable[[Mapping[str, Any]], Any]
    otherwise: str
    """Why it has no effect if it does not apply."""


def _constant(value: Any) -> Callable[[Mapping[str, Any]], Any]:
    return lambda _: value


PARAMETERS: dict[str, _Parameter] = {
    "ratio_level": _Parameter(
        lambda s: s["surrogate"] != "reinforce", _constant("token"), "surrogate reinforce has no ratio"
    ),
    "clip_low": _Parameter(
        lambda s: s["surrogate"] == "ppo_clip",
        _constant(0.2),
        "only surrogate ppo_clip has a lower bound",
    ),
    "clip_high": _Parameter(
        lambda s: s["surrogate"] != "reinforce",
        lambda s: 4.0 if s["surrogate"] == "cispo" else 0.28,
        "surrogate reinforce has no ratio to clip",
    ),
    "importance_cap": _Parameter(
        lambda s: s["importance_weight"] != "none", _constant(2.0), "importance_weight is none"
    ),
    "importance_mask_low": _Parameter(
        lambda s: s["importance_mask"] != "none",
        lambda s: 0.99 if s["importance_mask"] == "sequence" else 0.5,
        "importance_mask is none",
    ),
    "importance_mask_high": _Parameter(
        lambda s: s["importance_mask"] != "none",
        lambda s: 1.01 if s["importance_mask"] == "sequence" else 5.0,
        "importance_mask is none",
    ),
    "overlong_penalty": _Parameter(
        lambda s: s["overlong_buffer"] != 0, _constant(1.0), "overlong_buffer is 0"
    ),
    "kl_estimator": _Parameter(lambda s: s["kl_coefficient"] != 0, _constant("k3"), "kl_coefficient is 0"),
}


def complete(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`settings` with the choices of the algorithm that they name, then with `defaults`; a parameter of a
    choice that was not made is None.

    `settings` may still hold values of wrong types. Raises ValueError, naming the field, for a setting
    without effect.
    """
    name = settings.get("name", defaults["name"])
    preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
    completed = {**defaults, **preset, **settings}
    for field, parameter in PARAMETERS.items():
        if parameter.applies(completed):
            if completed[field] is None:
                completed[field] = parameter.default(completed)
        elif settings.get(field) is not None:
            raise ValueError(f"{field} {settings[field]!r} has no effect: {parameter.otherwise}; remove it")
        else:
            completed[field] = None
    return completed


def contradiction(s: Mapping[str, Any]) -> str | None:
    """What is wrong with complete and valid settings, or None. Names the field and the way out."""
    clips = s["surrogate"] != "reinforce"
    weighs = s["importance_weight"] != "none"
    if s["dual_clip"] is not None and s["surrogate"] != "ppo_clip":
        return f"dual_clip {s['dual_clip']!r} bounds surrogate ppo_clip only, not {s['surrogate']}; remove it"
    if not clips and s["proximal"] != "none":
        return f"proximal {s['proximal']!r}: surrogate reinforce has no ratio to centre on it; use none"
    if clips and weighs and s["proximal"] == "none":
        return (
            f"importance_weight {s['importance_weight']!r} would count the ratio to the behaviour policy twice: "
            f"surrogate {s['surrogate']} holds it already; set proximal, or use none"
        )
    if s["importance_mask"] != "none" and not s["importance_mask_low"] < 1.0 < s["importance_mask_high"]:
        return (
            f"importance_mask_low {s['importance_mask_low']!r} and importance_mask_high "
            f"{s['importance_mask_high']!r} would mask tokens that are on policy; put 1 between them"
        )
    if s["minibatches"] > s["groups_per_step"]:
        return (
            f"minibatches {s['minibatches']} cannot be made of groups_per_step {s['groups_per_step']}; "
            "lower it"
        )
    return None
