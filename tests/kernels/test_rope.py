"""QK norm and rotary embedding: the definition against transformers' modules, and the Triton kernel (interpreted)
against the definition in float64."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, Qwen3RotaryEmbedding, apply_rotary_pos_emb

from bucketrl.kernels import rope
from bucketrl.kernels.rope import qknorm_rope

EPS = 0.01
"""Large enough to be noticed."""


@pytest.fixture(scope="module")
def rope_kernel(triton_kernels: SimpleNamespace) -> Any:
    """`rope_cuda.qknorm_rope` with its kernels interpreted."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from bucketrl.kernels import rope_cuda, rope_triton

    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(rope_triton).items()):
            if isinstance(value, JITFunction):
                patch.setattr(rope_triton, name, InterpretedFunction(value.fn))
        yield rope_cuda.qknorm_rope


def draw(
    tokens: int, heads: int, kv_heads: int, head_dim: int, norm: bool, dtype: torch.dtype = torch.float64
) -> tuple[Any, ...]:
    """Arguments of `qknorm_rope`. The halves of cos and sin differ, which no model's do."""
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    qkv = normal(tokens, (heads + 2 * kv_heads) * head_dim).requires_grad_()
    weights = (normal(head_dim), normal(head_dim)) if norm else (None, None)
    return qkv, heads, kv_heads, head_dim, normal(tokens, head_dim), normal(tokens, head_dim), *weights, EPS


def results(
    function: Callable[..., tuple[Tensor, ...]],
    arguments: tuple[Any, ...],
    permute: tuple[int, ...] = (0, 1, 2),
) -> list[Tensor]:
    """Queries, keys, values, and the gradient; the gradients of the first three come in the memory order `permute`,
    as attention may leave them."""
    outputs = function(*arguments)
    generator = torch.Generator().manual_seed(1)
    upstream = []
    for output in outputs:
        drawn = torch.randn(output.shape, generator=generator, dtype=torch.float64).to(output)
        inverse = [permute.index(axis) for axis in range(3)]
        upstream.append(drawn.permute(permute).contiguous().permute(inverse))
    return [*outputs, *torch.autograd.grad(outputs, [arguments[0]], upstream)]


def in_float64(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each.detach().double().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
        for each in arguments
    )


def check(kernel: Any, arguments: tuple[Any, ...], tolerance: float, **how: Any) -> None:
    found, want = results(kernel, arguments, **how), results(qknorm_rope, in_float64(arguments))
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == arguments[0].dtype
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("norm", [True, False])
def test_the_definition_is_what_transformers_computes(norm: bool) -> None:
    """Bit for bit in float32, the model's own angles included."""
    tokens, heads, kv_heads, head_dim = 7, 4, 2, 16
    qkv, *_ = draw(tokens, heads, kv_heads, head_dim, norm, torch.float32)
    config = Qwen3Config(hidden_size=64, num_attention_heads=heads, head_dim=head_dim)
    norms = [Qwen3RMSNorm(head_dim, eps=EPS).requires_grad_(False) for _ in range(2)]
    for index, each in enumerate(norms):
        each.weight.copy_(torch.linspace(0.5, 1.5 + index, head_dim))
    cos, sin = Qwen3RotaryEmbedding(config)(qkv, torch.arange(tokens)[None] * 3)
    pieces = qkv.split([heads * head_dim, kv_heads * head_dim, kv_heads * head_dim], dim=1)
    query, key, value = (each.unflatten(1, (-1, head_dim))[None].transpose(1, 2) for each in pieces)
    if norm:
        query, key = norms[0](query), norms[1](key)
    query, key = apply_rotary_pos_emb(query, key, cos, sin)
    q_weight, k_weight = (each.weight if norm else None for each in norms)
    found = qknorm_rope(qkv, heads, kv_heads, head_dim, cos[0], sin[0], q_weight, k_weight, EPS)
    for ours, theirs in zip(found, (query, key, value), strict=True):
        assert torch.equal(ours, theirs[0].transpose(0, 1))
    assert found[2].data_ptr() == pieces[2].data_ptr()


@pytest.mark.parametrize("norm", [True, False])
class TestKernel:
    @pytest.mark.parametrize("shape", [(4, 2, 16), (3, 1, 12), (1, 1, 2), (5, 5, 6)])
    def test_is_the_definition(self, rope_kernel: Any, norm: bool, shape: tuple[int, int, int]) -> None:
        """Heads and halves that are powers of two, and that are none."""
        check(rope_kernel, draw(3, *shape, norm, torch.float32), 2e-6)

    def test_in_bfloat16_rounds_as_little_as_that_type_allows(self, rope_kernel: Any, norm: bool) -> None:
        check(rope_kernel, draw(3, 4, 2, 16, norm, torch.bfloat16), 0.03)

    @pytest.mark.parametrize("permute", [(1, 0, 2), (2, 0, 1)])
    def test_takes_gradients_in_any_memory_order(
        self, rope_kernel: Any, norm: bool, permute: tuple[int, ...]
    ) -> None:
        """Heads first, as SDPA leaves them; and head_dim not the last."""
        check(rope_kernel, draw(3, 4, 2, 8, norm, torch.float32), 2e-6, permute=permute)

    def test_takes_rows_of_a_wider_matrix_and_columns_of_a_transposed_one(
        self, rope_kernel: Any, norm: bool
    ) -> None:
        qkv, *rest = draw(3, 2, 1, 8, norm, torch.float32)
        *outputs, gradient = results(qknorm_rope, (qkv, *rest))
        wide = torch.cat([qkv, qkv], dim=1).detach()
        columns = qkv.detach().T.contiguous()
        for given_ in (wide[:, : qkv.shape[1]], columns.T):
            found = results(rope_kernel, (given_.requires_grad_(), *rest))
            for ours, theirs in zip(found, [*outputs, gradient], strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)

    def test_what_attention_does_not_use_gets_no_gradient(self, rope_kernel: Any, norm: bool) -> None:
        """And no tokens are no work."""
        qkv, *rest = draw(3, 2, 1, 8, norm, torch.float32)
        rope_kernel(qkv, *rest)[1].sum().backward()
        assert qkv.grad is not None
        assert qkv.grad.count_nonzero(dim=0).tolist() == [0] * 16 + [3] * 8 + [0] * 8
        none = draw(0, 2, 1, 8, norm, torch.float32)
        assert [each.shape[0] for each in results(rope_kernel, none)] == [0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("shape", [(32, 8, 128), (16, 8, 128), (14, 2, 64), (9, 3, 64), (24, 8, 96)])
def test_a_gpu_computes_the_definition(norm: bool, shape: tuple[int, int, int]) -> None:
    """In bfloat16, as rows of a wider matrix and with the gradients that SDPA leaves."""
    arguments = draw(77, *shape, norm, torch.bfloat16)
    placed = [each.detach().cuda() if isinstance(each, Tensor) else each for each in arguments]
    placed[0] = torch.cat([placed[0], placed[0]], dim=1)[:, : placed[0].shape[1]].requires_grad_()
    want = results(qknorm_rope, in_float64(arguments))
    for ours, theirs in zip(results(qknorm_rope, tuple(placed), (1, 0, 2)), want, strict=True):
        assert float((ours.cpu() - theirs).norm() / theirs.norm()) < 0.01


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3), st.integers(1, 5), st.booleans())
def test_rotation_keeps_lengths_and_depends_on_distances_only(
    tokens: int, heads: int, kv_heads: int, half: int, norm: bool
) -> None:
    """With a model's angles: |rotated| = |x|, and q_i · k_j is that of positions moved by any offset."""
    qkv, *_, q_weight, k_weight, eps = draw(tokens, heads, kv_heads, 2 * half, norm)
    inverse = torch.linspace(1.0, 0.1, half, dtype=torch.float64)

    def at(offset: int) -> tuple[Tensor, Tensor, Tensor]:
        angles = (torch.arange(tokens)[:, None] + offset) * inverse
        angles = torch.cat([angles, angles], dim=1)
        return qknorm_rope(
            qkv, heads, kv_heads, 2 * half, angles.cos(), angles.sin(), q_weight, k_weight, eps
        )

    (q, k, _), (moved_q, moved_k, _) = at(0), at(17)
    torch.testing.assert_close(q.norm(dim=-1), moved_q.norm(dim=-1))
    scores, moved = (torch.einsum("ihd,jgd->hgij", *pair) for pair in ((q, k), (moved_q, moved_k)))
    torch.testing.assert_close(scores, moved)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_heads": 1}, r"qkv_TN has 64 columns; 4 heads and 2 times 1 .* have 48"),
        ({"cos_TD": torch.zeros(1, 8)}, r"cos_TD is \(1, 8\).* expected \(3, 8\)"),
        ({"k_weight": None}, "both or neither"),
        ({"q_weight": torch.ones(8, requires_grad=True)}, "frozen norms"),
    ],
)
def test_arguments_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    names = ("qkv_TN", "heads", "kv_heads", "head_dim", "cos_TD", "sin_TD", "q_weight", "k_weight", "eps")
    with pytest.raises(ValueError, match=message):
        rope.qknorm_rope(**dict(zip(names, draw(3, 4, 2, 8, True), strict=True)) | change)
