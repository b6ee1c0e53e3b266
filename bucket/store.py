"""What bucketrl asks of an object store, and how a URL becomes one.

The contract is small on purpose: no append, no rename, no folders, no user metadata, no modification
time. A primitive that a store cannot do atomically is absent there (`Unsupported`), never approximated.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Protocol


class Tier(IntEnum):
    """What the store can serialise (`bucket_layout.md` section 3)."""

    PUT = 0
    """Whole-object put; the last writer wins. The proxy must serialise commits."""
    CREATE = 1
    """And create-if-absent with exactly one winner. The store serialises commits."""


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One row of a listing."""

    key: str
    size: int


class Store(Protocol):
    """An object store seen from one run prefix: every key is relative to it. Thread-safe."""

    url: str
    """Without credentials; safe to print."""
    tier: Tier
    """What the store claims; `probe.py` shows whether it holds."""

    def get(self, key: str) -> bytes:
        """The whole object. Raises NotFound."""

    def put(self, key: str, data: bytes) -> None:
        """Writes the whole object; readers see the old bytes or the new, never a mixture."""

    def create(self, key: str, data: bytes) -> None:
        """Writes `data` (never empty) if the key is absent. Raises AlreadyExists, or Unsupported at tier 0.

        After a lost reply a store may report AlreadyExists for the caller's own object: use
        `conditional.create` wherever that matters.
        """

    def put_file(self, key: str, path: Path) -> None:
        """Like `put`, streaming from a local file; multipart where the store has it."""

    def get_file(self, key: str, path: Path) -> None:
        """Downloads to `path`, which must not exist. Raises NotFound."""

    def size(self, key: str) -> int:
        """Bytes of the object. Raises NotFound."""

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below `prefix` (which ends in "/") with key > `start_after`, in ascending key order."""

    def delete(self, keys: Iterable[str]) -> None:
        """Deletes what exists of `keys`."""

    def sweep(self, older_than_s: float) -> int:
        """Drops what writers that died have left unfinished for so many seconds, by the store's own clock;
        no object ever shows it. Returns how many; failures are logged, not raised."""
