"""Rewards and environments in processes of their own: what raises, hangs or dies costs its completion only.

Each process does one thing at a time, in its main thread (verifiers use signal.alarm). After a time-out it is
killed and another one started; the others go on.
"""

import asyncio
import logging
import math
import multiprocessing
import os
import pickle
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Literal

from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.rollout_worker.blocking import in_thread
from bucketrl.tasks.base import FinishReason, Message, Prompt, Reward, Task

logger = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""A process imports the task's libraries before it is ready."""
MAX_ANSWER = 1 << 18
"""Bytes of what a process answers. A tool that says more would stop the event loop while it is encoded."""

UNHEEDED = (signal.SIGINT, signal.SIGTERM)
"""By a reward process."""

Job = tuple[Literal["score", "respond", "score_episode"], tuple[Any, ...]]
"""A method of the task, and what to call it with."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """What a reward process answers in place of a result."""

    reason: str


_WHAT = {"score": "reward", "score_episode": "reward", "respond": "environment"}


class RewardFailed(BucketrlError):
    """A completion without a reward, or a turn without an answer. The message is the reason; the worker counts
    it and goes on."""


class RewardPool:
    """`processes` processes that score completions of `task`, each within `timeout_s` seconds."""

    def __init__(self, task: Task, *, processes: int, timeout_s: float) -> None:
        self._all = [_RewardProcess(task, timeout_s) for _ in range(processes)]
        self._idle: asyncio.Queue[_RewardProcess] = asyncio.Queue()
        self.waiting = 0
        """Completions that wait for a reward or for an answer."""

    async def start(self) -> None:
        """Raises UserError if the task cannot be loaded in another process."""
        try:
            await asyncio.gather(*(in_thread(process.start) for process in self._all))
        except (EOFError, OSError, TimeoutError) as error:
            raise UserError(
                "task: it cannot be loaded in a reward process; see the error above, and make sure that its "
                "module can be imported there"
            ) from error
        for process in self._all:
            self._idle.put_nowait(process)

    async def score(self, prompt: Prompt, completion: str, finish_reason: FinishReason) -> Reward:
        """Raises RewardFailed if there is no finite reward in time."""
        reward: Reward = await self._ask(("score", (prompt, completion, finish_reason)))
        return reward

    async def score_episode(
        self, prompt: Prompt, said: tuple[Message, ...], finish_reason: FinishReason
    ) -> Reward:
        """As `score`, for a task of several turns (`tasks.base.Environment`)."""
        reward: Reward = await self._ask(("score_episode", (prompt, said, finish_reason)))
        return reward

    async def respond(self, prompt: Prompt, said: tuple[Message, ...]) -> tuple[Message, ...]:
        """The environment's answer. Raises RewardFailed if there is none in time."""
        answer: tuple[Message, ...] = await self._ask(("respond", (prompt, said)))
        return answer

    async def _ask(self, job: Job) -> Any:
        self.waiting += 1
        try:
            return await self._answer(job)
        finally:
            self.waiting -= 1

    async def _answer(self, job: Job) -> Any:
        process = await self._idle.get()
        try:
            outcome = await in_thread(process.ask, job)
        except TimeoutError as error:
            process.kill()
            raise RewardFailed(str(error)) from None
        except (EOFError, OSError) as error:
            process.kill()
            raise RewardFailed("reward process died") from error
        except asyncio.CancelledError:
            # Its answer must not reach the next completion.
            process.kill()
            raise
        except Exception as error:  # what a pickle of the task's own objects raises
            process.kill()
            raise RewardFailed(f"{_WHAT[job[0]]} cannot be read: {error}") from error
        finally:
            self._idle.put_nowait(process)
        if isinstance(outcome, _Failure):
            raise RewardFailed(outcome.reason.encode(errors="backslashreplace").decode())
        return outcome

    async def close(self) -> None:
        for process in self._all:
            await in_thread(process.close)


class _RewardProcess:
    """One process, started on demand and again after `kill`."""

    def __init__(self, task: Task, timeout_s: float) -> None:
        self._task = task
        self._timeout_s = timeout_s
        self._process: SpawnProcess | None = None
        self._connection: Connection | None = None
        self._closed = False
        # A cancelled `start` goes on in its thread: what it is about to start must not escape a `kill`.
        self._starting = threading.Lock()

    def start(self) -> Connection:
        """Blocks until it is ready. Raises EOFError, OSError or TimeoutError if it does not come up."""
        if self._connection is not None:
            return self._connection
        with self._starting:
            if self._closed:
                raise OSError("the reward pool is closed")
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._task), name="reward", daemon=True)
            process.start()
            theirs.close()
            self._process, self._connection = process, ours
        if not ours.poll(START_TIMEOUT_S):
            raise TimeoutError(f"reward process not ready after {START_TIMEOUT_S:.0f} s")
        ours.recv()
        return ours

    def ask(self, job: Job) -> Any:
        """What the task's method returns, or a _Failure. Blocks. After TimeoutError, EOFError or OSError:
        `kill` it."""
        connection = self.start()
        connection.send(job)
        if not connection.poll(self._timeout_s):
            raise TimeoutError(f"{_WHAT[job[0]]} took more than {self._timeout_s:g} s")
        return pickle.loads(connection.recv_bytes())

    def close(self) -> None:
        self._closed = True
        self.kill()

    def kill(self) -> None:
        with self._starting:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if process is not None and process.pid is not None:
            # It may have no group of its own yet, or all of it have ended.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        if connection is not None:
            connection.close()


def _serve(connection: Connection, task: Task) -> None:
    """Main function of a reward process."""
    # With a group of its own, the programs and processes that a reward has started end when it does.
    os.setsid()
    multiprocessing.current_process().daemon = False  # else it may start no processes
    process_id = os.getpid()
    # What a terminal or a batch system sends reaches every process of the group. A worker that was told to stop
    # still needs the rewards of what it has drawn; it ends this process itself. (A handler, not SIG_IGN, which
    # programs that a reward starts would inherit.)
    for number in UNHEEDED:
        signal.signal(number, lambda *_: None)
    # Held back meanwhile: a fork that is told to end before it has its own handlers would not hear of it.
    os.register_at_fork(
        before=partial(signal.pthread_sigmask, signal.SIG_BLOCK, UNHEEDED),
        after_in_parent=partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, UNHEEDED),
        after_in_child=_heed_signals,
    )
    threading.Thread(target=_end_with_parent, daemon=True).start()
    connection.send("ready")
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            outcome = _checked(getattr(task, method)(*arguments), method)
        except Exception as error:  # noqa: BLE001 - a task may raise anything: it costs this completion
            outcome = _Failure(f"{_WHAT[method]} raised {type(error).__name__}: {str(error)[:200]}")
        if os.getpid() != process_id:
            os._exit(1)  # a fork that the task has made and not ended must not answer in its place
        connection.send_bytes(_pickled(outcome, method))


def _heed_signals() -> None:
    """A process that a reward starts ends when it is told to."""
    for number in UNHEEDED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, UNHEEDED)


def _pickled(outcome: Any, method: str) -> bytes:
    try:
        data = pickle.dumps(outcome)
    except Exception as error:  # noqa: BLE001 - it costs this completion
        return pickle.dumps(_Failure(f"{_WHAT[method]} cannot be sent: {str(error)[:200]}"))
    if len(data) > MAX_ANSWER:
        return pickle.dumps(_Failure(f"{_WHAT[method]} has more than {MAX_ANSWER} bytes"))
    return data


def _checked(outcome: Any, method: str) -> Any:
    """`outcome`, or a _Failure if it is not what `method` has to return."""
    if method == "respond":
        fits = isinstance(outcome, tuple) and all(isinstance(m, dict) and "role" in m for m in outcome)
        return (
            outcome if fits else _Failure("environment answers with something else than a tuple of messages")
        )
    if not isinstance(outcome, Reward):
        return _Failure(f"reward is a {type(outcome).__name__}, not a Reward")
    if not all(map(math.isfinite, (outcome.total, *outcome.parts.values()))):
        return _Failure("reward is not finite")
    try:
        "".join(outcome.parts).encode()
    except (TypeError, UnicodeEncodeError) as error:
        return _Failure(f"reward has a part whose name is no text: {error}")
    return outcome


def _end_with_parent() -> None:
    """A worker that is killed cannot end a reward that hangs."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.killpg(0, signal.SIGKILL)
