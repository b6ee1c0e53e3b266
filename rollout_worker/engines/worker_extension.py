"""What runs inside vLLM's worker processes besides vLLM (`worker_extension_cls`): the watch over their parent, and
a thread that reads adapters.

vLLM reads, converts and packs an adapter between two decode steps, and every request waits meanwhile. Here a thread
does so, and `add_lora` finds the adapter ready; what is left to it is the copy to the device.
"""

import logging
import threading
from pathlib import Path
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
    """The adapters that were read and that vLLM has not asked for yet, by id."""

    def __init__(self) -> None:
        self._ready: dict[int, Any] = {}
        self._threads: dict[int, threading.Thread] = {}

    def begin(self, manager: Any, name: str, lora_id: int, path: str) -> None:
        """`manager` is vLLM's WorkerLoRAManager; from now on it asks here first."""
        spares = 0
        if "_load_adapter" not in vars(manager):
            spares = manager.lora_config.max_cpu_loras
            load = manager._load_adapter
            manager._load_adapter = lambda request: (
                self._ready.pop(request.lora_int_id, None) or load(request)
            )
        arguments = (manager, name, lora_id, Path(path), spares)
        thread = threading.Thread(target=self._read, args=arguments, name="adapter", daemon=True)
        self._threads[lora_id] = thread
        thread.start()

    def is_over(self, lora_id: int) -> bool:
        if self._threads[lora_id].is_alive():
            return False
        del self._threads[lora_id]
        return True

    def _read(self, manager: Any, name: str, lora_id: int, folder: Path, spares: int) -> None:
        import torch

        # Of this thread alone. A new thread's first parallel operation starts a team of threads, and each later one
        # waits until the last of them got a core.
        torch.set_num_threads(1)
        try:
            adapter = _read_at_once(manager, lora_id, folder, spares)
            manager._adapter_manager._create_merged_loras_inplace(adapter)
        except Exception as error:  # noqa: BLE001 - vLLM reads it again, and reports what is wrong as it always does
            logger.warning("adapter %s was not read ahead: %s", name, error)
        else:
            self._ready[lora_id] = adapter


def _read_at_once(manager: Any, lora_id: int, folder: Path, spares: int) -> Any:
    """What vLLM's `_load_adapter` makes, in few operations on all tensors.

    After every operation that is long enough for the engine's thread to go on, this one waits milliseconds until it
    may. vLLM converts, copies and scales each of some 400 tensors by itself: seconds, on an engine that is busy.
    """
    import torch
    from safetensors.torch import load_file
    from vllm.lora.peft_helper import PEFTHelper

    helper = PEFTHelper.from_local_dir(str(folder), manager.max_position_embeddings)
    helper.validate_legal(manager.lora_config)
    read = load_file(folder / "adapter_model.safetensors")
    sizes, dtype = [tensor.numel() for tensor in read.values()], manager.lora_config.lora_dtype
    # Pinned memory comes from the driver, which is slow and has the engine wait. So it is one piece, and PyTorch
    # keeps the spare ones for the adapters to come, which are as large.
    pinned = torch.cuda.is_available()
    whole, *_ = [torch.empty(sum(sizes), dtype=dtype, pin_memory=pinned) for _ in range(1 + spares)]
    parts = zip(read.items(), whole.split(sizes), strict=True)  # type: ignore[no-untyped-call]
    tensors = {name: part.view(tensor.shape) for (name, tensor), part in parts}
    torch._foreach_copy_([*tensors.values()], [*read.values()])
    torch._foreach_mul_(
        [tensor for name, tensor in tensors.items() if ".lora_B." in name], helper.vllm_lora_scaling_factor
    )
    helper.vllm_lora_scaling_factor = 1.0
    model = manager._adapter_manager.model
    return manager._lora_model_cls.from_lora_tensors(
        lora_id,
        tensors,
        helper,
        device="cpu",
        dtype=dtype,
        model_vocab_size=manager.vocab_size,
        weights_mapper=getattr(model, "hf_to_vllm_mapper", None),
        skip_prefixes=getattr(model, "lora_skip_prefixes", None),
    )


_ahead = ReadAhead()
