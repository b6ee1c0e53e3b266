"""All three roles on this machine, as the separate processes that they are everywhere.

      supervisor ── starts ──► proxy, rollout workers, learner      they share a bucket URL and the proxy's URL
          ▲                        │ a role that dies is started again; the learner's end ends the run
          └──── run status ────────┘

The supervisor knows nothing that is not in the bucket: killed and started again, the run goes on.
"""

import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from bucketrl.api.client import ProxyClient
from bucketrl.bucket.errors import UserError
from bucketrl.jobs.processes import Child, stop_all
from bucketrl.jobs.progress import Display
from bucketrl.jobs.role_commands import READ_TOKEN, WORKER_TOKEN

HOST = "127.0.0.1"
MAX_RESTARTS = 20
"""Of one role, in one run of the supervisor; a role that keeps dying has a cause that restarts do not cure."""
RESTART_BACKOFF_S = 1.0
GRACE_S = 12.0
UPDATE_S = 0.5
FATAL_EXIT_CODES = (2, 3)
"""Wrong input, fenced: starting again would end the same way."""


@dataclass(frozen=True, slots=True)
class LocalOptions:
    """Choices of one machine."""

    bucket: str
    workers: int
    engine: str
    port: int
    """0: any free one."""
    logs: Path
    groups_in_flight: int
    kv_cache_mb: int


class Stopped(Exception):
    """SIGINT or SIGTERM reached the supervisor."""


def supervise(options: LocalOptions, title: str) -> None:
    """Runs the roles until the learner has committed the last step.

    Raises UserError if a role ends with wrong input or keeps dying, Stopped on a signal. No child survives.
    """
    port = options.port or _free_port()
    if options.port:
        _check_free(options.port)
    url = f"http://{HOST}:{port}"
    tokens = {WORKER_TOKEN: secrets.token_hex(16), READ_TOKEN: secrets.token_hex(16)}
    children = _children(options, port, url, tokens)
    learner = children[-1]
    stop = threading.Event()
    with (
        _stop_on_signals(stop),
        Display(ProxyClient(url, tokens[READ_TOKEN], timeout_s=3.0), str(options.logs)) as show,
    ):
        try:
            for child in children:
                child.start()
            show.say(
                f"{title}: proxy {url}/, {options.workers} rollout worker(s), learner; logs in {options.logs}"
            )
            show.say("an engine takes about 30 s and 2 GB to start on CPU")
            while learner.exit_code() != 0:
                if stop.wait(UPDATE_S):
                    raise Stopped
                for child in children:
                    _revive(child, show)
                show.update()
            show.update()
            _let_workers_end(children[1:-1])
        finally:
            stop_all(children, GRACE_S)


def _children(options: LocalOptions, port: int, url: str, tokens: dict[str, str]) -> list[Child]:
    options.logs.mkdir(parents=True, exist_ok=True)
    # Two torch programs that each take every core run slower than with a share each.
    threads = max(1, (os.cpu_count() or 1) // (options.workers + 1))
    env = tokens | {"OMP_NUM_THREADS": str(threads)}
    where = ["--bucket", options.bucket]

    def child(name: str, *arguments: str) -> Child:
        return Child(name, list(arguments), options.logs / f"{name}.log", env)

    workers = [
        child(
            f"rollout-{number}", "rollout", *where, "--proxy", url, "--engine", options.engine,
            "--groups-in-flight", str(options.groups_in_flight), "--kv-cache-mb", str(options.kv_cache_mb),
        )
        for number in range(options.workers)
    ]  # fmt: skip
    return [
        child("proxy", "proxy", *where, "--host", HOST, "--port", str(port)),
        *workers,
        child("learner", "learner", *where, "--proxy", url, "--poll", "0.2"),
    ]


def _revive(child: Child, show: Display) -> None:
    code = child.exit_code()
    if code is None or (code == 0 and child.name != "proxy"):
        return
    if code in FATAL_EXIT_CODES:
        raise UserError(f"{child.name} gave up: {_last_error(child)}")
    if child.restarts >= MAX_RESTARTS:
        raise UserError(
            f"{child.name} died {MAX_RESTARTS} times; the last words in {child.log}:\n{child.last_words()}"
        )
    child.restarts += 1
    child.kill_group()  # what it had started must not keep its memory
    show.say(f"{child.name} ended with {code}; started again ({child.restarts})")
    time.sleep(RESTART_BACKOFF_S)
    child.start()


def _last_error(child: Child) -> str:
    lines = [line for line in child.last_words(50).splitlines() if line.startswith("error: ")]
    return lines[-1].removeprefix("error: ") if lines else f"see {child.log}"


def _let_workers_end(workers: list[Child]) -> None:
    """They see by themselves that the run is finished."""
    deadline = time.monotonic() + GRACE_S
    while time.monotonic() < deadline and any(worker.exit_code() is None for worker in workers):
        time.sleep(0.1)


@contextmanager
def _stop_on_signals(stop: threading.Event) -> Iterator[None]:
    def handle(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror}; choose another, or none for any free one"
            ) from None


def evaluate(options: LocalOptions, problems: int) -> None:
    """Before and after on held-out problems, in a process of its own: the engine's memory goes with it."""
    child = Child(
        "evaluate",
        ["evaluate", "--bucket", options.bucket, "--version", "0", "--version", "latest",
         "--problems", str(problems), "--engine", options.engine],
        options.logs / "evaluate.log",
        {},
    )  # fmt: skip
    print(f"evaluating version 0 and the last one on {problems} held-out problems", flush=True)
    child.start()
    try:
        while (code := child.exit_code()) is None:
            time.sleep(0.2)
    finally:
        child.kill_group()
    if code != 0:
        print(f"error: the evaluation failed: {child.last_words()}", file=sys.stderr)
