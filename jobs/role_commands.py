"""`bucketrl create | proxy | rollout | learner`: what a job runs. Each needs URLs and the environment only."""

import argparse
import logging
import os
import re
import socket
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.memory_check import check_engine, check_learner
from bucketrl.jobs.models import default_cache
from bucketrl.jobs.runs import create_or_join, load_parts, open_run

if TYPE_CHECKING:
    from bucketrl.api.client import ProxyClient

logger = logging.getLogger(__name__)

WORKER_TOKEN = "BUCKETRL_WORKER_TOKEN"
READ_TOKEN = "BUCKETRL_READ_TOKEN"


def create(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    run = create_or_join(open_store(arguments.bucket), config, progress=logger.info)
    print(f"run {run.run_id} in {arguments.bucket}")
    return 0


def proxy(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    from bucketrl.proxy.server import serve

    serve(
        store,
        run,
        host=arguments.host,
        port=arguments.port,
        worker_token=os.environ.get(WORKER_TOKEN, ""),
        read_token=os.environ.get(READ_TOKEN, ""),
    )
    return 0


def rollout(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    client = connect(arguments.proxy, run)
    task, model_path = load_parts(run, progress=logger.info)
    check_engine(run.config, model_path, arguments.groups_in_flight)
    from bucketrl.rollout_worker.main import WorkerOptions, run_worker

    options = WorkerOptions(
        worker_id=arguments.id or new_member_id(),
        cache_dir=arguments.cache_dir or default_cache(),
        engine=arguments.engine,
        max_groups_in_flight=arguments.groups_in_flight,
        grace_s=arguments.grace,
        kv_cache_bytes=arguments.kv_cache_mb << 20 if arguments.kv_cache_mb else None,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        reward_processes=arguments.reward_processes,
    )
    run_worker(store, run, model_path=model_path, task=task, client=client, options=options)
    return 0


def learner(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    client = connect(arguments.proxy, run) if arguments.proxy else None
    _, model_path = load_parts(run, progress=logger.info)
    check_learner(run.config, model_path)
    from bucketrl.learner.main import LearnerOptions, run_learner

    options = LearnerOptions(
        learner_id=arguments.id or new_member_id(),
        cache_dir=arguments.cache_dir or default_cache(),
        device=cast(Literal["auto", "cpu", "cuda"], arguments.device),
        poll_s=arguments.poll,
        threads=arguments.threads,
    )
    run_learner(store, run, model_path=model_path, client=client, options=options)
    return 0


def connect(url: str, run: RunRecord) -> "ProxyClient":
    """A client of the run's proxy. Raises UserError for a wrong token or another run's proxy; one that
    does not answer may come later."""
    from bucketrl.api.client import ProxyClient

    client = ProxyClient(url, os.environ.get(WORKER_TOKEN, ""))
    try:
        status = client.run_status()
    except ProxyUnavailable as error:
        logger.warning("the proxy does not answer yet (%s): going on", error)
        return client
    except ProxyRefused as error:
        raise UserError(f"--proxy {error}; check {WORKER_TOKEN}") from None
    if status.run_id != run.run_id:
        raise UserError(f"--proxy {url}: serves run {status.run_id}, but the bucket holds {run.run_id}")
    return client


def new_member_id() -> str:
    """`<host name>-<random>`: readable, and never the same twice."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:40] or "host"
    return f"{host}-{uuid.uuid4().hex[:6]}"


def add_arguments(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    verb = verbs.add_parser("create", help="write run.json into an empty bucket; on the same run: join it")
    verb.add_argument("config", type=Path)
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.set_defaults(command=create)

    verb = verbs.add_parser("proxy", help="serve leases, the newest version and the run's status")
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--host", default="127.0.0.1", help="0.0.0.0 to be reached by others (needs tokens)")
    verb.add_argument("--port", type=int, default=8080)
    verb.set_defaults(command=proxy)

    verb = verbs.add_parser("rollout", help="sample, score and upload groups until the run is finished")
    _add_member(verb)
    verb.add_argument("--proxy", required=True, metavar="URL")
    verb.add_argument("--engine", choices=("auto", "vllm", "transformers"), default="auto")
    verb.add_argument("--groups-in-flight", type=int, default=8, metavar="N")
    verb.add_argument("--grace", type=float, default=10.0, metavar="S", help="from SIGTERM to exit")
    verb.add_argument("--kv-cache-mb", type=int, default=0, metavar="N", help="0: the engine decides")
    verb.add_argument("--gpu-memory-utilization", type=float, default=0.9, metavar="F")
    verb.add_argument("--reward-processes", type=int, default=1, metavar="N")
    verb.set_defaults(command=rollout)

    verb = verbs.add_parser("learner", help="train on what workers upload; resumes by itself")
    _add_member(verb)
    verb.add_argument("--proxy", metavar="URL", help="needed only where the store cannot serialise commits")
    verb.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    verb.add_argument("--threads", type=int, default=0, metavar="N", help="CPU threads; 0: torch decides")
    verb.add_argument("--poll", type=float, default=0.5, metavar="S", help="between listings for new groups")
    verb.set_defaults(command=learner)


def _add_member(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--bucket", required=True, metavar="URL")
    verb.add_argument("--id", default="", help="default: host name and a random part")
    verb.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="default: ~/.cache/bucketrl")
