"""The proxy as a process: what it refuses before it starts, and how it ends."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.bucket.builders import Learner, run_record
from tests.proxy.worlds import World

from bucketrl.api.client import ProxyClient
from bucketrl.api.errors import ProxyUnavailable
from bucketrl.api.messages import PolicyHead
from bucketrl.bucket import keys
from bucketrl.bucket.errors import UserError
from bucketrl.bucket.probe import ProbeReport
from bucketrl.bucket.store import Tier
from bucketrl.bucket.stores import open_store
from bucketrl.proxy import server
from bucketrl.proxy.server import serve

SERVE = """
import sys
from bucketrl.bucket import keys
from bucketrl.bucket.records import RunRecord, decode
from bucketrl.bucket.stores import open_store
from bucketrl.proxy.server import serve
store = open_store(sys.argv[1])
serve(store, decode(RunRecord, store.get(keys.RUN)), host="127.0.0.1", port=int(sys.argv[2]),
      worker_token="", read_token="")
"""


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody else listens on."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        yield other.getsockname()[1]


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch) -> World:
    """Fails the test if anything is read from or written to the bucket."""

    def touch(*_: object, **__: object) -> ProbeReport:
        raise AssertionError("the bucket was touched")

    monkeypatch.setattr(server, "probe", touch)
    return World()


def test_a_port_in_use_is_refused_before_anything_else(taken: int, untouched: World) -> None:
    with pytest.raises(UserError, match=rf"--port {taken}: in use on 127\.0\.0\.1; choose another"):
        serve(untouched.store, untouched.run, host="127.0.0.1", port=taken, worker_token="", read_token="")


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_open_proxy_that_others_can_reach_is_refused(host: str, untouched: World) -> None:
    with pytest.raises(UserError, match="BUCKETRL_WORKER_TOKEN"):
        serve(untouched.store, untouched.run, host=host, port=0, worker_token="", read_token="")


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", 70000), ("192.0.2.1", 0), ("no-such-host.invalid", 0)]
)
def test_an_address_that_cannot_be_bound_is_one_line(host: str, port: int, untouched: World) -> None:
    with pytest.raises(UserError, match=f"--host {host} --port {port}: ") as refusal:
        serve(untouched.store, untouched.run, host=host, port=port, worker_token="t", read_token="")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("tier", [Tier.PUT, Tier.CREATE])
def test_commits_are_serialised_where_the_probe_says_so(tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the store has shown counts, not what it claims."""
    made: dict[str, Any] = {}

    def stop(*_: object, **options: Any) -> None:
        made.update(options)
        raise KeyboardInterrupt

    monkeypatch.setattr(server, "create_app", stop)
    monkeypatch.setattr(server, "probe", lambda *_, **__: replace(PROBED, tier=tier))
    world = World()
    with pytest.raises(KeyboardInterrupt):
        serve(world.store, world.run, host="127.0.0.1", port=0, worker_token="", read_token="")
    assert made["serialise_commits"] is (tier is Tier.PUT)


PROBED = ProbeReport(Tier.CREATE, True, True, True, ())


@pytest.mark.parametrize(
    ("url", "remote"),
    [("/data/run", False), ("memory://run", False), ("s3://bucket/run", True), ("hf://buckets/a/b", True)],
)
def test_a_store_across_a_network_is_polled_less_often(url: str, remote: bool) -> None:
    assert server._is_remote(url) is remote


@contextmanager
def process(bucket: Path, port: int) -> Iterator["subprocess.Popen[str]"]:
    started = subprocess.Popen(
        [sys.executable, "-c", SERVE, str(bucket), str(port)],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        # A background job of a shell inherits an ignored SIGINT, and would hand it on.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


def wait_for_policy(client: ProxyClient) -> PolicyHead:
    for _ in range(300):
        try:
            head = client.policy(-1, 0.0)
        except ProxyUnavailable:
            head = None
        if head is not None:
            return head
        time.sleep(0.1)
    raise AssertionError("the proxy does not come up")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_at_once_and_quietly_and_another_takes_over(number: int, tmp_path: Path) -> None:
    """With a long poll open, which is answered; then a new process on the same port knows the same."""
    store = open_store(str(tmp_path))
    store.create(keys.RUN, run_record().encode())
    learner = Learner(store, run_record(), "learner-a")
    learner.start()
    learner.commit()
    port = free_port()
    client = ProxyClient(f"http://127.0.0.1:{port}", "")
    answers: list[PolicyHead | None] = []
    with process(tmp_path, port) as first:
        head = wait_for_policy(client)
        poll = threading.Thread(target=lambda: answers.append(client.policy(0, 30.0)))
        poll.start()
        time.sleep(0.5)
        before = time.monotonic()
        first.send_signal(number)
        poll.join(10)
        _, stderr = first.communicate(timeout=10)
        assert time.monotonic() - before < 2.5
        assert answers == [None]
        assert "timeout graceful shutdown exceeded" not in stderr
        assert first.returncode == -number
    with process(tmp_path, port):
        assert wait_for_policy(client) == head
        assert client.run_status().run_id == run_record().run_id
    client.close()
