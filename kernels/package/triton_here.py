"""Whether Triton's kernels can run in this process, and on which device."""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


@cache
def triton_is_here() -> bool:
    """On an NVIDIA build of torch."""
    return torch.version.hip is None and find_spec("triton") is not None


def on_device_of(tensor: Tensor) -> AbstractContextManager[None]:
    """Triton launches on the current device, whatever its arguments are on: makes it the tensor's."""
    guard: AbstractContextManager[None] = torch.cuda.device_of(tensor)  # type: ignore[no-untyped-call]
    return guard
