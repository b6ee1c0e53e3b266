"""An asyncio event loop in virtual time."""

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

from bucketrl.simulator.kernel import Kernel


class _Selector(selectors.BaseSelector):
    """Nothing to select from: waiting is all it does."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._wake: Callable[[], None] | None = None
        self._woken = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if not self._woken and timeout != 0:
            self._wake = self._kernel.waiter()
            self._kernel.wait(timeout)
            self._wake = None
        self._woken = False
        return []

    def wake(self) -> None:
        self._woken = True
        if self._wake is not None:
            self._wake()

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        raise NotImplementedError

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        raise NotImplementedError

    def get_map(self) -> Any:
        return {}


class VirtualLoop(asyncio.BaseEventLoop):
    """For one simulated thread. What goes to an executor becomes a thread of the same process."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__()
        self._kernel = kernel
        self._selector = _Selector(kernel)
        # What a dead process leaves behind is nobody's business.
        self.set_exception_handler(lambda loop, context: None)

    def time(self) -> float:
        return self._kernel.now

    def run(self, main: Coroutine[Any, Any, Any]) -> Any:
        try:
            return self.run_until_complete(main)
        finally:
            if not self.is_running():
                self.close()

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, function: Callable[..., Any], *args: Any
    ) -> "asyncio.Future[Any]":
        future = self.create_future()
        process = self._kernel.process
        assert process is not None

        def deliver(result: Any, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)

        def run() -> None:
            result, error = None, None
            try:
                result = function(*args)
            except Exception as raised:  # noqa: BLE001 - raised again where it is awaited
                error = raised
            self.call_soon_threadsafe(deliver, result, error)

        self._kernel.spawn(process, run)
        return future

    def _process_events(self, events: Any) -> None:
        pass

    def _write_to_self(self) -> None:
        self._selector.wake()
