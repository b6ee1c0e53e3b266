"""An HTTP relay in front of an S3 server that does to requests what networks, services and gateways do."""

import http.server
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from tests.support.s3 import S3Server, forward


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


@dataclass(frozen=True)
class Stall:
    """The server does what was asked; the client hears of it after this many seconds."""

    seconds: float


Fault = Answer | LoseReply | CutBody | DropCondition | Stall
Plan = Callable[[str, str, int], Fault | None]
"""(method, path, how often this method met this path before) -> what to do to the request."""


@contextmanager
def faulty_relay(server: S3Server, plan: Plan, *, mount: str = "") -> Iterator[S3Server]:
    """A server like `server` whose requests suffer what `plan` says.

    `mount`: it answers below this path only, and to clients that the Hugging Face gateway suits.
    """
    target = int(server.endpoint_url.rpartition(":")[2])
    seen: dict[tuple[str, str], int] = {}
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle_request(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = self.rfile.read(length)
            if len(body) < length:
                self.close_connection = True  # the client died in the middle
                return
            if mount and not self.suits_the_gateway():
                self.answer(400, (), b"not as the gateway wants it")
                return
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
            status, reply_headers, reply = forward(
                target, self.command, self.path.removeprefix(mount), body, headers
            )
            if isinstance(fault, Stall):
                time.sleep(fault.seconds)
            if isinstance(fault, LoseReply):
                self.close_connection = True
                self.connection.close()
                return
            self.answer(status, reply_headers, reply, cut=isinstance(fault, CutBody))

        def suits_the_gateway(self) -> bool:
            """As https://huggingface.co/docs/hub/storage-buckets-s3 asks; other clients are redirected."""
            return (
                self.path.startswith(mount + "/")
                and self.headers["Host"].startswith("localhost:")
                and "botocore" in self.headers["User-Agent"].lower()
                and "aws-chunked" not in (self.headers["Content-Encoding"] or "")
                and "/us-east-1/s3/" in self.headers["Authorization"]
            )

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
    thread = threading.Thread(target=relay.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        host = "localhost" if mount else "127.0.0.1"
        yield replace(server, endpoint_url=f"http://{host}:{relay.server_address[1]}{mount}")
    finally:
        relay.shutdown()
        relay.server_close()
