"""Completions of one policy for many prompts at once, drawn by a decoder with a cache of keys and values.

Llama and Qwen3, all in float32, the adapter added into the weights. A cell of the study draws a few hundred
completions of some tokens each: transformers' modules would spend most of that time in launching kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bucketrl.bucket.config import RunConfig

FUSED = {
    "self_attn": (("q_proj", "k_proj", "v_proj"), ("o_proj",)),
    "mlp": (("gate_proj", "up_proj"), ("down_proj",)),
}
"""Linear layers that are one matrix product here, by the part of the block."""
LOOKED_AT_EVERY = 4
"""Tokens between two looks whether all completions have ended: on a GPU a look waits for everything queued."""


@dataclass(frozen=True)
class Drawn:
    """One completion."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str


class Sampler:
    """One policy at a time, of `load`."""

    def __init__(self, folder: Path, config: RunConfig, device: torch.device, stop: frozenset[int]) -> None:
        from transformers import AutoModelForCausalLM

        causal = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        self._decoder = Decoder(causal.to(device).requires_grad_(False), config.lora.alpha / config.lora.rank)
        self._sampling = config.sampling
        self._device = device
        self._stop = torch.tensor(sorted(stop), device=device)
        self.load = self._decoder.load

    @torch.no_grad()
    def draw(self, prompts: Sequence[tuple[int, ...]], copies: int, seed: torch.Generator) -> list[Drawn]:
        """`copies` completions of each prompt, side by side."""
        before = torch.get_float32_matmul_precision()
        # Ten bits of mantissa on a GPU, three more than the learner's bfloat16.
        torch.set_float32_matmul_precision("high")
        try:
            return self._draw(prompts, copies, seed)
        finally:
            torch.set_float32_matmul_precision(before)

    def _draw(self, prompts: Sequence[tuple[int, ...]], copies: int, seed: torch.Generator) -> list[Drawn]:
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        logits, cache = self._decoder.read(
            padded.to(self._device), lengths.to(self._device), copies, self._sampling.max_tokens
        )
        running = torch.ones(len(logits), dtype=torch.bool, device=self._device)
        tokens, logprobs = [], []
        for count in range(1, self._sampling.max_tokens + 1):
            scores = torch.log_softmax(logits / self._sampling.temperature, dim=-1)
            token = torch.multinomial(scores.exp(), 1, generator=seed)
            tokens.append(torch.where(running, token[:, 0], -1))
            logprobs.append(scores.gather(1, token)[:, 0])
            running = running & ~torch.isin(token[:, 0], self._stop)
            last = count == self._sampling.max_tokens
            if last or (count % LOOKED_AT_EVERY == 0 and not running.any()):
                break
            logits = self._decoder.advance(token, cache)
        return _rows(torch.stack(tokens, 1).cpu(), torch.stack(logprobs, 1).cpu(), running.cpu())


@dataclass
class Cache:
    """Of the completions that are being drawn; its tensors are written in place."""

    keys: Tensor
    """[layer, completion, head, column, head_dim]."""
    values: Tensor
    bias: Tensor
    """[completion, column] added to the attention's scores: -inf left of a prompt."""
    places: Tensor
    """[completion, 1] of the last token."""
    used: int
    """Columns."""


class Decoder:
    """Hidden states are [B, S, H]; queries that share a key head are as if they were more tokens."""

    def __init__(self, causal: Any, scale: float) -> None:
        """`scale`: of the adapter's product."""
        shape = causal.config
        self._causal, self._scale = causal, scale
        self._eps = shape.rms_norm_eps
        self._head_dim = shape.head_dim
        self._heads, self._key_heads = shape.num_attention_heads, shape.num_key_value_heads
        self._base = [
            {
                names: torch.cat([getattr(getattr(block, part), name).weight for name in names])
                for part, fused in FUSED.items()
                for names in fused
            }
            for block in causal.model.layers
        ]
        self._weights = [{names: weight.clone() for names, weight in base.items()} for base in self._base]
        self._qk_norms = [self._qk_norm(block.self_attn) for block in causal.model.layers]

    def _qk_norm(self, attention: Any) -> Tensor | None:
        """Qwen3's norms of queries and keys, [head, head_dim]."""
        if not hasattr(attention, "q_norm"):
            return None
        queries = attention.q_norm.weight.expand(self._heads, -1)
        return torch.cat([queries, attention.k_norm.weight.expand(self._key_heads, -1)])

    @torch.no_grad()
    def load(self, adapter: dict[str, Tensor]) -> None:
        """`adapter`: matrices under PEFT's names."""
        for layer, (base, weights) in enumerate(zip(self._base, self._weights, strict=True)):
            for part, fused in FUSED.items():
                for names in fused:
                    prefixes = [
                        f"base_model.model.model.layers.{layer}.{part}.{name}.lora_" for name in names
                    ]
                    deltas = [adapter[f"{p}B.weight"] @ adapter[f"{p}A.weight"] for p in prefixes]
                    torch.add(base[names], torch.cat(deltas), alpha=self._scale, out=weights[names])

    def read(self, tokens: Tensor, lengths: Tensor, copies: int, room: int) -> tuple[Tensor, Cache]:
        """The next token's logits for `copies` of each prompt, and a cache with `room` more columns.

        `tokens` [P, S], padded on the left to S; `lengths` [P].
        """
        prompts, longest = tokens.shape
        columns = torch.arange(longest, device=tokens.device)
        padding = columns[None] < (longest - lengths)[:, None]
        # A place of the padding sees itself: a row without any key would be NaN.
        seen = (columns[:, None] >= columns[None]) & ~padding[:, None] | (columns[:, None] == columns[None])
        bias = torch.zeros(seen.shape, device=tokens.device).masked_fill(~seen, float("-inf"))
        shape = (len(self._base), prompts, self._key_heads, longest, self._head_dim)
        keys, values = (torch.empty(shape, device=tokens.device) for _ in range(2))
        places = (columns[None] - (longest - lengths)[:, None]).clamp(min=0)
        logits = self._logits(tokens, places, keys, values, 0, bias)
        left = torch.zeros(prompts, longest + room, device=tokens.device)
        left[:, :longest].masked_fill_(padding, float("-inf"))
        keys, values = (F.pad(side, (0, 0, 0, room)).repeat_interleave(copies, 1) for side in (keys, values))
        cache = Cache(
            keys,
            values,
            left.repeat_interleave(copies, 0),
            (lengths - 1).repeat_interleave(copies)[:, None],
            longest,
        )
        return logits.repeat_interleave(copies, 0), cache

    def advance(self, token: Tensor, cache: Cache) -> Tensor:
        """The logits behind `token` [B, 1], which is put into the cache."""
        column, cache.used, cache.places = cache.used, cache.used + 1, cache.places + 1
        bias = cache.bias[:, None, : cache.used]
        return self._logits(token, cache.places, cache.keys, cache.values, column, bias)

    def _logits(
        self, tokens: Tensor, places: Tensor, keys: Tensor, values: Tensor, column: int, bias: Tensor
    ) -> Tensor:
        """[B, V] behind the last of `tokens` [B, S], whose keys go to `column` and on. `bias` [B, S, columns]."""
        model = self._causal.model
        hidden = F.embedding(tokens, model.embed_tokens.weight)
        cos, sin = (part[:, :, None] for part in model.rotary_emb(hidden, places))
        bias = bias.repeat(1, self._heads // self._key_heads, 1)[:, None]
        for block, weights, qk_norm, *cached in zip(
            model.layers, self._weights, self._qk_norms, keys, values, strict=True
        ):
            into_qkv, into_o = (weights[names] for names in FUSED["self_attn"])
            into_mlp, out_of_mlp = (weights[names] for names in FUSED["mlp"])
            qkv = F.linear(self._normed(hidden, block.input_layernorm), into_qkv)
            hidden = hidden + F.linear(self._attention(qkv, qk_norm, cos, sin, cached, column, bias), into_o)
            gate, up = F.linear(self._normed(hidden, block.post_attention_layernorm), into_mlp).chunk(2, -1)
            hidden = hidden + F.linear(F.silu(gate) * up, out_of_mlp)
        logits = F.linear(self._normed(hidden[:, -1], model.norm), self._causal.lm_head.weight)
        return logits

    def _attention(
        self,
        qkv: Tensor,
        qk_norm: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cached: Sequence[Tensor],
        column: int,
        bias: Tensor,
    ) -> Tensor:
        batch, length, _ = qkv.shape
        keys, values = cached
        qkv = qkv.view(batch, length, -1, self._head_dim)
        qk, value = torch.split(qkv, [self._heads + self._key_heads, self._key_heads], dim=2)
        if qk_norm is not None:
            qk = F.rms_norm(qk, (self._head_dim,), eps=self._eps) * qk_norm
        a, b = qk.chunk(2, -1)
        qk = qk * cos + torch.cat([-b, a], -1) * sin
        query, key = torch.split(qk, [self._heads, self._key_heads], dim=2)
        keys[:, :, column : column + length] = key.transpose(1, 2)
        values[:, :, column : column + length] = value.transpose(1, 2)
        shared = self._heads // self._key_heads
        query = query.view(batch, length, self._key_heads, shared, -1).permute(0, 2, 3, 1, 4)
        out = F.scaled_dot_product_attention(
            query.reshape(batch, self._key_heads, shared * length, -1),
            keys[:, :, : column + length],
            values[:, :, : column + length],
            attn_mask=bias,
        )
        out = out.view(batch, self._key_heads, shared, length, -1).permute(0, 3, 1, 2, 4)
        return out.reshape(batch, length, -1)

    def _normed(self, hidden: Tensor, norm: Any) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], norm.weight, self._eps)


def _rows(tokens: Tensor, logprobs: Tensor, running: Tensor) -> list[Drawn]:
    found = []
    for ids, values, still in zip(tokens.tolist(), logprobs.tolist(), running.tolist(), strict=True):
        count = sum(token >= 0 for token in ids)
        found.append(Drawn(tuple(ids[:count]), tuple(values[:count]), "length" if still else "stop"))
    return found
