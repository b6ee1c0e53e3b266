"""Whether an adapter folder is the adapter that the run trains, before an engine sees it."""

import json
from pathlib import Path
from typing import Any

from bucketrl.bucket.config import UNSERVABLE_MODULES, RunConfig
from bucketrl.bucket.errors import IntegrityError

_UNSERVABLE = (
    "use_dora",
    "use_rslora",
    "use_qalora",
    "lora_bias",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "trainable_token_indices",
    "layer_replication",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "use_bdlora",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "target_parameters",
)
"""Fields of PEFT's LoraConfig that must be absent, false or empty: engines ignore or refuse the rest."""


def check_adapter_config(folder: Path, config: RunConfig) -> None:
    """Raises IntegrityError that names the first field which differs from the run's LoRA settings."""
    try:
        adapter = json.loads((folder / "adapter_config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise IntegrityError(f"adapter_config.json: cannot be read: {error}") from None
    if not isinstance(adapter, dict):
        raise IntegrityError("adapter_config.json: no JSON object")
    expected: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": config.model.id,
        "r": config.lora.rank,
        "lora_alpha": config.lora.alpha,
        "bias": "none",
    }
    for field, want in expected.items():
        if adapter.get(field) != want:
            raise _mismatch(field, adapter.get(field), want)
    for field in _UNSERVABLE:
        if adapter.get(field):
            raise _mismatch(field, adapter[field], "nothing")
    # PiSSA, OLoRA and the like are to be loaded onto changed base weights.
    if adapter.get("init_lora_weights", True) is not True:
        raise _mismatch("init_lora_weights", adapter["init_lora_weights"], True)
    _check_targets(adapter.get("target_modules"), config.lora.target_modules)


def _check_targets(found: Any, wanted: str | tuple[str, ...]) -> None:
    """PEFT writes `all-linear` out as the list of modules that it matched."""
    if isinstance(wanted, tuple):
        if not isinstance(found, list) or set(found) != set(wanted):
            raise _mismatch("target_modules", found, sorted(wanted))
    elif found != wanted:
        if not isinstance(found, list) or not found:
            raise _mismatch("target_modules", found, wanted)
        if any(str(target).split(".")[-1] in UNSERVABLE_MODULES for target in found):
            raise _mismatch("target_modules", found, f"{wanted} without embeddings and head")


def _mismatch(field: str, found: Any, want: Any) -> IntegrityError:
    return IntegrityError(f"adapter_config.json: {field} is {found!r}, the run wants {want!r}")
