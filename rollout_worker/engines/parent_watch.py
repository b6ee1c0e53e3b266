"""Ends vLLM's processes when the rollout worker is killed: by themselves they would live on, memory and all.

vLLM imports this module in its worker process (by `worker_extension`), which is the moment when the watch
begins. When the worker process dies, vLLM's engine process stops as well.

An engine of several GPUs has a worker process for each, below the engine process. One that hangs on its GPU does
not hear that the engine process was killed, and keeps the memory that the next engine needs: each watches its own
parent as well.

The process also leaves the rollout worker's process group: a signal to all of the group (Ctrl-C, a batch
system's SIGTERM) would else end it before the rollout worker has collected what is being drawn.
"""

import os
import select
import signal
import threading

PARENT_VARIABLE = "BUCKETRL_ENGINE_PARENT"
"""Environment variable that holds the process id of the rollout worker."""


def _die_with(pid: int) -> None:
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        pass
    else:
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)


_parent = int(os.environ.get(PARENT_VARIABLE, os.getpid()))
if _parent != os.getpid():
    os.setpgid(0, 0)
    for _pid in {_parent, os.getppid()}:
        threading.Thread(target=_die_with, args=(_pid,), name="parent watch", daemon=True).start()
