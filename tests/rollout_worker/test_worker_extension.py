"""An adapter that was read ahead is the one that vLLM adds; whatever goes wrong, vLLM reads it by itself."""

import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from bucketrl.rollout_worker.engines.worker_extension import ReadAhead

from .engine_contract import TARGETS, make_setting

SCALING = 2.0
TENSORS = {
    "base_model.model.a.lora_A.weight": torch.randn(2, 5),
    "base_model.model.a.lora_B.weight": torch.randn(3, 2),
}


class Manager:
    """The parts of vLLM's WorkerLoRAManager that matter here."""

    max_position_embeddings = vocab_size = 100
    lora_config = SimpleNamespace(lora_dtype=torch.bfloat16, max_cpu_loras=3)

    def __init__(self) -> None:
        self.read_by: list[str] = []
        self.threads: list[int] = []
        self.packed: list[object] = []
        self._adapter_manager = SimpleNamespace(
            _create_merged_loras_inplace=self.packed.append, model=SimpleNamespace()
        )
        self._lora_model_cls = SimpleNamespace(from_lora_tensors=self._made)

    def _made(self, lora_id: int, tensors: dict[str, torch.Tensor], helper: Any, **options: Any) -> Any:
        self.read_by.append(threading.current_thread().name)
        self.threads.append(torch.get_num_threads())
        assert options["dtype"] == torch.bfloat16
        return SimpleNamespace(id=lora_id, tensors=tensors, scaling=helper.vllm_lora_scaling_factor)

    def _load_adapter(self, request: SimpleNamespace) -> str:
        self.read_by.append(threading.current_thread().name)
        if not Path(request.lora_path).is_dir():
            raise ValueError("no such adapter")
        return f"adapter {request.lora_int_id} by vLLM"

    def add_adapter(self, lora_id: int, folder: Path) -> Any:
        return self._load_adapter(SimpleNamespace(lora_int_id=lora_id, lora_path=str(folder)))


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_local_dir(folder: str, *_: Any) -> Any:
        return SimpleNamespace(vllm_lora_scaling_factor=SCALING, validate_legal=lambda config: None)

    module = ModuleType("vllm.lora.peft_helper")
    vars(module)["PEFTHelper"] = SimpleNamespace(from_local_dir=from_local_dir)
    monkeypatch.setitem(sys.modules, "vllm.lora.peft_helper", module)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "adapter_model.safetensors")
    return tmp_path


def read(ahead: ReadAhead, manager: Manager, lora_id: int, folder: Path) -> None:
    ahead.begin(manager, f"v-{lora_id}", lora_id, str(folder))
    deadline = time.monotonic() + 5
    while not ahead.is_over(lora_id):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_is_read_and_packed_in_a_thread_and_handed_over_once(folder: Path) -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1, folder)
    read(ahead, manager, 2, folder)
    second, first = manager.add_adapter(2, folder), manager.add_adapter(1, folder)
    assert manager.packed == [first, second]
    assert (first.id, second.id) == (1, 2)
    assert manager.read_by == ["adapter", "adapter"]
    assert manager.add_adapter(1, folder) == "adapter 1 by vLLM"  # it has evicted it and wants it again


def test_it_is_converted_and_scaled_as_vllm_does(folder: Path) -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1, folder)
    found = manager.add_adapter(1, folder)
    assert found.scaling == 1.0
    for name, tensor in TENSORS.items():
        want = tensor.bfloat16()
        torch.testing.assert_close(
            found.tensors[name], want * SCALING if "lora_B" in name else want, rtol=0, atol=0
        )


def test_the_reader_takes_one_core_and_leaves_the_others_theirs(folder: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ahead, manager = ReadAhead(), Manager()
        read(ahead, manager, 1, folder)
        assert manager.threads == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_read_ahead_is_left_to_vllm(folder: Path) -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1, folder / "missing")
    with pytest.raises(ValueError, match="no such adapter"):
        manager.add_adapter(1, folder / "missing")
    del manager._adapter_manager._create_merged_loras_inplace  # another version of vLLM
    read(ahead, manager, 2, folder)
    assert manager.add_adapter(2, folder) == "adapter 2 by vLLM"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_it_is_bit_for_bit_what_vllm_itself_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the stand-in
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    adapter = make_setting(tmp_path).adapters[1]
    manager: Any = Manager()
    manager._lora_model_cls = LoRAModel
    manager.lora_config = LoRAConfig(max_lora_rank=16, max_cpu_loras=3, lora_dtype=torch.bfloat16)
    ahead = ReadAhead()
    read(ahead, manager, 1, adapter)
    (found,) = manager.packed
    helper = PEFTHelper.from_local_dir(str(adapter), None)
    want = LoRAModel.from_local_checkpoint(
        str(adapter), set(TARGETS), helper, lora_model_id=1, device="cpu", dtype=torch.bfloat16
    )
    assert found.loras.keys() == want.loras.keys()
    for name, lora in want.loras.items():
        lora.optimize()
        assert torch.equal(found.loras[name].optimize().lora_b, lora.lora_b)
        assert torch.equal(found.loras[name].lora_a, lora.lora_a)
