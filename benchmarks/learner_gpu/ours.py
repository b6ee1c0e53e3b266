"""The learner's own step, by the classes that `bucketrl learner` runs."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.learner_gpu.shapes import Shape, storage_bytes, twin
from benchmarks.learner_gpu.workload import Batch, run_config
from bucketrl.bucket.errors import UserError
from bucketrl.learner import packing
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.objective import Denominators
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.packing import Floats
from bucketrl.learner.trainer import Replica, Trainer

B_DEVIATION = 0.02
"""Of the adapter's second factor, which PEFT starts at 0: the first would have no gradient to compare."""


class Ours:
    """Micro-batches are the largest that the learner itself says fit without activation checkpointing."""

    def __init__(self, causal: Any, shape: Shape, device: torch.device) -> None:
        tokens = shape.tokens
        # All, two groups with their prompts once, one group, and less.
        budgets = (tokens, tokens * 9 // 16, tokens * 9 // 32, tokens // 8, tokens // 16)
        choices = [(budget, False) for budget in budgets] + [(tokens // 4, True)]
        for budget, checkpointing in choices:
            self._causal = twin(causal)
            try:
                self.policy = PolicyModel.from_causal(
                    self._causal, run_config(shape, budget, checkpointing), device
                )
                break
            except (UserError, torch.OutOfMemoryError) as error:
                refused = str(error)
        else:
            raise MemoryError(refused)
        self.checkpointing = checkpointing
        generator = torch.Generator(device).manual_seed(1)
        with torch.no_grad():
            for name, parameter in self.policy.parameters.items():
                if "lora_B" in name:
                    parameter.normal_(std=B_DEVIATION, generator=generator)
        self._optimizer = Optimizer(self.policy.parameters, self.policy.config.algorithm)
        self._trainer = Trainer(self.policy, self._optimizer)

    @property
    def microbatch(self) -> str:
        return f"{self.policy.config.learner.tokens_per_microbatch} tokens"

    def step(self, batch: Batch) -> None:
        self._trainer.train(batch.groups, batch.step, _never)

    def gradient(self, batch: Batch) -> tuple[Floats, dict[str, Tensor]]:
        """Log-probabilities [S, C] and the gradient of each adapter parameter; one micro-batch."""
        items = packing.sequences(batch.groups, batch.advantages.reshape(len(batch.groups), -1).tolist())
        microbatches = packing.pack(items, batch.input_ids.size)
        replica = Replica(self.policy)
        self._optimizer.zero_grad()
        replica.begin([microbatches], batch.step, _never)
        count = batch.behaviour_logprobs.size
        denominators = Denominators(loss_tokens=count, sequences=len(items), max_tokens=count)
        (statistics,) = replica.accumulate(0, denominators, _never)
        gradients = {
            name: each.grad for name, each in self.policy.parameters.items() if each.grad is not None
        }
        self._optimizer.zero_grad()
        return statistics.logprobs.reshape(batch.behaviour_logprobs.shape), gradients

    def shrink(self) -> bool:
        """Halves the micro-batches; False if they cannot be smaller."""
        config = self.policy.config
        budget = config.learner.tokens_per_microbatch // 2
        if budget < config.rollout.max_model_len:
            return False
        learner = config.learner.model_copy(update={"tokens_per_microbatch": budget})
        self.policy.config = config.model_copy(update={"learner": learner})
        self._trainer = Trainer(self.policy, self._optimizer)
        return True

    def resident_bytes(self) -> int:
        """Weights, gradients and moments."""
        parameters = list(self._causal.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        moments = [moment for pair in self._optimizer.moments().values() for moment in pair]
        return storage_bytes([*parameters, *self._causal.buffers(), *gradients, *moments])


def _never() -> bool:
    return False
