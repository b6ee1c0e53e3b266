"""Data parallelism: the micro-batches of an update are shared out among processes, their gradients summed.

    rank 0    parameters ──broadcast──► own micro-batches ──┐
    rank 1 …            └─────────────► their micro-batches ┴──reduce──► rank 0: clip, AdamW

Every micro-batch's loss is divided by the denominators of the whole update, so the sum is the gradient of one
process, however many there are. Rank 0 alone holds the optimizer, the bucket and the run's state: others have
the parameters that they were given for an update, so that no two ranks can drift apart, and nothing has to be
restored or undone anywhere else. A broadcast and a reduction move as many bytes as one all-reduce.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist

from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.learner.flat import flat, flat_gradients, views
from bucketrl.learner.metrics import TokenStatistics
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.objective import Denominators
from bucketrl.learner.packing import MicroBatch
from bucketrl.learner.parts import Stopped
from bucketrl.learner.peer_process import (
    Abandon,
    Accumulate,
    Answer,
    Begin,
    Failed,
    Load,
    Reduce,
    Task,
    join,
    serve,
)
from bucketrl.learner.trainer import Replica

POLL_S = 0.1
"""Between two looks whether to stop, while others are at work."""
COLLECTIVE_POLL_S = 0.0005
"""Between two looks whether a collective is done, which nothing tells of."""
END_S = 10.0
"""For a process to end once it is told to; then it is killed."""


class PeerLost(BucketrlError):
    """A process of the data-parallel learner has died or failed."""


def share_out(tokens: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, the indices of its micro-batches, ascending. `tokens`: of each micro-batch.

    The longest first, each to the rank with the fewest tokens so far: the busiest rank has at most 4/3 of what
    the best split would give it (Graham 1969, Bounds on multiprocessing timing anomalies).
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(tokens)), key=lambda index: (-tokens[index], index)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += tokens[index]
    return [sorted(share) for share in shares]


class Peer:
    """What rank 0 holds of another rank's process."""

    def __init__(self, process: BaseProcess, pipe: Connection, name: str) -> None:
        self.process = process
        self.pipe = pipe
        self.busy = True
        """It owes an answer: at first, that it is ready."""
        self._name = name

    def send(self, message: Task | Reduce | Abandon | None) -> None:
        try:
            self.pipe.send(message)
        except OSError:
            raise self.lost() from None
        self.busy = self.busy or isinstance(message, Begin | Accumulate)

    def receive(self) -> Answer:
        try:
            answer: Answer | Failed = self.pipe.recv()
        except (EOFError, OSError):
            raise self.lost() from None
        if isinstance(answer, Failed):
            raise (UserError if answer.wrong_input else PeerLost)(f"{self._name}: {answer.message}")
        self.busy = False
        return answer

    def lost(self) -> PeerLost:
        self.process.join(END_S)
        return PeerLost(
            f"{self._name} has died (exit code {self.process.exitcode}): if memory ran out, take fewer "
            "processes or lower learner.tokens_per_microbatch; the next learner goes on from the last commit"
        )


class Peers:
    """The processes of ranks 1 to `size` - 1, from entering to leaving the context. They load at once, each on a
    device of its own type `device`, and they die with this process, whatever kills it. They find each other by
    the file `store`, which must not exist yet."""

    def __init__(self, size: int, load: Load, device: torch.device, store: Path) -> None:
        self.size = size
        self._load = load
        self._device = device
        self._store = store
        self._peers: list[Peer] = []

    def __enter__(self) -> "Peers":
        try:
            for rank in range(1, self.size):
                self._start(rank)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        joined = dist.is_initialized()
        whole = joined and all(peer.process.is_alive() and not peer.busy for peer in self._peers)
        for peer in self._peers:
            if whole:
                with suppress(PeerLost):
                    peer.send(None)
            else:
                peer.process.kill()
        if joined:
            if not whole and dist.group.WORLD is not None:
                dist.group.WORLD.abort()
            dist.destroy_process_group()
        for peer in self._peers:
            peer.process.join(END_S)
            peer.process.kill()
            peer.process.join()
            peer.pipe.close()

    def _start(self, rank: int) -> None:
        context = get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=serve,
            args=(
                rank,
                self.size,
                self._load,
                self._device.type,
                torch.get_num_threads(),
                self._store,
                theirs,
            ),
            name=f"learner rank {rank}",
            daemon=True,
        )
        process.start()
        theirs.close()  # else its end would not be seen
        self._peers.append(Peer(process, ours, f"process {rank} of --data-parallel {self.size}"))

    def wait_until_up(self, stopping: Callable[[], bool]) -> None:
        """Returns when all have loaded. Raises UserError, PeerLost, Stopped."""
        self.answers(stopping)
        if self.size > 1:
            join(0, self.size, self._device, self._store)

    def send(self, tasks: Sequence[Task | Reduce]) -> None:
        """One for each, in order of ranks."""
        for peer, task in zip(self._peers, tasks, strict=True):
            peer.send(task)

    def answers(self, stopping: Callable[[], bool]) -> list[Answer]:
        """In order of ranks, when all are there. Raises PeerLost, Stopped."""
        found: dict[Peer, Answer] = {}
        while busy := [peer for peer in self._peers if peer.busy]:
            if stopping():
                raise Stopped("asked to stop while other processes of the learner were at work")
            ready = connection.wait([peer.pipe for peer in busy], POLL_S)
            found |= {peer: peer.receive() for peer in busy if peer.pipe in ready}
        return [found[peer] for peer in self._peers]

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """An exception inside ends what they do as well; afterwards they are ready for another task."""
        try:
            yield
        except BaseException:
            with suppress(BucketrlError):  # the first exception says more
                for peer in self._peers:
                    if peer.busy:
                        peer.send(Abandon())
                while busy := [peer for peer in self._peers if peer.busy]:
                    for peer in busy:
                        peer.receive()
            raise

    def finish(self, work: dist.Work) -> None:
        """Waits for a collective. Raises PeerLost as soon as one that should take part has died."""
        sentinels = {peer.process.sentinel: peer for peer in self._peers}
        while not work.is_completed():
            for sentinel in connection.wait(list(sentinels), COLLECTIVE_POLL_S):
                assert isinstance(sentinel, int)
                raise sentinels[sentinel].lost()
        try:
            work.wait()
        except RuntimeError as error:
            for sentinel in connection.wait(list(sentinels), END_S):
                assert isinstance(sentinel, int)
                raise sentinels[sentinel].lost() from None
            raise PeerLost(f"--data-parallel {self.size}: the processes lost each other: {error}") from None


class DataParallel:
    """The gradients of rank 0's policy (`trainer.Gradients`), made by all ranks. Both methods raise PeerLost."""

    def __init__(self, policy: PolicyModel, peers: Peers) -> None:
        self._parameters = policy.parameters
        self._replica = Replica(policy)
        self._peers = peers
        self._shares: list[list[list[int]]] = []

    def begin(self, updates: Sequence[Sequence[MicroBatch]], step: int, stopping: Callable[[], bool]) -> None:
        ranks = range(self._peers.size)
        self._shares = [
            share_out([len(batch.input_ids) for batch in batches], len(ranks)) for batches in updates
        ]
        own, *others = [
            [
                [batches[index] for index in shares[rank]]
                for batches, shares in zip(updates, self._shares, strict=True)
            ]
            for rank in ranks
        ]
        self._peers.send([Begin(step, other) for other in others])
        self._broadcast()
        with self._peers.at_work():
            self._replica.begin(own, step, stopping)
            self._peers.answers(stopping)

    def accumulate(
        self, update: int, denominators: Denominators, stopping: Callable[[], bool]
    ) -> list[TokenStatistics]:
        others = self._peers.size - 1
        self._peers.send([Accumulate(update, denominators)] * others)
        if update > 0:
            self._broadcast()
        with self._peers.at_work():
            own = self._replica.accumulate(update, denominators, stopping)
            by_rank = [own, *self._peers.answers(stopping)]
        self._peers.send([Reduce()] * others)
        self._reduce()
        by_index = {
            index: statistics
            for share, of_rank in zip(self._shares[update], by_rank, strict=True)
            for index, statistics in zip(share, of_rank, strict=True)
        }
        return [by_index[index] for index in sorted(by_index)]

    def _broadcast(self) -> None:
        self._peers.finish(dist.broadcast(flat(list(self._parameters.values())), 0, async_op=True))

    def _reduce(self) -> None:
        total = flat_gradients(self._parameters)
        self._peers.finish(dist.reduce(total, 0, async_op=True))
        for parameter, gradient in views(total, self._parameters):
            parameter.grad = gradient
