"""Blocking calls (stores, HTTP, model loading) from the event loop.

Each call gets a daemon thread: a store that hangs must not keep a worker from exiting when its grace
period is over, which the threads of asyncio's default executor would.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class _DaemonThreads(Executor):
    """A thread for each call; nothing ever waits for them."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                result = function(*args, **kwargs)
            except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
                future.set_exception(error)
            else:
                future.set_result(result)

        threading.Thread(target=run, name="blocking call", daemon=True).start()
        return future


_THREADS = _DaemonThreads()


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `function` in a thread of its own; if the caller is cancelled it goes on, its result unread."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(function, *args, **kwargs))
