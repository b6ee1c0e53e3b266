"""What does not fit is refused, and what fits is computed whatever the process's defaults are."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor

from bucketrl.kernels import Objective, packed_policy_grad, packed_policy_loss, reference
from bucketrl.kernels.rope import qknorm_rope

HIDDEN, WEIGHT = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
TARGETS = torch.tensor([0, 5, 3, 2, 1, 4])
META = torch.device("meta")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in the interpreter


@pytest.mark.parametrize(
    ("hidden", "weight", "targets", "message"),
    [
        (HIDDEN, WEIGHT[:, :8].contiguous(), TARGETS, r"\(6, 16\), \(6, 8\), \(6,\); they must be"),
        (HIDDEN, WEIGHT, TARGETS[:4], r"\(4,\); they must be"),
        (HIDDEN, WEIGHT, TARGETS[:, None], r"\(6, 1\); they must be"),
        (HIDDEN[None], WEIGHT, TARGETS, r"\(1, 6, 16\), "),
        (HIDDEN, WEIGHT.to(META), TARGETS, "weight_VH on meta"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    triton_kernels: SimpleNamespace, hidden: Tensor, weight: Tensor, targets: Tensor, message: str
) -> None:
    for call in (triton_kernels.logprob.linear_logprob, reference.linear_logprob):
        with pytest.raises(ValueError, match=message):
            call(hidden, weight, targets)


@pytest.mark.parametrize("name", ["behaviour_N", "mask_N", "advantages_B", "weights_B"])
@pytest.mark.parametrize("call", [packed_policy_loss, packed_policy_grad])
def test_a_policy_input_that_is_too_short_is_refused(call: Callable[..., Any], name: str) -> None:
    inputs: dict[str, Any] = {
        "logprobs_N": torch.zeros(4),
        "behaviour_N": torch.zeros(4),
        "mask_N": torch.ones(4, dtype=torch.bool),
        "advantages_B": torch.ones(2),
        "weights_B": torch.ones(2),
        "cu_seqlens": torch.tensor([0, 1, 4]),
        "norm": 1.0,
    }
    inputs[name] = inputs[name][:1]
    with pytest.raises(ValueError, match=rf"{name} is \(1,\)"):
        call(**inputs, objective=Objective())


def test_norms_of_heads_of_another_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"k_weight is \(4,\); expected \(8,\)"):
        qknorm_rope(
            torch.zeros(3, 32), 2, 1, 8, torch.zeros(3, 8), torch.zeros(3, 8), torch.ones(8), torch.ones(4)
        )


def test_a_kernel_kept_is_not_given_the_address_of_a_tensor_elsewhere(
    triton_kernels: SimpleNamespace,
) -> None:
    kernel, here = MagicMock(), torch.zeros(8)
    for other in (here, here.to(META)):
        triton_kernels.policy._launch(kernel, 1, 1, (here, other), (1,), ())
    assert kernel.__getitem__.call_count == 2, "Triton's own launch refuses it"


def test_sequences_that_claim_more_tokens_than_there_are(triton_kernels: SimpleNamespace) -> None:
    beyond = torch.full((60,), -1.0)
    beyond[40:] = 5.0
    cu, objective = torch.tensor([0, 20, 60]), Objective(ratio_level="sequence")
    behaviour, advantages = torch.full((40,), -1.0), torch.ones(2)
    found, _ = triton_kernels.policy.packed_policy_loss(
        beyond[:40], None, (behaviour, advantages, cu, 1.0), (None,) * 4, objective
    )
    want, _ = packed_policy_loss(beyond[:40], behaviour, advantages, cu, 1.0, objective=objective)
    torch.testing.assert_close(found, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_log_probabilities_are_not_counted_in_16_bits(dtype: torch.dtype) -> None:
    """A bfloat16 sum of ones stops at 256."""
    logprobs = torch.full((3000,), -0.5, dtype=dtype, requires_grad=True)
    behaviour, cu = torch.full((3000,), -0.625, dtype=dtype), torch.tensor([0, 3000])
    loss, stats = packed_policy_loss(
        logprobs, behaviour, torch.ones(1), cu, 3000.0, objective=Objective(ratio_level="sequence")
    )
    torch.testing.assert_close(loss, -torch.tensor(0.125).exp())
    assert int(stats[1]) == 3000
    loss.backward()
    assert logprobs.grad is not None
    assert logprobs.grad.dtype == dtype


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def test_the_temperature_is_float32_whatever_torchs_default_type(triton_kernels: SimpleNamespace) -> None:
    want, _ = reference.linear_logprob(HIDDEN.double(), WEIGHT.double(), TARGETS, 0.7)
    with default_dtype(torch.bfloat16):
        found, _ = triton_kernels.logprob.linear_logprob(
            HIDDEN, WEIGHT, TARGETS, 0.7, plan=triton_kernels.logprob.Plan(block=64)
        )
    torch.testing.assert_close(found.double(), want, atol=1e-5, rtol=1e-6)


def test_a_second_derivative_is_refused(triton_kernels: SimpleNamespace) -> None:
    plan = {"plan": triton_kernels.logprob.Plan(block=64)}
    calls: list[tuple[Any, dict[str, Any]]] = [
        (triton_kernels.logprob.linear_logprob, plan),
        (reference.linear_logprob, {}),
    ]
    for call, options in calls:
        hidden = HIDDEN.clone().requires_grad_()
        logprobs, _ = call(hidden, WEIGHT, TARGETS, **options)
        (grad,) = torch.autograd.grad(logprobs.exp().sum(), hidden, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.square().sum().backward()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_run_where_their_tensors_are() -> None:
    from bucketrl.kernels import linear_logprob

    there = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    hidden = HIDDEN.to(there).requires_grad_()
    logprobs, _ = linear_logprob(hidden, WEIGHT.to(there), TARGETS.to(there))
    for _ in range(2):  # the second by the launch that is kept
        loss, _ = packed_policy_loss(
            logprobs, logprobs.detach(), torch.ones(1, device=there), torch.tensor([0, 6], device=there), 6.0,
            objective=Objective(ratio_level="sequence"),
        )  # fmt: skip
    loss.backward()
    want, _ = reference.linear_logprob(HIDDEN.double(), WEIGHT.double(), TARGETS)
    torch.testing.assert_close(logprobs.detach().cpu().double(), want, atol=1e-5, rtol=1e-6)
    assert float(loss.detach()) == pytest.approx(-1.0)


def test_triton_is_told_the_tensors_device(
    triton_kernels: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered: list[Any] = []
    guard = torch.cuda.device_of

    def told(tensor: Tensor) -> Any:
        entered.append(tensor)
        return guard(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", told)
    logprobs, _ = triton_kernels.logprob.linear_logprob(
        HIDDEN, WEIGHT, TARGETS, plan=triton_kernels.logprob.Plan(block=64)
    )
    required = logprobs, torch.ones(1), torch.tensor([0, 6]), 6.0
    triton_kernels.policy.packed_policy_loss(logprobs, None, required, (None,) * 4, Objective())
    triton_kernels.policy.packed_policy_grad(logprobs, None, required, (None,) * 4, Objective())
    assert [each.device.type for each in entered] == ["cpu"] * 3
