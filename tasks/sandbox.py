"""Runs Python that nobody has read, such as a model's answer, in a process of its own with limits.

    from bucketrl.tasks.sandbox import run_python
    result = run_python("print(6 * 7)", limits=Limits(wall_seconds=2))
    result.outcome, result.stdout          # "exited", "42\\n"

It holds resources and is good hygiene; it is no security boundary: a fault of the kernel or of the interpreter
is enough to break out. Run rollout workers in a container that holds nothing but what they need.

Everywhere: limits of CPU time, memory, file size, open files and core dumps; a wall-clock limit; output is kept
up to a limit; an empty environment; a private working folder, removed afterwards; standard input is what is
given; no site-packages (`-S`); the process group is killed at the end. A fixed hash seed makes results repeat.

On Linux, each layer where the machine allows it (`protections` says which hold here). None needs privileges,
and all but `namespaces` hold in a plain Docker container:
- `syscalls` (seccomp; x86-64, aarch64): no processes, no sockets, no signals to others, no tracing, no
  io_uring, no shared memory that outlives the process. Threads are allowed.
- `files` (Landlock, Linux 5.13): reads the interpreter and the system's libraries, writes the working folder,
  nothing else; /proc/<pid>/environ and memory of every other process are closed.
- `namespaces`: a user and a network namespace, which closes both again where a layer above is missing.
- `user`: a worker that is root runs the program as a user that owns nothing, if that user can read the
  interpreter (one below /root it cannot); otherwise as root without capabilities.
Without `syscalls`, processes are counted (RLIMIT_NPROC), and all descendants are found and killed, those with a
session of their own too: the supervisor is their subreaper.

Not covered: the number of files in the working folder (when less than half of the disk's free room is left, a
program with a share in that is ended); what side channels tell; threads of a program that stays root, but by
memory; with neither `files`, `namespaces` nor `user`, other processes of the worker's user (their environment
can be read; without `syscalls` they can be killed); on macOS, descendants that leave the process group, the
network and files. A user's limit of processes counts all that the user runs: it is set to what runs when the
program starts, plus 64.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

LAYERS: tuple[str, ...] = ("user", "namespaces", "files", "syscalls")
"""What is tried, see above."""
_SCRIPT = f"""import sys
sys.path.append({str(Path(__file__).parents[2])!r})
from bucketrl.tasks import sandbox_supervisor
sys.path.pop()
sandbox_supervisor.main()"""
GRACE_S = 10.0
"""For the supervisor to start and to clean up, beyond the program's own time."""

Outcome = Literal["exited", "timed_out", "out_of_memory", "killed", "too_much_output"]


class SandboxError(RuntimeError):
    """The sandbox itself failed; nothing is known about the program."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one program."""

    cpu_seconds: int = 5
    """CPU time of each process, in whole seconds: the kernel counts no finer."""
    memory_mb: int = 512
    """Address space of each process, in MiB. The interpreter takes about 30 of them."""
    wall_seconds: float = 6.0
    output_bytes: int = 1 << 16
    """Of each of standard output and error; more ends the program."""
    file_mb: int = 16
    """Size of a file that it writes, in MiB."""


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended and what it said."""

    outcome: Outcome
    """`timed_out`: CPU or wall-clock time; `out_of_memory`: an uncaught MemoryError; `killed`: by a signal."""
    exit_code: int
    """Minus the signal's number if a signal ended it."""
    stdout: str
    """UTF-8; other bytes are replaced."""
    stderr: str
    seconds: float
    """Wall-clock time of the program, without the start of its interpreter."""
    layers: tuple[str, ...]
    """Those of `LAYERS` that were in force."""


def run_python(
    program: str, *, stdin: str = "", limits: Limits | None = None, channel: int | None = None
) -> SandboxResult:
    """Runs `program` as `__main__`. Blocks; safe in threads. `limits`: None for the defaults.

    `channel` is a descriptor (of a pipe or a socket) that the program finds as descriptor 3. Whatever the
    program does is a result; raises SandboxError if it could not be run.
    """
    limits = limits or Limits()
    request = {
        "program": program,
        "stdin": stdin,
        "temporary": tempfile.gettempdir(),
        "channel": channel,
        "layers": LAYERS,
        **asdict(limits),
    }
    supervisor = subprocess.Popen(
        [sys.executable, "-P", "-s", "-S", "-X", "utf8", "-c", _SCRIPT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_environment(),
        cwd="/",
        start_new_session=True,
        pass_fds=() if channel is None else (channel,),
    )
    try:
        answer, errors = supervisor.communicate(
            json.dumps(request).encode(), timeout=limits.wall_seconds + GRACE_S
        )
    except subprocess.TimeoutExpired:
        raise SandboxError("the sandbox's supervisor did not answer in time") from None
    finally:
        supervisor.kill()
        supervisor.wait()
    if supervisor.returncode < 0:
        # Without the layers a program can kill it; that must not be better than a wrong answer.
        return SandboxResult("killed", supervisor.returncode, "", "", 0.0, ())
    if supervisor.returncode:
        reason = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise SandboxError(f"the sandbox cannot run here: {reason[0][:300]}")
    result = json.loads(answer)
    return SandboxResult(**{**result, "layers": tuple(result["layers"])})


@functools.cache
def protections() -> tuple[str, ...]:
    """The layers that hold on this machine, found by running an empty program. Raises SandboxError."""
    return run_python("").layers


def _environment() -> dict[str, str]:
    """Of the supervisor, and so all that a program can see of it."""
    kept = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}
    return {**kept, "PYTHONHASHSEED": "0"}
