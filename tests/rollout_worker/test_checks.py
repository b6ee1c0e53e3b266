"""Unusable engine output is dropped with its reason, never trained on."""

import math
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.engine import DroppedCompletion
from bucketrl.rollout_worker.engines.checks import check_weights, checked_completion


@given(
    st.lists(st.tuples(st.integers(0, 9), st.floats(-50, 0)), min_size=1), st.sampled_from(["stop", "length"])
)
def test_sound_output_passes_unchanged(rows: list[tuple[int, float]], reason: str) -> None:
    tokens, logprobs = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
    completion = checked_completion(tokens, logprobs, 7, reason)
    assert (completion.token_ids, completion.logprobs) == (tokens, logprobs)
    assert completion.policy_versions == (7,) * len(tokens)
    assert completion.finish_reason == reason


def test_a_probability_of_one_may_exceed_zero_by_rounding() -> None:
    assert checked_completion((1,), (3e-6,), 0, "stop").logprobs == (0.0,)


@pytest.mark.parametrize(
    ("logprobs", "reason", "complaint"),
    [
        ((), "stop", "empty"),
        ((-1.0, None), "stop", "missing"),
        ((-1.0, math.nan), "stop", "not finite"),
        ((-1.0, -math.inf), "stop", "not finite"),
        ((-1.0, 0.01), "stop", "positive"),
        ((-1.0, None), "abort", "missing"),
        ((-1.0, -1.0), None, "finish reason"),
    ],
)
def test_unusable_output_is_dropped_with_its_reason(
    logprobs: tuple[float | None, ...], reason: str | None, complaint: str
) -> None:
    with pytest.raises(DroppedCompletion, match=complaint):
        checked_completion(tuple(range(len(logprobs))), logprobs, 0, reason)


@pytest.mark.parametrize("drawn", [(), (-1.0, -2.0)])
def test_what_an_aborted_request_drew_is_kept(drawn: tuple[float, ...]) -> None:
    completion = checked_completion(tuple(range(len(drawn))), drawn, 7, "abort")
    assert (completion.logprobs, completion.finish_reason) == (drawn, "abort")


def test_a_missing_row_is_dropped() -> None:
    with pytest.raises(DroppedCompletion, match="missing"):
        checked_completion((1, 2), (-1.0,), 0, "stop")


TYPES = [torch.float32, torch.float16, torch.bfloat16]


def save_weights(folder: Path, *values: float, dtype: torch.dtype = torch.float32, count: int = 9) -> None:
    weights = torch.zeros(count, 3).index_put_(
        (torch.arange(len(values)), torch.tensor(1)), torch.tensor(values)
    )
    save_file({"a": torch.ones(2), "b": weights.to(dtype)}, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("dtype", TYPES)
def test_weights_of_any_size_pass(tmp_path: Path, dtype: torch.dtype) -> None:
    limits = torch.finfo(dtype)
    save_weights(tmp_path, limits.max, limits.min, limits.tiny, -0.0, dtype=dtype)
    check_weights(1, tmp_path)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_named(tmp_path: Path, dtype: torch.dtype, value: float) -> None:
    save_weights(tmp_path, 1.0, value, dtype=dtype)
    with pytest.raises(IntegrityError, match="version 3: b holds values that are not finite"):
        check_weights(3, tmp_path)


def test_weights_of_a_type_that_nobody_can_check_are_refused(tmp_path: Path) -> None:
    save_weights(tmp_path, 1.0, dtype=torch.float8_e4m3fn)
    with pytest.raises(IntegrityError, match=r"version 3: its weights cannot be read.*Float8"):
        check_weights(3, tmp_path)


def threads_of(work: Callable[[], object]) -> int:
    """How many there are when a new thread has done `work` that were not there before."""

    def run() -> None:
        work()
        seen.append(set(os.listdir("/proc/self/task")))

    seen = [set(os.listdir("/proc/self/task"))]
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return len(seen[1] - seen[0])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts the threads of Linux")
def test_weights_are_checked_by_one_thread(tmp_path: Path) -> None:
    save_weights(tmp_path, count=1 << 19)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert threads_of(lambda: check_weights(1, tmp_path)) == 1
        assert threads_of(lambda: torch.zeros(1 << 20).isfinite()) > 1, "else the line above shows nothing"
    finally:
        torch.set_num_threads(before)
