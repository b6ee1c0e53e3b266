"""The roles' client: what each answer of a proxy, or none, becomes."""

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from bucketrl.api.client import ProxyClient, ProxyRefused, ProxyUnavailable
from bucketrl.api.messages import Completion, Heartbeat, LeaseRequest, RolloutState

TOKEN = "a-secret-token"
URL = "http://proxy:8080"
HEAD = {
    "run_id": "r", "version": 3, "step": 3, "log_seq": 4, "log_sha256": "ab", "consumed_cursor": 6,
    "finished": False,
}  # fmt: skip
LEASE = {
    "lease_id": "l1", "group_id": "0000-00000001", "ordinal": 1, "policy_version": 3, "seconds": 60.0,
}  # fmt: skip
COMPLETION = Completion(
    worker_id="w", group_id="0000-00000001", attempt="a", size=1, sha256="ab", tokens=2, mean_reward=0.5
)
REQUEST = LeaseRequest(worker_id="w", max_groups=2, loaded_version=3)
BEAT = Heartbeat(state=RolloutState(worker_id="w", engine="tiny", loaded_version=3))

CALLS: list[Callable[[ProxyClient], Any]] = [
    lambda client: client.policy(0, 1.0),
    lambda client: client.lease(REQUEST),
    lambda client: client.renew("l1", "w"),
    lambda client: client.complete("l1", COMPLETION),
    lambda client: client.release("l1", "w"),
    lambda client: client.heartbeat(BEAT),
    lambda client: client.run_status(),
    lambda client: client.workers(),
    lambda client: client.steps(),
    lambda client: client.group("0000-00000001"),
    lambda client: client.append_log(0, b"{}"),
]
"""Every method that talks to the proxy."""


def client_of(answer: Callable[[httpx.Request], httpx.Response], token: str = TOKEN) -> ProxyClient:
    return ProxyClient(URL, token, transport=httpx.MockTransport(answer))


def always(status: int, body: object = None, **headers: str) -> ProxyClient:
    return client_of(lambda _: httpx.Response(status, json=body, headers=headers))


def test_requests_carry_the_token_and_the_message() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(200, json={"leases": [LEASE]})

    assert client_of(answer).lease(REQUEST).leases[0].ordinal == 1
    assert seen[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert json.loads(seen[0].content) == {"worker_id": "w", "max_groups": 2, "loaded_version": 3}


def test_no_token_sends_no_header() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        return httpx.Response(204)

    assert client_of(answer, token="").policy(0, 0.0) is None
    assert "authorization" not in seen[0].headers


def test_policy_is_the_head_or_nothing_new() -> None:
    head = always(200, HEAD).policy(2, 0.0)
    assert head is not None
    assert head.version == 3
    assert always(204).policy(3, 0.0) is None


def test_a_long_poll_waits_longer_than_promised_but_connects_as_fast_as_ever() -> None:
    timeouts: list[dict[str, float]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        timeouts.append(request.extensions["timeout"])
        return httpx.Response(204)

    client_of(answer).policy(0, 30.0)
    assert timeouts[0]["read"] > 30.0
    assert timeouts[0]["connect"] == 10.0


def test_a_log_record_is_created_or_what_is_there_comes_back() -> None:
    assert always(204).append_log(0, b"mine") is None
    there = client_of(lambda _: httpx.Response(409, content=b"theirs"))
    assert there.append_log(0, b"mine") == b"theirs"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
def test_an_overloaded_proxy_is_unavailable(call: Callable[[ProxyClient], Any], status: int) -> None:
    with pytest.raises(ProxyUnavailable, match="slow down"):
        call(always(status, {"error": "slow down"}))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422])
def test_a_refusal_says_why_and_never_the_token(call: Callable[[ProxyClient], Any], status: int) -> None:
    with pytest.raises(ProxyRefused) as refusal:
        call(always(status, {"error": "set BUCKETRL_WORKER_TOKEN"}))
    assert refusal.value.status == status
    assert "set BUCKETRL_WORKER_TOKEN" in str(refusal.value)
    assert TOKEN not in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("call", CALLS)
def test_a_redirect_is_a_refusal(call: Callable[[ProxyClient], Any]) -> None:
    """Taken for success, it would lose completions silently."""
    with pytest.raises(ProxyRefused, match="https://elsewhere"):
        call(always(307, location="https://elsewhere"))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "error", [httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadTimeout, httpx.ReadError, httpx.PoolTimeout]
)
def test_no_answer_is_unavailable(call: Callable[[ProxyClient], Any], error: type[httpx.HTTPError]) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise error("no answer")

    with pytest.raises(ProxyUnavailable, match=error.__name__) as failure:
        call(client_of(answer))
    assert TOKEN not in str(failure.value)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"leases": 3}', b'[{"id": 1}]', b"\xff"])
def test_an_answer_that_is_none_is_unavailable(body: bytes) -> None:
    """Something between here and the proxy, or another service, speaks in its place."""
    client = client_of(lambda _: httpx.Response(200, content=body))
    for call in (client.run_status, lambda: client.lease(REQUEST), lambda: client.policy(0, 0.0)):
        with pytest.raises(ProxyUnavailable, match="the answer is no"):
            call()
    if body != b"[]":
        with pytest.raises(ProxyUnavailable, match="the answer is no list"):
            client.workers()


def test_an_error_without_a_problem_still_has_its_status() -> None:
    with pytest.raises(ProxyUnavailable, match="HTTP 502"):
        client_of(lambda _: httpx.Response(502, content=b"<html>Bad Gateway")).run_status()


@pytest.mark.parametrize("url", ["proxy:8080", "", "http://proxy:port", "ftp://proxy", "/run"])
def test_a_url_that_is_none_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ProxyRefused, match="want http://host:port"):
        ProxyClient(url, TOKEN).run_status()


def test_credentials_in_the_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(ProxyRefused) as refusal:
        ProxyClient("http://me:hidden@proxy", "")
    assert "hidden" not in str(refusal.value)


@pytest.mark.parametrize("token", ["secret\n", "sec ret", "sécret", "sec\x00ret"])
def test_a_token_that_a_header_cannot_carry_is_refused_and_not_repeated(token: str) -> None:
    with pytest.raises(ProxyRefused) as refusal:
        ProxyClient(URL, token)
    assert "sec" not in str(refusal.value)


@contextmanager
def listener(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server on this machine that handles its connections one after the other; its URL."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    serve(connection)

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def request_on(connection: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        more = connection.recv(65536)
        if not more:
            return b""
        data += more
    return data


def test_a_connection_closed_while_idle_is_opened_again_at_once() -> None:
    """The server says keep-alive, answers once, and drops the second request on the same connection."""
    connections = 0

    def serve(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        request_on(connection)
        connection.sendall(b"HTTP/1.1 204 No Content\r\nConnection: keep-alive\r\n\r\n")
        request_on(connection)

    with listener(serve) as url:
        client = ProxyClient(url, "")
        for _ in range(3):
            assert client.policy(0, 0.0) is None
        client.close()
    assert connections == 3


def test_a_proxy_that_always_hangs_up_is_unavailable_after_one_repetition() -> None:
    connections = 0

    def serve(connection: socket.socket) -> None:
        nonlocal connections
        connections += 1
        request_on(connection)

    with listener(serve) as url:
        client = ProxyClient(url, "")
        with pytest.raises(ProxyUnavailable):
            client.lease(REQUEST)
        client.close()
    assert connections == 2


def test_a_proxy_that_is_not_there_is_unavailable() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        client = ProxyClient(f"http://127.0.0.1:{unused.getsockname()[1]}", TOKEN)
        with pytest.raises(ProxyUnavailable):
            client.run_status()
        client.close()


def test_many_threads_share_one_client() -> None:
    lock, served = threading.Lock(), 0

    def answer(request: httpx.Request) -> httpx.Response:
        nonlocal served
        with lock:
            served += 1
        return httpx.Response(200, json=HEAD)

    client = client_of(answer)
    heads: list[object] = []
    threads = [
        threading.Thread(target=lambda: heads.extend(client.policy(0, 0.0) for _ in range(50)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert served == 400
    assert set(map(repr, heads)) == {repr(heads[0])}
    assert len(heads) == 400
