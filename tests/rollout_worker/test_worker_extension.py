"""An adapter that was read ahead is the one that vLLM adds; whatever goes wrong, vLLM reads it by itself."""

import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from bucketrl.rollout_worker.engines.worker_extension import ReadAhead

from .engine_contract import TARGETS, make_setting

SCALING = 2.0
TENSORS = {"a": torch.randn(2, 5), "b": torch.randn(3, 2)}


class Model:
    """As vLLM's LoRAModel, of one layer."""

    def __init__(self, lora_id: int, tensors: dict[str, torch.Tensor]) -> None:
        self.id = lora_id
        self.loras = {"layer": SimpleNamespace(lora_a=tensors["a"], lora_b=tensors["b"], scaling=SCALING)}

    @classmethod
    def from_lora_tensors(cls, *, lora_model_id: int, tensors: dict[str, Any], dtype: Any) -> Any:
        return cls(lora_model_id, {name: tensor.to(dtype) for name, tensor in tensors.items()})

    @classmethod
    def from_local_checkpoint(cls, lora_id: int) -> Any:
        return cls.from_lora_tensors(lora_model_id=lora_id, tensors=dict(TENSORS), dtype=torch.bfloat16)


class Manager:
    """The parts of vLLM's WorkerLoRAManager that matter here."""

    lora_config = SimpleNamespace(max_cpu_loras=3)

    def __init__(self) -> None:
        self.read_by: list[str] = []
        self.threads: list[int] = []
        self.packed: list[Any] = []
        self._lora_model_cls: Any = Model
        self._adapter_manager: Any = SimpleNamespace(_create_merged_loras_inplace=self.packed.append)

    def _load_adapter(self, request: Any) -> Any:
        self.read_by.append(threading.current_thread().name)
        self.threads.append(torch.get_num_threads())
        if request.lora_path == "/broken":
            raise ValueError("unexpected modules")
        return self._lora_model_cls.from_local_checkpoint(request.lora_int_id)

    def add_adapter(self, lora_id: int, path: str = "/a") -> Any:
        return self._load_adapter(SimpleNamespace(lora_int_id=lora_id, lora_path=path))


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.lora.request")
    vars(module)["LoRARequest"] = lambda name, lora_id, path: SimpleNamespace(
        lora_name=name,
        lora_int_id=lora_id,
        lora_path=path,
        is_3d_lora_weight=False,
        tensorizer_config_dict=None,
    )
    monkeypatch.setitem(sys.modules, "vllm.lora.request", module)


def read(ahead: ReadAhead, manager: Manager, lora_id: int, path: str = "/a") -> None:
    ahead.begin(manager, f"v-{lora_id}", lora_id, path)
    deadline = time.monotonic() + 5
    while not ahead.is_over(lora_id):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_is_read_and_packed_in_a_thread_and_handed_over_once() -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1)
    read(ahead, manager, 2)
    second, first = manager.add_adapter(2), manager.add_adapter(1)
    assert manager.packed == [first, second]
    assert (first.id, second.id) == (1, 2)
    assert manager.read_by == ["adapter", "adapter"]
    manager.add_adapter(1)  # vLLM has evicted it and wants it again
    assert manager.read_by[2:] == ["MainThread"]


def test_it_is_converted_and_scaled_as_vllm_does_and_lies_in_one_piece() -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1)
    layer = manager.add_adapter(1).loras["layer"]
    assert layer.scaling == 1
    assert torch.equal(layer.lora_a, TENSORS["a"].bfloat16())
    assert torch.equal(layer.lora_b, TENSORS["b"].bfloat16() * SCALING)
    assert layer.lora_a.untyped_storage().data_ptr() == layer.lora_b.untyped_storage().data_ptr()


def test_the_reader_takes_one_core_and_leaves_the_others_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        ahead, manager = ReadAhead(), Manager()
        read(ahead, manager, 1)
        assert manager.threads == [1]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_what_cannot_be_read_ahead_is_left_to_vllm() -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1, "/broken")
    with pytest.raises(ValueError, match="unexpected modules"):
        manager.add_adapter(1, "/broken")
    del manager._adapter_manager._create_merged_loras_inplace  # another version of vLLM
    read(ahead, manager, 2)
    assert manager.add_adapter(2).loras["layer"].scaling == SCALING
    assert manager.read_by[-1] == "MainThread"


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")
def test_it_is_bit_for_bit_what_vllm_itself_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of the stand-in
    from vllm.config.lora import LoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager

    class RealManager(Manager):
        _load_adapter = WorkerLoRAManager._load_adapter
        lora_config = LoRAConfig(max_lora_rank=16, max_cpu_loras=3, lora_dtype=torch.bfloat16)
        max_position_embeddings = vocab_size = None

        def __init__(self) -> None:
            super().__init__()
            self._lora_model_cls = LoRAModel
            self._adapter_manager = MagicMock(
                supported_lora_modules=list(TARGETS), packed_modules_mapping={}, moe_ep_load_spec=None
            )
            self._adapter_manager.model = SimpleNamespace()

    path = str(make_setting(tmp_path).adapters[1])
    ahead, manager = ReadAhead(), RealManager()
    want = manager._load_adapter(LoRARequest("by vLLM", 1, path))
    read(ahead, manager, 1, path)
    found = ahead._ready[1]
    assert found.loras.keys() == want.loras.keys()
    for name, layer in want.loras.items():
        assert layer.scaling != 1
        layer.optimize()
        assert torch.equal(found.loras[name].optimize().lora_b, layer.lora_b)
        assert torch.equal(found.loras[name].lora_a, layer.lora_a)
