"""What a micro-batch costs in memory, and whether its activations are kept or computed again in the backward pass.

The forward pass itself is measured on a few tokens, so that every architecture and every kernel counts as it is.
"""

import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from bucketrl.bucket.errors import UserError

logger = logging.getLogger(__name__)

GIB = 1 << 30
OPTIMIZER_BYTES = 12
"""Of one adapter parameter beside its master: gradient and two Adam moments, float32."""
UNDO_BYTES = 12
"""Besides, if a step has several updates: master and moments as they were before it."""
USABLE = 0.92
"""Share of the device's memory that the estimate may fill; fragments and the kernels' work space take the rest."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that a learner needs at its peak, between forward and backward pass."""

    weights: int
    """Base model and adapter masters."""
    optimizer: int
    activations: int
    """Of a full micro-batch."""
    checkpointed: int
    """The same if each block keeps its input only and one block at a time is computed again."""


def measure(
    model: nn.Module,
    forward: Callable[[], Any],
    *,
    measured_tokens: int,
    tokens: int,
    hidden_bytes: int,
    updates: int = 1,
) -> Footprint:
    """Of micro-batches of `tokens` tokens, not counting the head, in steps of `updates` updates.

    `forward` runs `model` with gradients on `measured_tokens` tokens, no block checkpointed, and returns what
    keeps the graph alive. `hidden_bytes`: of one token's hidden state.
    """
    storages = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
    resident = {storage.data_ptr(): storage.nbytes() for storage in storages}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in resident:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        graph = forward()  # while it lives, no storage is freed and no address is used twice
    del graph
    blocks = max(1, len(list(_blocks(model))))
    kept = sum(saved.values()) * tokens // measured_tokens
    block = kept // blocks
    of_parameter = OPTIMIZER_BYTES + (UNDO_BYTES if updates > 1 else 0)
    return Footprint(
        weights=sum(resident.values()),
        optimizer=of_parameter * sum(each.numel() for each in model.parameters() if each.requires_grad),
        # Gradients of one block exist beside what is kept.
        activations=kept + block,
        checkpointed=tokens * hidden_bytes * blocks + 2 * block,
    )


def decide(
    footprint: Footprint, setting: bool | Literal["auto"], *, head: int, tokens: int, memory: int, where: str
) -> bool:
    """Whether to checkpoint. `head`: bytes of the head beside its weight; `memory`: what there is for all of the
    learner, its weights included; `where` names it.

    Raises UserError if the learner does not fit either way, or not in the way that `setting` wants.
    """
    kept, checkpointed = (
        footprint.weights + footprint.optimizer + head + each
        for each in (footprint.activations, footprint.checkpointed)
    )
    chosen = kept > memory if setting == "auto" else setting
    needed = checkpointed if chosen else kept
    report = (
        f"{footprint.weights / GIB:.2f} GiB of weights, {footprint.optimizer / GIB:.2f} of gradients and "
        f"optimizer, {head / GIB:.2f} for the head, {footprint.activations / GIB:.2f} for a micro-batch of "
        f"{tokens} tokens ({footprint.checkpointed / GIB:.2f} with activation checkpointing), of the "
        f"{memory / GIB:.2f} of {where}"
    )
    if needed > memory:
        ways = "lower learner.tokens_per_microbatch or rollout.max_model_len, or take a larger machine"
        if not chosen:
            ways = f"set learner.activation_checkpointing to true, {ways}"
        raise UserError(f"the learner does not fit: {report}: {ways}")
    logger.info("memory: %s: activation checkpointing is %s", report, "on" if chosen else "off")
    return chosen


def device_memory(device: torch.device) -> tuple[int, str]:
    """Bytes that this process has or can get on `device`, and what to call it."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(USABLE * (free + torch.cuda.memory_reserved(device))), "the GPU"
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"


def checkpoint_blocks(model: nn.Module) -> None:
    """From now on each block of `model` keeps its input only, and is computed again in the backward pass.

    Transformers' own switch works in training mode only, which would also switch dropout on.
    """
    for block in _blocks(model):
        block.forward = _checkpointed(block.forward)


def _checkpointed(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        # Nothing is drawn at random in a forward pass, so there is no state of a generator to bring back.
        return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

    return run


def _blocks(module: nn.Module) -> Iterator[nn.Module]:
    """The outermost layers that transformers marks as fit for checkpointing."""
    for child in module.children():
        if isinstance(child, GradientCheckpointingLayer):
            yield child
        else:
            yield from _blocks(child)
