"""Bytes that a role will need, from the model's shape: told and checked before anything is loaded.

Counts what grows with the model and the settings; `RUNTIME_BYTES` stands for the rest (interpreter,
libraries, the engine's own processes), as measured on CPU with a model of a few hundred kilobytes.
"""

from dataclasses import dataclass

GIB = 1 << 30

ENGINE_RUNTIME_BYTES = 2 * GIB
LEARNER_RUNTIME_BYTES = GIB // 2
MASTER_BYTES = 16
"""Of one adapter parameter in the learner: float32 master, gradient and two Adam moments."""
ACTIVATION_WIDTHS = 34
"""Activations kept for the backward pass, in multiples of the hidden size per token and layer (Korthikanti
et al., arXiv 2205.05198, eq. 2, without the attention matrix, which is counted apart)."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied_embeddings: bool

    @property
    def linear_shapes(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of the linear layers of one block: q, k, v, o, gate, up, down."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return (
            (self.hidden, queries),
            (self.hidden, keys),
            (self.hidden, keys),
            (queries, self.hidden),
            (self.hidden, self.intermediate),
            (self.hidden, self.intermediate),
            (self.intermediate, self.hidden),
        )

    @property
    def parameters(self) -> int:
        """Norms left out: they are a fraction of a per mille."""
        block = sum(inputs * outputs for inputs, outputs in self.linear_shapes)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * block + embeddings

    def lora_parameters(self, rank: int) -> int:
        """Of one adapter on every linear layer."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linear_shapes)


def engine_bytes(shape: ModelShape, *, dtype_bytes: int, rank: int, adapters: int, kv_tokens: int) -> int:
    """A rollout engine: weights, `adapters` adapter slots on the device and as many in host memory, and
    keys and values of `kv_tokens` tokens."""
    weights = shape.parameters * dtype_bytes
    slots = 2 * adapters * shape.lora_parameters(rank) * dtype_bytes
    kv = kv_tokens * 2 * shape.layers * shape.kv_heads * shape.head_dim * dtype_bytes
    return weights + slots + kv + ENGINE_RUNTIME_BYTES


def learner_bytes(shape: ModelShape, *, dtype_bytes: int, rank: int, tokens: int, longest: int) -> int:
    """A learner: weights, the adapter with its optimizer, and the activations of one micro-batch of
    `tokens` tokens in sequences of at most `longest`; the attention weights of one sequence at a time."""
    weights = shape.parameters * dtype_bytes
    adapter = shape.lora_parameters(rank) * MASTER_BYTES
    activations = tokens * shape.layers * shape.hidden * ACTIVATION_WIDTHS * dtype_bytes // 2
    attention = longest * longest * shape.heads * dtype_bytes
    return weights + adapter + activations + attention + LEARNER_RUNTIME_BYTES
