"""Create-if-absent whose winner knows that it won, even if the store's reply was lost."""

import random
from collections.abc import Callable

from bucketrl.bucket.errors import AlreadyExists, NotFound
from bucketrl.bucket.pause import pause
from bucketrl.bucket.retry import Transient, retrying
from bucketrl.bucket.store import Store

ATTEMPTS = 4
BASE_S = 0.5
"""Few and slow: each call of the store has retried already; this waits for what shows late."""


def create(
    store: Store,
    key: str,
    data: bytes,
    *,
    sleep: Callable[[float], None] = pause,
    uniform: Callable[[float, float], float] = random.uniform,
) -> bytes | None:
    """None if the object now is `data` through this call, else the bytes of the object that was there.

    `data` carries a random `write_id`: an existing object with equal bytes is the caller's own, written by
    an attempt whose reply was lost. Raises Unsupported at tier 0, StoreError if the outcome stays unknown;
    calling again with the same bytes settles it.
    """

    def attempt() -> bytes | None:
        try:
            store.create(key, data)
        except AlreadyExists:
            try:
                existing = store.get(key)
            except NotFound:
                # The winner's object exists but does not show yet.
                raise Transient(f"{key}: exists and cannot be read yet") from None
            return None if existing == data else existing
        return None

    return retrying(attempt, attempts=ATTEMPTS, base_s=BASE_S, sleep=sleep, uniform=uniform)
