"""Bytes that a role needs at least, from the model's shape: told and checked before anything is loaded.

Counts what grows with the model and the settings. The `*_RUNTIME_BYTES` stand for the rest (interpreter,
libraries, the engine's own processes), measured on CPU with a model of a few hundred kilobytes.
"""

from dataclasses import dataclass

ENGINE_RUNTIME_BYTES = 2 << 30
LEARNER_RUNTIME_BYTES = 1 << 29
ADAPTER_STATE_BYTES = 16
"""Of one adapter parameter in the learner: float32 master, gradient and two Adam moments."""
HOST_COPIES = 2
"""An engine keeps each adapter in a device slot and in host memory."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder with gated feed-forward layers."""

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
        """Norms and biases left out: less than one in a hundred."""
        block = sum(inputs * outputs for inputs, outputs in self.linear_shapes)
        embeddings = self.vocabulary * self.hidden * (1 if self.tied_embeddings else 2)
        return self.layers * block + embeddings

    def lora_parameters(self, rank: int) -> int:
        """Of one adapter on every linear layer: A is [rank, in], B is [out, rank]."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.linear_shapes)

    def kv_bytes_per_token(self, dtype_bytes: int) -> int:
        """Key and value of every layer."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype_bytes

    def activation_bytes_per_token(self, dtype_bytes: int) -> int:
        """Kept for the backward pass, between the embedding and the final norm.

        In a float32 model 4·(hidden + heads·head_dim + intermediate) elements a layer. In a bfloat16 model
        the adapters, which are float32, add casts of their inputs and the frozen layers keep less. Measured
        on the learner's own forward pass: 42.9 kB (float32) and 37.4 kB (bfloat16) a token and layer for
        hidden 576, intermediate 1536 (this formula: 43.0 and 39.6), 11.6 kB for Qwen3 with 128 and 384
        (10.2).
        """
        queries = self.heads * self.head_dim
        if dtype_bytes >= 4:
            elements = 4 * (self.hidden + queries + self.intermediate)
            return self.layers * dtype_bytes * elements
        casts = 5 * self.hidden + queries + self.intermediate
        plain = 4 * (self.hidden + queries) + 3 * self.intermediate
        return self.layers * (4 * casts + dtype_bytes * plain)


def engine_bytes(shape: ModelShape, *, dtype_bytes: int, rank: int, adapters: int, kv_bytes: int) -> int:
    """A rollout engine: weights, `adapters` adapters on the device and in host memory, `kv_bytes` of keys
    and values."""
    weights = shape.parameters * dtype_bytes
    slots = HOST_COPIES * adapters * shape.lora_parameters(rank) * dtype_bytes
    return weights + slots + kv_bytes + ENGINE_RUNTIME_BYTES


def learner_bytes(shape: ModelShape, *, dtype_bytes: int, rank: int, tokens: int) -> int:
    """A learner: weights, the adapter with gradient and optimizer, and the activations of one micro-batch
    of `tokens` tokens."""
    weights = shape.parameters * dtype_bytes
    adapter = shape.lora_parameters(rank) * ADAPTER_STATE_BYTES
    return weights + adapter + tokens * shape.activation_bytes_per_token(dtype_bytes) + LEARNER_RUNTIME_BYTES
