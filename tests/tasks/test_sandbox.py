"""Programs that nobody has read: how they end, what they cannot do, and that nothing of them is left."""

import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bucketrl.tasks import sandbox, sandbox_layers
from bucketrl.tasks.sandbox import Limits, SandboxError, protections, run_python

LIMITS = Limits(cpu_seconds=1, memory_mb=128, wall_seconds=10, output_bytes=1000, file_mb=1)
linux = pytest.mark.skipif(sys.platform != "linux", reason="what only Linux offers")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where programs get their working folders; none may be left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield tmp_path
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("sandbox-")] == []


@pytest.fixture(params=["every layer", "no layer"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "no layer":
        monkeypatch.setattr(sandbox, "LAYERS", ())


def wait_until_empty(folders: Path) -> None:
    until = time.monotonic() + 30
    while any(folders.glob("sandbox-*")) and time.monotonic() < until:
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_input_output_and_exit_code(layers: None) -> None:
    result = run_python(
        "import sys\nprint(sys.stdin.read()[::-1], __name__)\nprint('é', file=sys.stderr)\nsys.exit(3)",
        stdin="äbc",
    )
    assert (result.outcome, result.exit_code) == ("exited", 3)
    assert (result.stdout, result.stderr) == ("cbä __main__\n", "é\n")
    assert 0 < result.seconds < 10


@pytest.mark.parametrize(
    ("program", "outcome", "exit_code"),
    [
        ("print(1)", "exited", 0),
        ("1/0", "exited", 1),
        ("(", "exited", 1),
        ("\0", "exited", 1),
        ("import os; os._exit(4)", "exited", 4),
        ("import time; time.sleep(60)", "timed_out", -signal.SIGKILL),
        ("import os, time; os.closerange(0, 9); time.sleep(60)", "timed_out", -signal.SIGKILL),
        ("bytearray(1 << 30)", "out_of_memory", 1),
        ("x = []\nwhile True: x.append(bytearray(1 << 20))", "out_of_memory", 1),
        ("while True: print('x' * 100)", "too_much_output", -signal.SIGKILL),
        ("import os\nwhile True: os.write(2, b'x')", "too_much_output", -signal.SIGKILL),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "killed", -signal.SIGTERM),
        ("import ctypes; ctypes.string_at(0)", "killed", -signal.SIGSEGV),
    ],
)
def test_outcomes(program: str, outcome: str, exit_code: int) -> None:
    limits = Limits(
        cpu_seconds=5, memory_mb=128, wall_seconds=0.7 if "sleep" in program else 10, output_bytes=1000
    )
    result = run_python(program, limits=limits)
    assert (result.outcome, result.exit_code) == (outcome, exit_code)
    assert len(result.stdout) <= 1000
    assert len(result.stderr) <= 1000


@pytest.mark.slow
def test_cpu_time_is_limited_even_if_the_signal_is_ignored() -> None:
    result = run_python(
        "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass", limits=LIMITS
    )
    assert (result.outcome, result.exit_code) in (
        ("timed_out", -signal.SIGKILL),
        ("timed_out", -signal.SIGXCPU),
    )


def test_a_traceback_shows_the_program_only() -> None:
    result = run_python("def f():\n    return 1 / 0\nf()")
    assert 'File "program.py", line 2, in f' in result.stderr
    assert "supervisor" not in result.stderr


def test_a_file_has_a_largest_size() -> None:
    result = run_python(
        "file = open('big', 'wb', buffering=0)\ntry:\n    while True: file.write(bytes(1 << 16))\n"
        "except OSError as error:\n    print(file.tell(), error.strerror)",
        limits=LIMITS,
    )
    assert result.stdout == f"{1 << 20} File too large\n"


@pytest.mark.parametrize(
    "program",
    [
        "import os\nos.mkdir('x'); open('x/y', 'w'); os.chmod('x', 0)",
        "import os\nfor _ in range(300):\n    os.mkdir('x'); os.chdir('x')",
    ],
)
def test_the_working_folder_goes_whatever_is_in_it(folders: Path, program: str) -> None:
    result = run_python(program)
    assert result.stderr == ""
    wait_until_empty(folders)


@pytest.mark.slow
def test_a_program_whose_files_take_long_to_remove_has_a_result(
    monkeypatch: pytest.MonkeyPatch, folders: Path
) -> None:
    program = "import os\nfor _ in range(1000):\n    os.mkdir('x'); os.chdir('x')"
    assert run_python(program, limits=Limits(wall_seconds=1)).outcome in ("exited", "timed_out")
    wait_until_empty(folders)


def test_the_workers_secrets_are_not_in_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    if not {"files", "namespaces", "user"}.intersection(protections()):
        pytest.skip("this machine offers nothing against it")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    result = run_python(
        "import os\nprint(dict(os.environ))\n"
        f"for pid in (os.getppid(), {os.getpid()}, {os.getppid()}, 'self'):\n"
        "    for name in ('environ', 'mem', 'maps'):\n"
        "        try:\n            print(pid, name, open(f'/proc/{pid}/{name}', 'rb').read(10))\n"
        "        except OSError as error:\n            print('refused')\n"
    )
    environment, *attempts = result.stdout.splitlines()
    assert "hf_secret" not in result.stdout
    assert set(eval(environment)) <= {"PYTHONHASHSEED", "LC_CTYPE", "LD_LIBRARY_PATH"}
    assert attempts[:9] == ["refused"] * 9


@linux
def test_files_outside_are_closed(folders: Path) -> None:
    if "files" not in protections():
        pytest.skip("no Landlock")
    (folders / "secret").write_text("s")
    tries = [f"open({str(folders / 'secret')!r}).read()", f"open({str(folders / 'new')!r}, 'w')",
             "open('/etc/passwd')", f"os.listdir({str(Path.home())!r})", "os.listdir('/proc')"]  # fmt: skip
    result = run_python("import os\n" + "".join(
        f"try:\n    {one}\n    print('open')\nexcept PermissionError: print('refused')\n" for one in tries
    ))  # fmt: skip
    assert result.stdout.split() == ["refused"] * len(tries)
    assert not (folders / "new").exists()


@linux
def test_a_connection_is_refused_at_once() -> None:
    if not {"namespaces", "syscalls"}.intersection(protections()):
        pytest.skip("this machine offers nothing against it")
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        result = run_python(
            f"import socket\nfor host in ('127.0.0.1', '192.0.2.1'):\n"
            f"    try: socket.create_connection((host, {server.getsockname()[1]}))\n"
            "    except OSError: print('refused')",
            limits=LIMITS,
        )
        assert result.stdout == "refused\nrefused\n"
        with pytest.raises(BlockingIOError):
            server.accept()


@linux
def test_processes_are_refused_and_own_threads_work() -> None:
    if "syscalls" not in protections():
        pytest.skip("no seccomp filter for this machine")
    result = run_python(
        "import os, subprocess, asyncio, threading\n"
        "for start in (os.fork, lambda: subprocess.run(['true']), lambda: os.kill(os.getppid(), 9),\n"
        "              lambda: os.kill(-1, 9)):\n"
        "    try: start(); print('started')\n"
        "    except PermissionError: print('refused')\n"
        "threads = [threading.Thread(target=print, args=('thread',)) for _ in range(3)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
        "async def main(): return await asyncio.to_thread(lambda: 'asyncio')\n"
        "print(asyncio.run(main()))"
    )
    assert result.stdout.split() == ["refused"] * 4 + ["thread"] * 3 + ["asyncio"]


GRANDCHILD = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        os.write(1, b"%d " % os.getpid())
        time.sleep(60)
    os._exit(0)
os.wait()
time.sleep(0.2)
"""
BOMB = """
import os, time
for _ in range(6):
    try:
        os.fork()
    except OSError: pass
os.write(1, b"%d " % os.getpid())
time.sleep(60)
"""


@linux
@pytest.mark.parametrize("program", [GRANDCHILD, BOMB], ids=["sessions of their own", "64 processes"])
def test_descendants_do_not_outlive_a_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    """Without the filter that refuses them."""
    monkeypatch.setattr(sandbox, "LAYERS", ())
    result = run_python(program, limits=Limits(wall_seconds=1, memory_mb=64))
    pids = [int(pid) for pid in result.stdout.split()]
    assert pids
    assert not any(map(is_alive, pids))


def children_of(pid: int) -> list[int]:
    lists = [path.read_text().split() for path in Path(f"/proc/{pid}/task").glob("*/children")]
    return [int(child) for children in lists for child in children]


@linux
def test_a_program_ends_with_its_supervisor_and_counts_as_killed(layers: None, folders: Path) -> None:
    """Which it can kill where the machine allows no layer."""

    def kill_supervisor() -> int:
        while not (new := [pid for pid in children_of(os.getpid()) if pid not in before]) or not (
            programs := children_of(new[0])
        ):
            time.sleep(0.01)
        time.sleep(0.3)  # past the change of user, which undoes what ties it to its supervisor
        os.kill(new[0], signal.SIGKILL)
        return programs[0]

    before = children_of(os.getpid())
    with ThreadPoolExecutor(1) as thread:
        program = thread.submit(kill_supervisor)
        result = run_python("import time; time.sleep(60)", limits=Limits(wall_seconds=20))
    assert result.outcome == "killed"
    until = time.monotonic() + 5
    while is_alive(program.result()) and time.monotonic() < until:
        time.sleep(0.01)
    assert not is_alive(program.result())
    for folder in folders.glob("sandbox-*"):
        folder.rmdir()  # nobody was left to do it


@linux
def test_a_program_ends_with_its_worker(folders: Path) -> None:
    code = (
        "import tempfile; from bucketrl.tasks.sandbox import *\n"
        f"tempfile.tempdir = {str(folders)!r}\n"
        "run_python('import time; time.sleep(60)', limits=Limits(wall_seconds=60))"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as worker:
        until = time.monotonic() + 20
        while not list(folders.glob("sandbox-*")) and time.monotonic() < until:
            time.sleep(0.01)
        worker.kill()
    wait_until_empty(folders)


@linux
def test_the_disk_is_not_taken_at_once() -> None:
    if "syscalls" not in protections():
        pytest.skip("no seccomp filter for this machine")
    program = (
        "import os\ntry: os.posix_fallocate(os.open('f', os.O_CREAT | os.O_RDWR), 0, 1 << 20)\n"
        "except PermissionError: print('no')"
    )
    assert run_python(program).stdout == "no\n"


@pytest.mark.parametrize(("share", "outcome"), [(1000, "too_much_output"), (1e9, "exited")])
def test_a_program_with_a_share_in_a_full_disk_is_ended(
    monkeypatch: pytest.MonkeyPatch, share: float, outcome: str
) -> None:
    room = "free_bytes = lambda folder, left=itertools.chain([10, 6], itertools.repeat(4)): next(left)"
    script = sandbox._SCRIPT.replace("sandbox_supervisor.main()", "")
    monkeypatch.setattr(
        sandbox,
        "_SCRIPT",
        f"{script}import itertools\nsandbox_supervisor.{room}\nsandbox_supervisor.LEAST_SHARE = {share}\n"
        "sandbox_supervisor.main()",
    )
    program = f"open('f', 'w').write('x' * 65536); import time; time.sleep({60 if share == 1000 else 0.5})"
    result = run_python(program, limits=Limits(wall_seconds=20))
    assert result.outcome == outcome


def test_programs_run_side_by_side() -> None:
    with ThreadPoolExecutor(4) as threads:
        results = threads.map(lambda i: run_python(f"print({i})").stdout, range(8))
    assert list(results) == [f"{i}\n" for i in range(8)]


def test_the_same_program_gives_the_same_result() -> None:
    """Sets of strings have an order that depends on the hash seed."""
    program = "print({str(i) for i in range(20)})"
    assert run_python(program).stdout == run_python(program).stdout


def test_what_is_printed_does_not_pass_for_a_result(layers: None) -> None:
    fake = '{"outcome": "exited", "exit_code": 0}'
    program = (
        f"import os\nfor fd in range(1, 9):\n    try: os.write(fd, {fake!r}.encode())\n"
        "    except OSError: pass\n1/0"
    )
    result = run_python(program)
    assert (result.outcome, result.exit_code) == ("exited", 1)


def test_a_sandbox_that_does_not_work_is_an_error_and_not_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "_SCRIPT", "raise OSError('no room')")
    with pytest.raises(SandboxError, match="no room"):
        run_python("print(1)")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_filter_decides_by_number_and_argument(machine: str) -> None:
    """Also for the architecture that the tests do not run on. Numbers are those of the kernel's tables."""
    allow, deny = 0x7FFF0000, 0x50001
    code = sandbox_layers.filter_program(machine, pid=77)

    def decide(number: int, argument0: int = 0, argument1: int = 0, arch: int | None = None) -> int:
        arch = sandbox_layers.AUDIT_ARCH[machine] if arch is None else arch
        data = struct.pack("=IIQQQ", number, arch, 0, argument0, argument1)
        accumulator = position = 0
        while True:
            kind, if_true, if_false, constant = struct.unpack("=HBBI", code[position])
            position += 1
            if kind == 0x06:
                return int(constant)
            if kind == 0x20:
                accumulator = struct.unpack_from("=I", data, constant)[0]
            elif kind == 0x54:
                accumulator &= constant
            else:
                holds = {0x15: accumulator == constant, 0x35: accumulator >= constant,
                         0x45: bool(accumulator & constant)}[kind]  # fmt: skip
                position += if_true if holds else if_false

    read, clone, kill, pair = {"x86_64": (0, 56, 62, 53), "aarch64": (63, 220, 129, 199)}[machine]
    assert decide(read) == allow
    assert decide({"x86_64": 41, "aarch64": 198}[machine]) == deny
    assert (decide(clone, 17), decide(clone, 0x3D0F00)) == (deny, allow)
    assert decide(435) == 0x50000 | 38
    assert (decide(kill, 77), decide(kill, 78), decide(kill, 0xFFFFFFFF)) == (allow, deny, deny)
    assert (decide(pair, 1, 1 | 0x80000), decide(pair, 1, 2)) == (allow, deny)
    assert decide(read, arch=0x40000003) == 0x80000000
    if machine == "x86_64":
        assert decide(0x40000000 | 41) == deny
