"""S3 servers on this machine: moto with its requests handled one at a time, so that conditional writes are
atomic; and an HTTP relay in front of it that does to requests what networks and services do."""

import http.client
import http.server
import os
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-access-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-not-to-be-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

_SERVER = """
import logging, os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()  # ends with its parent
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server
server = make_server("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server.serve_forever()
"""


@dataclass(frozen=True)
class S3Server:
    """A running server with one bucket."""

    endpoint_url: str
    bucket: str

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs to use `s3://<bucket>/…`."""
        return CREDENTIALS | {"AWS_ENDPOINT_URL": self.endpoint_url}

    def url(self, prefix: str) -> str:
        return f"s3://{self.bucket}/{prefix}?endpoint_url={self.endpoint_url}"


@contextmanager
def moto_server(bucket: str = "bucketrl-tests", *, page: int = 1000) -> Iterator[S3Server]:
    """`page`: objects per answer to a listing, at most."""
    port = _free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVER, str(port)],
        env=os.environ | CREDENTIALS | {"MOTO_S3_DEFAULT_MAX_KEYS": str(page)},
        stdin=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, process)
        _request(port, "PUT", f"/{bucket}")
        yield S3Server(f"http://127.0.0.1:{port}", bucket)
    finally:
        process.kill()
        process.communicate()


@dataclass(frozen=True)
class Answer:
    """An answer of the relay's own in place of the server's."""

    status: int
    code: str
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def body(self) -> bytes:
        return f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>injected</Message></Error>".encode()


@dataclass(frozen=True)
class LoseReply:
    """The server does what was asked; the connection closes before the client hears of it."""


@dataclass(frozen=True)
class CutBody:
    """The client gets the headers and half of the body."""


@dataclass(frozen=True)
class DropCondition:
    """The request goes on without its `If-None-Match`, as through a gateway that ignores it."""


Fault = Answer | LoseReply | CutBody | DropCondition
Plan = Callable[[str, str, int], Fault | None]
"""(method, path, how often this method met this path before) -> what to do to the request."""


@contextmanager
def faulty_relay(server: S3Server, plan: Plan) -> Iterator[S3Server]:
    """A server like `server` whose requests suffer what `plan` says."""
    target = int(server.endpoint_url.rpartition(":")[2])
    seen: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_request(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = self.path.partition("?")[0]
            with lock:
                before = seen.get((self.command, path), 0)
                seen[self.command, path] = before + 1
            fault = plan(self.command, path, before)
            if isinstance(fault, Answer):
                self.answer(fault.status, fault.headers, fault.body)
                return
            headers = {k: v for k, v in self.headers.items() if k.lower() != "connection"}
            if isinstance(fault, DropCondition):
                headers = {k: v for k, v in headers.items() if k.lower() != "if-none-match"}
            status, reply_headers, reply = _forward(target, self.command, self.path, body, headers)
            if isinstance(fault, LoseReply):
                self.close_connection = True
                self.connection.close()
                return
            self.answer(status, reply_headers, reply, cut=isinstance(fault, CutBody))

        def answer(
            self, status: int, headers: tuple[tuple[str, str], ...], body: bytes, *, cut: bool = False
        ) -> None:
            self.send_response(status)
            length = str(len(body))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif name.lower() not in ("transfer-encoding", "content-length", "connection"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if cut else body)
            if cut:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_request

    class Relay(socketserver.ThreadingMixIn, http.server.HTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # closed connections are this relay's trade

    relay = Relay(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=relay.serve_forever, daemon=True)
    thread.start()
    try:
        yield S3Server(f"http://127.0.0.1:{relay.server_address[1]}", server.bucket)
    finally:
        relay.shutdown()
        relay.server_close()


def _forward(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, tuple(reply.getheaders()), reply.read()
    finally:
        connection.close()


def _request(port: int, method: str, path: str) -> None:
    status, _, body = _forward(port, method, path, b"", {})
    assert status < 300, body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "the S3 server did not start"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError("the S3 server does not listen")
