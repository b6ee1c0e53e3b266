"""AdamW over the adapter's masters, with warm-up and clipping by the global norm."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from bucketrl.bucket.config import AlgorithmConfig
from bucketrl.bucket.errors import UserError


def learning_rate(config: AlgorithmConfig, step: int) -> float:
    """Of step `step` (the first is 1): linear warm-up over `warmup_steps`, then constant."""
    return config.learning_rate * min(1.0, step / max(1, config.warmup_steps))


class Optimizer:
    """Its moments are addressed by parameter name, so that a checkpoint does not depend on any layout."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: AlgorithmConfig) -> None:
        self._config = config
        self._parameters = parameters
        self._adamw = torch.optim.AdamW(
            parameters.values(),
            lr=config.learning_rate,
            betas=(config.adam_beta1, config.adam_beta2),
            weight_decay=config.weight_decay,
        )

    def zero_grad(self) -> None:
        self._adamw.zero_grad(set_to_none=True)

    @contextmanager
    def atomic(self) -> Iterator[None]:
        """Inside, updates are all or nothing: an exception leaves parameters and moments as they were before.

        Costs a copy of them for as long.
        """
        parameters = {name: value.detach().clone() for name, value in self._parameters.items()}
        moments = {name: (first.clone(), second.clone()) for name, (first, second) in self.moments().items()}
        try:
            yield
        except BaseException:
            with torch.no_grad():
                for name, value in self._parameters.items():
                    value.copy_(parameters[name])
            self._adamw.state.clear()
            self.restore(moments, 0)  # `step` sets the count
            raise

    def step(self, step: int, update: int = 0) -> float:
        """Applies the accumulated gradients; returns their norm before clipping.

        `update` counts the updates of one step. The learning rate is that of the step; Adam's count of
        updates follows from both, so that a resumed run has it from the step alone.
        Raises UserError, with nothing changed, if the gradient is not finite.
        """
        norm = nn.utils.clip_grad_norm_(self._parameters.values(), self._config.max_grad_norm)
        if not torch.isfinite(norm):
            raise UserError(
                f"the gradient of step {step} is not finite: lower algorithm.learning_rate "
                f"(now {self._config.learning_rate:g}) or train in model.dtype float32"
            )
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate(self._config, step)
        for state in self._adamw.state.values():
            state["step"].fill_((step - 1) * self._config.minibatches + update)
        self._adamw.step()
        return float(norm)

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """First and second moment of each parameter; empty before the first step."""
        return {
            name: (state["exp_avg"], state["exp_avg_sq"])
            for name, parameter in self._parameters.items()
            if (state := self._adamw.state.get(parameter))
        }

    def restore(self, moments: Mapping[str, tuple[Tensor, Tensor]], steps: int) -> None:
        """As after `steps` steps that left `moments` (empty for 0 steps)."""
        for name, (first, second) in moments.items():
            parameter = self._parameters[name]
            self._adamw.state[parameter] = {
                "step": torch.tensor(float(steps * self._config.minibatches)),
                "exp_avg": first.to(parameter.device),
                "exp_avg_sq": second.to(parameter.device),
            }
