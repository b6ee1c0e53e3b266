"""An adapter that changes nothing.

vLLM's CPU kernels give a request without adapter the weights of the last adapter slot when it shares a
batch with requests that have one. With this adapter the base model is served right in any company.
"""

import json
from pathlib import Path

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from bucketrl.bucket.errors import UserError


def write_null_adapter(model_path: Path, targets: tuple[str, ...], folder: Path) -> None:
    """Writes a PEFT folder with one pair of zero matrices, of rank 1, for a module among `targets`.

    Raises UserError if the model's safetensors files have no such module.
    """
    module, rows, columns = _first_module(model_path, targets)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 1,
        "lora_alpha": 1,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2]],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    prefix = f"base_model.model.{module}"
    save_file(
        {
            f"{prefix}.lora_A.weight": np.zeros((1, columns), dtype=np.float32),
            f"{prefix}.lora_B.weight": np.zeros((rows, 1), dtype=np.float32),
        },
        folder / "adapter_model.safetensors",
    )


def _first_module(model_path: Path, targets: tuple[str, ...]) -> tuple[str, int, int]:
    """Name and weight shape [rows, columns] of a module that adapters may change."""
    for path in sorted(model_path.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            for name in sorted(file.keys()):
                module, _, kind = name.rpartition(".")
                shape = file.get_slice(name).get_shape()
                if kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] in targets:
                    return module, shape[0], shape[1]
    raise UserError(f"model folder {model_path}: no safetensors weights for any of {', '.join(targets)}")
