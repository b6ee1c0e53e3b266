"""Runs the proxy: checks what can be checked, binds the port, serves until SIGTERM."""

import errno
import logging
import socket
import uuid

import uvicorn

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store, Tier
from bucketrl.proxy.app import create_app
from bucketrl.proxy.auth import Tokens

logger = logging.getLogger(__name__)

LOCAL_POLL_S = 0.25
REMOTE_POLL_S = 1.0
"""One GET each while nothing is new."""
GRACE_S = 3
"""For open requests at the end; long polls are cut."""


def serve(store: Store, run: RunRecord, *, host: str, port: int, worker_token: str, read_token: str) -> None:
    """Blocks until SIGTERM or SIGINT. Raises UserError if the port or the tokens will not do."""
    tokens = Tokens(worker_token, read_token)
    tokens.check_for(host)
    bound = _bind(host, port)
    report = probe(store, write_id=uuid.uuid4().hex)
    for message in report.messages:
        logger.warning("%s: %s", store.url, message)
    app = create_app(
        store,
        run,
        tokens=tokens,
        serialise_commits=report.tier < Tier.CREATE,
        poll_s=REMOTE_POLL_S if "://" in store.url and not store.url.startswith("memory") else LOCAL_POLL_S,
    )
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=30
    )
    logger.info("proxy of run %s on http://%s:%d", run.run_id, host, bound.getsockname()[1])
    uvicorn.Server(config).run(sockets=[bound])


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except OSError as error:
        bound.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another") from None
        raise UserError(f"--host {host} --port {port}: cannot be bound: {error.strerror or error}") from None
    return bound
