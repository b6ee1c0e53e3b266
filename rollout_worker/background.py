"""Tasks that run beside the caller, whose first error is everybody's business."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

CANCEL_S = 1.0
"""What cancelled tasks may take to clean up before they are left behind."""


class Background:
    """A set of tasks. `on_error` gets what one of them raises; it may be called several times."""

    def __init__(self, on_error: Callable[[BaseException], None]) -> None:
        self._on_error = on_error
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_error(error)

    async def join(self) -> None:
        """Until none runs."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def cancel(self) -> None:
        """Cancels all and lets them clean up."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CANCEL_S)


async def in_time(work: Coroutine[Any, Any, Any] | asyncio.Future[Any], seconds: float) -> bool:
    """Whether `work` was done within `seconds`; if not, it is cancelled."""
    try:
        await asyncio.wait_for(work, max(seconds, 0.0))
    except TimeoutError:
        return False
    return True
