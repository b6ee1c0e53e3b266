"""What a learner needs to go on after a step: adapter masters, AdamW moments, step and RNG.

    state.safetensors   adapter/<name>, exp_avg/<name>, exp_avg_sq/<name> (float32), rng (uint8)
    checkpoint.json     step, and the environment that wrote it

Tensors are addressed by parameter name and whole, so the files say nothing about the layout (devices,
ranks, shards) of the learner that wrote them.
"""

import json
import logging
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from bucketrl.bucket.errors import IntegrityError
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer

logger = logging.getLogger(__name__)

STATE_FILE = "state.safetensors"
DESCRIPTION_FILE = "checkpoint.json"


class Environment(BaseModel):
    """What bit-identical continuation depends on beside the checkpoint."""

    model_config = ConfigDict(frozen=True)

    torch_version: str
    device: str
    threads: int
    """Of each process."""
    data_parallel: int = 1
    """Processes that shared the step's micro-batches: for each number, gradients are summed in another order."""

    @classmethod
    def of(cls, device: torch.device, data_parallel: int) -> "Environment":
        return cls(
            torch_version=torch.__version__,
            device=device.type,
            threads=torch.get_num_threads(),
            data_parallel=data_parallel,
        )


class Description(BaseModel):
    """`checkpoint.json`."""

    model_config = ConfigDict(frozen=True)

    run_id: str
    step: int
    environment: Environment


def save(
    folder: Path,
    policy: PolicyModel,
    optimizer: Optimizer,
    *,
    run_id: str,
    step: int,
    data_parallel: int = 1,
) -> None:
    """Writes the two files into `folder`, which exists."""
    tensors = {f"adapter/{name}": value.detach() for name, value in policy.parameters.items()}
    for name, (first, second) in optimizer.moments().items():
        tensors[f"exp_avg/{name}"] = first
        tensors[f"exp_avg_sq/{name}"] = second
    tensors["rng"] = torch.get_rng_state()
    save_file(tensors, folder / STATE_FILE)
    environment = Environment.of(policy.device, data_parallel)
    description = Description(run_id=run_id, step=step, environment=environment)
    (folder / DESCRIPTION_FILE).write_text(
        json.dumps(description.model_dump(), indent=1, sort_keys=True) + "\n"
    )


def load(
    folder: Path,
    policy: PolicyModel,
    optimizer: Optimizer,
    *,
    run_id: str,
    step: int,
    data_parallel: int = 1,
) -> None:
    """Brings a freshly made policy and optimizer, and torch's generator, to the state after `step`.

    Under another environment, of another `data_parallel` for one, training goes on, equal up to rounding.
    Raises IntegrityError if `folder` is no checkpoint of that step and this adapter.
    """
    try:
        description = Description.model_validate_json((folder / DESCRIPTION_FILE).read_bytes())
        tensors = load_file(folder / STATE_FILE)
    except (OSError, ValidationError, SafetensorError) as error:
        raise IntegrityError(f"unreadable checkpoint: {str(error).splitlines()[0]}") from None
    if (description.run_id, description.step) != (run_id, step):
        raise IntegrityError(
            f"checkpoint of run {description.run_id} step {description.step}, want {run_id} step {step}"
        )
    _check_names(tensors, policy, with_moments=step > 0)
    now = Environment.of(policy.device, data_parallel)
    if now != description.environment:
        logger.warning(
            "the checkpoint was written under %s, this is %s: training goes on, but not bit for bit",
            description.environment,
            now,
        )
    with torch.no_grad():
        for name, parameter in policy.parameters.items():
            parameter.copy_(tensors[f"adapter/{name}"])
    moments = {
        name: (tensors[f"exp_avg/{name}"], tensors[f"exp_avg_sq/{name}"])
        for name in policy.parameters
        if step > 0
    }
    optimizer.restore(moments, step)
    torch.set_rng_state(tensors["rng"])


def _check_names(tensors: dict[str, torch.Tensor], policy: PolicyModel, *, with_moments: bool) -> None:
    kinds = ("adapter", "exp_avg", "exp_avg_sq") if with_moments else ("adapter",)
    want = {
        f"{kind}/{name}": tuple(value.shape) for kind in kinds for name, value in policy.parameters.items()
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name != "rng"}
    if "rng" not in tensors or found != want:
        differing = sorted(name for name in want.keys() | found.keys() if want.get(name) != found.get(name))
        raise IntegrityError(
            "checkpoint does not fit the run's adapter: "
            + (", ".join(differing[:3]) + f" ({len(differing)} in all)" if differing else "no rng")
        )
