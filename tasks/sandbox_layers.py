"""What Linux offers an unprivileged process to confine itself (`tasks.sandbox` says what each layer is for).

Each layer applies to the calling process, for good, and says whether it holds. Standard library only. Sources:
landlock(7), seccomp(2), user_namespaces(7), prctl(2); system call numbers from the kernel's tables.
"""

import ctypes
import errno
import os
import resource
import signal
import stat
import struct
import sys

EXTRA_TASKS = 64
"""Threads (and processes, without the syscall filter) beyond those that the user has already."""

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = (
    1,
    4,
    22,
    36,
    38,
)
CLONE_THREAD, CLONE_NEWUSER, CLONE_NEWNET = 0x10000, 0x10000000, 0x40000000

USER_BASE = 1_900_000_000
"""Above what systemd and container runtimes hand out. Plus the process id: no two programs share a user."""
NOBODY = 65534

READABLE = (
    "/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache",
    "/dev/null", "/dev/zero", "/dev/random", "/dev/urandom",
)  # fmt: skip
"""Besides the interpreter's own folders."""

# On x86-64, then on aarch64; None where there is no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    "fork": (57, None), "vfork": (58, None),
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434), "pidfd_getfd": (438, 438), "pidfd_send_signal": (424, 424),
    "tkill": (200, 130), "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240),
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    "io_uring_setup": (425, 425), "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40),
    # What outlives a process or is in no limit of its memory.
    "shmget": (29, 194), "semget": (64, 190), "msgget": (68, 186), "mq_open": (240, 180),
    "memfd_create": (319, 279),
    # Takes gigabytes of the disk in no time. What is written takes time, which is limited.
    "fallocate": (285, 47),
}  # fmt: skip
CLONE, CLONE3, SOCKETPAIR = (56, 220), (435, 435), (53, 199)
KILL, TGKILL, PRLIMIT = (62, 129), (234, 131), (302, 261)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

_libc = ctypes.CDLL(None, use_errno=True)


def shield_supervisor() -> None:
    """Orphaned descendants become children of this process; others of its user cannot read its memory."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_DUMPABLE, 0)


def end_with(parent: int) -> None:
    """This process is killed when `parent` ends. A change of user or privileges undoes it."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def confine(layers: list[str], folder: str, *, cpu_seconds: int, memory_mb: int, file_mb: int) -> list[str]:
    """Sets the limits, gives up privileges and applies those of `layers` that the machine allows; returns them.

    `folder` is the working folder, the current one already: the only place that may be written. No other order
    works: a user is changed with privileges, tasks are counted while /proc can be read.
    """
    held = []
    if "user" in layers and change_user(folder):
        held.append("user")
    if "namespaces" in layers and enter_namespaces():
        held.append("namespaces")
    _drop_capabilities()
    _prctl(PR_SET_NO_NEW_PRIVS, 1)
    limit_resources(cpu_seconds=cpu_seconds, memory_mb=memory_mb, file_mb=file_mb)
    if "files" in layers and restrict_files():
        held.append("files")
    if "syscalls" in layers and filter_syscalls():
        held.append("syscalls")
    return held


def limit_resources(*, cpu_seconds: int, memory_mb: int, file_mb: int) -> None:
    """Limits that the process cannot raise. What the system does not know (macOS: memory) stays as it is."""
    wanted = {
        resource.RLIMIT_CPU: (cpu_seconds, cpu_seconds + 1),
        resource.RLIMIT_AS: (memory_mb << 20,) * 2,
        resource.RLIMIT_FSIZE: (file_mb << 20,) * 2,
        resource.RLIMIT_NOFILE: (64, 64),
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_NPROC: (_tasks_of(os.getuid()) + EXTRA_TASKS,) * 2,
    }
    for kind, (soft, hard) in wanted.items():
        ceiling = resource.getrlimit(kind)[1]
        if ceiling != resource.RLIM_INFINITY:
            soft, hard = min(soft, ceiling), min(hard, ceiling)
        try:
            resource.setrlimit(kind, (soft, hard))
        except (OSError, ValueError):
            pass


def change_user(folder: str) -> bool:
    """From root to a user of this program's own, `nobody` where a container maps few users."""
    if os.geteuid() != 0 or not all(map(_open_to_others, sys.path)):
        return False
    for user in (USER_BASE + os.getpid(), NOBODY):
        try:
            os.chown(folder, user, user)
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        except OSError:
            continue
        return True
    return False


def enter_namespaces() -> bool:
    """A user namespace, without rights to others' processes, and a network with no interface that is up."""
    user, group = os.getuid(), os.getgid()
    _prctl(PR_SET_DUMPABLE, 1)  # otherwise uid_map belongs to root
    if not hasattr(_libc, "unshare") or _libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
        return False
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    except OSError:
        pass  # the program has no name for itself and cannot make files; it is as confined
    return True


def restrict_files() -> bool:
    """Landlock: also closes what /proc tells of other processes, and signals to them (Linux 6.12)."""
    if sys.platform != "linux":
        return False
    create_ruleset, add_rule, restrict_self = 444, 445, 446
    version = _libc.syscall(create_ruleset, None, 0, 1)
    if version < 1:
        return False
    # Rights by version: 13 at first, then refer, truncate, (network in 4), ioctl_dev.
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    network, scopes = (3 if version >= 4 else 0), (3 if version >= 6 else 0)
    attributes = struct.pack("=QQQ", rights, network, scopes)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    ruleset = _libc.syscall(create_ruleset, attributes, size, 0)
    if ruleset < 0:
        return False
    write_file, read_file, read_folder, truncate = 1 << 1, 1 << 2, 1 << 3, 1 << 14
    libraries = (f"{sys.base_prefix}/lib", *os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    allowed = dict.fromkeys((*READABLE, *sys.path, *libraries), read_file | read_folder)
    allowed |= {"/dev/null": read_file | write_file | truncate, os.curdir: rights & ~1}  # 1: execute
    for path, access in allowed.items():
        try:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            access &= read_file | write_file | truncate
        _libc.syscall(add_rule, ruleset, 1, struct.pack("=Qi", access & rights, opened), 0)
        os.close(opened)
    held: bool = _libc.syscall(restrict_self, ruleset, 0) == 0
    os.close(ruleset)
    return held


def filter_syscalls() -> bool:
    """Seccomp: calls in `DENIED` fail with EPERM, some others by their arguments."""
    machine = os.uname().machine
    if sys.platform != "linux" or machine not in AUDIT_ARCH:
        return False
    code = b"".join(filter_program(machine, os.getpid()))
    buffer = ctypes.create_string_buffer(code)
    # struct sock_fprog: a count, padding, a pointer
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code) // 8, ctypes.addressof(buffer)))
    return _prctl(PR_SET_SECCOMP, 2, ctypes.addressof(program))


def filter_program(machine: str, pid: int) -> list[bytes]:
    """The filter's instructions (struct sock_filter: code, jump if true, jump if false, constant)."""

    def instruction(code: int, constant: int, if_true: int = 0, if_false: int = 0) -> bytes:
        return struct.pack("=HBBI", code, if_true, if_false, constant)

    def load(
        offset: int,
    ) -> bytes:  # of struct seccomp_data: nr, arch, instruction pointer (8), arguments (8 each)
        return instruction(0x20, offset)

    def argument(index: int) -> bytes:
        return load(16 + 8 * index)  # its lower half

    def answer(error: int) -> bytes:
        return instruction(0x06, 0x50000 | error)

    equal, at_least, any_bit, mask = 0x15, 0x35, 0x45, 0x54
    allow, deny, kill = instruction(0x06, 0x7FFF0000), answer(errno.EPERM), instruction(0x06, 0x80000000)
    column = list(AUDIT_ARCH).index(machine)
    rules: list[tuple[int, list[bytes]]] = [
        (CLONE[column], [argument(0), instruction(any_bit, CLONE_THREAD, 0, 1), allow, deny]),
        # Its flags are behind a pointer; without it the C library takes clone.
        (CLONE3[column], [answer(errno.ENOSYS)]),
        # A pair of streams is connected for good; a datagram socket can send elsewhere.
        (
            SOCKETPAIR[column],
            [argument(1), instruction(mask, 0xF), instruction(equal, 1, 0, 1), allow, deny],
        ),
        (KILL[column], [argument(0), instruction(equal, pid, 0, 1), allow, deny]),
        (TGKILL[column], [argument(0), instruction(equal, pid, 0, 1), allow, deny]),
        (PRLIMIT[column], [argument(0), instruction(equal, 0, 0, 1), allow, deny]),
    ]
    rules += [(number, [deny]) for numbers in DENIED.values() if (number := numbers[column]) is not None]
    program = [load(4), instruction(equal, AUDIT_ARCH[machine], 1, 0), kill, load(0)]
    if machine == "x86_64":  # the x32 interface, which has the same calls under other numbers
        program += [instruction(at_least, 0x40000000, 0, 1), deny]
    for number, body in rules:
        program += [instruction(equal, number, 0, len(body)), *body]
    return [*program, allow]


def _drop_capabilities() -> None:
    if hasattr(_libc, "capset"):
        _libc.capset(struct.pack("=II", 0x20080522, 0), bytes(24))


def _prctl(option: int, *values: int) -> bool:
    if not hasattr(_libc, "prctl"):
        return False
    arguments = (*values, 0, 0, 0, 0)[:4]
    held: bool = _libc.prctl(option, *(ctypes.c_ulong(value) for value in arguments)) == 0
    return held


def _open_to_others(path: str) -> bool:
    """Whether any user can read a folder of the interpreter. One that does not exist hinders nobody."""
    if not os.path.isdir(path):
        return True
    if not os.stat(path).st_mode & stat.S_IROTH:
        return False
    while path != "/":
        if not os.stat(path).st_mode & stat.S_IXOTH:
            return False
        path = os.path.dirname(path)
    return True


def _tasks_of(user: int) -> int:
    """Threads of all processes of `user`; 0 where there is no /proc."""
    count = 0
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == user:
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue  # it has ended
    return count
