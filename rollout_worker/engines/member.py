"""One place in an engine pool: the engine that has it now, and the next one when that is gone.

                   ┌── died, or does not serve what it should ──┐
down ─► start ─► all adapters loaded and proved ─► serving ─────┤
 ▲        │ fails: again, later                                 │
 └────────┴───────────────── closed ◄── draining ◄── drain ─────┘
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from bucketrl.bucket.errors import IntegrityError
from bucketrl.rollout_worker.background import Background
from bucketrl.rollout_worker.engine import DroppedCompletion, Engine, EngineDied

logger = logging.getLogger(__name__)

RESTART_S = 1.0
"""Before the second attempt in a row to start an engine; doubles with each. The first is made at once."""
MAX_FAILURES = 5
"""Of one engine within WINDOW_S. Then it rests until the oldest is that long ago."""
WINDOW_S = 600.0
CLOSE_S = 30.0
"""What an engine may take to free its memory before the next is started."""

MakeEngine = Callable[[int], Engine]
"""Index -> an engine that has not been started."""
Judge = Callable[[Sequence[float]], str | None]
"""Says what is wrong with an engine's logprobs of a probe; None: nothing."""


@dataclass(slots=True, eq=False)
class Served:
    """What every engine of a pool has to have before it gets requests. By version."""

    adapters: dict[int, Path] = field(default_factory=dict)
    proofs: dict[int, tuple[tuple[int, ...], Judge]] = field(default_factory=dict)
    """The probe's tokens, and what their logprobs have to be."""


class Member:
    """`changed` is called whenever something that others may wait for is different."""

    def __init__(
        self,
        index: int,
        make: MakeEngine,
        served: Served,
        background: Background,
        changed: Callable[[], None],
    ) -> None:
        self.index = index
        self.make = make
        self.engine = make(index)
        self.state: Literal["down", "serving", "draining"] = "down"
        self.trouble = ""
        """Why it does not serve."""
        self.resting = False
        """It failed too often to be tried again now."""
        self.requests: set[str] = set()
        """Ids of those that it runs."""
        self.adapters: dict[int, Path] = {}
        self.proved: set[int] = set()
        self._served = served
        self._background = background
        self._changed = changed
        self._failures: list[float] = []
        """When it died or did not start, in seconds of the event loop's clock."""

    def up(self, engine: Engine) -> bool:
        """Whether `engine` still is the one, and alive as far as is known."""
        return self.engine is engine and self.state != "down"

    def take_out(self, engine: Engine, trouble: str, *, failed: bool = True) -> None:
        """Replaces `engine`, unless that has begun."""
        if not self.up(engine):
            return
        logger.log(logging.ERROR if failed else logging.INFO, "engine %d: %s", self.index, trouble)
        self.state, self.trouble = "down", trouble
        if failed:
            self._failures.append(_now())
        self._background.spawn(self._replace())
        self._changed()

    async def load(self, version: int, folder: Path) -> IntegrityError | None:
        """Why it cannot, though it lives."""
        engine = self.engine
        if not self.up(engine):
            return None
        try:
            await engine.add_adapter(version, folder)
        except IntegrityError as error:
            return error
        except (EngineDied, DroppedCompletion) as error:
            self.take_out(engine, str(error))
        else:
            if self.up(engine):
                self.adapters[version] = folder
        return None

    async def unload(self, version: int) -> None:
        engine = self.engine
        self.proved.discard(version)
        if self.adapters.pop(version, None) is None:
            return
        try:
            await engine.remove_adapter(version)
        except (EngineDied, DroppedCompletion) as error:
            self.take_out(engine, str(error))

    async def prove(self, version: int, token_ids: tuple[int, ...], judge: Judge) -> str | None:
        """What is wrong, though it lives."""
        engine = self.engine
        if not self.up(engine):
            return None
        try:
            failure = judge(await engine.score(token_ids, version))
        except (EngineDied, DroppedCompletion) as error:
            self.take_out(engine, str(error))
            return None
        except IntegrityError as error:
            return str(error)
        if failure is None and self.up(engine):
            self.proved.add(version)
        return failure

    async def _replace(self) -> None:
        """Until a new engine serves."""
        while True:
            await self._free()
            self._failures = [then for then in self._failures if _now() - then < WINDOW_S]
            self.resting = len(self._failures) >= MAX_FAILURES
            self._changed()
            await asyncio.sleep(restart_delay(self._failures, _now()))
            self.resting = False
            try:
                self.engine = self.make(self.index)
                await self.engine.start()
                await self._catch_up()
            except Exception as error:  # noqa: BLE001 - an engine may fail in any way; it is counted and told
                self.trouble = f"cannot be restarted: {' '.join(str(error).split())[:300]}"
                logger.error("engine %d: %s", self.index, self.trouble)
                self._failures.append(_now())
            else:
                self.state, self.trouble = "serving", ""
                logger.info("engine %d serves again", self.index)
                self._changed()
                return

    async def _free(self) -> None:
        self.adapters, self.proved = {}, set()
        try:
            # wait_for of Python 3.11 can lose a cancellation.
            async with asyncio.timeout(CLOSE_S):
                await self.engine.close()
        except TimeoutError:
            logger.warning("engine %d does not close; it may keep its memory", self.index)
        except Exception as error:  # noqa: BLE001 - what is broken need not close well
            logger.warning("engine %d: closing it failed: %s", self.index, error)

    async def _catch_up(self) -> None:
        """Gives it every adapter of the pool, proved. They may change meanwhile: nothing is awaited between
        the last look at them and the return."""
        engine = self.engine
        while True:
            stale = [v for v, folder in self.adapters.items() if self._served.adapters.get(v) != folder]
            missing = [v for v in self._served.adapters if v not in self.adapters]
            unproved = [v for v in self._served.proofs if v not in self.proved]
            if stale:
                self.adapters.pop(stale[0])
                self.proved.discard(stale[0])
                await engine.remove_adapter(stale[0])
            elif missing:
                folder = self._served.adapters[missing[0]]
                try:
                    await engine.add_adapter(missing[0], folder)
                except IntegrityError:
                    # Its files are removed when it is.
                    if self._served.adapters.get(missing[0]) == folder:
                        raise
                else:
                    self.adapters[missing[0]] = folder
            elif unproved:
                token_ids, judge = self._served.proofs[unproved[0]]
                if failure := judge(await engine.score(token_ids, unproved[0])):
                    raise IntegrityError(f"does not serve version {unproved[0]}: {failure}")
                self.proved.add(unproved[0])
            else:
                return


def restart_delay(failures: Sequence[float], now: float) -> float:
    """Seconds until the next attempt to start an engine that failed at these times, all within WINDOW_S."""
    if len(failures) >= MAX_FAILURES:
        return max(0.0, failures[0] + WINDOW_S - now)
    return float(RESTART_S * 2 ** (len(failures) - 2)) if len(failures) > 1 else 0.0


def _now() -> float:
    return asyncio.get_running_loop().time()
