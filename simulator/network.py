"""The way from a role to the proxy: the real client and the real application, without sockets."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from fastapi import FastAPI

from bucketrl.proxy.core import ProxyCore
from bucketrl.simulator.kernel import Crash, Kernel, Process
from bucketrl.simulator.loop import VirtualLoop

CONNECT_TIMEOUT_S = 4.0
LOSS = 0.01
"""Share of answers that do not arrive, while trouble lasts."""


@dataclass(eq=False)
class _Exchange:
    request: httpx.Request
    wake: Callable[[], None]
    answer: httpx.Response | None = None
    lost: bool = False
    """The proxy died meanwhile."""


@dataclass
class Network:
    """Where the proxy listens, and who cannot reach it."""

    kernel: Kernel
    seed: int
    lossy: bool = True
    cut_off: set[str] = field(default_factory=set)
    """Roles that cannot reach the proxy."""
    _server: tuple[Process, VirtualLoop, FastAPI] | None = None
    _pending: list[_Exchange] = field(default_factory=list)

    def listen(self, process: Process, loop: VirtualLoop, app: FastAPI) -> None:
        self._server = (process, loop, app)

    def forgotten_groups(self) -> list[int]:
        """Of the proxy that listens now, if one does: groups that nobody will ever be asked to sample."""
        if self._server is None or not self._server[2].state.follower.ready:
            return []
        core: ProxyCore = self._server[2].state.core
        return core.scheduler.forgotten()

    def connection_of(self, process: Process) -> "Connection":
        return Connection(self, process)

    def proxy_died(self) -> None:
        self._server = None
        pending, self._pending = self._pending, []
        for exchange in pending:
            exchange.lost = True
            exchange.wake()

    def send(self, exchange: _Exchange) -> None:
        """Raises httpx.ConnectError if nobody listens."""
        if self._server is None or not self._server[0].alive:
            raise httpx.ConnectError("connection refused")
        _, loop, app = self._server
        self._pending.append(exchange)
        loop.call_soon_threadsafe(lambda: loop.create_task(self._serve(app, exchange)))

    async def _serve(self, app: FastAPI, exchange: _Exchange) -> None:
        exchange.answer = await _call(app, exchange.request)
        if exchange in self._pending:
            self._pending.remove(exchange)
        exchange.wake()


class Connection(httpx.BaseTransport):
    """A process's transport for `ProxyClient`."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network = network
        self._process = process
        self._rng = random.Random(f"network/{network.seed}/{process.name}")

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if not self._process.alive:
            raise Crash
        kernel = self._network.kernel
        kernel.sleep(self._rng.uniform(0.001, 0.02))
        if self._process.role in self._network.cut_off:
            kernel.sleep(CONNECT_TIMEOUT_S)
            raise httpx.ConnectTimeout("timed out")
        exchange = _Exchange(request, kernel.waiter())
        self._network.send(exchange)
        if exchange.answer is None:
            kernel.wait(request.extensions["timeout"]["read"])
        if exchange.lost or self._process.role in self._network.cut_off:
            raise httpx.ReadError("connection reset")
        if exchange.answer is None:
            raise httpx.ReadTimeout("timed out")
        if self._network.lossy and self._rng.random() < LOSS:
            raise httpx.ReadError("connection lost")
        return exchange.answer


async def _call(app: FastAPI, request: httpx.Request) -> httpx.Response:
    """One request through the application, as a server would."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": request.url.path,
        "raw_path": request.url.raw_path.split(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "server": ("proxy", 80),
        "client": ("client", 1),
    }
    body = [{"type": "http.request", "body": request.read(), "more_body": False}]
    status, headers, content = 500, [], bytearray()

    async def receive() -> dict[str, Any]:
        return body.pop() if body else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], message["headers"]
        else:
            content.extend(message.get("body", b""))

    await app(scope, receive, send)
    return httpx.Response(status, headers=headers, content=bytes(content))
