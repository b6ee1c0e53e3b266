"""One optimizer step on one batch of groups."""

import time
from collections.abc import Callable, Sequence

import torch

from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.learner import losses, packing
from bucketrl.learner.metrics import TokenStatistics, token_metrics
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer, learning_rate
from bucketrl.learner.parts import Stopped


class Trainer:
    """Gradients are accumulated over micro-batches and do not depend on how the batch is split."""

    def __init__(
        self, policy: PolicyModel, optimizer: Optimizer, *, clock: Callable[[], float] = time.monotonic
    ):
        self._policy = policy
        self._optimizer = optimizer
        self._algorithm = policy.config.algorithm
        self._budget = policy.config.learner.tokens_per_microbatch
        self._clock = clock

    def train(
        self, groups: Sequence[TrajectoryGroup], step: int, stopping: Callable[[], bool]
    ) -> dict[str, float]:
        """Moves the policy from version `step - 1` to `step`; returns the metrics of the tokens.

        Raises Stopped between two micro-batches, with the policy unchanged, once `stopping()` is true.
        """
        started = self._clock()
        items = packing.sequences(groups)
        loss_tokens = sum(len(item.targets) for item in items)
        self._optimizer.zero_grad()
        statistics = []
        for batch in packing.pack(items, self._budget):
            if stopping():
                raise Stopped(f"asked to stop in step {step}, before its end")
            statistics.append(self._accumulate(batch, loss_tokens))
        gradient_norm = self._optimizer.step(step)
        tokens = sum(len(item.input_ids) for item in items)
        return token_metrics(statistics, step=step, algorithm=self._algorithm) | {
            "grad_norm": gradient_norm,
            "learning_rate": learning_rate(self._algorithm, step),
            "tokens": float(tokens),
            "tokens_per_second": tokens / max(1e-9, self._clock() - started),
        }

    def _accumulate(self, batch: packing.MicroBatch, loss_tokens: int) -> TokenStatistics:
        """Adds the micro-batch's gradient to the parameters'."""
        device = self._policy.device
        logprobs, entropy = self._policy.logprobs(batch)
        behaviour, advantages = (
            torch.from_numpy(array).to(device) for array in (batch.behaviour_logprobs, batch.advantages)
        )
        log_ratio = losses.log_ratio(logprobs, behaviour)
        loss = losses.ppo_clip(log_ratio, advantages, self._algorithm.clip_low, self._algorithm.clip_high)
        losses.token_mean(loss, loss_tokens).backward()  # type: ignore[no-untyped-call]
        return TokenStatistics(
            logprobs=logprobs.detach().cpu().numpy(),
            entropy=entropy.cpu().numpy(),
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            versions=batch.versions,
        )
