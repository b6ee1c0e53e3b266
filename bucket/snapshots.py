"""Where to begin reading a long log: `snapshots/<seq>.json` points to a commit, which holds the whole state.

A snapshot only saves reading. Nothing is lost if it is missing, late or wrong: a reader that finds none that
verifies begins with record 0. Garbage collection keeps the newest KEPT.
"""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.records import (
    SnapshotRecord,
    StartRecord,
    StepRecord,
    decode,
    decode_log,
    sha256_hex,
)
from bucketrl.bucket.store import Store

logger = logging.getLogger(__name__)

EVERY = 64
"""Log records from one snapshot to the next, about: what a reader that begins has to read at most."""
KEPT = 2
THREADS = 16
WINDOW = 256
"""Records fetched at once: bounds a reader's memory."""


def find(store: Store, run_id: str) -> bytes | None:
    """The bytes of the commit that the newest valid snapshot points to, verified; None if there is none.

    Raises StoreError. A snapshot that does not verify is passed over with a warning.
    """
    listed = [keys.parse_snapshot(info.key) for info in store.list(keys.SNAPSHOT_PREFIX)]
    for seq in sorted((seq for seq in listed if seq is not None), reverse=True):
        try:
            return _open(store, run_id, seq)
        except (IntegrityError, NotFound) as error:
            logger.warning("%s is ignored: %s", keys.snapshot(seq), error)
    return None


def newest(store: Store) -> int:
    """Sequence number of the newest snapshot's record; -1 if there is none."""
    listed = [keys.parse_snapshot(info.key) for info in store.list(keys.SNAPSHOT_PREFIX)]
    return max((seq for seq in listed if seq is not None), default=-1)


def write(store: Store, run_id: str, seq: int, record_sha256: str) -> None:
    """A snapshot at the `step` record `seq`, which the caller has verified with all before it."""
    record = SnapshotRecord(run_id=run_id, seq=seq, record_sha256=record_sha256)
    store.put(keys.snapshot(seq), record.encode())


def check(data: bytes, run_id: str, seq: int) -> SnapshotRecord:
    """The record under `snapshots/<seq>.json`. Raises IntegrityError if it is none of this run's."""
    snapshot = decode(SnapshotRecord, data)
    if (snapshot.run_id, snapshot.seq) != (run_id, seq):
        raise IntegrityError(f"of run {snapshot.run_id} record {snapshot.seq}, want {run_id} {seq}")
    return snapshot


def history(store: Store, record: StartRecord | StepRecord, count: int) -> list[StartRecord | StepRecord]:
    """Up to `count` records right before `record`, oldest first, verified backwards by their digests.

    Raises IntegrityError for one that is not what its successor names, StoreError.
    """
    seqs = range(max(0, record.seq - count), record.seq)
    found: list[StartRecord | StepRecord] = []
    want = record.parent_sha256
    for seq, data in zip(reversed(seqs), fetch(store, list(reversed(seqs))), strict=True):
        if sha256_hex(data) != want:
            raise IntegrityError(f"{keys.log(seq)}: digest is not the one that its successor names")
        before = decode_log(data)
        want = before.parent_sha256
        found.append(before)
    return found[::-1]


def fetch(store: Store, seqs: Sequence[int]) -> Iterator[bytes]:
    """The bytes of these log records in the order given, read in parallel. Raises StoreError."""
    with ThreadPoolExecutor(THREADS) as pool:
        for start in range(0, len(seqs), WINDOW):
            yield from pool.map(store.get, [keys.log(seq) for seq in seqs[start : start + WINDOW]])


def _open(store: Store, run_id: str, seq: int) -> bytes:
    snapshot = check(store.get(keys.snapshot(seq)), run_id, seq)
    data = store.get(keys.log(seq))
    if sha256_hex(data) != snapshot.record_sha256:
        raise IntegrityError(f"{keys.log(seq)} has another digest than it names")
    record = decode_log(data)
    if not isinstance(record, StepRecord) or (record.run_id, record.seq) != (run_id, seq):
        raise IntegrityError(f"{keys.log(seq)} is no commit of run {run_id}")
    return data
