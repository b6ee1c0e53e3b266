"""All three roles on this machine, as the separate processes that they are everywhere.

      supervisor ── starts ──► proxy, rollout workers, learner      they share a bucket URL and the proxy's URL
          ▲                        │ a role that dies is started again; the run's last step ends it
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from bucketrl.api.client import ProxyClient
from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.jobs.processes import Child, stop_all, wait_for_all
from bucketrl.jobs.progress import Display
from bucketrl.jobs.restarts import RestartPolicy
from bucketrl.jobs.role_commands import READ_TOKEN, WORKER_TOKEN

HOST = "127.0.0.1"
GRACE_S = 12.0
"""From SIGTERM to SIGKILL; a rollout worker takes up to 10 s."""
UPDATE_S = 0.5
LAST_LOOK_S = 3.0
"""For the proxy to see the last commit."""
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
    folder: Path
    """For log files and the token that people need."""
    groups_in_flight: int | None
    kv_cache_mb: int | None
    keep: int | None
    """Commits that stay in the bucket; see `bucketrl learner --keep`."""


@dataclass
class Role:
    """A child that is meant to run until the end."""

    child: Child
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    start_at: float | None = None
    """When to start it again; None while it runs."""


class Stopped(BucketrlError):
    """SIGINT or SIGTERM reached the supervisor."""


def supervise(options: LocalOptions, title: str, finished: Callable[[], bool]) -> None:
    """Runs the roles until `finished()`, which is asked when a role ends by itself.

    Raises UserError if a role ends with wrong input or keeps dying, Stopped on a signal. No child survives.
    """
    port = options.port or _free_port()
    url = f"http://{HOST}:{port}"
    tokens = _tokens()
    roles = [Role(child) for child in _children(options, port, url, tokens)]
    proxy, workers, learner = roles[0].child, [role.child for role in roles[1:-1]], roles[-1].child
    client = ProxyClient(url, tokens[READ_TOKEN], timeout_s=3.0)
    stop = threading.Event()
    with _stop_on_signals(stop), Display(client, str(options.folder)) as show:
        _say_hello(show, options, title, url, tokens)
        try:
            for role in roles:
                role.child.start()
            while not (learner.exit_code() == 0 and finished()):
                if stop.wait(UPDATE_S):
                    raise Stopped
                for role in roles:
                    _revive(role, finished, show)
                show.update()
            show.last_look(LAST_LOOK_S)
            wait_for_all(workers, GRACE_S)  # they see by themselves that the run is finished
        finally:
            stop_all([*workers, learner, proxy], GRACE_S)


def evaluate(options: LocalOptions, problems: int) -> bool:
    """Version 0 and the last one on held-out problems, with one engine start, in a process of its own: the
    engine's memory goes with it. Whether it worked."""
    child = Child(
        "evaluate",
        ["evaluate", "--bucket", options.bucket, "--version", "0", "--version", "latest",
         "--problems", str(problems), "--engine", options.engine],
        options.folder / "evaluate.log",
        {},
    )  # fmt: skip
    print(f"evaluating version 0 and the last one on {problems} held-out problems", flush=True)
    child.start()
    try:
        while (code := child.exit_code()) is None:
            time.sleep(UPDATE_S)
    finally:
        child.kill_group()
    if code != 0:
        print(f"error: the evaluation failed: {child.last_error()}", file=sys.stderr)
    return code == 0


def check_port(port: int) -> None:
    """Raises UserError if somebody listens there already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                f"--port {port}: {error.strerror}; choose another, or none for any free one"
            ) from None


def _tokens() -> dict[str, str]:
    """The user's own, else new ones."""
    return {name: os.environ.get(name) or secrets.token_hex(16) for name in (WORKER_TOKEN, READ_TOKEN)}


def _children(options: LocalOptions, port: int, url: str, tokens: dict[str, str]) -> list[Child]:
    # Two torch programs that each take every core run slower than with a share each.
    threads = max(1, (os.cpu_count() or 1) // (options.workers + 1))
    env = {"OMP_NUM_THREADS": str(threads)} | tokens
    where = ["--bucket", options.bucket]

    def child(name: str, *arguments: str) -> Child:
        return Child(name, arguments, options.folder / f"{name}.log", env)

    rollout = ["rollout", *where, "--proxy", url, "--engine", options.engine]
    if options.groups_in_flight is not None:
        rollout += ["--groups-in-flight", str(options.groups_in_flight)]
    if options.kv_cache_mb is not None:
        rollout += ["--kv-cache-mb", str(options.kv_cache_mb)]
    learner = ["learner", *where, "--proxy", url, "--poll", "0.2"]
    if options.keep is not None:
        learner += ["--keep", str(options.keep)]
    return [
        child("proxy", "proxy", *where, "--host", HOST, "--port", str(port)),
        *(child(f"rollout-{number}", *rollout) for number in range(options.workers)),
        child("learner", *learner),
    ]


def _say_hello(show: Display, options: LocalOptions, title: str, url: str, tokens: dict[str, str]) -> None:
    if os.environ.get(READ_TOKEN):
        token = f"${READ_TOKEN}"
    else:
        path = options.folder / "read_token"
        _write_secret(path, tokens[READ_TOKEN])
        token = f"$(cat {path})"
    show.say(f"{title}: proxy, {options.workers} rollout worker(s), learner; logs in {options.folder}")
    show.say(f'  dashboard  {url}/   ask  curl -s -H "Authorization: Bearer {token}" {url}/v1/run')
    show.say("  an engine takes about 30 s and 2 GB to start on CPU")


def _write_secret(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        file.write(text + "\n")


def _revive(role: Role, finished: Callable[[], bool], show: Display) -> None:
    child, now = role.child, time.monotonic()
    if role.start_at is not None:
        if now >= role.start_at:
            role.start_at = None
            child.start()
        return
    code = child.exit_code()
    if code is None or (code == 0 and child.name != "proxy" and finished()):
        return
    if code in FATAL_EXIT_CODES:
        raise UserError(f"{child.name} gave up: {child.last_error()}")
    child.kill_group()  # what it had started must not keep its memory
    delay = role.policy.died(now - child.started_at)
    if delay is None:
        raise UserError(f"{child.name} keeps dying, last with {code}: {child.last_error()}")
    show.say(f"{child.name} ended with {code}; starting it again in {delay:.0f} s ({role.policy.total})")
    role.start_at = now + delay


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
