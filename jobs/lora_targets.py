"""Do the LoRA targets exist in the base model? Told from the weights' headers, without loading anything."""

from pathlib import Path

from bucketrl.bucket.config import LoraConfig
from bucketrl.bucket.errors import UserError
from bucketrl.rollout_worker.model_files import linear_modules


def check_lora_targets(config: LoraConfig, model_folder: Path) -> None:
    """Raises UserError naming the first target that no linear layer of the model has."""
    linear = linear_modules(model_folder)
    if not linear:
        raise UserError(f"lora.target_modules: {model_folder} has no linear layers to adapt")
    if config.target_modules == "all-linear":
        return
    for target in config.target_modules:
        if target not in linear:
            raise UserError(
                f"lora.target_modules: the model has no linear layer {target!r}; it has {', '.join(sorted(linear))}"
            )
