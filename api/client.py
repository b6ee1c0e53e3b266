"""The roles' HTTP client of the proxy. One call, one answer; when to try again is the caller's business."""

from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import (
    Completion,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Message,
    PolicyHead,
    Problem,
    RunStatus,
    StepSummary,
    WorkerRef,
    WorkerSummary,
)

__all__ = ["ProxyClient", "ProxyRefused", "ProxyUnavailable"]

M = TypeVar("M", bound=Message)

LONG_POLL_MARGIN_S = 10.0
"""How much longer than the proxy's promise a long poll may take."""


class ProxyClient:
    """Talks to one proxy. Thread-safe. Every method raises ProxyUnavailable or ProxyRefused."""

    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout_s: float = 10.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`token` may be empty where the proxy asks for none. `transport` replaces the network in tests."""
        self.url = url.rstrip("/")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout_s,
                transport=transport or httpx.HTTPTransport(retries=1),
            )
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ProxyRefused(0, f"proxy URL {url}: {error}; want http://host:port") from None
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._http.close()

    def policy(self, after: int, wait_s: float) -> PolicyHead | None:
        """The newest committed version if it is above `after`; otherwise None after at most `wait_s`."""
        reply = self._send(
            "GET",
            "/v1/policy",
            params={"after": after, "wait": wait_s},
            timeout=max(self._timeout_s, wait_s + LONG_POLL_MARGIN_S),
        )
        return None if reply.status_code == 204 else _parse(PolicyHead, reply)

    def lease(self, request: LeaseRequest) -> LeaseReply:
        return _parse(LeaseReply, self._post("/v1/leases", request))

    def renew(self, lease_id: str, worker_id: str) -> Lease:
        return _parse(Lease, self._post(f"/v1/leases/{lease_id}/renew", WorkerRef(worker_id=worker_id)))

    def complete(self, lease_id: str, completion: Completion) -> None:
        self._post(f"/v1/leases/{lease_id}/complete", completion)

    def release(self, lease_id: str, worker_id: str) -> None:
        self._post(f"/v1/leases/{lease_id}/release", WorkerRef(worker_id=worker_id))

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return _parse(HeartbeatReply, self._post("/v1/heartbeats", beat))

    def run_status(self) -> RunStatus:
        return _parse(RunStatus, self._send("GET", "/v1/run"))

    def workers(self) -> list[WorkerSummary]:
        return _parse_list(WorkerSummary, self._send("GET", "/v1/workers"))

    def steps(self, after: int = -1) -> list[StepSummary]:
        """Committed steps above `after`, ascending."""
        return _parse_list(StepSummary, self._send("GET", "/v1/steps", params={"after": after}))

    def append_log(self, seq: int, data: bytes) -> bytes | None:
        """Creates log record `seq` on a store that cannot: None if it now is `data`, else what is there."""
        reply = self._send("PUT", f"/v1/log/{seq}", content=data, accept_conflict=True)
        return reply.content if reply.status_code == 409 else None

    def _post(self, path: str, message: Message) -> httpx.Response:
        return self._send("POST", path, json=message.model_dump(mode="json"))

    def _send(
        self, method: str, path: str, *, accept_conflict: bool = False, **options: Any
    ) -> httpx.Response:
        try:
            reply = self._http.request(method, path, **options)
        except httpx.UnsupportedProtocol as error:
            raise ProxyRefused(0, f"proxy URL {self.url}: {error}; want http://host:port") from None
        except httpx.HTTPError as error:
            raise ProxyUnavailable(f"{self.url}: {type(error).__name__}: {error}") from None
        if reply.status_code < 400 or (accept_conflict and reply.status_code == 409):
            return reply
        message = f"{self.url}{path}: {_problem(reply)}"
        if reply.status_code == 429 or reply.status_code >= 500:
            raise ProxyUnavailable(message)
        raise ProxyRefused(reply.status_code, message)


def _problem(reply: httpx.Response) -> str:
    try:
        return Problem.model_validate_json(reply.content).error
    except ValidationError:
        return f"HTTP {reply.status_code}"


def _parse(kind: type[M], reply: httpx.Response) -> M:
    try:
        return kind.model_validate_json(reply.content)
    except ValidationError:
        raise ProxyUnavailable(f"{reply.request.url}: the answer is no {kind.__name__}") from None


def _parse_list(kind: type[M], reply: httpx.Response) -> list[M]:
    try:
        return [kind.model_validate(item) for item in reply.json()]
    except (ValueError, TypeError):
        raise ProxyUnavailable(f"{reply.request.url}: the answer is no list of {kind.__name__}") from None
