"""A process that only makes gradients, for rank 0 of a data-parallel learner: what it is told and answers.

    rank 0: the learner                                    ranks 1 … N-1: a replica each
      │ ──── Begin, Accumulate, Reduce, Abandon ─── pipe ──► │
      │ ◄─── statistics, Failed ─────────────────── pipe ─── │
      └ ◄─── parameters, gradients ───── gloo or NCCL ─────► ┘

Begin and Accumulate have one answer each. Nobody enters a collective that another may not reach: gradients are
summed when all have answered. A process that dies closes its pipe, which rank 0 sees at once.
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, parent_process
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.learner.flat import flat, flat_gradients, views
from bucketrl.learner.metrics import TokenStatistics
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.objective import Denominators
from bucketrl.learner.packing import MicroBatch
from bucketrl.learner.parts import Stopped
from bucketrl.learner.trainer import Replica

COLLECTIVE_TIMEOUT = timedelta(minutes=2)
"""For a process that is alive and stuck: all are idle when a collective begins."""

Load = Callable[[torch.device], PolicyModel]
"""Makes the policy on a device, in any process: it is pickled."""


@dataclass(frozen=True, slots=True)
class Begin:
    """`Gradients.begin`; the parameters follow."""

    step: int
    updates: Sequence[Sequence[MicroBatch]]
    """The micro-batches of this rank."""


@dataclass(frozen=True, slots=True)
class Accumulate:
    """`Gradients.accumulate`; the parameters follow if they are no longer those of the step's begin."""

    update: int
    denominators: Denominators


@dataclass(frozen=True, slots=True)
class Reduce:
    """Hand over the gradients."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """Answer the task under way before its end. Without meaning to one that has just answered."""


@dataclass(frozen=True, slots=True)
class Failed:
    """In place of an answer: the process ends."""

    message: str
    wrong_input: bool


Task = Begin | Accumulate
Answer = list[TokenStatistics]


def join(rank: int, size: int, device: torch.device, store: Path) -> None:
    """Returns when all ranks are here. `store`: a file that they share, made by the first."""
    if device.type == "cpu":
        # All are on this machine: nothing listens where others could connect.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def serve(
    rank: int, size: int, load: Load, device_type: str, threads: int, store: Path, pipe: Connection
) -> None:
    """What a peer's process runs."""
    # A signal to the whole process group is for rank 0 to act on.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_die_with_parent, name="parent watch", daemon=True).start()
    try:
        torch.set_num_threads(threads)
        if device_type == "cuda":
            torch.cuda.set_device(rank)
            device = torch.device("cuda", rank)
        else:
            torch.use_deterministic_algorithms(True)
            device = torch.device("cpu")
        policy = load(device)
        pipe.send([])
        join(rank, size, device, store)
        _answer_tasks(policy, pipe)
        dist.destroy_process_group()
    except (EOFError, ConnectionError):
        os._exit(1)  # rank 0 has gone: there is nobody to take leave of
    except BucketrlError as error:
        pipe.send(Failed(str(error), isinstance(error, UserError)))
        sys.exit(1)
    except Exception as error:
        pipe.send(Failed(f"{type(error).__name__}: {error}", False))
        raise


def _answer_tasks(policy: PolicyModel, pipe: Connection) -> None:
    replica = Replica(policy)
    while (message := pipe.recv()) is not None:
        if isinstance(message, Begin | Accumulate):
            pipe.send(_do(message, replica, policy.parameters, pipe.poll))
        elif isinstance(message, Reduce):
            dist.reduce(flat_gradients(policy.parameters), 0)


def _do(
    task: Task, replica: Replica, parameters: Mapping[str, nn.Parameter], abandoned: Callable[[], bool]
) -> Answer:
    """While a task is under way, Abandon is all that can arrive."""
    if isinstance(task, Begin) or task.update > 0:
        received = flat(list(parameters.values()))
        dist.broadcast(received, 0)
        with torch.no_grad():
            for parameter, value in views(received, parameters):
                parameter.copy_(value)
    try:
        if isinstance(task, Begin):
            replica.begin(task.updates, task.step, abandoned)
            return []
        for parameter in parameters.values():
            parameter.grad = None
        return replica.accumulate(task.update, task.denominators, abandoned)
    except Stopped:
        return []


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
