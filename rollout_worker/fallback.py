"""Finding work without a proxy. Pure: every worker decides for itself, and duplicates are harmless.

Each worker ranks the open groups by a hash of its own id and the group (as rendezvous hashing does), so
that workers which know nothing of each other mostly choose different ones.
"""

import hashlib
from collections.abc import Collection

from bucketrl.bucket.records import Consumed

WINDOW = 2
"""How far ahead of the cursor work is taken, in multiples of the run's bound on outstanding groups."""


def window(consumed: Consumed, max_outstanding: int) -> range:
    """Ordinals that may be worked on."""
    return range(consumed.cursor, consumed.cursor + WINDOW * max_outstanding)


def choose(
    worker_id: str,
    consumed: Consumed,
    taken: Collection[int],
    *,
    max_outstanding: int,
    count: int,
) -> list[int]:
    """Up to `count` ordinals of the window, this worker's favourites first.

    `taken` are ordinals that are uploaded already or held by this worker.
    """
    closed = set(taken) | set(consumed.above)
    free = [ordinal for ordinal in window(consumed, max_outstanding) if ordinal not in closed]
    return sorted(free, key=lambda ordinal: _rank(worker_id, ordinal))[:count]


def _rank(worker_id: str, ordinal: int) -> bytes:
    return hashlib.sha256(f"{worker_id}/{ordinal}".encode()).digest()
