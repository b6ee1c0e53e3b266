"""An HTTP proxy between an S3 client and an S3 server that spoils chosen requests."""

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "content-length", "expect"}


@dataclass(frozen=True)
class Answer:
    """Answers itself; the server never sees the request."""

    status: int
    code: str
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def body(self) -> bytes:
        text = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>injected</Message></Error>"
        return text.encode()


@dataclass(frozen=True)
class LostReply:
    """The server does what it is asked; the client sees the connection close."""


@dataclass(frozen=True)
class CutBody:
    """The reply's headers announce the whole body, half of it comes."""


@dataclass(frozen=True)
class WithoutCondition:
    """The request arrives without its `If-None-Match`, as at a server that does not know it."""


Fault = Answer | LostReply | CutBody | WithoutCondition


@dataclass
class FaultyS3:
    """The running proxy. Each fault added hits the next `times` requests that match."""

    upstream: str
    endpoint: str = ""
    seen: list[tuple[str, str]] = field(default_factory=list)
    """Method and path with query of every request, in order of arrival."""
    _faults: list[tuple[str, str, Fault]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def spoil(self, method: str, path_part: str, fault: Fault, times: int = 1) -> None:
        with self._lock:
            self._faults += [(method, path_part, fault)] * times

    def count(self, method: str, path_part: str) -> int:
        return sum(m == method and path_part in path for m, path in self.seen)

    def take(self, method: str, path: str) -> Fault | None:
        """Notes a request; the fault that hits it, used up."""
        with self._lock:
            self.seen.append((method, path))
            for position, (wanted, part, fault) in enumerate(self._faults):
                if method == wanted and part in path:
                    del self._faults[position]
                    return fault
        return None


@contextmanager
def faulty_s3(upstream: str) -> Iterator[FaultyS3]:
    proxy = FaultyS3(upstream)

    class Handler(_Handler):
        state = proxy

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, name="faulty-s3", daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    state: FaultyS3
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.state.take(self.command, self.path)
        if isinstance(fault, Answer):
            self._reply(fault.status, fault.headers | {"Content-Type": "application/xml"}, fault.body)
            return
        status, headers, data = self._forward(body, conditional=not isinstance(fault, WithoutCondition))
        if isinstance(fault, LostReply):
            self.close_connection = True
        elif isinstance(fault, CutBody):
            self.close_connection = True
            self._reply(status, headers | {"Content-Length": str(len(data))}, data[: len(data) // 2])
        else:
            self._reply(status, headers, data)

    def _forward(self, body: bytes, *, conditional: bool) -> tuple[int, dict[str, str], bytes]:
        headers = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
        if not conditional:
            headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
        connection = http.client.HTTPConnection(urlsplit(self.state.upstream).netloc)
        try:
            connection.request(self.command, self.path, body or None, headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        kept = {name: value for name, value in response.getheaders() if name.lower() not in _HOP_BY_HOP}
        if self.command == "HEAD":
            kept["Content-Length"] = response.getheader("Content-Length") or "0"
        return response.status, kept, data

    def _reply(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _handle
