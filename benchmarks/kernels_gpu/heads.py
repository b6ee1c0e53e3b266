"""Output heads to measure on: hidden states, a frozen weight, and targets drawn from the softmax itself."""

from dataclasses import dataclass

import torch
from torch import Tensor

QWEN3 = 151936
"""Its vocabulary: 1187 · 128, ragged for every tile width but 128."""
REGIMES = {"uniform": (0.0, 0.0, 0.0), "mixed": (0.7, 6.0, 30.0), "confident": (0.95, 24.0, 36.0)}
"""Share of rows that lean towards one token, and the least and greatest logit that they give it."""


@dataclass(frozen=True)
class Head:
    hidden: Tensor
    """[N, H] bfloat16"""
    weight: Tensor
    """[V, H] bfloat16"""
    targets: Tensor
    """[N] int64"""
    upstream: Tensor
    """[N] float32: what the loss passes back."""


def make(rows: int, size: int, vocabulary: int, regime: str, seed: int) -> Head:
    """Logits with a standard deviation of 2.5, and one that stands out where the regime says so."""
    generator = torch.Generator("cuda").manual_seed(seed)
    share, least, most = REGIMES[regime]

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weight = normal(vocabulary, size).mul_(0.02).bfloat16()
    hidden = normal(rows, size).mul_(2.5 / 0.02 / size**0.5)
    favourite = torch.randint(vocabulary, (rows,), device="cuda", generator=generator)
    leans = torch.rand(rows, device="cuda", generator=generator) < share
    logit = least + (most - least) * torch.rand(rows, device="cuda", generator=generator)
    for part in torch.arange(rows, device="cuda").split(8192):  # type: ignore[no-untyped-call]
        own = weight[favourite[part]].float()
        hidden[part] += own * (leans[part] * logit[part] / own.square().sum(dim=1))[:, None]
    hidden = hidden.bfloat16()
    targets = torch.empty(rows, dtype=torch.int64, device="cuda")
    for part in torch.arange(rows, device="cuda").split(2048):  # type: ignore[no-untyped-call]
        probs = torch.softmax((hidden[part] @ weight.T).float(), dim=1)
        targets[part] = torch.multinomial(probs, 1, generator=generator)[:, 0]
    return Head(hidden, weight, targets, normal(rows))


@dataclass(frozen=True)
class Truth:
    """In float64, of some rows."""

    rows: Tensor
    logprobs: Tensor
    entropy: Tensor
    grad: Tensor


def truth(head: Head, count: int = 64) -> Truth:
    rows = torch.linspace(0, len(head.targets) - 1, count, device="cuda").long()
    weight, hidden = head.weight.double(), head.hidden[rows].double()
    log_softmax = torch.log_softmax(hidden @ weight.T, dim=1)
    probs = log_softmax.exp()
    logprobs = log_softmax.gather(1, head.targets[rows, None])[:, 0]
    entropy = torch.special.entr(probs).sum(dim=1)
    others = probs.scatter_(1, head.targets[rows, None], 0.0).sum(dim=1, keepdim=True)
    slope = probs.neg_().scatter_(1, head.targets[rows, None], others) @ weight
    return Truth(rows, logprobs, entropy, slope * head.upstream[rows, None].double())


def relative(found: Tensor, want: Tensor) -> float:
    """‖found - want‖ / ‖want‖."""
    return float((found.double() - want).norm() / want.norm().clamp(min=1e-300))
