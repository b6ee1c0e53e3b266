"""Bytes of an engine and a learner, against models whose sizes are known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.planner.memory_model import (
    ENGINE_RUNTIME_BYTES,
    LEARNER_RUNTIME_BYTES,
    ModelShape,
    engine_bytes,
    learner_bytes,
)

SMOLLM2_135M = ModelShape(
    hidden=576, layers=30, intermediate=1536, heads=9, kv_heads=3, head_dim=64, vocabulary=49152,
    tied_embeddings=True,
)  # fmt: skip
QWEN3_1P7B = ModelShape(
    hidden=2048, layers=28, intermediate=6144, heads=16, kv_heads=8, head_dim=128, vocabulary=151936,
    tied_embeddings=True,
)  # fmt: skip
QWEN3_8B = ModelShape(
    hidden=4096, layers=36, intermediate=12288, heads=32, kv_heads=8, head_dim=128, vocabulary=151936,
    tied_embeddings=False,
)  # fmt: skip

shapes = st.builds(
    ModelShape,
    hidden=st.integers(1, 8192), layers=st.integers(1, 100), intermediate=st.integers(1, 30_000),
    heads=st.integers(1, 64), kv_heads=st.integers(1, 64), head_dim=st.integers(1, 256),
    vocabulary=st.integers(1, 200_000), tied_embeddings=st.booleans(),
)  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "published"),
    [(SMOLLM2_135M, 134_515_008), (QWEN3_1P7B, 1_720_574_976), (QWEN3_8B, 8_190_735_360)],
    ids=["SmolLM2-135M", "Qwen3-1.7B", "Qwen3-8B"],
)
def test_parameters_are_those_of_the_published_models(shape: ModelShape, published: int) -> None:
    """Within half a per cent: norms are left out."""
    assert shape.parameters == pytest.approx(published, rel=0.005)
    assert shape.parameters <= published


def test_adapter_parameters_by_hand() -> None:
    """Rank 8 on SmolLM2's seven linear layers: 30 layers of 8 · Σ(in + out)."""
    by_hand = 30 * 8 * (2 * (576 + 576) + 2 * (576 + 192) + 3 * (576 + 1536))
    assert SMOLLM2_135M.lora_parameters(8) == by_hand == 2_442_240


def test_keys_and_values_by_hand() -> None:
    """Key and value, 30 layers, 3 heads of 64, 2 bytes."""
    assert SMOLLM2_135M.kv_bytes_per_token(2) == 2 * 30 * 3 * 64 * 2


@pytest.mark.parametrize(
    ("shape", "dtype_bytes", "measured"),
    [
        (ModelShape(576, 1, 1536, 9, 3, 64, 1000, True), 4, 42_860),
        (ModelShape(576, 1, 1536, 9, 3, 64, 1000, True), 2, 37_420),
        (ModelShape(128, 1, 384, 4, 2, 32, 200, True), 4, 11_568),
    ],
)
def test_activations_are_near_what_was_measured(shape: ModelShape, dtype_bytes: int, measured: int) -> None:
    """Bytes saved for the backward pass by the learner's forward, a token and layer, rank 16."""
    assert shape.activation_bytes_per_token(dtype_bytes) == pytest.approx(measured, rel=0.15)


def test_an_engine_by_hand() -> None:
    need = engine_bytes(SMOLLM2_135M, dtype_bytes=2, rank=8, adapters=6, kv_bytes=1 << 20)
    assert need == 2 * SMOLLM2_135M.parameters + 2 * 6 * 2 * 2_442_240 + (1 << 20) + ENGINE_RUNTIME_BYTES


def test_a_learner_by_hand() -> None:
    """Adapter parameters cost 16 bytes each: master, gradient, two moments, all float32."""
    need = learner_bytes(SMOLLM2_135M, dtype_bytes=4, rank=8, tokens=0)
    assert need == 4 * SMOLLM2_135M.parameters + 16 * 2_442_240 + LEARNER_RUNTIME_BYTES


@given(shapes, st.sampled_from([2, 4]), st.integers(1, 512), st.integers(0, 10**6))
def test_more_of_anything_never_needs_less(
    shape: ModelShape, dtype_bytes: int, rank: int, tokens: int
) -> None:
    """Tokens, rank, adapters and cache each cost something; nothing is free or negative."""
    learner = learner_bytes(shape, dtype_bytes=dtype_bytes, rank=rank, tokens=tokens)
    assert learner_bytes(shape, dtype_bytes=dtype_bytes, rank=rank, tokens=tokens + 1) > learner
    assert learner_bytes(shape, dtype_bytes=dtype_bytes, rank=rank + 1, tokens=tokens) > learner
    engine = engine_bytes(shape, dtype_bytes=dtype_bytes, rank=rank, adapters=2, kv_bytes=tokens)
    assert engine_bytes(shape, dtype_bytes=dtype_bytes, rank=rank, adapters=3, kv_bytes=tokens) > engine
    assert engine_bytes(shape, dtype_bytes=dtype_bytes, rank=rank, adapters=2, kv_bytes=tokens + 1) > engine
