"""Batched decoding with a KV cache for the transformers engine: one forward pass per token and batch."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from bucketrl.rollout_worker.engine import DroppedCompletion, SampledCompletion, SamplingRequest
from bucketrl.rollout_worker.engines.checks import checked_completion


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request and the future that its caller awaits."""

    request: SamplingRequest
    future: "Future[SampledCompletion]" = field(default_factory=Future)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    generator: torch.Generator = field(default_factory=torch.Generator)
    aborted: bool = False
    """Set by the event loop; the engine thread ends the request before its next token."""

    def __post_init__(self) -> None:
        self.generator.manual_seed(self.request.seed)

    def finish(self, reason: str) -> None:
        """Answers the caller, unless it has gone."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            completion = checked_completion(
                tuple(self.token_ids), tuple(self.logprobs), self.request.policy_version, reason
            )
        except DroppedCompletion as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(completion)

    def fail(self, error: BaseException) -> None:
        if self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


class DecodingBatch:
    """Requests of one policy version that advance together, left-padded to the longest context."""

    def __init__(
        self, requests: list[PendingRequest], stop_token_ids: tuple[int, ...], device: torch.device
    ) -> None:
        self.version = requests[0].request.policy_version
        self.rows = requests
        self._stop = frozenset(stop_token_ids)
        contexts = [pending.request.context for pending in requests]
        longest = max(len(context) for context in contexts)
        padded = [(0,) * (longest - len(context)) + context for context in contexts]
        self._input = torch.tensor(padded, device=device)
        """[B, n] tokens that the cache does not hold yet: the contexts, later one token per row."""
        self._mask = torch.tensor(
            [[0] * (longest - len(context)) + [1] * len(context) for context in contexts], device=device
        )
        """[B, cached + n]; 0 marks padding."""
        self._cache: Any = None

    def wanted(self) -> bool:
        """Whether anybody still wants a row; the others are dropped. Their version may be gone already."""
        self._keep([row for row, pending in enumerate(self.rows) if not self._left(pending)])
        return bool(self.rows)

    @torch.inference_mode()
    def step(self, model: Any) -> None:
        """Samples one token for every row and answers the rows that end with it."""
        positions = (self._mask.cumsum(-1) - 1).clamp(min=0)[:, -self._input.shape[1] :]
        output = model(
            input_ids=self._input,
            attention_mask=self._mask,
            position_ids=positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._cache = output.past_key_values
        logits = output.logits[:, -1].float().cpu()
        tokens = [self._sample(pending, logits[row]) for row, pending in enumerate(self.rows)]
        self._input = torch.tensor(tokens, device=self._mask.device).unsqueeze(1)
        self._mask = torch.cat([self._mask, torch.ones_like(self._mask[:, :1])], dim=1)
        self._keep([row for row, pending in enumerate(self.rows) if not self._ended(pending)])

    def _left(self, pending: PendingRequest) -> bool:
        """Whether nobody wants more of it."""
        if pending.aborted:
            pending.finish("abort")
        return pending.aborted or pending.future.cancelled()

    def _sample(self, pending: PendingRequest, logits: torch.Tensor) -> int:
        """Draws from softmax(logits / temperature); temperature 0 takes the most likely token."""
        temperature = pending.request.temperature
        logprobs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
        if not bool(torch.isfinite(logprobs.max())):
            token = 0  # Nothing can be drawn from NaN; the logprob appended below drops the completion.
        elif temperature > 0:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=pending.generator))
        else:
            token = int(logprobs.argmax())
        pending.token_ids.append(token)
        pending.logprobs.append(float(logprobs[token]))
        return token

    def _ended(self, pending: PendingRequest) -> bool:
        if pending.token_ids[-1] in self._stop:
            pending.finish("stop")
        elif len(pending.token_ids) >= pending.request.max_tokens:
            pending.finish("length")
        else:
            return False
        return True

    def _keep(self, rows: list[int]) -> None:
        if len(rows) == len(self.rows):
            return
        self.rows = [self.rows[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.long, device=self._mask.device)
        self._input = self._input[index]
        self._mask = self._mask[index]
        if self._cache is not None and rows:
            self._cache.batch_select_indices(index)
