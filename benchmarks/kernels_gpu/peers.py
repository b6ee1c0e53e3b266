"""What others do for log-probabilities of a frozen head, forward and backward.

Each is a function of (hidden, weight, targets) that returns log-probabilities [N], or a sum of them where the
peer gives no more. A peer that is not installed raises ImportError. "-style" marks a published algorithm that
has no installable package: written here, in plain torch, from its description.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Peer = Callable[[Tensor, Tensor, Tensor], Tensor]
ROWS = 4096


def eager(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """bfloat16 logits of 4096 rows at a time, float32 log-softmax, done again in the backward pass."""
    return _by_rows(_selected, hidden, weight, targets)


def compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The same under torch.compile."""
    return _by_rows(_compiled_selected(), hidden, weight, targets)


def _by_rows(function: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    parts = [
        checkpoint(function, some, weight, chosen, use_reentrant=False)
        for some, chosen in zip(hidden.split(ROWS), targets.split(ROWS), strict=True)  # type: ignore[no-untyped-call]
    ]
    return torch.cat(parts)


def _selected(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    log_softmax = torch.log_softmax((hidden @ weight.T).float(), dim=-1)
    return log_softmax.gather(1, targets[:, None])[:, 0]


@cache
def _compiled_selected() -> Any:
    return torch.compile(_selected)


def prime_rl_style(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Online log-sum-exp over vocabulary chunks of 8192; the backward pass does each chunk again."""
    apply: Any = _VocabularyChunks.apply
    logprobs: Tensor = apply(hidden, weight, targets)
    return logprobs


class _VocabularyChunks(torch.autograd.Function):
    CHUNK = 8192

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        chunk = _VocabularyChunks.CHUNK
        top = hidden.new_full((len(hidden),), -torch.inf, dtype=torch.float32)
        total, weighted, target = torch.zeros_like(top), torch.zeros_like(top), torch.zeros_like(top)
        for first in range(0, len(weight), chunk):
            logits = (hidden @ weight[first : first + chunk].T).float()
            new_top = torch.maximum(top, logits.amax(dim=1))
            exp = (logits - new_top[:, None]).exp()
            scale = (top - new_top).exp()
            total = total * scale + exp.sum(dim=1)
            weighted = weighted * scale + (exp * logits).sum(dim=1)
            here = (targets >= first) & (targets < first + logits.shape[1])
            index = (targets - first).clamp(0, logits.shape[1] - 1)
            target = torch.where(here, logits.gather(1, index[:, None])[:, 0], target)
            top = new_top
        log_sum = top + total.log()
        ctx.save_for_backward(hidden, weight, targets, log_sum)
        return target - log_sum

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, log_sum = ctx.saved_tensors
        chunk = _VocabularyChunks.CHUNK
        grad_hidden = torch.zeros_like(hidden)
        for first in range(0, len(weight), chunk):
            part = weight[first : first + chunk]
            logits = (hidden @ part.T).float()
            slope = (logits - log_sum[:, None]).exp() * -grads[0][:, None]
            here = (targets >= first) & (targets < first + len(part))
            index = (targets - first).clamp(0, len(part) - 1)
            slope.scatter_add_(1, index[:, None], (here * grads[0])[:, None])
            grad_hidden.add_(slope.to(hidden.dtype) @ part)
        return grad_hidden, None, None


def trl(chunk: int) -> Peer:
    """TRL 1.16's `ChunkedLogProbFunction` with `chunk` columns at a time."""

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        function = _trl_kernels().ChunkedLogProbFunction
        logprobs: Tensor = function.apply(hidden, weight, None, targets, 1.0, chunk, None, 1.0, ("entropy",))[
            0
        ]
        return logprobs

    return call


@cache
def _trl_kernels() -> Any:
    utils = {"maybe_gather_lm_head_ctx": lambda *_: nullcontext()}
    stand_ins = {"trl": {}, "trl.trainer": {}, "trl.trainer.utils": utils}
    return _alone("trl.kernels.chunked_logprob", stand_ins)


def _alone(name: str, stand_ins: Mapping[str, Mapping[str, Any]]) -> Any:
    """The module `name`, without what its packages import, which has nothing to do with it: of the modules in
    `stand_ins` there is no more than is given. Raises ImportError."""
    package, _, _ = name.partition(".")
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ImportError(f"{package} is not installed")
    for stand_in, contents in stand_ins.items():
        module = sys.modules[stand_in] = ModuleType(stand_in)
        below = stand_in.removeprefix(package).replace(".", "/")
        module.__path__ = [folder + below for folder in spec.submodule_search_locations or []]
        vars(module).update(contents)
    return importlib.import_module(name)


def liger_flce(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger's fused linear cross entropy in Triton, per token."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_cross_entropy")
    apply = module.LigerFusedLinearCrossEntropyFunction.apply
    loss: Tensor = apply(hidden, weight, targets, None, None, -100, 0.0, 0.0, "none")[0]
    return -loss


def liger_sm90(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Liger's CuTe kernels for Hopper; they want nvidia-cutlass-dsl."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    module._load_sm90_function()
    loss: Tensor = module.LigerFusedLinearScaledCrossEntropyFunction.apply(hidden, weight, targets)
    return -loss


def verl(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """verl's Triton kernels, which form the head's gradient too, frozen or not."""
    logprobs: Tensor = _verl_kernels().linear_cross_entropy(hidden, weight, targets, 1.0, "none")[0]
    return logprobs


@cache
def _verl_kernels() -> Any:
    device = {
        "get_device_capability": torch.cuda.get_device_capability,
        "get_device_name": lambda: "cuda",
        "get_torch_device": lambda: torch.cuda,
        "is_cuda_available": True,
    }
    stand_ins = {"verl": {}, "verl.utils": {}, "verl.utils.device": device}
    return _alone("verl.utils.kernel.linear_cross_entropy", stand_ins)


def verl_style(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """verl's other way, chunks of 512 tokens, as Liger ships it for other devices."""
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    loss: Tensor = module._FusedLinearPPOFallbackFunction.apply(hidden, weight, targets, 1.0, -100, False)
    return -loss


def cce(filter_eps: str | None) -> Peer:
    """Apple's cut cross entropy; with "high" it leaves out gradients that are small, with None it is exact."""

    def call(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        module = importlib.import_module("cut_cross_entropy")
        loss: Tensor = module.linear_cross_entropy(
            hidden, weight, targets, reduction="none", filter_eps=filter_eps
        )
        return -loss

    return call


def quack(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """quack's scaled-exp kernel: a sum over tokens is all that it gives."""
    module = importlib.import_module("quack.linear_cross_entropy")
    loss: Tensor = module.scaled_exp_linear_cross_entropy(hidden, weight, targets, reduction="sum")
    return -loss


PEERS: dict[str, Peer] = {
    "TRL 1.16, 32k columns": trl(32768),
    "TRL 1.16, 8k columns": trl(8192),
    "Liger SM90": liger_sm90,
    "Liger FLCE": liger_flce,
    "prime-rl-style": prime_rl_style,
    "verl": verl,
    "verl-style": verl_style,
    "CCE": cce("high"),
    "CCE exact": cce(None),
    "quack (sum only)": quack,
    "torch eager": eager,
    "torch.compile": compiled,
}
