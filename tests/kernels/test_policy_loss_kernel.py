"""The Triton kernel of the packed policy loss (interpreted) against the definition in float64; its launches and
their memory.

The numbers in the names are those of the bug reports of other implementations that the case comes from.
"""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, call

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bucketrl.kernels.policy import STATS, Objective
from bucketrl.kernels.policy_terms import MAX_LOG_RATIO

from .test_policy_loss import CU, OBJECTIVES, N, agree, batch, in_float64, run, run_direct


def check(inputs: dict[str, Any], objective: Objective, kernels: SimpleNamespace) -> list[Tensor]:
    found, want = run(inputs, objective, kernels), run(in_float64(inputs), objective)
    for ours, theirs in zip(found, want, strict=True):
        zero = torch.zeros_like(ours) if theirs is None else theirs
        torch.testing.assert_close(ours.double(), zero.double(), rtol=2e-6, atol=1e-6)
    return found


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
class TestKernel:
    def test_is_the_definition(
        self, triton_kernels: SimpleNamespace, objective: Objective, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Over several blocks. And 27: an empty sequence, and padding that holds NaN."""
        monkeypatch.setattr(triton_kernels.policy, "BLOCK", 8)
        monkeypatch.setattr(triton_kernels.policy, "WAYS", 2)
        inputs = batch()
        for name in ("logprobs_N", "behaviour_N", "reference_N"):
            inputs[name][CU[-1] :] = torch.nan
        check(inputs, objective, triton_kernels)
        required = {
            name: inputs[name] for name in ("logprobs_N", "behaviour_N", "advantages_B", "cu_seqlens")
        }
        check(required | {"norm": torch.tensor(7.0)}, objective, triton_kernels)

    def test_20_21_what_is_masked_or_not_finite_reaches_nothing(
        self, triton_kernels: SimpleNamespace, objective: Objective
    ) -> None:
        inputs = batch()
        masked = (~inputs["mask_N"]).nonzero()[:, 0]
        for place, poison in zip(masked, [torch.nan, torch.inf, -torch.inf, -1e10, 1e30] * 2, strict=False):
            inputs["logprobs_N"][place] = poison
            inputs["behaviour_N"][place] = -poison
        live = inputs["mask_N"][: CU[-1]].nonzero()[:, 0]
        inputs["behaviour_N"][live[0]], inputs["logprobs_N"][live[-1]] = torch.nan, -torch.inf
        check(inputs, objective, triton_kernels)
        found = agree(inputs, objective, triton_kernels)
        assert all(bool(tensor.isfinite().all()) for tensor in found)
        assert float(found[1][STATS.index("dropped")]) == 2.0
        assert bool((found[2][~inputs["mask_N"]] == 0).all())


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 9), st.integers(0, 5), st.booleans())
def test_each_token_has_the_advantage_of_its_sequence(
    triton_kernels: SimpleNamespace, lengths: list[int], before: int, padding: int, narrow: bool
) -> None:
    """Sequences that are empty, that begin or end with a block, tokens before the first and after the last."""
    cu = torch.tensor([before, *lengths]).cumsum(0)
    count = int(cu[-1]) + padding
    advantages, behaviour = torch.arange(1.0, len(lengths) + 1), torch.zeros(count)
    want = [0.0] * before + [-float(a) for a, n in zip(advantages, lengths, strict=True) for _ in range(n)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton_kernels.policy, "BLOCK", 8)
        patch.setattr(triton_kernels.policy, "WAYS", 4)
        grad = triton_kernels.policy.packed_policy_grad(
            behaviour, None, (behaviour, advantages, cu.int() if narrow else cu, 1.0), (None,) * 4,
            Objective(surrogate="reinforce"),
        )[1]  # fmt: skip
    assert grad.tolist() == want + [0.0] * padding


def test_14_expanded_and_strided_views(triton_kernels: SimpleNamespace) -> None:
    inputs = batch()
    plain = run(inputs, Objective(), triton_kernels)
    strided = {
        name: value.repeat_interleave(3)[::3] if name.endswith("_N") else value
        for name, value in inputs.items()
    }
    assert all(map(torch.equal, run(strided, Objective(), triton_kernels), plain))
    everywhere = inputs | {"mask_N": torch.tensor([True]).expand(N)}
    check(everywhere, Objective(), triton_kernels)


def test_an_absurd_ratio_is_clamped_and_gets_no_gradient(triton_kernels: SimpleNamespace) -> None:
    inputs = {
        "logprobs_N": torch.tensor([-1.0, -80.0]),
        "behaviour_N": torch.tensor([-80.0, -1.0]),
        "advantages_B": torch.tensor([-1.0]),
        "cu_seqlens": torch.tensor([0, 2]),
        "norm": 1.0,
    }
    found = check(inputs, Objective(clip_low=1.0), triton_kernels)
    assert found[2].tolist() == [0.0, 0.0]
    assert float(found[1][STATS.index("ratio_max")]) == pytest.approx(math.exp(MAX_LOG_RATIO), rel=1e-5)


@pytest.mark.parametrize("change", ["no token", "one token", "all masked", "norm 0", "no sequence"])
def test_empty_batches_have_loss_zero(triton_kernels: SimpleNamespace, change: str) -> None:
    inputs = batch()
    if change == "all masked":
        inputs["mask_N"] = torch.zeros(N, dtype=torch.bool)
    elif change == "norm 0":
        inputs["norm"] = 0.0
    elif change == "no sequence":
        inputs |= {
            "cu_seqlens": torch.tensor([0]),
            "advantages_B": torch.empty(0),
            "weights_B": torch.empty(0),
        }
    else:
        count = int(change == "one token")
        inputs = {name: value[:count] if name.endswith("_N") else value for name, value in inputs.items()}
        inputs["cu_seqlens"] = CU.clamp(max=count)
    found = check(inputs, Objective(), triton_kernels)
    if change != "one token":
        assert float(found[0]) == float(found[2].abs().sum()) == 0.0


class Kernel:
    """Stands for a kernel of Triton: compiles at each call, and counts."""

    def __init__(self) -> None:
        self.compiled = MagicMock()
        self.calls = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., MagicMock]:
        def run(*_: object, num_warps: int) -> MagicMock:
            self.calls += 1
            return self.compiled

        return run


def test_a_kernel_is_launched_as_compiled_only_for_what_it_was_compiled_for(
    triton_kernels: SimpleNamespace,
) -> None:
    launch, o = triton_kernels.policy._launch, Objective()
    kernel, tensor = Kernel(), torch.zeros(8)
    assert tensor.data_ptr() % 16 == 0
    for number in (5, 6, 7):
        launch(kernel, 2, 1, (tensor, None), (number,), (o, 128))
    assert kernel.calls == 1
    assert kernel.compiled.__getitem__.call_args_list == [call((2, 1, 1))] * 2
    launched = kernel.compiled.__getitem__.return_value.call_args_list
    assert launched == [call(tensor.data_ptr(), 0, number, o, 128) for number in (6, 7)]
    others: list[tuple[tuple[Tensor | None, ...], tuple[Objective, int]]] = [
        ((tensor, None), (Objective(clip_low=0.1), 128)),
        ((tensor, None), (o, 256)),
        ((tensor, tensor), (o, 128)),
        ((tensor.long(), None), (o, 128)),
        ((tensor[1:], None), (o, 128)),
    ]
    for calls, (tensors, constants) in enumerate(others, start=2):
        for _ in range(2):
            launch(kernel, 2, 1, tensors, (5,), constants)
        assert kernel.calls == calls


def test_calls_that_follow_each_other_are_added_up_each_for_itself(
    triton_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More blocks than are read at once, fewer, no token: right, and the second time the same bits."""
    monkeypatch.setattr(triton_kernels.policy, "BLOCK", 8)
    monkeypatch.setattr(triton_kernels.policy, "_work", {})
    objective = OBJECTIVES["reinforce, all terms"]
    large, small, none = (
        {name: value.repeat(times) if name.endswith("_N") else value for name, value in batch().items()}
        | {"cu_seqlens": CU * times}
        for times in (4, 1, 0)
    )
    order = large, small, none, large
    found = [run_direct(inputs, objective, triton_kernels) for inputs in order]
    for inputs, ours in zip(order, found, strict=True):
        for one, want in zip(ours, run_direct(in_float64(inputs), objective), strict=True):
            torch.testing.assert_close(one.double(), want, rtol=2e-6, atol=1e-6)
    assert all(map(torch.equal, found[0], found[3]))
    monkeypatch.setattr(triton_kernels.policy, "_stream", lambda device: None)
    assert all(map(torch.equal, run_direct(small, objective, triton_kernels), found[1]))


def test_the_launches_of_a_stream_share_memory_and_no_others_do(
    triton_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Tensor] = []
    monkeypatch.setattr(triton_kernels.policy, "_work", {})

    def memory(stream: int | None, blocks: int) -> int:
        """Where it is; None: a graph's."""
        monkeypatch.setattr(triton_kernels.policy, "_stream", lambda device: stream)
        kept.append(triton_kernels.policy._work_for(blocks, torch.device("cpu")))
        assert kept[-1].shape[0] >= (1 + blocks) * len(STATS)
        assert not kept[-1].any()
        return kept[-1].data_ptr()

    one, two = memory(1, 5), memory(2, 5)
    assert (memory(1, 3), memory(2, 5)) == (one, two)
    grown = memory(1, 6)
    assert memory(1, 5) == grown
    assert len({one, two, grown, memory(None, 5), memory(None, 5)}) == 5
