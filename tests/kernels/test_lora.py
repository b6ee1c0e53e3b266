"""LoRA linears: the definition against PEFT's and transformers' modules, and the storage that the kernels read.

The numbers in the names are those of the bug reports of other implementations that the case comes from.
"""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.layer import Linear
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from bucketrl.kernels import LoraLayer, LoraLinears, lora_linear, rmsnorm_lora_linear, swiglu_lora_linear

T, H = 7, 24
NORM_WEIGHT = torch.linspace(0.5, 1.5, H).bfloat16()


def make_layer(outputs: int, rank: int, scaling: float, dtype: torch.dtype = torch.float64) -> LoraLayer:
    generator = torch.Generator().manual_seed(outputs + rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    master = torch.promote_types(dtype, torch.float32)
    return LoraLayer(
        nn.Parameter(normal(outputs, H).to(dtype), requires_grad=False),
        nn.Parameter(normal(rank, H).to(master)),
        nn.Parameter(normal(outputs, rank).to(master)),
        scaling,
    )


def inputs(columns: int = H, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(columns)
    return torch.randn(T, columns, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def by_peft(layer: LoraLayer) -> Linear:
    base = nn.Linear(H, len(layer.weight), bias=False, dtype=layer.weight.dtype)
    base.weight.data.copy_(layer.weight)
    rank = len(layer.a)
    found = Linear(base, "default", LoraConfig(r=rank), r=rank, lora_alpha=1, autocast_adapter_dtype=False)
    found.scaling["default"] = layer.scaling
    found.lora_A["default"].weight.data = layer.a.detach().clone()
    found.lora_B["default"].weight.data = layer.b.detach().clone()
    return found


def in_rmsnorm(x: Tensor) -> Tensor:
    """Qwen3RMSNorm; written out in float64, which it would round to float32."""
    norm = Qwen3RMSNorm(H, eps=0.01).to(x.dtype)
    norm.weight.data = NORM_WEIGHT.to(x.dtype)
    if x.dtype == torch.float64:
        return norm.weight.detach() * x * torch.rsqrt(x.square().mean(dim=1, keepdim=True) + 0.01)
    normed: Tensor = norm(x)
    return normed


CASES: dict[str, tuple[int, Callable[[Tensor], Tensor], Callable[..., Tensor]]] = {
    "linear": (H, lambda x: x, lora_linear),
    "rmsnorm": (
        H,
        in_rmsnorm,
        lambda x, linears: rmsnorm_lora_linear(x, NORM_WEIGHT.to(x.dtype), 0.01, linears),
    ),
    "swiglu": (2 * H, lambda x: F.silu(x[:, :H]) * x[:, H:], swiglu_lora_linear),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_is_pefts_layer_of_what_comes_before(
    case: tuple[int, Callable[[Tensor], Tensor], Callable[..., Tensor]],
) -> None:
    """And 28: two layers side by side, each with its own adapter, rank and scaling."""
    columns, before, ours = case
    layers = [make_layer(10, 4, 2.0), make_layer(6, 3, 0.5)]
    peft = [by_peft(layer) for layer in layers]
    found_x, want_x = inputs(columns), inputs(columns)
    found = ours(found_x, LoraLinears(layers))
    want = torch.cat([layer(before(want_x)) for layer in peft], dim=1)
    upstream = torch.linspace(-1.0, 2.0, found.numel(), dtype=found.dtype).view_as(found)
    found.backward(upstream)
    want.backward(upstream)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(found_x.grad, want_x.grad)
    for layer, other in zip(layers, peft, strict=True):
        torch.testing.assert_close(layer.a.grad, other.lora_A["default"].weight.grad)
        torch.testing.assert_close(layer.b.grad, other.lora_B["default"].weight.grad)
        assert layer.weight.grad is None


def test_the_norm_rounds_where_transformers_does() -> None:
    x = inputs(dtype=torch.bfloat16)
    identity = nn.Parameter(torch.eye(H, dtype=torch.bfloat16), requires_grad=False)
    linears = LoraLinears(
        [LoraLayer(identity, nn.Parameter(torch.zeros(1, H)), nn.Parameter(torch.zeros(H, 1)), 1.0)]
    )
    assert torch.equal(CASES["rmsnorm"][2](x, linears), in_rmsnorm(x))


@pytest.mark.parametrize("name", ["linear", "swiglu"])
def test_the_residual_is_added_and_gets_the_gradient(name: str) -> None:
    columns, _, ours = CASES[name]
    linears = LoraLinears([make_layer(10, 4, 2.0)])
    residual = inputs(10)
    out = ours(inputs(columns), linears, residual)
    torch.testing.assert_close(out, ours(inputs(columns), linears) + residual)
    out.backward(out.detach())
    assert torch.equal(residual.grad, out.detach())


@settings(max_examples=25)
@given(sizes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 70)), min_size=1, max_size=3))
def test_one_product_applies_base_and_adapters(sizes: list[tuple[int, int]]) -> None:
    """[x | x · downᵀ] · weightᵀ, for any ranks; and its transpose the gradient of x."""
    linears = LoraLinears([make_layer(*size, scaling=0.5 + index) for index, size in enumerate(sizes)])
    assert linears.weight_NK.shape[1] % 64 == 0
    x = inputs()
    want = lora_linear(x, linears)
    found = torch.cat([x, x @ linears.down_RH.T], dim=1) @ linears.weight_NK.T
    torch.testing.assert_close(found, want)
    want.sum().backward()
    both = torch.ones_like(want) @ linears.weight_NK
    torch.testing.assert_close(both[:, :H] + both[:, H:] @ linears.down_RH, x.grad)


class TestStorage:
    def test_base_weights_live_once_and_30_never_change(self) -> None:
        layers = [make_layer(10, 4, 2.0, torch.bfloat16), make_layer(6, 3, 0.5, torch.bfloat16)]
        before = [layer.weight.detach().clone() for layer in layers]
        linears = LoraLinears(layers)
        storage = linears.weight_NK.untyped_storage().data_ptr()
        assert [layer.weight.untyped_storage().data_ptr() for layer in layers] == [storage] * 2
        optimizer = torch.optim.AdamW(linears.adapter(), lr=0.1)
        for _ in range(3):
            lora_linear(inputs(dtype=torch.bfloat16), linears).sum().backward()
            optimizer.step()
            linears.refresh()
        assert all(torch.equal(layer.weight, old) for layer, old in zip(layers, before, strict=True))

    @pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"foreach": False}])
    def test_every_optimizers_step_is_seen(self, options: dict[str, bool]) -> None:
        """A fused one leaves `_version` as it is."""
        layers = [make_layer(10, 4, 2.0, torch.bfloat16), make_layer(6, 3, 0.5, torch.bfloat16)]
        linears = LoraLinears(layers)
        optimizer = torch.optim.AdamW(linears.adapter(), lr=0.1, **options)
        x = inputs(dtype=torch.bfloat16)
        lora_linear(x, linears).sum().backward()
        old = linears.weight_NK.clone()
        optimizer.step()
        lora_linear(x, linears)
        assert not torch.equal(linears.weight_NK, old)
        assert torch.equal(linears.down_RH[:7], torch.cat([layers[0].a, layers[1].a]).bfloat16())
        for layer, rows, columns in (
            (layers[0], slice(0, 10), (24, 28)),
            (layers[1], slice(10, 16), (28, 31)),
        ):
            want = (layer.b * layer.scaling).bfloat16()
            assert torch.equal(linears.weight_NK[rows, slice(*columns)], want)
        assert int(linears.weight_NK[:, H:].count_nonzero()) == 10 * 4 + 6 * 3

    def test_what_autograd_sees_is_taken_over_and_nothing_is_done_twice(self) -> None:
        layer = make_layer(10, 4, 2.0)
        linears = LoraLinears([layer])
        version = linears.weight_NK._version
        linears.refresh()
        assert linears.weight_NK._version == version
        with torch.no_grad():
            layer.b.zero_()
        lora_linear(inputs(), linears)
        assert int(linears.weight_NK[:, H:].count_nonzero()) == 0

    def test_without_the_adapter_it_is_the_base(self) -> None:
        layer = make_layer(10, 4, 2.0)
        linears = LoraLinears([layer])
        linears.enabled = False
        x = inputs()
        out = lora_linear(x, linears)
        out.sum().backward()
        assert torch.equal(out, F.linear(x, layer.weight))
        assert layer.a.grad is layer.b.grad is None


def test_13_the_same_bits_under_torch_compile() -> None:
    linears = LoraLinears([make_layer(10, 4, 2.0)])
    compiled = torch.compile(lambda x: lora_linear(x * 2.0, linears) + 1.0, backend="eager")
    assert torch.equal(compiled(inputs()), lora_linear(inputs() * 2.0, linears) + 1.0)


class TestRefusals:
    def test_a_trained_weight(self) -> None:
        layer = make_layer(10, 4, 2.0)
        layer.weight.requires_grad_()
        with pytest.raises(ValueError, match=r"layers\[0\].weight is trained"):
            LoraLinears([layer])

    def test_layers_that_do_not_fit(self) -> None:
        with pytest.raises(ValueError, match=r"layers\[1\].weight is \(6, 24\) torch.float32"):
            LoraLinears([make_layer(10, 4, 2.0), make_layer(6, 4, 2.0, torch.float32)])
        layer = make_layer(10, 4, 2.0)
        with pytest.raises(ValueError, match=r"must be \(r, 24\) and \(10, r\)"):
            LoraLinears([LoraLayer(layer.weight, layer.b, layer.a, 1.0)])

    def test_an_input_of_another_size_and_a_trained_norm(self) -> None:
        linears = LoraLinears([make_layer(10, 4, 2.0)])
        with pytest.raises(ValueError, match=r"\(7, 24\); these layers read \(tokens, 48\)"):
            swiglu_lora_linear(inputs(), linears)
        with pytest.raises(ValueError, match="frozen norm"):
            rmsnorm_lora_linear(inputs(), torch.ones(H, requires_grad=True), 1e-6, linears)
        with pytest.raises(ValueError, match=r"norm_weight_H is \(1,\); expected \(24,\)"):
            rmsnorm_lora_linear(inputs(), torch.ones(1), 1e-6, linears)
        with pytest.raises(
            ValueError, match="the input is on meta, these layers on cpu: build LoraLinears when"
        ):
            lora_linear(inputs().to("meta"), linears)
