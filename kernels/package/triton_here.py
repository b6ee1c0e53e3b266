"""Whether Triton's kernels can run in this process."""

from functools import cache
from importlib.util import find_spec

import torch


@cache
def triton_is_here() -> bool:
    """On an NVIDIA build of torch."""
    return torch.version.hip is None and find_spec("triton") is not None
