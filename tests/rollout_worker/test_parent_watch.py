"""An engine process dies with the rollout worker that started it, however that one dies."""

import os
import select
import signal
import subprocess
import sys

# Starts a child with the watch, says the child's id and waits.
PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c",
    "import bucketrl.rollout_worker.engines.parent_watch as w, time; print('up', flush=True); time.sleep(60)"],
    stdout=subprocess.PIPE)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
ROLLOUT_WORKER = 'import os\nos.environ["BUCKETRL_ENGINE_PARENT"] = str(os.getpid())' + PARENT


def test_a_killed_engine_process_takes_its_workers_along() -> None:
    """Though the rollout worker lives: the next engine needs their memory."""
    environment = os.environ | {"BUCKETRL_ENGINE_PARENT": str(os.getpid())}
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout is not None
        worker = os.pidfd_open(int(engine.stdout.readline()))
        poll = select.poll()
        poll.register(worker, select.POLLIN)
        assert poll.poll(100) == []
        engine.send_signal(signal.SIGKILL)
        ended = poll.poll(5000) != []
        if not ended:
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        assert ended
    os.close(worker)


def test_a_killed_parent_takes_the_engine_along() -> None:
    """Though a signal to the parent's process group does not reach it."""
    with subprocess.Popen([sys.executable, "-c", ROLLOUT_WORKER], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert os.getpgid(pid) != os.getpgid(parent.pid)
        child = os.pidfd_open(pid)
        poll = select.poll()
        poll.register(child, select.POLLIN)
        assert poll.poll(100) == []
        parent.send_signal(signal.SIGKILL)
        assert poll.poll(5000) != []
    os.close(child)
