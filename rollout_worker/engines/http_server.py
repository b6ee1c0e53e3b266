"""vLLM's OpenAI server over HTTP: its endpoints as 0.24 to 0.33 share them, what its answers mean, and patience
with a server that is busy or restarts.
"""

import asyncio
import json
import logging
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import httpx

from bucketrl.bucket.errors import BucketrlError, UserError

logger = logging.getLogger(__name__)

T = TypeVar("T")

KEY_VARIABLE = "BUCKETRL_ENGINE_KEY"
OUTAGE_S = 300.0
"""A server that fails for this long is taken as gone. Restarting one takes minutes."""
RETRY_S, RETRY_CAP_S = 0.5, 15.0
_CONNECT_S = 10.0
_READ_S = 600.0
"""Between two chunks, too: a request may wait that long for its turn inside the server."""
_BUSY = (429, 502, 503, 504)
_SENDABLE = re.compile(r"[!-~]*")


class ServerRefused(BucketrlError):
    """The server answered, and the same request again would get the same answer."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"HTTP {status}: {' '.join(reason.split())[:400]}")
        self.status = status
        self.reason = reason


class ServerAway(BucketrlError):
    """No answer, or one that says to come again. `status` is 0 if there was none."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class VllmServer:
    """One server. Methods raise ServerRefused, ServerAway, and UserError if the key is wrong."""

    def __init__(self, url: str, key: str, *, rng: random.Random) -> None:
        """`key` may be empty."""
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise UserError(f"engine URL: it carries credentials; want http://host:port, and {KEY_VARIABLE}")
        if not _SENDABLE.fullmatch(key):
            # Checked here because the HTTP library would quote the key in its error.
            raise UserError(f"{KEY_VARIABLE}: it has white space or characters that a header cannot carry")
        self.url = url.rstrip("/").removesuffix("/v1")
        # No pool limits: each running request holds a connection, and the engine's caller bounds requests.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        try:
            if httpx.URL(self.url).scheme not in ("http", "https"):
                raise httpx.InvalidURL("no http:// or https://")
            self._http = httpx.AsyncClient(
                base_url=self.url,
                headers={"Authorization": f"Bearer {key}"} if key else {},
                timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
                limits=limits,
                trust_env=False,
            )
        except httpx.InvalidURL as error:
            raise UserError(f"engine URL {self.url!r}: {error}; want http://host:port") from None
        self._rng = rng
        self._answers = True

    async def close(self) -> None:
        await self._http.aclose()

    async def health(self) -> None:
        await self._send("GET", "/health")

    async def version(self) -> str:
        return str(_json(await self._send("GET", "/version")).get("version", "of unknown version"))

    async def models(self, *, fresh: bool = False) -> dict[str, dict[str, Any]]:
        """Cards of the base model and of all adapters, by name. `fresh`: the next request opens a connection."""
        headers = {"Connection": "close"} if fresh else {}
        return {card["id"]: card for card in _json(await self._send("GET", "/v1/models", headers))["data"]}

    async def metrics(self) -> str:
        """Empty if the server shows none."""
        try:
            return (await self._send("GET", "/metrics")).text
        except ServerRefused:
            return ""

    async def load_adapter(self, name: str, folder: Path) -> None:
        """`folder` is what the server reads from. May be repeated."""
        body = {"lora_name": name, "lora_path": _absolute(folder)}
        try:
            await self._send("POST", "/v1/load_lora_adapter", body=body)
        except ServerRefused as error:
            # An earlier attempt worked, and its answer was lost.
            if "already been loaded" not in error.reason:
                raise

    async def unload_adapter(self, name: str) -> None:
        """No error if it is not there."""
        try:
            await self._send("POST", "/v1/unload_lora_adapter", body={"lora_name": name})
        except ServerRefused as error:
            if error.status != 404:
                raise

    async def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices, in the order of the prompts. Status 404 also if another model made them."""
        reply = _json(await self._send("POST", "/v1/completions", body=body))
        if reply.get("model") != body["model"]:
            raise ServerRefused(404, f"asked for {body['model']}, answered by {reply.get('model')}")
        return sorted(reply["choices"], key=lambda choice: int(choice["index"]))

    async def stream(self, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a completion. Closing the iterator ends the request in the server."""
        done = False
        try:
            async with self._http.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                if reply.status_code != 200:
                    await reply.aread()
                self._check(reply)
                async for line in reply.aiter_lines():
                    # Other lines separate events or keep the connection alive.
                    if line == "data: [DONE]":
                        done = True
                    elif line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "choices" not in event:
                            raise ServerRefused(500, _reason(event))
                        yield event
        except httpx.HTTPError as error:
            raise self._away(error) from None
        except ValueError:
            raise ServerRefused(200, "the stream holds an event that is no JSON") from None
        if not done:
            raise ServerAway(0, f"{self.url}: the stream ended early")

    async def persist(self, call: Callable[[], Awaitable[T]]) -> T:
        """`call`, again and again while the server is away, for OUTAGE_S at most after its first failure: how long
        it waited for its turn before that is no outage.

        Raises UserError if it has not answered until then, ServerRefused if it said to come again.
        """
        away_since, failures = 0.0, 0
        while True:
            try:
                result = await call()
            except ServerAway as error:
                if self._answers:
                    self._answers = False
                    logger.warning("the engine's server does not serve (%s); trying again", error)
                delay = min(RETRY_S * 2**failures, RETRY_CAP_S) * self._rng.uniform(0.5, 1.0)
                away_since = away_since if failures else time.monotonic()
                failures += 1
                if time.monotonic() - away_since + delay <= OUTAGE_S:
                    await asyncio.sleep(delay)
                elif error.status:
                    raise ServerRefused(error.status, f"{error}, for {OUTAGE_S:g} s") from None
                else:
                    raise UserError(
                        f"engine: no answer for {OUTAGE_S:g} s ({error}); is `vllm serve` running there?"
                    ) from None
            else:
                if not self._answers:
                    self._answers = True
                    logger.warning("the engine's server serves again")
                return result

    async def _send(
        self, method: str, path: str, headers: dict[str, str] | None = None, body: Any = None
    ) -> httpx.Response:
        try:
            reply = await self._http.request(method, path, headers=headers, json=body)
        except httpx.HTTPError as error:
            raise self._away(error) from None
        self._check(reply)
        return reply

    def _check(self, reply: httpx.Response) -> None:
        status = reply.status_code
        if status < 300:
            return
        if status in (401, 403):
            raise UserError(
                f"engine {self.url}: the server refuses the key; set {KEY_VARIABLE} to the one of its --api-key"
            )
        try:
            reason = _reason(reply.json())
        except ValueError:
            reason = reply.reason_phrase
        if status in _BUSY:
            raise ServerAway(status, f"{self.url}: HTTP {status}: {reason[:200]}")
        raise ServerRefused(status, reason)

    def _away(self, error: httpx.HTTPError) -> ServerAway:
        return ServerAway(0, f"{self.url}: {type(error).__name__}: {error}".rstrip(": "))


def _absolute(folder: Path) -> str:
    return str(folder.absolute())


def _json(reply: httpx.Response) -> dict[str, Any]:
    try:
        document = reply.json()
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise ServerRefused(reply.status_code, f"{reply.request.url.path}: the answer is no JSON object")
    return document


def _reason(answer: Any) -> str:
    """vLLM says {"error": {"message": …}}, its middleware {"error": …}, its web framework {"detail": …}."""
    error = answer.get("error", answer) if isinstance(answer, dict) else answer
    if isinstance(error, dict):
        return str(error.get("message") or error.get("detail") or error)
    return str(error)
