"""A model whose completions are long, so that there is something to stop in the middle of."""

import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from bucketrl.jobs.models import TINY_ARITHMETIC


def long_winded_model(folder: Path) -> Path:
    """`folder`/model: chooses among all tokens alike, and so takes long to find the end of its turn."""
    model = folder / "model"
    shutil.copytree(TINY_ARITHMETIC, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = (weights["model.norm.weight"] * 0.02).astype(np.float32)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    return model
