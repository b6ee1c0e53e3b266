"""The process between `tasks.sandbox` and a program: forks it, watches it, cleans up and reports.

It reads a request from standard input (JSON: `program`, `stdin`, `temporary`, `channel`, `layers` and the fields
of `Limits`) and writes the fields of a `SandboxResult` to standard output. Standard library only: it runs without
site-packages. The program is a fork of it, so nothing in it is secret.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import sys
import time
import types
from typing import TYPE_CHECKING

from bucketrl.tasks import sandbox_layers

if TYPE_CHECKING:
    from typing import Any  # each import costs every program its time

CHANNEL_FD, STATUS_FD = 3, 4
"""In the program. On the latter it says which layers hold, and that memory ran out."""
CHUNK = 1 << 16
REMOVAL_S = 1.0
DISK_CHECK_S = 0.05
DISK_SHARE, LEAST_SHARE = 0.5, 1 / 32
"""Of the room that was on the disk. When less than the first is left, a program that took the second or more is
ended: others fill the disk as well."""
MAX_FILES = 10_000


def main() -> None:
    with open(0, "rb", closefd=False) as file:
        request = json.load(file)
    sandbox_layers.shield_supervisor()
    folder = os.path.join(request["temporary"], f"sandbox-{os.urandom(8).hex()}")
    os.mkdir(folder, 0o700)
    stdin = _file_with(request["stdin"], folder)
    out, err, status, ended = os.pipe(), os.pipe(), os.pipe(), os.pipe()
    os.set_blocking(ended[1], False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(ended[1])
    supervisor, pid = os.getpid(), os.fork()
    if pid == 0:
        _become_program(request, supervisor, folder, (stdin, out[1], err[1], request["channel"], status[1]))
        _run(request["program"])
        return
    try:
        for descriptor in (stdin, out[1], err[1], status[1], request["channel"]):
            if descriptor is not None:
                os.close(descriptor)
        result = _watch(pid, request, folder, out=out[0], err=err[0], status=status[0], ended=ended[0])
    finally:
        _remove(folder)
    print(json.dumps(result), flush=True)


def _become_program(
    request: dict[str, Any], supervisor: int, folder: str, descriptors: tuple[int | None, ...]
) -> None:
    """`descriptors` become 0, 1, ...; all others are closed."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    # Out of the way first: one of them may have the number that another one gets.
    moved = [None if one is None else fcntl.fcntl(one, fcntl.F_DUPFD, 32) for one in descriptors]
    for number, descriptor in enumerate(moved):
        if descriptor is not None:
            os.dup2(descriptor, number)
    if request["channel"] is None:
        os.close(CHANNEL_FD)
    os.closerange(len(descriptors), max(0, *(one for one in (*moved, *descriptors) if one is not None)) + 1)
    os.chdir(folder)
    os.umask(0o077)
    limits = {name: request[name] for name in ("cpu_seconds", "memory_mb", "file_mb")}
    held = sandbox_layers.confine(request["layers"], folder, **limits)
    sandbox_layers.end_with(supervisor)
    os.write(STATUS_FD, json.dumps(held).encode() + b"\n")


def _run(program: str) -> None:
    """Runs it as the interpreter would run a file, and then returns to the end of this process's script."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = ["program.py"]
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - what the interpreter does, without the frame of this file
        if isinstance(error, MemoryError):
            os.write(STATUS_FD, b"out_of_memory")
        shown = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)
        sys.excepthook(type(shown), shown, shown.__traceback__)
        sys.exit(1)


def _watch(
    pid: int, request: dict[str, Any], folder: str, *, out: int, err: int, status: int, ended: int
) -> dict[str, Any]:
    """Until the program ends, is over a limit, or nobody waits for it any more; then nothing of it is left."""
    started, room = time.monotonic(), free_bytes(folder)
    limits = {out: request["output_bytes"], err: request["output_bytes"], status: CHUNK}
    output = dict.fromkeys(limits, b"")
    outcome, code, cpu_seconds = "", None, 0.0
    poll = select.poll()
    for descriptor in (*limits, ended):
        poll.register(descriptor, select.POLLIN)
        os.set_blocking(descriptor, False)
    poll.register(1, 0)  # an error there: who asked is gone

    def read(descriptor: int) -> bool:
        """Whether there was something. Keeps up to the limit and a byte, which tells that it was passed."""
        try:
            data = os.read(descriptor, CHUNK)
        except BlockingIOError:
            return False
        output[descriptor] = (output[descriptor] + data)[: limits[descriptor] + 1]
        return bool(data)

    while code is None:
        remaining = started + request["wall_seconds"] - time.monotonic()
        if any(len(output[one]) > limits[one] for one in limits) or (
            free_bytes(folder) < room * DISK_SHARE and takes(folder, room * LEAST_SHARE)
        ):
            outcome = "too_much_output"
        elif remaining <= 0:
            outcome = "timed_out"
        if outcome:
            os.kill(pid, signal.SIGKILL)
        for descriptor, _ in poll.poll(None if outcome else min(remaining, DISK_CHECK_S) * 1000):
            if descriptor == 1:
                _end_descendants(pid)
                sys.exit("nobody waits for the result")
            if descriptor == ended:
                os.read(ended, CHUNK)
            elif not read(descriptor):
                poll.unregister(descriptor)
        reaped, wait_status, usage = os.wait4(pid, os.WNOHANG)
        if reaped:
            code, cpu_seconds = os.waitstatus_to_exitcode(wait_status), usage.ru_utime + usage.ru_stime
    seconds = time.monotonic() - started
    _end_descendants(pid)
    for descriptor in limits:
        while len(output[descriptor]) <= limits[descriptor] and read(descriptor):
            pass
    held, _, told = output[status].partition(b"\n")
    texts = [output[one][: limits[one]].decode(errors="replace") for one in (out, err)]
    if not held.startswith(b"["):
        sys.exit(f"the program was not started: {texts[1]}")
    if not outcome and any(len(output[one]) > limits[one] for one in (out, err)):
        outcome = "too_much_output"
    if not outcome:
        outcome = _outcome(code, cpu_seconds >= request["cpu_seconds"], b"out_of_memory" in told)
    return {
        "outcome": outcome, "exit_code": code, "stdout": texts[0], "stderr": texts[1], "seconds": seconds,
        "layers": json.loads(held),
    }  # fmt: skip


def free_bytes(folder: str) -> int:
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


def takes(folder: str, least: float) -> bool:
    """Whether what is in it takes so many bytes, or cannot all be counted."""
    taken, seen, folders = 0, 0, [folder]
    while folders and taken < least and seen < MAX_FILES:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    seen, taken = seen + 1, taken + entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except FileNotFoundError:
            continue
        except OSError:
            return True
    return bool(folders) or taken >= least


def _outcome(code: int, cpu_spent: bool, memory_ran_out: bool) -> str:
    if code < 0:
        return "timed_out" if cpu_spent and -code in (signal.SIGXCPU, signal.SIGKILL) else "killed"
    return "out_of_memory" if memory_ran_out and code else "exited"


def _end_descendants(pid: int) -> None:
    """Kills the program's process group and, on Linux, all who left it: orphans become children of this process."""
    while True:
        for kill, target in ((os.killpg, pid), *((os.kill, child) for child in _children())):
            try:
                kill(target, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                pass  # it has ended
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


def _children() -> list[int]:
    """Of this process; none where there is no /proc."""
    children = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            with open(f"/proc/{int(name)}/stat", "rb") as file:
                # The name, in parentheses, may hold anything.
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except (ValueError, OSError):
            continue
        if parent == os.getpid():
            children.append(int(name))
    return children


def _file_with(text: str, folder: str) -> int:
    path = os.path.join(folder, "stdin")
    with open(path, "w", encoding="utf-8", errors="replace", newline="") as file:
        file.write(text)
    descriptor = os.open(path, os.O_RDONLY)
    os.unlink(path)
    return descriptor


def _remove(folder: str) -> None:
    """In a process of its own that is waited for a second only: a program may leave very many files, or thousands
    of folders inside each other, and must not gain a lost result by that."""
    if not os.listdir(folder):
        os.rmdir(folder)
        return
    pid = os.fork()
    if pid == 0:
        try:
            for descriptor in range(3):
                os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
            script = 'rm -rf "$0" || { chmod -R u+rwX "$0"; rm -rf "$0"; }'
            os.execve("/bin/sh", ["sh", "-c", script, folder], {"PATH": "/bin:/usr/bin"})
        finally:
            os._exit(127)
    until = time.monotonic() + REMOVAL_S
    while os.waitpid(pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
        time.sleep(0.005)
