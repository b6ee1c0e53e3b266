"""The same step as users of PEFT and TRL have it: transformers' own model on rows of equal length.

As TRL's GRPOTrainer does it with a chunked head: decoder, hidden states of the completions, log-probabilities
without whole logits, the clipped loss in plain torch, its mean over all completion tokens of the step (`dapo`).
What it also does in a step (statistics, its own scoring pass where a sampler is checked) is left out.
"""

import importlib.util
from contextlib import nullcontext
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from benchmarks.kernels_gpu import peers
from benchmarks.learner_gpu.shapes import storage_bytes
from benchmarks.learner_gpu.workload import Batch
from bucketrl.bucket.config import RunConfig
from bucketrl.learner.model import lora_targets
from bucketrl.learner.packing import Floats

TRL_COLUMNS = 32_768
"""What TRL's head works on at once."""
TRL_IS_HERE = importlib.util.find_spec("trl") is not None
"""Asked before its kernels are loaded, with stand-ins for the rest of the package."""


class TrlPath:
    """One way to run it. Micro-batches are the largest power of two of rows that fits, found by trying."""

    def __init__(
        self,
        causal: Any,
        config: RunConfig,
        device: torch.device,
        *,
        rows: int,
        autocast: bool = True,
        checkpointing: bool = False,
    ) -> None:
        """`causal` becomes part of it. With `autocast`, adapters are float32 masters under bfloat16 autocast,
        PEFT's and TRL's default; without, they are of the base's type, and so is what Adam adds to them."""
        lora = LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,
            target_modules=lora_targets(causal, config),
            lora_dropout=0.0,
            task_type="CAUSAL_LM",
        )
        self._model = get_peft_model(causal, lora, autocast_adapter_dtype=autocast).to(device)
        self._causal: Any = self._model.get_base_model()
        if checkpointing:
            self._causal.gradient_checkpointing_enable({"use_reentrant": False})
            self._model.train()
        self.checkpointing = checkpointing
        self._device = device
        self._mixed = autocast and config.model.dtype == "bfloat16"
        on_trl = device.type == "cuda" and TRL_IS_HERE
        self.head = "TRL ChunkedLogProbFunction" if on_trl else "eager torch, 4096 rows at a time"
        self._logprobs = peers.trl(TRL_COLUMNS) if on_trl else peers.eager
        self._algorithm = config.algorithm
        self.parameters: dict[str, nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in sorted(self._model.named_parameters())
            if parameter.requires_grad
        }
        self._adamw = torch.optim.AdamW(
            self.parameters.values(),
            lr=config.algorithm.learning_rate,
            betas=(config.algorithm.adam_beta1, config.algorithm.adam_beta2),
            weight_decay=config.algorithm.weight_decay,
            fused=device.type == "cuda",
        )
        self._rows = rows

    @property
    def microbatch(self) -> str:
        return f"{self._rows} rows"

    @torch.no_grad()
    def adopt(self, parameters: dict[str, nn.Parameter]) -> None:
        """Takes over the values of another's adapter."""
        for name, parameter in self.parameters.items():
            parameter.copy_(parameters[name])

    def step(self, batch: Batch) -> None:
        self._adamw.zero_grad()
        self._accumulate(batch)
        nn.utils.clip_grad_norm_(self.parameters.values(), self._algorithm.max_grad_norm)
        self._adamw.step()

    def gradient(self, batch: Batch) -> tuple[Floats, dict[str, Tensor]]:
        """As `Ours.gradient`."""
        self._adamw.zero_grad()
        logprobs = torch.cat(self._accumulate(batch)).cpu().numpy()
        gradients = {name: each.grad for name, each in self.parameters.items() if each.grad is not None}
        self._adamw.zero_grad()
        return logprobs, gradients

    def shrink(self) -> bool:
        """Halves the micro-batches; False if they cannot be smaller."""
        self._adamw.zero_grad()
        self._rows //= 2
        return self._rows > 0

    def resident_bytes(self) -> int:
        """Weights, gradients and moments."""
        parameters = list(self._model.parameters())
        gradients = [each.grad for each in parameters if each.grad is not None]
        moments = [each for state in self._adamw.state.values() for each in state.values()]
        return storage_bytes([*parameters, *self._model.buffers(), *gradients, *moments])

    def _accumulate(self, batch: Batch) -> list[Tensor]:
        """Adds the gradient; log-probabilities [S, C] by micro-batch."""
        made = []
        for first in range(0, len(batch.input_ids), self._rows):
            rows = slice(first, first + self._rows)
            ids, behaviour, advantages = (
                torch.from_numpy(each[rows]).to(self._device)
                for each in (batch.input_ids, batch.behaviour_logprobs, batch.advantages)
            )
            with torch.autocast(self._device.type, torch.bfloat16) if self._mixed else nullcontext():
                logprobs = self._completion_logprobs(ids, batch.prompt_length)
            ratio = torch.exp(logprobs - behaviour)
            low, high = self._algorithm.clip_low, self._algorithm.clip_high
            assert low is not None
            assert high is not None
            clipped = torch.clamp(ratio, 1 - low, 1 + high)
            loss = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
            (loss.sum() / batch.behaviour_logprobs.size).backward()  # type: ignore[no-untyped-call]
            made.append(logprobs.detach())
        return made

    def _completion_logprobs(self, ids: Tensor, prompt: int) -> Tensor:
        """[S, L] to [S, C]. Rows are equally long, so there is no mask, and attention is plainly causal."""
        hidden = self._causal.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
        scored = hidden[:, prompt - 1 : -1]
        targets = ids[:, prompt:]
        head = self._causal.get_output_embeddings().weight
        logprobs = self._logprobs(scored.reshape(-1, scored.shape[-1]), head, targets.reshape(-1))
        return logprobs.view(targets.shape)
