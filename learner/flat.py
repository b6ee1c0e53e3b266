"""Many parameters as one vector: one operation on it costs a host what it costs on each of hundreds."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn


def flat(tensors: Sequence[Tensor]) -> Tensor:
    """[sum of their sizes]"""
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def views(flat: Tensor, parameters: Mapping[str, nn.Parameter]) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Each parameter with its part of `flat`, in its shape."""
    sizes = [parameter.numel() for parameter in parameters.values()]
    for parameter, part in zip(parameters.values(), torch.split(flat, sizes), strict=True):
        yield parameter, part.view_as(parameter)


def flat_gradients(parameters: Mapping[str, nn.Parameter]) -> Tensor:
    """Zero where a rank had no micro-batch."""
    return flat([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters.values()])
