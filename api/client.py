"""The roles' HTTP client of the proxy. One call, one answer; when to try again is the caller's business."""

import re
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from bucketrl.api.errors import ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import (
    Completion,
    GroupStatus,
    Heartbeat,
    HeartbeatReply,
    Lease,
    LeaseReply,
    LeaseRequest,
    Message,
    PolicyHead,
    Problem,
    Release,
    RunStatus,
    StepSummary,
    UploadedGroups,
    WorkerRef,
    WorkerSummary,
)

__all__ = ["ProxyClient", "ProxyRefused", "ProxyUnavailable"]

M = TypeVar("M", bound=Message)

LONG_POLL_MARGIN_S = 10.0
"""How much longer than the proxy's promise a long poll may take."""
_SENDABLE = re.compile(r"[!-~]*")


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
        """`token` may be empty where the proxy asks for none. `transport` replaces the network in tests.

        Raises ProxyRefused for a URL or a token that cannot be used.
        """
        self.url = url.rstrip("/")
        if "@" in url.partition("://")[2].partition("/")[0]:
            raise ProxyRefused(0, "the proxy URL carries credentials; want http://host:port and a token")
        if not _SENDABLE.fullmatch(token):
            # Checked here because the HTTP library would quote the token in its error.
            raise ProxyRefused(0, "the token contains white space or characters that a header cannot carry")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._http = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=timeout_s,
                transport=transport or httpx.HTTPTransport(),
            )
        except httpx.InvalidURL as error:
            raise self._bad_url(error) from None
        self._timeout_s = timeout_s

    def close(self) -> None:
        self._http.close()

    def policy(self, after: int, wait_s: float) -> PolicyHead | None:
        """The newest committed version if it is above `after`; otherwise None after at most `wait_s` (which
        the proxy allows up to 30)."""
        reply = self._poll("/v1/policy", wait_s, after=after)
        return None if reply.status_code == 204 else _parse(PolicyHead, reply)

    def uploads(self, groups: int, log_seq: int, wait_s: float) -> UploadedGroups:
        """How many unconsumed groups are in the bucket: once there are `groups` and the proxy has read the log
        up to `log_seq`, or after `wait_s` (at most 30)."""
        return _parse(UploadedGroups, self._poll("/v1/uploads", wait_s, groups=groups, log_seq=log_seq))

    def lease(self, request: LeaseRequest) -> LeaseReply:
        return _parse(LeaseReply, self._post("/v1/leases", request))

    def renew(self, lease_id: str, worker_id: str) -> Lease:
        """ProxyRefused with status 404: the lease is over, and its group may be another worker's."""
        return _parse(Lease, self._post(f"/v1/leases/{lease_id}/renew", WorkerRef(worker_id=worker_id)))

    def complete(self, lease_id: str, completion: Completion) -> None:
        """Announces an upload; may be repeated."""
        self._post(f"/v1/leases/{lease_id}/complete", completion)

    def release(self, lease_id: str, worker_id: str, partial_attempt: str | None = None) -> None:
        """Gives a group back, to be continued from `partial_attempt` if there is one; may be repeated."""
        body = Release(worker_id=worker_id, partial_attempt=partial_attempt)
        self._post(f"/v1/leases/{lease_id}/release", body)

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        return _parse(HeartbeatReply, self._post("/v1/heartbeats", beat))

    def run_status(self) -> RunStatus:
        return _parse(RunStatus, self._send("GET", "/v1/run"))

    def workers(self) -> list[WorkerSummary]:
        return _parse_list(WorkerSummary, self._send("GET", "/v1/workers"))

    def steps(self, after: int = -1) -> list[StepSummary]:
        """Committed steps above `after`, ascending; the proxy keeps the newest 10,000."""
        return _parse_list(StepSummary, self._send("GET", "/v1/steps", params={"after": after}))

    def group(self, group_id: str) -> GroupStatus:
        return _parse(GroupStatus, self._send("GET", f"/v1/groups/{group_id}"))

    def append_log(self, seq: int, data: bytes) -> bytes | None:
        """Creates log record `seq` on a store that cannot: None if it now is `data`, else what is there.

        ProxyUnavailable: it may or may not have been created; the same call again tells.
        """
        reply = self._send("PUT", f"/v1/log/{seq}", content=data, accept_conflict=True)
        return reply.content if reply.status_code == 409 else None

    def _poll(self, path: str, wait_s: float, **query: int) -> httpx.Response:
        """A long poll."""
        timeout = httpx.Timeout(self._timeout_s, read=max(self._timeout_s, wait_s + LONG_POLL_MARGIN_S))
        return self._send("GET", path, params=query | {"wait": wait_s}, timeout=timeout)

    def _post(self, path: str, message: Message) -> httpx.Response:
        return self._send("POST", path, json=message.model_dump(mode="json"))

    def _send(
        self, method: str, path: str, *, accept_conflict: bool = False, **options: Any
    ) -> httpx.Response:
        try:
            try:
                reply = self._http.request(method, path, **options)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                # Most likely an idle connection that the proxy has closed. Every request may be repeated:
                # at worst a lease is issued to nobody, and runs out.
                reply = self._http.request(method, path, **options)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise self._bad_url(error) from None
        except httpx.HTTPError as error:
            raise ProxyUnavailable(f"{self.url}: {type(error).__name__}: {error}") from None
        status = reply.status_code
        if status < 300 or (accept_conflict and status == 409):
            return reply
        if status < 400:
            where = reply.headers.get("location", "elsewhere")
            raise ProxyRefused(status, f"{self.url}{path}: redirects to {where}; give the proxy's own URL")
        message = f"{self.url}{path}: {_problem(reply)}"
        if status == 429 or status >= 500:
            raise ProxyUnavailable(message)
        raise ProxyRefused(status, message)

    def _bad_url(self, error: Exception) -> ProxyRefused:
        return ProxyRefused(0, f"proxy URL {self.url}: {error}; want http://host:port")


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
