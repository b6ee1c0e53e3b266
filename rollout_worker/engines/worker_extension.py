"""What runs inside vLLM's worker processes besides vLLM (`worker_extension_cls`): the watch over their parent, and
a thread that reads adapters.

vLLM reads, converts and packs an adapter between two decode steps, and every request waits meanwhile. Here a thread
does so, and `add_lora` finds the adapter ready; what is left to it is the copy to the device.
"""

import logging
import threading
from typing import Any

from bucketrl.rollout_worker.engines import parent_watch  # noqa: F401 - importing it begins the watch

logger = logging.getLogger(__name__)


class WorkerExtension:
    """Mixed into vLLM's worker class. Its methods are called by `collective_rpc`."""

    model_runner: Any

    def bucketrl_read_adapter(self, name: str, lora_id: int, path: str) -> None:
        """Begins to read the adapter; `bucketrl_has_read` says when that is over."""
        _ahead.begin(self.model_runner.lora_manager, name, lora_id, path)

    def bucketrl_has_read(self, lora_id: int) -> bool:
        return _ahead.is_over(lora_id)


class ReadAhead:
    """The adapters that are read, or were, and that vLLM has not asked for yet, by id."""

    def __init__(self) -> None:
        self._readings: dict[int, _Reading] = {}

    def begin(self, manager: Any, name: str, lora_id: int, path: str) -> None:
        """`manager` is vLLM's WorkerLoRAManager; from now on it asks here first."""
        if "_load_adapter" not in vars(manager):
            load = manager._load_adapter
            manager._load_adapter = lambda request: self._taken(request.lora_int_id) or load(request)
        self._readings[lora_id] = _Reading(manager, name, lora_id, path)
        self._readings[lora_id].start()

    def is_over(self, lora_id: int) -> bool:
        """May be asked again: all processes of an engine are, until the last of them has read it. An answer that is
        an error would leave those of the others behind, for the next call to take for its own."""
        return not self._readings[lora_id].is_alive()

    def _taken(self, lora_id: int) -> Any:
        """None if it is not ready, and then its thread's result is nobody's."""
        reading = self._readings.pop(lora_id, None)
        return reading and reading.adapter


class _Reading(threading.Thread):
    """One adapter on its way."""

    adapter: Any = None
    """What vLLM makes of the files; None until it is read, and if it cannot be."""

    def __init__(self, manager: Any, name: str, lora_id: int, path: str) -> None:
        super().__init__(name="adapter", daemon=True)
        self._manager = manager
        self._which = (name, lora_id, path)

    def run(self) -> None:
        import torch
        from vllm.lora.request import LoRARequest

        # Of this thread alone. A new thread's first parallel operation starts a team of threads, and each later one
        # waits until the last of them got a core: on a busy machine that took seconds.
        torch.set_num_threads(1)
        try:
            # Of the class: the instance's own one would ask here.
            adapter = type(self._manager)._load_adapter(self._manager, LoRARequest(*self._which))
            self._manager._adapter_manager._create_merged_loras_inplace(adapter)
        except Exception as error:  # noqa: BLE001 - vLLM reads it again, and reports what is wrong as it always does
            logger.warning("adapter %s was not read ahead: %s", self._which[0], error)
        else:
            self.adapter = adapter


_ahead = ReadAhead()
