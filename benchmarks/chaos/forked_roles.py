"""Roles as processes forked from one that has imported everything: the same command, up in a second.

A role that is started as `python -m bucketrl.jobs …` spends its first 5 to 10 seconds of CPU on imports. Of many
signals most would find it there, where there is nothing to disturb.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.e2e.roles import Role, environment

_PRELOADED = [
    "bucketrl.jobs.cli",
    "bucketrl.jobs.role_commands",
    "bucketrl.proxy.server",
    "bucketrl.learner.main",
    "bucketrl.rollout_worker.main",
    "bucketrl.rollout_worker.engines.transformers_engine",
    "benchmarks.chaos.forked_imports",
]


@contextmanager
def imported() -> Iterator[None]:
    """While the process that all roles are forked from lives; it keeps the environment that it began with."""
    before = dict(os.environ)
    os.environ.update(environment())
    try:
        multiprocessing.get_context("forkserver").set_forkserver_preload(_PRELOADED)
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    try:
        yield
    finally:
        forkserver._forkserver._stop()  # it would else keep its memory as long as this process lives


class ForkedRole(Role):
    """A role whose process has its imports done when it starts."""

    def start(self) -> None:
        self.process = _Forked(self.arguments, self.env, self.log)  # type: ignore[assignment]


class _Forked:
    """The part of `subprocess.Popen` that `Role` uses."""

    def __init__(self, arguments: list[str], env: dict[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process: ForkServerProcess = context.Process(target=_run, args=(arguments, env, log))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        while self.poll() is None and not _leads_its_group(self.pid):
            time.sleep(0.005)  # a signal to the group would reach nobody

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise subprocess.TimeoutExpired("role", timeout or 0.0)
        return code


def _leads_its_group(pid: int) -> bool:
    try:
        return os.getpgid(pid) == pid
    except ProcessLookupError:
        return False


def _run(arguments: list[str], env: dict[str, str], log: Path) -> None:
    os.setsid()
    os.environ.update(env)
    with log.open("ab") as file:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(file.fileno(), stream.fileno())
    from bucketrl.jobs.cli import main

    sys.exit(main(arguments))
