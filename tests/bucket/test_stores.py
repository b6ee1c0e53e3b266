"""What every store promises (`bucket/store.py`), each asked the same."""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.support.stores import Kind, Open, opener, parameters

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, NotFound, Unsupported
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import Store, Tier

MEGABYTE = 1 << 20
WRITERS = 32
PROCESSES = 4
"""Writers come from as many stores opened apart, since one S3 client keeps to 10 connections."""


@pytest.fixture
def reopen(request: pytest.FixtureRequest, kind: Kind, tmp_path: Path) -> Iterator[Open]:
    with ExitStack() as stack:
        yield opener(kind, request, tmp_path, stack)


@pytest.fixture
def store(reopen: Open) -> Store:
    return reopen()


every_store = pytest.mark.parametrize("kind", parameters(lambda kind: True))
creating = pytest.mark.parametrize("kind", parameters(lambda kind: kind.tier >= Tier.CREATE))
putting_whole = pytest.mark.parametrize("kind", parameters(lambda kind: kind.whole_puts))
admittedly_putting = pytest.mark.parametrize("kind", parameters(lambda kind: kind.claims < Tier.CREATE))


def keys_of(store: Store, prefix: str, start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


@every_store
def test_the_probe_shows_the_tier_whatever_is_claimed(kind: Kind, store: Store) -> None:
    report = probe(store, write_id="p")
    assert store.tier == kind.claims
    assert (report.tier, report.create_exclusive) == (kind.tier, kind.tier >= Tier.CREATE)
    assert (report.read_after_write, report.list_after_put) == (True, True)
    assert len(report.messages) == (1 if kind.tier < kind.claims else 0)
    assert keys_of(store, "") == []


@every_store
def test_what_is_put_is_read_at_once_by_everybody(reopen: Open) -> None:
    one, other = reopen(), reopen()
    for number in range(5):
        one.put(f"log/{number}", f"body {number}".encode())
        assert other.get(f"log/{number}") == one.get(f"log/{number}") == f"body {number}".encode()
        assert other.size(f"log/{number}") == 6
        assert keys_of(other, "log/")[-1] == f"log/{number}"


@every_store
def test_a_put_replaces_the_whole_object(store: Store) -> None:
    store.put("a/b", b"the longer first object")
    store.put("a/b", b"second")
    assert store.get("a/b") == b"second"
    assert [(info.key, info.size) for info in store.list("a/")] == [("a/b", 6)]


@every_store
def test_an_object_may_be_empty(store: Store) -> None:
    store.put("a/empty", b"")
    assert store.get("a/empty") == b""
    assert store.size("a/empty") == 0


@every_store
def test_what_is_not_there_is_not_found(store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"x")
    for key in ("a/c", "a", "nothing/at/all"):
        with pytest.raises(NotFound, match=key):
            store.get(key)
        with pytest.raises(NotFound):
            store.size(key)
        with pytest.raises(NotFound):
            store.get_file(key, tmp_path / "target")
        assert not (tmp_path / "target").exists()


@every_store
def test_a_listing_is_in_key_order_and_below_its_prefix(store: Store) -> None:
    """Also where folder names sort differently from their contents: "a-b" < "a/0" < "a0"."""
    below = ["run/A", "run/a-b", "run/a.b/1", "run/a/0", "run/a0", "run/b/c/d", "run/é"]
    for key in [*reversed(below), "runner/x", "ru"]:
        store.put(key, key.encode())
    assert keys_of(store, "run/") == sorted(below)
    assert {info.key: info.size for info in store.list("run/")} == {key: len(key.encode()) for key in below}
    assert keys_of(store, "") == sorted([*below, "runner/x", "ru"])
    assert keys_of(store, "nothing/") == []


@every_store
def test_a_listing_starts_after_the_given_key(store: Store) -> None:
    names = ["t/0000-1/a", "t/0000-1/b", "t/0000-2/a", "t/0001-0/a"]
    for key in names:
        store.put(key, b"x")
    for position, key in enumerate(names):
        assert keys_of(store, "t/", start_after=key) == names[position + 1 :]
    assert keys_of(store, "t/", start_after="t/0000-2") == names[2:]
    assert keys_of(store, "t/", start_after="t/0000-1/aa") == names[1:]
    assert keys_of(store, "t/", start_after="t/~") == []


@every_store
def test_delete_removes_what_exists_and_ignores_the_rest(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"x")
    store.delete(["a/1", "a/3", "c/1", "b/1"])
    assert keys_of(store, "") == ["a/2"]
    store.delete([])
    store.delete(f"a/{number}" for number in range(1001))
    assert keys_of(store, "") == []


@every_store
def test_a_large_file_comes_back_as_it_was(store: Store, tmp_path: Path) -> None:
    """On S3 in three parts and a bit."""
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(24 * MEGABYTE + 1))
    store.put_file("checkpoints/1/state", source)
    assert [(info.key, info.size) for info in store.list("")] == [("checkpoints/1/state", 24 * MEGABYTE + 1)]
    store.get_file("checkpoints/1/state", target)
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()


@every_store
def test_a_download_never_replaces_a_local_file(store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"remote")
    (tmp_path / "target").write_bytes(b"local")
    with pytest.raises(FileExistsError):
        store.get_file("a/b", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"local"


@every_store
def test_mistakes_with_local_files_are_not_blamed_on_the_store(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.put_file("a/b", tmp_path / "missing")
    store.put("a/b", b"x")
    with pytest.raises(FileNotFoundError):
        store.get_file("a/b", tmp_path / "missing folder" / "target")


@putting_whole
def test_readers_see_one_object_or_another_while_it_is_replaced(store: Store) -> None:
    bodies = [bytes([byte]) * 300_000 for byte in range(4)]
    store.put("a/b", bodies[0])

    def read() -> set[bytes]:
        return {store.get("a/b") for _ in range(20)}

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        turn = 0
        while not all(task.done() for task in reading):
            turn += 1
            store.put("a/b", bodies[turn % 4])
        assert set().union(*(task.result() for task in reading)) <= set(bodies)


@creating
def test_of_32_simultaneous_creators_one_wins_and_only_it_believes_so(kind: Kind, reopen: Open) -> None:
    races = range(5 if kind.server else 40)
    stores = [reopen() for _ in range(PROCESSES)]
    barrier = threading.Barrier(WRITERS)

    def enter(number: int) -> list[bytes | None]:
        found = []
        for race in races:
            barrier.wait()
            data = f"writer {number} of race {race}".encode()
            found.append(conditional.create(stores[number % PROCESSES], f"log/{race}", data))
        return found

    with ThreadPoolExecutor(WRITERS) as pool:
        found = list(pool.map(enter, range(WRITERS)))
    for race in races:
        winners = [number for number in range(WRITERS) if found[number][race] is None]
        assert len(winners) == 1
        body = f"writer {winners[0]} of race {race}".encode()
        assert stores[0].get(f"log/{race}") == body
        assert {found[number][race] for number in range(WRITERS)} == {None, body}


@creating
def test_create_never_replaces_and_is_visible_at_once(store: Store) -> None:
    assert conditional.create(store, "log/0", b"first") is None
    assert keys_of(store, "log/") == ["log/0"]
    with pytest.raises(AlreadyExists, match="log/0"):
        store.create("log/0", b"second")
    store.put("log/1", b"put")
    assert conditional.create(store, "log/1", b"created") == b"put"
    assert (store.get("log/0"), store.get("log/1")) == (b"first", b"put")


@creating
def test_create_refuses_an_empty_object(store: Store) -> None:
    with pytest.raises(ValueError, match="empty"):
        store.create("log/0", b"")
    assert keys_of(store, "") == []


@admittedly_putting
def test_a_store_without_exclusive_create_says_so_and_writes_nothing(store: Store) -> None:
    with pytest.raises(Unsupported):
        store.create("log/0", b"first")
    assert keys_of(store, "") == []
