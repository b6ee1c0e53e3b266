"""Attention of packed sequences against its formula, however it is computed, and which way is chosen."""

import logging
import math
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config

from bucketrl.learner import attention
from bucketrl.learner.attention import Layout, SdpaLayout
from bucketrl.learner.attention_varlen import (
    FLASH4_BOUND,
    VarlenLayout,
    flash4_function,
    varlen_function,
)
from bucketrl.learner.packing import Segment

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SEGMENTS = (Segment(5), Segment(1, 0), Segment(4, 0), Segment(1), Segment(3), Segment(2, 4), Segment(6))


def by_formula(query: Tensor, key: Tensor, value: Tensor, segments: Any, window: int | None) -> Tensor:
    """softmax(q·kᵀ / √d) v, one token at a time. Shapes as in `Layout.attend`."""
    group = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(group, dim=1) for each in (key, value))
    starts = [sum(s.length for s in segments[:i]) for i in range(len(segments))]
    outputs = []
    for start, segment in zip(starts, segments, strict=True):
        prefix = segment.prefix
        before = (
            [] if prefix is None else list(range(starts[prefix], starts[prefix] + segments[prefix].length))
        )
        for row in range(start, start + segment.length):
            seen = [*before, *range(start, row + 1)]
            seen = seen if window is None else seen[-window:]
            scores = (key[0, :, seen] @ query[0, :, row, :, None])[..., 0] / query.shape[-1] ** 0.5
            outputs.append((torch.softmax(scores, dim=-1)[:, None] @ value[0, :, seen])[:, 0])
    return torch.stack(outputs)[None]


def by_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    top_left: bool = False,
    windows: bool = True,
) -> Tensor:
    """What the documentation of FlashAttention says that its kernel computes: the ends of queries and keys are
    aligned, query i sees keys i - left to i. With `top_left` or without `windows` it does not."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths_q, lengths_k = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max(lengths_q), max(lengths_k)) == (max_q, max_k)
    outputs = []
    pieces = zip(query.split(lengths_q), key.split(lengths_k), value.split(lengths_k), strict=True)
    for q, k, v in pieces:
        shift = 0 if top_left else len(k) - len(q)
        distance = torch.arange(len(q))[:, None] + shift - torch.arange(len(k))
        seen = distance >= 0
        if windows and window_size[0] >= 0:
            seen &= distance <= window_size[0]
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * (scale or q.shape[-1] ** -0.5)
        weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outputs)


def flash4_by_documentation(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int | None, int | None],
    return_lse: bool,
) -> tuple[Tensor, None]:
    """What `flash_attn.cute.flash_attn_varlen_func` computes: with `causal` all keys before, else the window's."""
    longest = [int(each.diff().max()) for each in (cu_seqlens_q, cu_seqlens_k)]
    bounds = max_seqlen_q, max_seqlen_k
    assert all(n <= bound for n, bound in zip(longest, bounds, strict=True))
    # What would make it compile another kernel.
    assert return_lse
    assert min(bounds) >= FLASH4_BOUND
    left, right = window_size
    assert (left, right) == (None, None) if causal else right == 0
    output = by_documentation(
        query, key, value, cu_seqlens_q, cu_seqlens_k, *longest,
        scale=softmax_scale, window_size=(-1 if left is None else left, 0),
    )  # fmt: skip
    return output, None


MAKERS: list[Callable[..., Layout]] = [
    partial(SdpaLayout, device=CPU),
    partial(VarlenLayout, device=CPU, function=by_documentation),
]


def draw(tokens: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    return [
        torch.randn(1, heads, tokens, HEAD_DIM, generator=generator, dtype=dtype).requires_grad_()
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    ]


def check(make: Callable[..., Layout], segments: tuple[Segment, ...], window: int | None) -> None:
    inputs = draw(sum(segment.length for segment in segments))
    found = make(segments).attend(*inputs, None, window)
    want = by_formula(*inputs, segments, window)
    torch.testing.assert_close(found, want, rtol=0, atol=1e-12)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(1), dtype=want.dtype)
    gradients = (torch.autograd.grad(output, inputs, upstream) for output in (found, want))
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-11)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
def test_every_way_equals_the_formula_and_so_do_its_gradients(
    make: Callable[..., Layout], window: int | None
) -> None:
    check(make, SEGMENTS, window)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.lists(st.integers(1, 3), max_size=3)), min_size=1, max_size=3),
    st.none() | st.integers(1, 5),
)
def test_every_way_equals_the_formula_for_any_packing(
    shape: list[tuple[int, list[int]]], window: int | None
) -> None:
    segments: list[Segment] = []
    for prompt, completions in shape:
        prefix = len(segments)
        segments += [Segment(prompt), *(Segment(length, prefix) for length in completions)]
    for make in MAKERS:
        check(make, tuple(segments), window)


def test_the_probe_tells_a_right_kernel_from_wrong_ones() -> None:
    def error(window: int | None = None, **wrong: bool) -> float:
        make = partial(VarlenLayout, device=CPU, function=partial(by_documentation, **wrong))
        return attention.probe(make, HEADS, KV_HEADS, HEAD_DIM, window, CPU, torch.float32)

    assert error() < 1e-4
    assert error(24) < 1e-4
    assert error(top_left=True) > 10 * attention.PROBE_TOLERANCE
    assert error(24, windows=False) > 5 * attention.PROBE_TOLERANCE


@pytest.mark.parametrize("spoilt", range(3))
def test_the_probe_sees_keys_that_a_backward_pass_forgot_to_mask(
    monkeypatch: pytest.MonkeyPatch, spoilt: int
) -> None:
    """Their share is e to the power of minus a query's log-sum-exp, times zero: NaN where all its scores are far
    below zero, in one gradient of the three."""

    class Unmasked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
            q, k, _ = inputs
            scores = q[:, 0] @ k[:, 0].T / HEAD_DIM**0.5
            ctx.share = torch.exp(-scores.logsumexp(dim=1)).amax() * 0
            return inputs

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return tuple(grad + ctx.share * (i == spoilt) for i, grad in enumerate(grads))

    def function(q: Tensor, k: Tensor, v: Tensor, *lengths: Any, **options: Any) -> Tensor:
        return by_documentation(*Unmasked.apply(q, k, v), *lengths, **options)

    make = partial(VarlenLayout, device=CPU, function=function)
    assert math.isnan(attention.probe(make, HEADS, KV_HEADS, HEAD_DIM, None, CPU, torch.float32))
    monkeypatch.setattr(attention, "PROBE_SCORE", -1e-6)
    assert attention.probe(make, HEADS, KV_HEADS, HEAD_DIM, None, CPU, torch.float32) < 1e-4


def test_no_gradient_is_copied_on_its_way() -> None:
    """Neither into zeros, as that of a selected row would be, nor for a layout that nobody asked for."""
    heads = [torch.randn(6, count, HEAD_DIM, requires_grad=True) for count in (HEADS, KV_HEADS, KV_HEADS)]
    written = [torch.randn(6, count, HEAD_DIM) for count in (HEADS, KV_HEADS, KV_HEADS)]

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Tensor) -> Tensor:
            return inputs[0].clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
            return tuple(written)

    layout = VarlenLayout((Segment(2), Segment(4)), CPU, lambda q, k, v, *_, **__: Kernel.apply(q, k, v))
    output = layout.attend(*(each[None].transpose(1, 2) for each in heads), None, None)
    for gradient, of_kernel in zip(torch.autograd.grad(output.sum(), heads), written, strict=True):
        assert gradient.data_ptr() == of_kernel.data_ptr()


GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
KERNELS = [varlen_function, flash4_function]


def kernel(function: Callable[[], Callable[..., Tensor]]) -> partial[VarlenLayout]:
    try:
        return partial(VarlenLayout, device=torch.device("cuda"), function=function())
    except (ImportError, RuntimeError) as missing:
        pytest.skip(str(missing))


@GPU
@pytest.mark.parametrize("function", KERNELS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(16, 8, 128), (32, 8, 128), (14, 2, 64), (9, 3, 64)]
)
@pytest.mark.parametrize("window", [None, 24])
def test_a_kernel_is_right(
    function: Any, heads: int, kv_heads: int, head_dim: int, window: int | None
) -> None:
    error = attention.probe(
        kernel(function), heads, kv_heads, head_dim, window, torch.device("cuda"), torch.bfloat16
    )
    assert error < attention.PROBE_TOLERANCE / 2


@GPU
@pytest.mark.parametrize("function", KERNELS)
@pytest.mark.parametrize(("count", "longest", "group"), [(17, 2048, 0), (17, 2048, 8), (300, 90, 299)])
def test_a_kernel_is_right_for_long_sequences_and_for_many(
    function: Any, count: int, longest: int, group: int
) -> None:
    """Lengths at random, views of one projection's output; it prints how long that takes."""
    gpu, generator = torch.device("cuda"), torch.Generator().manual_seed(0)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    segments = [Segment(n, 0 if group and 0 < i <= group else None) for i, n in enumerate(lengths)]
    qkv = torch.randn(sum(lengths), 32, 128, generator=generator).to(gpu, torch.bfloat16).requires_grad_()
    upstream = torch.randn(1, sum(lengths), 16, 128, generator=generator).to(gpu, torch.bfloat16)
    results = []
    for make in (kernel(function), partial(SdpaLayout, device=gpu)):
        dtype = torch.float32 if make.func is SdpaLayout else torch.bfloat16
        heads = [each[None].transpose(1, 2) for each in qkv.to(dtype).split([16, 8, 8], dim=1)]
        layout = make(segments)
        for _ in range(2):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            output = layout.attend(*heads, None, None)
            (gradient,) = torch.autograd.grad(output, qkv, upstream.to(dtype), retain_graph=True)
            end.record()
            torch.cuda.synchronize()
        print(f"{make.func.__name__}: {begin.elapsed_time(end):.2f} ms")
        results.append((output.detach().float(), gradient.float()))
    for found, want in zip(*results, strict=True):
        assert float((found - want).norm() / want.norm()) < attention.PROBE_TOLERANCE / 2


def test_pytorchs_kernel_takes_what_it_is_given() -> None:
    """There is no kernel for a CPU; the rules for shapes and types, gradients included, hold everywhere."""
    layout = VarlenLayout(SEGMENTS, torch.device("meta"), varlen_function())
    tokens = sum(segment.length for segment in SEGMENTS)
    inputs = [each.detach().to("meta", torch.bfloat16).requires_grad_() for each in draw(tokens)]
    output = layout.attend(*inputs, 0.1, 4)
    assert output.shape == (1, tokens, HEADS, HEAD_DIM)
    for given_, gradient in zip(inputs, torch.autograd.grad(output.sum(), inputs), strict=True):
        assert (gradient.shape, gradient.dtype) == (given_.shape, torch.bfloat16)


def chosen(monkeypatch: pytest.MonkeyPatch, *outcomes: float | Exception, flash4: bool = False) -> Any:
    """For a GPU on which probes end with `outcomes`, of FlashAttention 4 first if it is there."""
    left = list(outcomes)

    def probe(*arguments: Any) -> float:
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def missing() -> Any:
        raise ImportError("No module named 'flash_attn'")

    monkeypatch.setattr(attention, "probe", probe)
    monkeypatch.setattr(attention, "flash4_function", (lambda: by_documentation) if flash4 else missing)
    return attention.choose(Qwen3Config(), torch.device("cuda"), torch.bfloat16)


@pytest.mark.parametrize(
    ("outcomes", "level"),
    [
        ([0.004], logging.INFO),
        ([float("nan"), 0.004], logging.WARNING),
        ([AssertionError("Unsupported compute capability"), 0.004], logging.WARNING),
    ],
)
def test_a_kernel_that_is_missing_is_news_and_one_that_is_wrong_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outcomes: list[Any], level: int
) -> None:
    with caplog.at_level(logging.INFO):
        found = chosen(monkeypatch, *outcomes, flash4=len(outcomes) > 1)
    assert found.func is VarlenLayout
    assert found.keywords["function"] is not by_documentation
    assert [record.levelno for record in caplog.records] == [level, logging.INFO]
    assert "FlashAttention 4" in caplog.messages[0]
    assert "PyTorch" in caplog.messages[1]


def test_the_fastest_kernel_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    found = chosen(monkeypatch, 0.004, flash4=True)
    assert (found.func, found.keywords["function"]) == (VarlenLayout, by_documentation)


def test_flash_attention_4_is_asked_for_the_attention_of_every_segment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = ModuleType("flash_attn.cute")
    monkeypatch.setattr(module, "flash_attn_varlen_func", flash4_by_documentation, raising=False)
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))
    monkeypatch.setitem(sys.modules, "flash_attn.cute", module)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    make = partial(VarlenLayout, device=CPU, function=flash4_function())
    for window in (None, 1, 3, 100):
        check(make, SEGMENTS, window)
    check(make, (Segment(FLASH4_BOUND), Segment(2, 0)), None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 0))
    with pytest.raises(NotImplementedError, match="10, 0"):
        flash4_function()


@pytest.mark.parametrize(
    ("outcome", "words"),
    [
        (0.4, "wrong here"),
        (float("nan"), "wrong here"),
        (RuntimeError("FlashAttention only supports fp16 and bf16"), "only supports fp16"),
        (TypeError("unexpected keyword argument 'window_size'"), "window_size"),
    ],
)
def test_what_a_machine_cannot_do_right_it_does_slowly_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, outcome: float | Exception, words: str
) -> None:
    with caplog.at_level(logging.WARNING):
        assert chosen(monkeypatch, outcome).func is SdpaLayout
    assert words in caplog.text


def test_a_cpu_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "probe", lambda *_: pytest.fail("probed"))
    assert attention.choose(Qwen3Config(), CPU, torch.float32).func is SdpaLayout
