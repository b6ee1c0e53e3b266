"""AdamW over the adapter's masters, with warm-up and clipping by the global norm."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.bucket.errors import UserError
from bucketrl.learner.flat import flat, flat_gradients, views


def learning_rate(config: AlgorithmConfig, step: int) -> float:
    """Of step `step` (the first is 1): linear warm-up over `warmup_steps`, then constant."""
    return config.learning_rate * min(1.0, step / max(1, config.warmup_steps))


class Optimizer:
    """Its moments are addressed by parameter name, so that a checkpoint does not depend on any layout."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AlgorithmConfig) -> None:
        """From now on the parameters lie in one vector of the optimizer's: nobody may move them."""
        self._config = config
        self._parameters = parameters
        self._vector = nn.Parameter(flat(list(parameters.values())))
        for parameter, part in views(self._vector.detach(), parameters):
            parameter.data = part
        self._adamw = torch.optim.AdamW(
            [self._vector],
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Inside, updates are all or nothing: an exception leaves parameters and moments as they were before.

        Costs a copy of them for as long.
        """
        vector, state = self._vector.detach().clone(), self._state
        before = {name: value.clone() for name, value in state.items()}
        try:
            yield
        except BaseException:
            with torch.no_grad():
                # Not the vector at once: what is derived from a parameter looks at its `_version`.
                for parameter, value in views(vector, self._parameters):
                    parameter.copy_(value)
            self._state = before
            raise

    def step(self, step: int, update: int = 0) -> float:
        """Applies the accumulated gradients; returns their norm before clipping.

        `update` counts the updates of one step. The learning rate is that of the step; Adam's count of
        updates follows from both, so that a resumed run has it from the step alone.
        Raises UserError, with nothing changed, if the gradient is not finite.
        """
        self._vector.grad = flat_gradients(self._parameters)
        # A CPU's sum of millions of squares in float32 is some 0.1 % too small.
        total = torch.linalg.vector_norm(self._vector.grad, dtype=torch.float64)
        nn.utils.clip_grads_with_norm_(self._vector, self._config.max_grad_norm, total)
        norm = float(total)
        if not math.isfinite(norm):
            raise UserError(
                f"the gradient of step {step} is not finite: lower algorithm.learning_rate "
                f"(now {self._config.learning_rate:g}) or train in model.dtype float32"
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._config, step)
        if self._state:
            self._state["step"].fill_((step - 1) * self._config.minibatches + update)
        self._adamw.step()
        self._vector.grad = None
        return norm

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """First and second moment of each parameter; empty before the first step."""
        if not self._state:
            return {}
        first, second = (views(self._state[name], self._parameters) for name in ("exp_avg", "exp_avg_sq"))
        return {name: (a, b) for name, (_, a), (_, b) in zip(self._parameters, first, second, strict=True)}

    def restore(self, moments: Mapping[str, tuple[Tensor, Tensor]], steps: int) -> None:
        """As after `steps` steps that left `moments` (empty for 0 steps)."""
        if not moments:
            self._state = {}
            return
        first, second = (flat([moments[name][i] for name in self._parameters]) for i in range(2))
        self._state = {
            "step": torch.tensor(float(steps * self._config.minibatches)),
            "exp_avg": first.to(self._vector.device),
            "exp_avg_sq": second.to(self._vector.device),
        }

    @property
    def _state(self) -> dict[str, Tensor]:
        """AdamW's own; empty before the first step."""
        state: dict[str, Tensor] = self._adamw.state.get(self._vector, {})
        return state

    @_state.setter
    def _state(self, state: dict[str, Tensor]) -> None:
        self._adamw.state.clear()
        if state:
            self._adamw.state[self._vector] = state
