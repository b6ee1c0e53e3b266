"""Groups that wait to be issued again: those that somebody has begun first, then the oldest."""

from collections.abc import Callable, Iterator
from heapq import heappop, heappush


class ReissueQueue:
    """Ordinals, each once. Found without walking over them: when a fleet dies there are thousands."""

    def __init__(self) -> None:
        self._begun: dict[int, bool] = {}
        """What waits, and whether somebody has begun it."""
        self._heap: list[tuple[bool, int]] = []
        """(nobody has begun it, ordinal) of all that waits, stale ones too: of what has left or was begun since."""

    def __len__(self) -> int:
        return len(self._begun)

    def __contains__(self, ordinal: int) -> bool:
        return ordinal in self._begun

    def __iter__(self) -> Iterator[int]:
        return iter(self._begun)

    def add(self, ordinal: int, *, begun: bool) -> None:
        """Also for one that waits already and has been begun since."""
        self._begun[ordinal] = begun
        heappush(self._heap, (not begun, ordinal))

    def discard(self, ordinal: int) -> None:
        self._begun.pop(ordinal, None)

    def discard_if(self, gone: Callable[[int], bool]) -> None:
        for ordinal in [ordinal for ordinal in self._begun if gone(ordinal)]:
            del self._begun[ordinal]

    def pop(self) -> int | None:
        """The next one; None if none waits."""
        while self._begun:
            fresh, ordinal = heappop(self._heap)
            if self._begun.get(ordinal) == (not fresh):
                del self._begun[ordinal]
                return ordinal
        self._heap.clear()
        return None
