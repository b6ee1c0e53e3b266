"""The canary tells the adapter from the base model and from noise."""

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.records import Canary
from bucketrl.rollout_worker.canary import canary_failure

Dtype = Literal["float32", "bfloat16"]
NOISE: dict[Dtype, float] = {"float32": 1e-4, "bfloat16": 0.05}
logprob = st.floats(-20, 0)
DTYPES = st.sampled_from(["float32", "bfloat16"])


def canary(adapter: list[float], base: list[float]) -> Canary:
    return Canary(
        token_ids=tuple(range(len(adapter) + 1)), logprobs=tuple(adapter), base_logprobs=tuple(base)
    )


@given(st.lists(st.tuples(logprob, logprob, st.floats(-1, 1)), min_size=1, max_size=24), DTYPES)
def test_the_adapter_passes_through_numerical_noise(
    rows: list[tuple[float, float, float]], dtype: Dtype
) -> None:
    """Noise is far below what tells adapter and base apart, wherever that can be told at all."""
    adapter, base = [row[0] for row in rows], [row[1] for row in rows]
    measured = [value + NOISE[dtype] * noise for value, _, noise in rows]
    assert canary_failure(measured, canary(adapter, base), dtype) is None


@given(st.lists(logprob, min_size=1, max_size=24), st.floats(0.5, 5), DTYPES)
def test_the_base_model_fails_where_it_differs(base: list[float], shift: float, dtype: Dtype) -> None:
    adapter = [value - shift for value in base]
    failure = canary_failure(base, canary(adapter, base), dtype)
    assert failure is not None
    assert "base model" in failure


def test_an_untrained_adapter_equals_the_base_model_and_passes() -> None:
    assert canary_failure([-1.0, -2.0], canary([-1.0, -2.0], [-1.0, -2.0]), "float32") is None


def test_nearer_to_the_base_model_fails_although_within_tolerance() -> None:
    """bfloat16 tolerates a mean of 0.15: enough for the base model to hide behind."""
    both = canary([-1.0, -1.0], [-1.2, -1.2])
    assert canary_failure([-1.05, -1.05], both, "bfloat16") is None
    assert canary_failure([-1.14, -1.14], both, "bfloat16") is not None


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_fail(value: float) -> None:
    assert canary_failure([-1.0, value], canary([-1.0, -2.0], [-1.0, -2.0]), "bfloat16") is not None


def test_a_wrong_length_fails() -> None:
    assert canary_failure([-1.0], canary([-1.0, -2.0], [-1.0, -2.0]), "float32") is not None
