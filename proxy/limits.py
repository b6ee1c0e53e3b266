"""What one client may ask for: body sizes and request rates. Pure ASGI, before any parsing."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY = 64 << 10
MAX_LOG_BODY = 4 << 20
"""Of `PUT /v1/log/{seq}`: a commit record with its canary and a few thousand groups."""
RATE_PER_S = 500.0
BURST = 1000.0
"""Per address. A thousand workers behind one address send 200 heartbeats and 200 idle requests a second;
what remains stops a client that runs wild."""
MAX_CLIENTS = 4096


@dataclass
class RateLimiter:
    """A token bucket per client address. `clock` is monotonic seconds."""

    clock: Callable[[], float]
    rate: float = RATE_PER_S
    burst: float = BURST
    _buckets: dict[str, tuple[float, float]] = field(default_factory=dict)

    def allow(self, client: str) -> bool:
        now = self.clock()
        tokens, since = self._buckets.pop(client, (self.burst, now))
        tokens = min(self.burst, tokens + (now - since) * self.rate)
        allowed = tokens >= 1.0
        self._buckets[client] = (tokens - 1.0 if allowed else tokens, now)
        if len(self._buckets) > MAX_CLIENTS:
            del self._buckets[next(iter(self._buckets))]  # the one that asked longest ago
        return allowed


class Limits:
    """ASGI middleware. Answers 429 and 413 itself."""

    def __init__(self, app: ASGIApp, limiter: RateLimiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        client = scope.get("client") or ("unknown", 0)
        if not self._limiter.allow(str(client[0])):
            await _answer(send, 429, "too many requests from this address; slow down", retry_after=1)
            return
        limit = MAX_LOG_BODY if scope["path"].startswith("/v1/log/") else MAX_BODY
        body = await _read(receive, limit)
        if body is None:
            await _answer(send, 413, f"body is larger than {limit} bytes")
            return
        given = False

        async def replay() -> Message:
            nonlocal given
            if given:
                return await receive()
            given = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self._app(scope, replay, send)


async def _read(receive: Receive, limit: int) -> bytes | None:
    """The whole body, or None if it is longer than `limit`."""
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > limit:
            return None
        # A client that went away mid-body leaves a torn one, which no route can parse.
        if message["type"] != "http.request" or not message.get("more_body"):
            return bytes(body)


async def _answer(send: Send, status: int, error: str, retry_after: int | None = None) -> None:
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if retry_after is not None:
        headers.append((b"retry-after", str(retry_after).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
