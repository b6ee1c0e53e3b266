"""The Triton kernels of the LoRA linears (interpreted) against the definition in float64.

The numbers in the names are those of the bug reports of other implementations that the case comes from.
The interpreter truncates where a GPU rounds to bfloat16.
"""

from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bucketrl.kernels import LoraLayer, LoraLinears, lora_reference

T, H = 21, 40
"""Neither fills its tiles."""
TILE, SMALL_TILE = {"BT": 32, "BH": 64}, {"BT": 16, "BH": 32}
"""The interpreter's time goes with the number of tiles: one each, where a test is not about several."""
ERROR = 1.5e-2
"""Relative, of what went through a few operations in bfloat16."""
NAMES = ["linear", "rmsnorm", "swiglu"]


@pytest.fixture(scope="module")
def cuda(triton_kernels: SimpleNamespace) -> Iterator[ModuleType]:
    """`lora_cuda` with its kernels interpreted; what it leaves unwritten is NaN."""
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    from bucketrl.kernels import lora_cuda, lora_triton

    with pytest.MonkeyPatch.context() as patch:
        for name, value in list(vars(lora_triton).items()):
            if isinstance(value, JITFunction):
                patch.setattr(lora_triton, name, InterpretedFunction(value.fn))
        patch.setattr(lora_cuda, "TILES", dict.fromkeys(lora_cuda.TILES, TILE))
        torch.use_deterministic_algorithms(True)
        yield lora_cuda
        torch.use_deterministic_algorithms(False)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make(*sizes: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> LoraLinears:
    """Layers of these outputs and ranks, of bfloat16 values."""
    layers = []
    for index, (outputs, rank) in enumerate(sizes):
        weight, a, b = (
            normal(outputs, H),
            normal(rank, H, seed=1 + index),
            normal(outputs, rank, seed=5 + index),
        )
        master = torch.float64 if dtype == torch.float64 else torch.float32
        layers.append(
            LoraLayer(
                nn.Parameter((weight / H**0.5).bfloat16().to(dtype), requires_grad=False),
                nn.Parameter((a / H**0.5).bfloat16().to(master)),
                nn.Parameter((b / rank**0.5).bfloat16().to(master)),
                0.5 + index,
            )
        )
    return LoraLinears(layers)


def call(module: Any, name: str, x: Tensor, linears: LoraLinears, residual: Tensor | None = None) -> Tensor:
    if name == "linear":
        return module.lora_linear(x, linears, residual)
    if name == "swiglu":
        return module.swiglu_lora_linear(x, linears, residual)
    norm_weight = (1.0 + 0.3 * normal(H)).bfloat16().to(x.dtype)
    return module.rmsnorm_lora_linear(x, norm_weight, 0.01, linears)


def inputs(name: str, tokens: int = T) -> Tensor:
    return normal(tokens, 2 * H if name == "swiglu" else H).bfloat16()


def results(
    module: Any, name: str, linears: LoraLinears, x: Tensor, residual: Tensor | None = None
) -> dict[str, Tensor | None]:
    x = x.detach().to(linears.weight_NK.dtype).requires_grad_()
    if residual is not None:
        residual = residual.detach().to(x.dtype).requires_grad_()
    out = call(module, name, x, linears, residual)
    out.backward(normal(*out.shape, seed=9).bfloat16().to(x.dtype))
    found = {"out": out.detach(), "x": x.grad}
    if residual is not None:
        found["residual"] = residual.grad
    for index, layer in enumerate(linears.layers):
        found |= {f"a{index}": layer.a.grad, f"b{index}": layer.b.grad}
    return found


def check(
    cuda: ModuleType,
    name: str,
    sizes: list[tuple[int, int]],
    x: Tensor,
    residual: Tensor | None = None,
    enabled: bool = True,
) -> dict[str, Tensor | None]:
    ours, definition = make(*sizes), make(*sizes, dtype=torch.float64)
    ours.enabled = definition.enabled = enabled
    found = results(cuda, name, ours, x, residual)
    want = results(lora_reference, name, definition, x, residual)
    for key, value in want.items():
        got = found[key]
        if value is None:
            assert got is None, key
        else:
            assert got is not None, key
            assert float((got.double() - value).norm()) <= ERROR * float(value.norm()), key
            assert got.dtype == (torch.float32 if key[0] in "ab" else torch.bfloat16)
    return found


@pytest.mark.parametrize("name", NAMES)
class TestEveryFunction:
    @pytest.mark.parametrize("ranks", [[1, 4, 8], [12, 16], [24, 64]], ids=str)
    def test_26_any_rank_28_and_adapters_of_their_own(
        self, cuda: ModuleType, name: str, ranks: list[int]
    ) -> None:
        residual = None if name == "rmsnorm" else normal(T, 13 * len(ranks)).bfloat16()
        check(cuda, name, [(13, rank) for rank in ranks], inputs(name), residual)

    def test_several_tiles_and_parts_of_the_tokens(
        self, cuda: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(cuda, "TILES", dict.fromkeys(cuda.TILES, SMALL_TILE))
        monkeypatch.setattr(cuda, "_parts", lambda *_: (2, 16))
        check(cuda, name, [(13, 4), (6, 3)], inputs(name))

    def test_without_the_adapter_it_is_the_base(self, cuda: ModuleType, name: str) -> None:
        residual = None if name == "rmsnorm" else normal(T, 20).bfloat16()
        found = check(cuda, name, [(20, 12)], inputs(name), residual, enabled=False)
        assert found["a0"] is found["b0"] is None

    def test_14_rows_apart_and_columns_apart(self, cuda: ModuleType, name: str) -> None:
        x = inputs(name)
        plain = results(cuda, name, make((20, 4)), x)
        wide = torch.cat([x, x, x], dim=1)
        middle = wide[:, x.shape[1] : 2 * x.shape[1]]
        for view in (middle, x.T.contiguous().T):
            found = results(cuda, name, make((20, 4)), view)
            assert all(torch.equal(found[key], value) for key, value in plain.items() if value is not None)

    @pytest.mark.parametrize("tokens", [0, 1])
    def test_27_few_tokens(self, cuda: ModuleType, name: str, tokens: int) -> None:
        found = check(cuda, name, [(20, 4)], inputs(name, tokens))
        assert found["x"] is not None
        assert len(found["x"]) == tokens

    def test_29_nothing_that_others_read_is_written(self, cuda: ModuleType, name: str) -> None:
        """Two consumers of the result, a gradient in use elsewhere, and a second backward pass."""
        linears = make((20, 4), (20, 8))
        x = inputs(name).requires_grad_()
        residual = None if name == "rmsnorm" else normal(T, 40).bfloat16().requires_grad_()
        watched = [x, linears.weight_NK, linears.down_RH, *([] if residual is None else [residual])]
        before = [tensor.detach().clone() for tensor in watched]
        out = call(cuda, name, x, linears, residual)
        loss = (out * 2.0).float().sum() + (out * out).float().sum()
        wanted = [x, *linears.adapter(), *([] if residual is None else [residual])]
        first = torch.autograd.grad(loss, wanted, retain_graph=True)
        kept = [grad.clone() for grad in first]
        second = torch.autograd.grad(loss, wanted)
        upstream = (2.0 + 2.0 * out).detach()
        once = torch.autograd.grad(call(cuda, name, x, linears, residual), wanted, upstream)
        for one, two, old, other in zip(first, second, kept, once, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, old)
            assert float((one - other).norm()) <= ERROR * float(other.norm())
        assert all(torch.equal(tensor, old) for tensor, old in zip(watched, before, strict=True))

    def test_masters_that_changed_before_the_backward_pass(self, cuda: ModuleType, name: str) -> None:
        linears = make((20, 4))
        out = call(cuda, name, inputs(name).requires_grad_(), linears)
        with torch.no_grad():
            linears.layers[0].b.add_(1.0)
        linears.refresh()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


def test_23_autocast_and_no_grad_change_nothing(cuda: ModuleType) -> None:
    linears = make((20, 4))
    plain = call(cuda, "swiglu", inputs("swiglu"), linears)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        assert torch.equal(call(cuda, "swiglu", inputs("swiglu"), linears), plain)


def test_activation_checkpointing_changes_nothing(cuda: ModuleType) -> None:
    gate_up, down = make((H, 4), (H, 4)), make((H, 8))

    def mlp(x: Tensor) -> Tensor:
        return call(cuda, "swiglu", call(cuda, "rmsnorm", x, gate_up), down, x)

    grads = []
    for run in (mlp, lambda x: checkpoint(mlp, x, use_reentrant=False)):
        x = inputs("rmsnorm").requires_grad_()
        out = run(x)
        grads.append(torch.autograd.grad(out, [x, *gate_up.adapter(), *down.adapter()], out.detach()))
    assert all(map(torch.equal, *grads))


def test_what_is_kept_for_the_backward_pass(cuda: ModuleType) -> None:
    """The input, s and, for the norm, its weight and a factor a row; no [n | s], no h."""
    for name in NAMES:
        linears, x = make((20, 4)), inputs(name).requires_grad_()
        kept: list[Tensor] = []

        def pack(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            call(cuda, name, x, linears)
        given = {tensor.data_ptr() for tensor in (x, linears.weight_NK, linears.down_RH)}
        extra = sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in given)
        assert extra == T * len(linears.down_RH) + (T + H if name == "rmsnorm" else 0)


@given(
    count=st.integers(0, 1 << 20),
    blocks=st.integers(1, 3000),
    padded=st.sampled_from([16, 64, 256]),
    programs=st.integers(1, 5000),
)
def test_parts_cover_the_tokens_once(
    cuda: ModuleType, count: int, blocks: int, padded: int, programs: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(cuda.PROGRAMS, "tall_product", programs)
        parts, tokens = cuda._parts("tall_product", count, blocks, padded, torch.device("cpu"))
    assert (parts - 1) * tokens < max(1, count) <= parts * tokens
    assert tokens % 64 == 0
    assert parts == 1 or tokens >= 32 * padded


def apart(values: Tensor) -> Tensor:
    """The same rows, so far from each other that the third starts beyond 2^31. Few pages are ever touched."""
    stride = (1 << 30) + 64
    far = torch.empty(2 * stride + values.shape[1], dtype=values.dtype).as_strided(values.shape, (stride, 1))
    return far.copy_(values)


def test_1_2_3_no_row_offset_is_32_bit(cuda: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel against itself with the rows side by side."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    linears = make((20, 4))
    down, weight, kernels = linears.down_RH, normal(H).bfloat16(), cuda.kernels
    ranks = cuda._ranks(linears) | TILE
    padded = len(down)
    s, rstd, x, gate_up = normal(3, padded).bfloat16(), normal(3), inputs("linear", 3), inputs("swiglu", 3)
    both = normal(3, H + padded).bfloat16()

    def run(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
        normed, swiglued = place(torch.zeros_like(both)), place(torch.zeros_like(both))
        sums, factors, parts = torch.zeros(2, 3, padded).bfloat16(), torch.zeros(3), torch.zeros(2, 16, H)
        added, dx, dgate_up = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(gate_up)
        far_x, far_gate_up, far_both = place(x), place(gate_up), place(both)
        step, far_s = far_x.stride(0), place(s)
        kernels.augment[(1,)](
            far_x, weight, down, normed, sums[0], factors, 3, H, padded, 0.01, step, normed.stride(0),
            NORM=True, ADAPTER=True, **ranks,
        )  # fmt: skip
        kernels.swiglu_augment[(1,)](
            far_gate_up, down, swiglued, sums[1], 3, H, padded, far_gate_up.stride(0), swiglued.stride(0),
            ADAPTER=True, **ranks,
        )  # fmt: skip
        kernels.add_low_rank[(1, 1)](far_both, down, added, 3, H, padded, far_both.stride(0), **ranks)
        kernels.rmsnorm_backward[(1,)](
            far_both, far_x, weight, down, s, rstd, dx, 3, H, padded, far_both.stride(0), step,
            ADAPTER=True, **ranks,
        )  # fmt: skip
        kernels.swiglu_backward[(1, 1)](
            far_both, far_gate_up, down, dgate_up, parts[0], 3, H, padded, 64, far_both.stride(0),
            far_gate_up.stride(0), ADAPTER=True, **ranks,
        )  # fmt: skip
        kernels.tall_product[(1, 1)](
            far_x, far_s, rstd, weight, parts[1], 3, H, 16, 64, step, far_s.stride(0), NORM=True, **ranks
        )
        return [normed, swiglued, sums, factors, added, dx, dgate_up, parts]

    near = run(lambda values: values)
    assert all(bool((result != 0).any(dim=-1).all()) for result in near)
    assert all(map(torch.equal, run(apart), near))
