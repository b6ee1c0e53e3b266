"""An adapter that was read ahead is the one that vLLM adds; whatever goes wrong, vLLM reads it by itself."""

import sys
import threading
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from bucketrl.rollout_worker.engines.worker_extension import ReadAhead


class Manager:
    """The parts of vLLM's WorkerLoRAManager that matter here."""

    def __init__(self) -> None:
        self.read_by: list[str] = []
        self.threads: list[int] = []
        self.packed: list[object] = []
        self._adapter_manager = SimpleNamespace(_create_merged_loras_inplace=self.packed.append)

    def _load_adapter(self, request: SimpleNamespace) -> str:
        self.read_by.append(threading.current_thread().name)
        self.threads.append(torch.get_num_threads())
        if request.lora_path == "/broken":
            raise ValueError("unexpected modules")
        return f"adapter {request.lora_int_id} of {request.lora_path}"

    def add_adapter(self, lora_id: int, path: str = "/a") -> str:
        return self._load_adapter(SimpleNamespace(lora_int_id=lora_id, lora_path=path))


@pytest.fixture(autouse=True)
def _without_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm.lora.request")
    vars(module)["LoRARequest"] = lambda name, lora_id, path: SimpleNamespace(
        lora_name=name, lora_int_id=lora_id, lora_path=path
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
    assert manager.packed == ["adapter 1 of /a", "adapter 2 of /a"]
    assert manager.add_adapter(2) == "adapter 2 of /a"
    assert manager.add_adapter(1) == "adapter 1 of /a"
    assert manager.read_by == ["adapter", "adapter"]
    manager.add_adapter(1)  # vLLM has evicted it and wants it again
    assert manager.read_by[2:] == ["MainThread"]


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


def test_the_processes_of_an_engine_are_asked_until_the_last_has_read_it() -> None:
    """Those that are done answer each time, and what is read too late for vLLM is kept by nobody."""
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1)
    assert ahead.is_over(1)
    gate = threading.Event()
    manager._adapter_manager._create_merged_loras_inplace = lambda adapter: gate.wait(5)
    ahead.begin(manager, "v-2", 2, "/a")
    assert not ahead.is_over(2)
    assert manager.add_adapter(2) == "adapter 2 of /a"
    assert manager.read_by[-1] == "MainThread"
    gate.set()
    manager.add_adapter(1)
    assert ahead._readings == {}


def test_what_cannot_be_read_ahead_is_left_to_vllm() -> None:
    ahead, manager = ReadAhead(), Manager()
    read(ahead, manager, 1, "/broken")
    with pytest.raises(ValueError, match="unexpected modules"):
        manager.add_adapter(1, "/broken")
    del manager._adapter_manager._create_merged_loras_inplace  # another version of vLLM
    read(ahead, manager, 2)
    assert manager.add_adapter(2) == "adapter 2 of /a"
    assert manager.read_by[-1] == "MainThread"
