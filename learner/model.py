"""The policy: a frozen base model with a trained LoRA adapter, read on packed micro-batches."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bucketrl.bucket.config import RunConfig
from bucketrl.bucket.errors import UserError
from bucketrl.kernels.gather import RowIndex, gather_rows
from bucketrl.kernels.logprob import EAGER_LOGITS_BYTES, linear_logprob
from bucketrl.kernels.transfer import to_device
from bucketrl.kernels.triton_here import triton_is_here
from bucketrl.learner import activations, attention
from bucketrl.learner.fused_block import fuse_blocks, restore_blocks
from bucketrl.learner.packing import MicroBatch, Segment

logger = logging.getLogger(__name__)

SELF_CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}
"""Nats, mean absolute difference between our forward pass and the model's own."""
FUSED_TOLERANCE = 0.2
"""Of hidden states and gradients, relative to their norm, between fused blocks and transformers' own. Rounding to
bfloat16 leaves some 0.02, a wrong kernel 0.5 and more."""
HEAD_BYTES = {"cpu": 3 * EAGER_LOGITS_BYTES, "cuda": 2 << 30}
"""Work space of the head: logits, and what is made from them."""
MEASURED_PROMPT, MEASURED_COMPLETION = 32, 8
"""Lengths in the group whose forward pass shows what a token takes in memory. Attention keeps the keys of a prompt
for each completion: the shorter completions are beside their prompt, the more a token takes."""


class PolicyModel:
    """Adapter parameters are float32 whatever the type of the base. Dropout is off, always."""

    def __init__(self, peft_model: PeftModel, config: RunConfig, device: torch.device) -> None:
        self._peft = peft_model.to(device).eval()
        self._causal: Any = peft_model.get_base_model()
        self._decoder = self._causal.get_decoder()
        self._head = _head(self._causal)
        self._make_layout = attention.choose(
            self._causal.config.get_text_config(), device, self._head.weight.dtype
        )
        self.config = config
        self.device = device
        self.vocab_size = int(
            min(self._causal.config.get_text_config().vocab_size, self._head.weight.shape[0])
        )
        self.parameters = {
            name.replace(".default.", "."): parameter
            for name, parameter in sorted(self._peft.named_parameters())
            if parameter.requires_grad
        }
        """The adapter's masters under their names in `adapter_model.safetensors`, sorted."""

    @classmethod
    def load(cls, folder: Path, config: RunConfig, device: torch.device) -> "PolicyModel":
        """Base model from `folder`, fresh adapter from the run's seed.

        Raises UserError if the model cannot be trained as configured.
        """
        causal = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, config.model.dtype), local_files_only=True
        )
        return cls.from_causal(causal, config, device)

    @classmethod
    def from_causal(cls, causal: Any, config: RunConfig, device: torch.device) -> "PolicyModel":
        """As `load`, of a base model that is already there and becomes part of the policy."""
        causal.requires_grad_(False)
        causal.set_attn_implementation(attention.NAME)
        lora = LoraConfig(
            r=config.lora.rank,
            lora_alpha=config.lora.alpha,
            target_modules=lora_targets(causal, config),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
            revision=config.model.revision or None,
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            peft_model = get_peft_model(causal, lora, autocast_adapter_dtype=True)
        # PEFT has put the local folder here; the adapter names its base as the run does.
        lora.base_model_name_or_path = config.model.id
        policy = cls(peft_model, config, device)
        policy._check_forward()
        if device.type == "cuda" and config.model.dtype == "bfloat16" and triton_is_here():
            policy._fuse_blocks()
        policy._fit_memory()
        return policy

    def logprobs(self, batch: MicroBatch, entropy_grad: bool = False) -> tuple[Tensor, Tensor]:
        """log π of every loss token at the run's sampling temperature, and the policy's entropy there.

        Both [N] float32, in nats; the first is differentiable in the adapter's parameters, the second if
        `entropy_grad`.
        """
        targets = to_device(batch.targets, self.device)
        temperature = self.config.sampling.temperature
        return self._linear_logprob(self.hidden(batch), targets, temperature, entropy_grad)

    def hidden(self, batch: MicroBatch) -> Tensor:
        """[N, H] what the output head reads to predict the loss tokens."""
        input_ids, position_ids = (
            to_device(array, self.device) for array in (batch.input_ids, batch.position_ids)
        )
        rows = RowIndex.of(batch.rows, len(input_ids), self.device)
        return gather_rows(self._hidden(input_ids, position_ids, batch.segments), rows)

    @torch.no_grad()
    def score(self, token_ids: tuple[int, ...]) -> list[float]:
        """[len - 1] log-probability of token i + 1 given 0..i, at temperature 1."""
        ids = torch.tensor(token_ids, device=self.device)
        length = len(ids) - 1
        hidden_TH = self._hidden(ids[:-1], torch.arange(length, device=self.device), (Segment(length),))
        logprobs, _ = self._linear_logprob(hidden_TH, ids[1:], temperature=1.0)
        return [float(value) for value in logprobs]

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Inside, the adapter is switched off."""
        with self._peft.disable_adapter():
            yield

    def save_adapter(self, folder: Path) -> None:
        """PEFT's own files: `adapter_model.safetensors`, `adapter_config.json` (and a README)."""
        # The embeddings are frozen; "auto" would look for them on the hub.
        self._peft.save_pretrained(str(folder), save_embedding_layers=False)

    def _hidden(self, input_ids: Tensor, position_ids: Tensor, segments: Sequence[Segment]) -> Tensor:
        """[T] to [T, H], after the final norm."""
        output = self._decoder(
            input_ids=input_ids[None],
            position_ids=position_ids[None],
            use_cache=False,
            layout=self._make_layout(segments),
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def _linear_logprob(
        self, hidden_NH: Tensor, targets: Tensor, temperature: float, entropy_grad: bool = False
    ) -> tuple[Tensor, Tensor]:
        return linear_logprob(hidden_NH, self._head.weight, targets, temperature, entropy_grad=entropy_grad)

    def _fuse_blocks(self) -> None:
        """Decoder blocks by our kernels, if they are seen to compute the same on this machine."""
        want = self._probe()
        if not fuse_blocks(self._peft):
            return
        problem = ""
        try:
            error = max(float((a - b).norm() / b.norm()) for a, b in zip(self._probe(), want, strict=True))
            if not error <= FUSED_TOLERANCE:
                problem = f"they differ by {error:.2g} from transformers' own"
        except Exception as found:  # noqa: BLE001 - of Triton and the driver, which raise what they like
            problem = " ".join(f"{type(found).__name__}: {found}".split())[:300]
        if problem:
            logger.warning("fused decoder blocks do not work here (%s): slower ones are used", problem)
            restore_blocks(self._peft)

    def _probe(self) -> tuple[Tensor, Tensor]:
        """Hidden states of two completions behind one prompt, and the adapter's gradient, both flat; the adapter
        is a random one meanwhile, and fresh afterwards."""
        generator = torch.Generator().manual_seed(0)
        fresh = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator).to(self.device))
        try:
            ids = torch.arange(24, device=self.device) * (self.vocab_size // 24)
            places = torch.cat([torch.arange(8), torch.arange(8, 16).repeat(2)]).to(self.device)
            hidden = self._hidden(ids, places, (Segment(8), Segment(8, 0), Segment(8, 0))).float()
            upstream = torch.randn(hidden.shape, generator=generator).to(self.device)
            grads = torch.autograd.grad(hidden, list(self.parameters.values()), upstream)
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(fresh[name])
        return hidden.detach().flatten(), torch.cat([grad.flatten() for grad in grads])

    def _fit_memory(self) -> None:
        """Switches activation checkpointing on where it is configured, or the device's memory needs it.

        Raises UserError if the largest micro-batch does not fit.
        """
        config = self.config
        group_size = config.sampling.group_size
        longest = config.rollout.max_model_len
        step = config.algorithm.groups_per_step * group_size * longest
        tokens = config.learner.largest_microbatch(longest, step)
        segments = (Segment(MEASURED_PROMPT), *[Segment(MEASURED_COMPLETION, 0)] * group_size)
        places = torch.arange(MEASURED_PROMPT + MEASURED_COMPLETION, device=self.device)
        places = torch.cat([places[:MEASURED_PROMPT], places[MEASURED_PROMPT:].repeat(group_size)])
        hidden_size = self._head.weight.shape[1]
        footprint = activations.measure(
            self._peft,
            lambda: self._hidden(places % self.vocab_size, places, segments),
            measured_tokens=len(places),
            tokens=tokens,
            hidden_bytes=hidden_size * self._head.weight.element_size(),
            updates=config.algorithm.minibatches,
        )
        # The head keeps its derivative and makes the gradient from it, at most in float32.
        head = tokens * hidden_size * 8 + HEAD_BYTES[self.device.type]
        memory, where = activations.device_memory(self.device)
        setting = config.learner.activation_checkpointing
        if activations.decide(footprint, setting, head=head, tokens=tokens, memory=memory, where=where):
            activations.checkpoint_blocks(self._decoder)

    @torch.no_grad()
    def _check_forward(self) -> None:
        """Refuses architectures that compute more than we do between hidden states and logits (soft caps,
        scales) or in attention (sinks): their log-probabilities here would be silently wrong."""
        count = min(16, self.vocab_size)
        ids = torch.arange(count, device=self.device) * (self.vocab_size // count)
        self._causal.set_attn_implementation("sdpa")
        logits = self._causal(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        self._causal.set_attn_implementation(attention.NAME)
        want = torch.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
        places = torch.arange(count, device=self.device)
        half = count // 2
        own = count - half
        packed_TH = self._hidden(
            torch.cat([ids, ids[half:]]),
            torch.cat([places, places[half:]]),
            (Segment(half), Segment(own, 0), Segment(own, 0)),
        )
        last_TH = torch.cat([packed_TH[:half], packed_TH[-own:]])
        found, _ = self._linear_logprob(last_TH[:-1], ids[1:], temperature=1.0)
        difference = float((found - want).abs().mean())
        if not difference <= SELF_CHECK_TOLERANCE[self.config.model.dtype]:
            raise UserError(
                f"model.id {self.config.model.id!r}: architecture {type(self._causal).__name__} cannot be "
                f"trained on packed sequences (log-probabilities differ by {difference:.2g} from its own)"
            )


def lora_targets(causal: Any, config: RunConfig) -> list[str]:
    """Names of the linear layers that get an adapter, sorted: never the output head.

    Raises UserError if the configuration names one that the model lacks.
    """
    head = causal.get_output_embeddings()
    linear = {
        name.rsplit(".", 1)[-1]
        for name, module in causal.named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    if config.lora.target_modules == "all-linear":
        return sorted(linear)
    missing = sorted(set(config.lora.target_modules) - linear)
    if missing:
        raise UserError(
            f"lora.target_modules: model {config.model.id!r} has no linear layer {', '.join(missing)}; "
            f"it has {', '.join(sorted(linear))}"
        )
    return sorted(set(config.lora.target_modules))


def _head(causal: Any) -> nn.Linear:
    head = causal.get_output_embeddings()
    if not isinstance(head, nn.Linear) or getattr(head, "bias", None) is not None:
        raise UserError(f"architecture {type(causal).__name__} has no plain output head (linear, no bias)")
    return head
