"""`bucketrl create | proxy | rollout | learner`: what a job runs. Each needs URLs and the environment only.

A role's own module is imported when the role runs: a box has the packages of its role alone.
"""

import argparse
import logging
import os
import re
import socket
import uuid

from bucketrl.api.client import ProxyClient
from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.stores import open_store
from bucketrl.jobs.config_file import load_config
from bucketrl.jobs.memory_check import check_engine, check_learner
from bucketrl.jobs.models import default_cache
from bucketrl.jobs.runs import create_or_join, load_model, open_run
from bucketrl.tasks.load import load_task

logger = logging.getLogger(__name__)

WORKER_TOKEN = "BUCKETRL_WORKER_TOKEN"
READ_TOKEN = "BUCKETRL_READ_TOKEN"
FORBIDDEN = (401, 403)


def create(arguments: argparse.Namespace) -> int:
    config = load_config(arguments.config)
    store = open_store(arguments.bucket)
    run = create_or_join(store, config, progress=logger.info)
    print(f"run {run.run_id} in {store.url}")
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
    task, model_path = load_task(run.config.task), load_model(run, progress=logger.info)
    kv_cache_bytes = arguments.kv_cache_mb << 20 if arguments.kv_cache_mb else None
    if arguments.engine != "http":
        logger.info(
            check_engine(
                run.config,
                model_path,
                kv_cache_bytes=kv_cache_bytes,
                engines=arguments.engines,
                gpus_per_engine=arguments.tensor_parallel * arguments.pipeline_parallel,
            )
        )
    from bucketrl.rollout_worker.main import WorkerOptions, run_worker

    options = WorkerOptions(
        worker_id=arguments.member_id or new_member_id(),
        cache_dir=arguments.cache_dir or default_cache(),
        engine=arguments.engine,
        engine_url=arguments.engine_url,
        engines=arguments.engines,
        tensor_parallel=arguments.tensor_parallel,
        pipeline_parallel=arguments.pipeline_parallel,
        max_groups_in_flight=arguments.groups_in_flight,
        grace_s=arguments.grace,
        kv_cache_bytes=kv_cache_bytes,
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        reward_processes=arguments.reward_processes,
    )
    run_worker(store, run, model_path=model_path, task=task, client=client, options=options)
    return 0


def learner(arguments: argparse.Namespace) -> int:
    store = open_store(arguments.bucket)
    run = open_run(store)
    client = connect(arguments.proxy, run) if arguments.proxy else None
    model_path = load_model(run, progress=logger.info)
    logger.info(check_learner(run.config, model_path, arguments.data_parallel))
    from bucketrl.learner.main import LearnerOptions, run_learner

    options = LearnerOptions(
        learner_id=arguments.member_id or new_member_id(),
        cache_dir=arguments.cache_dir or default_cache(),
        device=arguments.device,
        poll_s=arguments.poll,
        threads=arguments.threads or 0,
        data_parallel=arguments.data_parallel,
        keep=arguments.keep,
    )
    run_learner(store, run, model_path=model_path, client=client, options=options)
    return 0


def connect(url: str, run: RunRecord) -> ProxyClient:
    """A client of the run's proxy. Raises UserError for a wrong token or another run's proxy; one that
    does not answer may come later."""
    client = ProxyClient(url, os.environ.get(WORKER_TOKEN, ""))
    try:
        status = client.run_status()
    except ProxyUnavailable as error:
        logger.warning("the proxy does not answer yet (%s): going on", error)
        return client
    except ProxyRefused as error:
        if error.status in FORBIDDEN:
            raise UserError(f"--proxy {error}; check {WORKER_TOKEN}") from None
        raise
    if status.run_id != run.run_id:
        raise UserError(f"--proxy {url}: serves run {status.run_id}, but the bucket holds {run.run_id}")
    return client


def new_member_id() -> str:
    """`<host name>-<random>`: readable, and never the same twice."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")[:40] or "host"
    return f"{host}-{uuid.uuid4().hex[:6]}"
