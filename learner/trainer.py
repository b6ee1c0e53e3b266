"""One step on one batch of groups: one optimizer update, or several in a row."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import groupby, pairwise
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from bucketrl.bucket.errors import IntegrityError
from bucketrl.bucket.trajectories import TrajectoryGroup
from bucketrl.kernels.transfer import to_device
from bucketrl.learner import packing
from bucketrl.learner.advantages import batch_advantages, overlong_penalty
from bucketrl.learner.metrics import TokenStatistics, batch_metrics, token_metrics
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.objective import Denominators, Samples, loss_and_gradients, proximal_logprobs
from bucketrl.learner.optimizer import Optimizer, learning_rate
from bucketrl.learner.packing import MicroBatch, TokenSequence
from bucketrl.learner.parts import Stopped


class Gradients(Protocol):
    """What micro-batches add to the parameters' gradients; hides how many processes share them.

    Both methods raise Stopped between two micro-batches once `stopping()` is true.
    """

    def begin(self, updates: Sequence[Sequence[MicroBatch]], step: int, stopping: Callable[[], bool]) -> None:
        """Takes the micro-batches of each update of step `step`, when none of them is made yet."""

    def accumulate(
        self, update: int, denominators: Denominators, stopping: Callable[[], bool]
    ) -> list[TokenStatistics]:
        """Adds the gradient of update `update`; the statistics are in the order of its micro-batches."""


class Trainer:
    """Gradients are accumulated over micro-batches and do not depend on how the batch is split."""

    def __init__(
        self,
        policy: PolicyModel,
        optimizer: Optimizer,
        gradients: Gradients | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Without `gradients`, this process makes them alone."""
        self._gradients = gradients or Replica(policy)
        self._optimizer = optimizer
        self._algorithm = policy.config.algorithm
        self._max_tokens = policy.config.sampling.max_tokens
        self._budget = policy.config.learner.tokens_per_microbatch
        self._clock = clock

    def train(
        self, groups: Sequence[TrajectoryGroup], step: int, stopping: Callable[[], bool]
    ) -> dict[str, float]:
        """Moves the policy from version `step - 1` to `step`; returns the metrics of the tokens.

        Raises Stopped between two micro-batches, with the policy unchanged, once `stopping()` is true: the
        updates of the step that were already made are undone. Raises IntegrityError if no completion can be
        trained on.
        """
        started = self._clock()
        rewards = [[self._reward(t.reward, t.loss_mask) for t in group.trajectories] for group in groups]
        advantages = batch_advantages(rewards, self._algorithm.baseline, self._algorithm.advantage_scale)
        sequences = packing.sequences(groups, advantages)
        kept = [item for item in sequences if np.isfinite(item.behaviour_logprobs).all()]
        if not kept:
            raise IntegrityError(f"step {step}: no completion has finite behaviour log-probabilities")
        updates = _parts(kept, self._algorithm.minibatches)
        statistics: list[TokenStatistics] = []
        norms: list[float] = []
        with self._optimizer.atomic() if len(updates) > 1 else nullcontext():
            batches = [packing.pack(items, self._budget) for items in updates]
            self._gradients.begin(batches, step, stopping)
            for update, items in enumerate(updates):
                denominators = Denominators(
                    loss_tokens=sum(len(item.targets) for item in items),
                    sequences=len(items),
                    max_tokens=self._max_tokens,
                )
                self._optimizer.zero_grad()
                statistics += self._gradients.accumulate(update, denominators, stopping)
                if update == len(updates) - 1:
                    # While a GPU is still at the backward pass.
                    metrics = token_metrics(statistics, step=step, algorithm=self._algorithm)
                norms.append(self._optimizer.step(step, update))
        tokens = sum(len(item.input_ids) for item in kept)
        return (
            metrics
            | batch_metrics(rewards, advantages, dropped=len(sequences) - len(kept))
            | {
                "grad_norm": max(norms),
                "learning_rate": learning_rate(self._algorithm, step),
                "updates": float(len(updates)),
                "tokens": float(tokens),
                "tokens_per_second": tokens / max(1e-9, self._clock() - started),
            }
        )

    def _reward(self, reward: float, loss_mask: Sequence[bool]) -> float:
        algorithm = self._algorithm
        if algorithm.overlong_penalty is None:
            return reward
        return reward + overlong_penalty(
            sum(loss_mask), self._max_tokens, algorithm.overlong_buffer, algorithm.overlong_penalty
        )


class Replica:
    """One copy of the policy, and the gradients that it makes."""

    def __init__(self, policy: PolicyModel) -> None:
        self._policy = policy
        self._algorithm = policy.config.algorithm
        self._updates: Sequence[Sequence[MicroBatch]] = ()
        self._starts: list[list[Tensor | None]] = []
        self._step = 0

    def begin(self, updates: Sequence[Sequence[MicroBatch]], step: int, stopping: Callable[[], bool]) -> None:
        self._updates, self._step = updates, step
        self._starts = self._start_logprobs(updates, step, stopping)

    def accumulate(
        self, update: int, denominators: Denominators, stopping: Callable[[], bool]
    ) -> list[TokenStatistics]:
        launched = []
        for batch, start in zip(self._updates[update], self._starts[update], strict=True):
            _check(stopping, self._step)
            launched.append(self._launch(batch, self._step, denominators, start, is_start=update == 0))
        # Not before: a GPU has the next micro-batch in its queue when it ends one, and the last backward pass still
        # runs when this returns.
        return [each.statistics() for each in launched]

    def _start_logprobs(
        self, batches: Sequence[Sequence[MicroBatch]], step: int, stopping: Callable[[], bool]
    ) -> list[list[Tensor | None]]:
        """For a recomputed proximal policy: the log-probabilities before the first update, which needs none."""
        starts: list[list[Tensor | None]] = [[None] * len(of_update) for of_update in batches]
        if self._algorithm.proximal != "recomputed":
            return starts
        for update, of_update in enumerate(batches[1:], start=1):
            for index, batch in enumerate(of_update):
                _check(stopping, step)
                starts[update][index] = self._logprobs(batch)
        return starts

    @torch.no_grad()
    def _logprobs(self, batch: MicroBatch) -> Tensor:
        return self._policy.logprobs(batch)[0]

    def _launch(
        self,
        batch: MicroBatch,
        step: int,
        denominators: Denominators,
        start: Tensor | None,
        *,
        is_start: bool,
    ) -> "_Launched":
        """Adds the micro-batch's gradient to the parameters'. `is_start`: the step has changed nothing yet."""
        reference = None
        if self._algorithm.kl_coefficient > 0:
            with self._policy.base_only():
                reference = self._logprobs(batch)
        samples = self._samples(batch, step, start, reference)
        with_entropy = self._algorithm.entropy_coefficient > 0
        logprobs, entropy = self._policy.logprobs(batch, entropy_grad=with_entropy)
        proximal = proximal_logprobs(self._algorithm, logprobs, samples)
        _, by_logprob, by_entropy = loss_and_gradients(
            self._algorithm, logprobs, entropy, proximal, samples, denominators
        )
        # Before the backward pass, so that they are there before it ends.
        launched = _Launched(
            batch,
            {
                "logprobs": logprobs,
                "entropy": entropy,
                "proximal_logprobs": proximal,
                "start_logprobs": logprobs if is_start else start,
                "reference_logprobs": reference,
            },
        )
        if by_entropy is None:
            torch.autograd.backward(logprobs, by_logprob)
        else:
            torch.autograd.backward([logprobs, entropy], [by_logprob, by_entropy])
        return launched

    def _samples(
        self, batch: MicroBatch, step: int, start: Tensor | None, reference: Tensor | None
    ) -> Samples:
        # The tokens of a completion lie side by side.
        starts = np.flatnonzero(np.diff(batch.sequence_ids, prepend=-1))
        behaviour, advantages, lag, cu_seqlens = (
            to_device(array, self._policy.device)
            for array in (
                batch.behaviour_logprobs,
                batch.advantages[starts],
                (step - 1) - batch.versions,
                np.append(starts, len(batch.sequence_ids)),
            )
        )
        return Samples(
            behaviour_logprobs=behaviour,
            advantages=advantages,
            lag=lag,
            cu_seqlens=cu_seqlens,
            start_logprobs=start,
            reference_logprobs=reference,
        )


class _Launched:
    """A micro-batch that the device may still work on, and what it said, on its way to the host."""

    def __init__(self, batch: MicroBatch, said: Mapping[str, Tensor | None]) -> None:
        self._batch = batch
        self._copies = {
            name: tensor.detach().to("cpu", non_blocking=True)
            for name, tensor in said.items()
            if tensor is not None
        }
        device = next(tensor.device for tensor in said.values() if tensor is not None)
        self._copied = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    def statistics(self) -> TokenStatistics:
        """Waits for the copies, and for nothing that was launched after them."""
        if self._copied is not None:
            self._copied.synchronize()
        batch = self._batch
        return TokenStatistics(
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            versions=batch.versions,
            sequence_ids=batch.sequence_ids,
            **{name: copy.numpy() for name, copy in self._copies.items()},
        )


def _parts(items: Sequence[TokenSequence], count: int) -> list[list[TokenSequence]]:
    """Whole groups in order, in `count` parts of about as many groups each; fewer if there are fewer groups."""
    groups = [list(members) for _, members in groupby(items, key=lambda item: item.group)]
    count = min(count, len(groups))
    bounds = [len(groups) * part // count for part in range(count + 1)]
    return [[item for group in groups[a:b] for item in group] for a, b in pairwise(bounds)]


def _check(stopping: Callable[[], bool], step: int) -> None:
    if stopping():
        raise Stopped(f"asked to stop in step {step}, before its end")
