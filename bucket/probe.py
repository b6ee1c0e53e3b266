"""Shows what a store really does, instead of believing what it claims. Creator, learner and proxy each run
it at start: they may sit behind different gateways. A worker only puts and needs no tier.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Barrier

from bucketrl.bucket import keys
from bucketrl.bucket.errors import AlreadyExists, BucketrlError, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.store import Store, Tier

RACERS = 8
MOST_REQUESTS = 2 * RACERS + 7
"""Of one probe, besides repetitions: put, get, list; a create and a get per racer; create, get, get of the
late writer; delete. They are 9 rounds, one after the other. A store that claims tier 0 is asked 4."""


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """What the store showed."""

    tier: Tier
    """What may be relied on: never above the store's claim."""
    read_after_write: bool
    list_after_put: bool
    create_exclusive: bool
    """Of `racers` simultaneous creates exactly one won, and a later one lost."""
    messages: tuple[str, ...]
    """One line for each thing that is less than hoped for."""


def probe(store: Store, *, write_id: str, racers: int = RACERS) -> ProbeReport:
    """Writes two small objects below `probe/<write_id>/` and removes them again.

    Each call ends when the store gives it up, and the first that is given up ends the probe: on S3, 6 attempts
    of 10 s (no connection) or 60 s (no answer), more only if the service asks for it (`Retry-After`).
    Raises UserError if the store cannot be written at all, StoreError if it fails later.
    """
    folder = f"{keys.PROBE_PREFIX}{write_id}/"
    messages: list[str] = []
    data = f"put {write_id}".encode()
    try:
        store.put(folder + "put", data)
    except StoreError as error:
        raise UserError(f"bucket {store.url}: cannot be written: {error}") from None
    with _removed_afterwards(store, [folder + "put", folder + "create"]):
        read_after_write = _reads(store, folder + "put", data)
        if not read_after_write:
            messages.append("an object just written is not read back: readers will retry")
        list_after_put = folder + "put" in [info.key for info in store.list(folder)]
        if not list_after_put:
            messages.append("an object just written is not listed: new groups show up late")
        exclusive = store.tier >= Tier.CREATE and _race(store, folder + "create", write_id, racers)
        if store.tier >= Tier.CREATE and not exclusive:
            messages.append("create-if-absent is not exclusive here: commits must go through the proxy")
    tier = Tier.CREATE if exclusive else Tier.PUT
    return ProbeReport(tier, read_after_write, list_after_put, exclusive, tuple(messages))


def _race(store: Store, key: str, write_id: str, racers: int) -> bool:
    barrier = Barrier(racers)

    def enter(number: int) -> bool:
        barrier.wait()
        return _creates(store, key, f"racer {number} {write_id}".encode())

    with ThreadPoolExecutor(racers) as pool:
        won = [number for number, win in enumerate(pool.map(enter, range(racers))) if win]
    if len(won) != 1:
        return False
    winner = f"racer {won[0]} {write_id}".encode()
    return not _creates(store, key, f"late {write_id}".encode()) and _reads(store, key, winner)


def _creates(store: Store, key: str, data: bytes) -> bool:
    """Whether the object is `data` now through this call; a lost reply counts as what it was."""
    try:
        store.create(key, data)
    except AlreadyExists:
        return _reads(store, key, data)
    except Unsupported:
        return False
    return True


def _reads(store: Store, key: str, data: bytes) -> bool:
    try:
        return store.get(key) == data
    except NotFound:
        return False


@contextmanager
def _removed_afterwards(store: Store, names: list[str]) -> Iterator[None]:
    try:
        yield
    finally:
        try:
            store.delete(names)
        except BucketrlError:
            pass  # a few stray bytes below probe/ are no reason to fail
