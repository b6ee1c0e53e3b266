"""What `audit` says about `partial/`: nothing depends on these objects, so none of them can be a violation."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, NotFound
from bucketrl.bucket.partials import decode
from bucketrl.bucket.records import RunRecord
from bucketrl.bucket.store import Store


def check_partials(store: Store, run: RunRecord, newest_version: int, threads: int) -> tuple[int, list[str]]:
    """How many partial groups can be continued, and notes about the other objects below `partial/`."""
    listed = [info.key for info in store.list(keys.PARTIAL_PREFIX)]
    with ThreadPoolExecutor(threads) as pool:
        notes: Sequence[str | None] = list(
            pool.map(lambda key: _note(store, run, newest_version, key), listed)
        )
    return notes.count(None), [note for note in notes if note]


def _note(store: Store, run: RunRecord, newest_version: int, key: str) -> str | None:
    """None if the object is sound; empty if it has been collected meanwhile."""
    parsed = keys.parse_partial(key)
    if parsed is None or parsed[0].index >= run.prompts_per_epoch:
        return f"{key}: foreign key"
    group_id, attempt = parsed
    try:
        decode(
            store.get(key),
            run_id=run.run_id,
            group_id=str(group_id),
            attempt=attempt,
            max_version=newest_version,
        )
    except NotFound:
        return ""
    except IntegrityError as error:
        return f"{key}: cannot be continued: {error}"
    return None
