"""What a base model consists of, told from the headers of its weight files, without loading anything."""

import json
import struct
from pathlib import Path

from bucketrl.bucket.config import UNSERVABLE_MODULES
from bucketrl.bucket.errors import UserError

MAX_HEADER = 100 << 20
"""The format's own limit, in bytes."""


def linear_modules(model_folder: Path) -> set[str]:
    """Last name parts of the modules with a matrix `weight` (`q_proj`, ...). Raises UserError."""
    names = set()
    for file in sorted(model_folder.glob("*.safetensors")):
        for name, shape in _shapes(file).items():
            parts = name.split(".")
            if len(parts) > 1 and parts[-1] == "weight" and len(shape) == 2:
                names.add(parts[-2])
    return names - set(UNSERVABLE_MODULES)


def _shapes(file: Path) -> dict[str, list[int]]:
    """Tensor name -> shape: a safetensors file is an 8-byte little-endian length, a JSON header, the data."""
    try:
        with file.open("rb") as data:
            (size,) = struct.unpack("<Q", data.read(8))
            if not 0 < size <= MAX_HEADER:
                raise ValueError(size)
            header = json.loads(data.read(size))
        header.pop("__metadata__", None)
        return {name: entry["shape"] for name, entry in header.items()}
    except (struct.error, ValueError, KeyError, TypeError, AttributeError):
        raise UserError(f"model: {file} is no safetensors file") from None
