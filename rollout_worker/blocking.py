"""Blocking calls (stores, HTTP, model loading) from the event loop.

Each call gets a daemon thread: a store that hangs must not keep a worker from exiting when its grace
period is over, which the threads of asyncio's default executor would.
"""

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Runs `function` in a thread of its own; if the caller is cancelled it goes on, its result unread."""
    future: concurrent.futures.Future[T] = concurrent.futures.Future()

    def run() -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - raised again where it is awaited
            future.set_exception(error)
        else:
            future.set_result(result)

    name = getattr(function, "__qualname__", "blocking call")
    threading.Thread(target=run, name=name, daemon=True).start()
    return await asyncio.wrap_future(future)
