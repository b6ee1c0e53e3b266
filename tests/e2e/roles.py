"""Starts the roles as the operating-system processes that a user would start, and kills them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

WORKER_TOKEN = "worker-token-of-the-tests"
READ_TOKEN = "read-token-of-the-tests"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cli(
    *arguments: str, env: dict[str, str] | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Runs `bucketrl ARGUMENTS` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "bucketrl.jobs", *arguments],
        env=environment(env),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    return os.environ | {
        "BUCKETRL_WORKER_TOKEN": WORKER_TOKEN,
        "BUCKETRL_READ_TOKEN": READ_TOKEN,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        **(extra or {}),
    }


@dataclass
class Role:
    """One role's command, started any number of times."""

    module = "bucketrl.jobs"
    """What is run, with `arguments`."""
    name: str
    arguments: list[str]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                env=environment(self.env),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def send(self, signal_number: int) -> None:
        assert self.process is not None
        try:
            os.killpg(self.process.pid, signal_number)
        except ProcessLookupError:
            pass  # it has ended by itself, which the caller sees from `alive`

    def kill(self) -> None:
        """SIGKILL to the role and whatever it started, as a lost machine would."""
        assert self.process is not None
        self.send(signal.SIGKILL)
        self.process.wait()

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait(self, timeout: float) -> int:
        assert self.process is not None
        return self.process.wait(timeout)

    def tail(self, lines: int = 40) -> str:
        return (
            "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:]) if self.log.exists() else ""
        )


@dataclass
class Fleet:
    """A proxy, a learner and some rollout workers that share a bucket URL and the proxy's URL."""

    proxy_url: str
    proxy: Role
    learner: Role
    workers: list[Role]

    @property
    def roles(self) -> list[Role]:
        return [self.proxy, self.learner, *self.workers]

    def status(self) -> dict[str, object] | None:
        """`GET /v1/run`, or None while the proxy is away."""
        try:
            reply = httpx.get(
                f"{self.proxy_url}/v1/run", headers={"Authorization": f"Bearer {READ_TOKEN}"}, timeout=5
            )
        except httpx.TransportError:
            return None
        return reply.json() if reply.status_code == 200 else None

    def step(self) -> int:
        status = self.status()
        return -1 if status is None else int(str(status["step"]))

    def wait_for(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"{what}: not within {seconds} s\n" + self.tails())
            time.sleep(0.2)

    def tails(self) -> str:
        return "\n".join(f"--- {role.name}\n{role.tail()}" for role in self.roles)


@contextmanager
def fleet(
    bucket_url: str,
    folder: Path,
    *,
    workers: int = 1,
    engine: str = "transformers",
    env: dict[str, str] | None = None,
    role_type: type[Role] = Role,
    learner: Sequence[str] = (),
    rollout: Sequence[str] = (),
) -> Iterator[Fleet]:
    """Roles by hand, not yet started; whatever runs at the end is killed. `learner` and `rollout` are further
    arguments of their commands."""
    port = free_port()
    proxy_url = f"http://127.0.0.1:{port}"
    env = env or {}

    def role(name: str, *arguments: str) -> Role:
        return role_type(name, list(arguments), folder / f"{name}.log", dict(env))

    made = Fleet(
        proxy_url=proxy_url,
        proxy=role("proxy", "proxy", "--bucket", bucket_url, "--port", str(port)),
        learner=role("learner", "learner", "--bucket", bucket_url, "--proxy", proxy_url, *learner),
        workers=[
            role(
                f"rollout-{i}",
                "rollout",
                "--bucket",
                bucket_url,
                "--proxy",
                proxy_url,
                "--engine",
                engine,
                *rollout,
            )
            for i in range(workers)
        ],
    )
    try:
        yield made
    finally:
        for one in made.roles:
            if one.alive:
                one.kill()
