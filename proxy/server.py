"""Runs the proxy: checks what can be checked, binds the port, serves until SIGTERM."""

import errno
import logging
import socket
import uuid
from collections.abc import Callable

import uvicorn

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store, Tier
from bucketrl.proxy.app import create_app
from bucketrl.proxy.auth import Tokens

logger = logging.getLogger(__name__)

LOCAL_POLL_S = 0.25
REMOTE_POLL_S = 2.0
"""One GET each while nothing is new; rarer while a learner tells of its commits."""
GRACE_S = 3
"""For open requests at the end."""


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_stop = on_stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._on_stop()
        await super().shutdown(sockets)


def serve(store: Store, run: RunRecord, *, host: str, port: int, worker_token: str, read_token: str) -> None:
    """Blocks until SIGTERM or SIGINT, then ends what is in flight and lets the signal take its effect.

    Raises UserError if the port or the tokens will not do; any other error that ends the following of
    the bucket passes through, because a proxy that does not see the log would only hold everybody up.
    """
    tokens = Tokens(worker_token, read_token)
    tokens.check_for(host)
    bound = _bind(host, port)
    report = probe(store, write_id=uuid.uuid4().hex)
    for message in report.messages:
        logger.warning("%s: %s", store.url, message)
    failures: list[BaseException] = []

    def stop_for(error: BaseException) -> None:
        failures.append(error)
        server.should_exit = True

    app = create_app(
        store,
        run,
        tokens=tokens,
        serialise_commits=report.tier < Tier.CREATE,
        poll_s=REMOTE_POLL_S if _is_remote(store.url) else LOCAL_POLL_S,
        on_failure=stop_for,
    )
    config = uvicorn.Config(
        app, access_log=False, log_level="warning", timeout_graceful_shutdown=GRACE_S, timeout_keep_alive=30
    )
    server = _Server(config, on_stop=app.state.follower.end_waits)
    shown = f"[{host}]" if ":" in host else host
    logger.info("proxy of run %s on http://%s:%d", run.run_id, shown, bound.getsockname()[1])
    server.run(sockets=[bound])
    if failures:
        raise failures[0]


def _is_remote(url: str) -> bool:
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme not in ("memory", "file")


def _bind(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        bound.listen(128)
    except (OSError, OverflowError) as error:
        bound.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise UserError(f"--port {port}: in use on {host}; choose another") from None
        raise UserError(f"--host {host} --port {port}: cannot be bound: {error}") from None
    return bound
