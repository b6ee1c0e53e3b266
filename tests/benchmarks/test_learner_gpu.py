"""The learner benchmark, end to end on a tiny model, and what it makes of providers that do not fit."""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.learner_gpu.__main__ import main
from benchmarks.learner_gpu.profile import kind
from benchmarks.learner_gpu.shapes import SHAPES, storage_bytes, twin
from benchmarks.learner_gpu.trl_path import TrlPath

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_record_has_what_fits_and_names_what_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    step = TrlPath.step

    def limited(self: TrlPath, batch: Any) -> None:
        if not self.checkpointing and int(self.microbatch.split()[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        step(self, batch)

    def broken(self: TrlPath, causal: Any, config: Any, device: Any, **way: Any) -> None:
        if not way.get("autocast", True) and not way.get("checkpointing"):
            raise ImportError("no such kernel")
        make(self, causal, config, device, **way)

    make = TrlPath.__init__
    monkeypatch.setattr(TrlPath, "step", limited)
    monkeypatch.setattr(TrlPath, "__init__", broken)
    assert main(Namespace(model="tiny", rounds=2, quick=False, results=tmp_path)) == 0
    record = json.loads((tmp_path / "learner_gpu_tiny.json").read_text())
    found, details = record["figures"], record["models"]["tiny"]

    assert details["left_out"] == {"peft_trl_bf16_adapter": "ImportError: no such kernel"}
    assert found["agrees_tiny"] is True
    assert details["errors"]["bucketrl"]["gradient"] < 1e-4
    for workload, prefix in (("separate", ""), ("group", "group_")):
        times = details[workload]
        assert {name: each["microbatch"] for name, each in times.items()} == {
            "bucketrl": "384 tokens",
            "peft_trl": "4 rows",
            "peft_trl_checkpointed": "16 rows",
        }
        assert all(len(each["ms"]) == 2 for each in times.values())
        peer = min(times["peft_trl"]["median_ms"], times["peft_trl_checkpointed"]["median_ms"])
        ours = times["bucketrl"]["median_ms"]
        assert found[f"{prefix}ratio_vs_trl_path_tiny"] == pytest.approx(peer / ours)
        assert found[f"{prefix}tokens_per_s_tiny"] == pytest.approx(16 * 24 / ours * 1e3)
    by_kind = details["profile"]["by_kind"]
    assert min(by_kind[name] for name in ("gemm", "attention", "head", "elementwise")) > 0
    assert sum(by_kind.values()) == pytest.approx(details["profile"]["busy"], abs=0.1)
    assert "left out: peft_trl_bf16_adapter" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "want"),
    [
        ("nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NTN", "gemm"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu>", "gemm"),
        ("void flash::flash_bwd_kernel<Flash_bwd_kernel_traits<128, cutlass::bfloat16_t>>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7", "attention"),
        ("exp_tile", "head"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
         "elementwise"),
        ("Memcpy HtoD (Pageable -> Device)", "elementwise"),
        ("policy_loss", "our other kernels"),
        ("void something_else<int>()", "other"),
    ],
)  # fmt: skip
def test_kernels_are_told_apart_by_their_names(name: str, want: str) -> None:
    assert kind(name) == want


def test_flops_are_those_of_the_shape() -> None:
    shape = SHAPES["1.7b"]
    causal = shape.make(torch.device("meta"))
    weights = 28 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144)
    attention = 28 * 16 * 6 * 2048 * 2048 * 2048
    head = 16 * 1792 * 2048 * 151_936
    for per_weight in (4, 6):
        want = per_weight * (weights * 32_768 + head) + attention
        assert shape.flops(causal, "separate", per_weight) == pytest.approx(want)


def test_a_twin_has_the_same_weights_in_the_same_memory() -> None:
    causal = SHAPES["tiny"].make(CPU)
    other = twin(causal)
    both = [*causal.parameters(), *other.parameters()]
    assert storage_bytes(both) == storage_bytes([*causal.parameters()])
    assert other.get_decoder() is not causal.get_decoder()
    precise = twin(causal, torch.float64)
    assert precise.get_output_embeddings().weight is precise.get_input_embeddings().weight
    assert {each.dtype for each in precise.parameters()} == {torch.float64}
