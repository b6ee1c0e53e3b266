"""The learner job: builds the parts of `loop.Learner` and runs it until the run's last step.

    bucketrl learner --bucket URL [--proxy URL] [--device cpu|cuda] [--data-parallel N]

On CPU a continued run is bit-identical to an undisturbed one with the same number of threads and processes; on a
GPU it is the same up to the rounding of its kernels.
"""

import logging
import signal
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

from bucketrl.api.client import ProxyClient, ProxyUnavailable
from bucketrl.bucket import conditional, keys
from bucketrl.bucket.counting import requests_of
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.log import LogReader, LogWriter
from bucketrl.bucket.probe import probe
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.retention import resolve_keep
from bucketrl.bucket.scratch import scratch_folder
from bucketrl.bucket.store import Store, Tier
from bucketrl.learner.batches import Batches
from bucketrl.learner.data_parallel import DataParallel, Peers
from bucketrl.learner.heartbeat import Heartbeats
from bucketrl.learner.housekeeping import Housekeeping
from bucketrl.learner.intake import Intake
from bucketrl.learner.loop import Learner
from bucketrl.learner.model import PolicyModel
from bucketrl.learner.optimizer import Optimizer
from bucketrl.learner.pacing import Arrivals
from bucketrl.learner.parts import Stopped
from bucketrl.learner.publish import Publisher
from bucketrl.learner.trainer import Trainer

logger = logging.getLogger(__name__)

PROXY_RETRY_S = 2.0


@dataclass(frozen=True, slots=True)
class LearnerOptions:
    """Choices of one machine; none of them changes what is learned."""

    learner_id: str
    """Lower case letters, digits and dashes; for people and heartbeats."""
    cache_dir: Path
    """Scratch space: adapters and checkpoints on their way to the bucket."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: the GPU if there is one."""
    poll_s: float = 2.0
    """Seconds between two listings while groups arrive that no proxy tells of; up to four times as long while none
    do."""
    threads: int = 0
    """CPU threads of torch; 0 leaves its own choice (OMP_NUM_THREADS, else the cores). Recorded in the
    checkpoint: the rounding depends on it."""
    data_parallel: int = 1
    """Processes of this machine that share each step's micro-batches, each on a GPU of its own; without GPUs they
    divide the threads among them. Recorded in the checkpoint; a run may go on with another number, equal up to
    rounding."""
    keep: int | None = None
    """Commits whose trajectories, batches and adapters stay in the bucket; 0 keeps everything, None is the
    default of `bucket/retention.py`."""


def run_learner(
    store: Store,
    run: RunRecord,
    *,
    model_path: Path,
    client: ProxyClient | None,
    options: LearnerOptions,
) -> None:
    """Trains until the last step is committed, or until SIGTERM or SIGINT; either way it returns.

    Raises UserError for what the user must change (nothing is written if it shows at the start), Fenced if
    another learner has taken over, StoreError if the store fails for good.
    """
    keep = resolve_keep(run.config, options.keep)
    stop = threading.Event()
    device = _set_up_torch(options, run.config.seed)
    with (
        scratch_folder(options.cache_dir, "learner-") as staging,
        _stop_on_signals(stop),
        Peers(
            options.data_parallel,
            partial(PolicyModel.load, model_path, run.config),
            device,
            staging / "ranks",
        ) as peers,
        Heartbeats(
            client,
            options.learner_id,
            on_drain=stop.set,
            store_requests=lambda: requests_of(store).total,
        ) as heartbeats,
    ):
        tier = _working_tier(store, client)
        logger.info("loading %s on %s", run.config.model.id, device)
        policy = PolicyModel.load(model_path, run.config, device)
        optimizer = Optimizer(policy.parameters, run.config.algorithm)
        intake = Intake(
            store,
            run,
            vocab_size=policy.vocab_size,
            learner_id=options.learner_id,
            now=_now,
            on_refused=lambda group, attempt, _: heartbeats.quarantined(str(group), attempt),
        )
        log = LogWriter(
            LogReader(store, run, from_snapshot=True),
            appender(store, tier, client, stop),
            now=_now,
            new_id=_new_id,
        )
        learner = Learner(
            run=run,
            log=log,
            trainer=Trainer(policy, optimizer, DataParallel(policy, peers) if peers.size > 1 else None),
            publisher=Publisher(store, run, policy, optimizer, staging, peers.size),
            intake=intake,
            batches=Batches(store, intake, new_id=_new_id),
            heartbeats=heartbeats,
            stop=stop,
            arrivals=Arrivals(client.uploads if client else None, poll_s=options.poll_s, stop=stop),
        )
        housekeeping = Housekeeping(
            store, run, lambda: log.state, keep=keep, learner_id=options.learner_id, now=_now
        )
        try:
            peers.wait_until_up(stop.is_set)
            with housekeeping:
                learner.learn(options.learner_id)
        except Stopped as stopped:
            logger.info("%s; the next learner goes on from the last commit", stopped)


def _set_up_torch(options: LearnerOptions, seed: int) -> torch.device:
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda: this machine has no usable GPU; use --device cpu")
    use_cuda = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    processes = options.data_parallel
    if processes < 1:
        raise UserError(f"--data-parallel {processes}: want the number of processes, from 1 on")
    if use_cuda and processes > torch.cuda.device_count():
        raise UserError(
            f"--data-parallel {processes}: each process needs a GPU, and this machine has "
            f"{torch.cuda.device_count()}"
        )
    if options.threads > 0 or processes > 1:
        torch.set_num_threads(max(1, (options.threads or torch.get_num_threads()) // processes))
    if not use_cuda:
        torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    return torch.device("cuda" if use_cuda else "cpu")


def _working_tier(store: Store, client: ProxyClient | None) -> Tier:
    """What the store has just shown that it can do. Raises UserError if commits could not be serialised."""
    report = probe(store, write_id=_new_id())
    for message in report.messages:
        logger.warning("%s: %s", store.url, message)
    if report.tier < Tier.CREATE and client is None:
        raise UserError(
            f"{store.url} cannot create objects exclusively, so the proxy must serialise commits: "
            "pass --proxy URL"
        )
    return report.tier


def appender(
    store: Store, tier: Tier, client: ProxyClient | None, stop: threading.Event
) -> Callable[[str, bytes], bytes | None]:
    """Creates a log record: in the store if it can, else through the proxy, which is waited for."""
    if tier >= Tier.CREATE:
        return partial(conditional.create, store)
    assert client is not None

    def append(key: str, data: bytes) -> bytes | None:
        seq = keys.parse_log(key)
        assert seq is not None
        while True:
            try:
                return client.append_log(seq, data)
            except ProxyUnavailable as error:
                logger.warning("%s cannot be appended (%s); trying again", key, error)
            if stop.wait(PROXY_RETRY_S):
                raise Stopped(f"asked to stop while the proxy was away; {key} may or may not be in the log")

    return append


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`. A step that is being published is still committed."""

    def handle(number: int, _frame: FrameType | None) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may have handlers; whoever runs a learner elsewhere stops it otherwise
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _new_id() -> str:
    return uuid.uuid4().hex
