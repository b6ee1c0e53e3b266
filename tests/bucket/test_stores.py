"""What every store promises (`bucket/store.py`), each asked the same."""

import hashlib
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.hub import BUCKET, StandInHub
from tests.support.s3 import S3Server

from bucketrl.bucket.errors import AlreadyExists, NotFound, Unsupported
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.generic import GenericStore
from bucketrl.bucket.stores.hf import HfStore

MEGABYTE = 1 << 20
SLOW_S3 = pytest.param("s3", marks=pytest.mark.slow)
TIER_1 = ["memory", "local", SLOW_S3]
TIER_0 = ["hf stand-in", "fsspec memory", "fsspec local"]


@pytest.fixture
def open_kind(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Store]:
    def build(kind: str) -> Store:
        match kind:
            case "memory":
                return open_store(f"memory://{uuid4().hex}")
            case "local":
                return open_store(str(tmp_path / "bucket"))
            case "s3":
                request.getfixturevalue("s3_credentials")
                server: S3Server = request.getfixturevalue("s3_server")
                return open_store(server.url(uuid4().hex))
            case "hf stand-in":
                return HfStore(BUCKET, "run", api=StandInHub())
            case "fsspec memory":
                return GenericStore(f"memory://{uuid4().hex}/run")
            case "fsspec local":
                return GenericStore(f"local://{tmp_path}/bucket")
        raise ValueError(kind)

    return build


@pytest.fixture(params=TIER_1 + TIER_0)
def store(request: pytest.FixtureRequest, open_kind: Callable[[str], Store]) -> Store:
    return open_kind(request.param)


@pytest.fixture(params=TIER_1)
def creating_store(request: pytest.FixtureRequest, open_kind: Callable[[str], Store]) -> Store:
    return open_kind(request.param)


@pytest.fixture(params=[*TIER_1, "hf stand-in", "fsspec memory"])
def atomic_store(request: pytest.FixtureRequest, open_kind: Callable[[str], Store]) -> Store:
    """Not fsspec's local files: it writes them in place, as `generic.py` warns."""
    return open_kind(request.param)


@pytest.fixture(params=TIER_0)
def putting_store(request: pytest.FixtureRequest, open_kind: Callable[[str], Store]) -> Store:
    return open_kind(request.param)


def keys_of(store: Store, prefix: str, start_after: str = "") -> list[str]:
    return [info.key for info in store.list(prefix, start_after)]


def test_what_is_put_is_read(store: Store) -> None:
    store.put("log/1.json", b"one")
    assert store.get("log/1.json") == b"one"
    assert store.size("log/1.json") == 3


def test_a_put_replaces_the_whole_object(store: Store) -> None:
    store.put("a/b", b"the longer first object")
    store.put("a/b", b"second")
    assert store.get("a/b") == b"second"
    assert [(info.key, info.size) for info in store.list("a/")] == [("a/b", 6)]


def test_an_object_may_be_empty(store: Store) -> None:
    store.put("a/empty", b"")
    assert store.get("a/empty") == b""
    assert store.size("a/empty") == 0


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


def test_a_listing_is_in_key_order_and_below_its_prefix(store: Store) -> None:
    """Also where folder names sort differently from their contents: "a-b" < "a/0" < "a0"."""
    below = ["run/A", "run/a-b", "run/a.b/1", "run/a/0", "run/a0", "run/b/c/d", "run/é"]
    for key in [*reversed(below), "runner/x", "ru"]:
        store.put(key, key.encode())
    assert keys_of(store, "run/") == sorted(below)
    assert {info.key: info.size for info in store.list("run/")} == {key: len(key.encode()) for key in below}
    assert keys_of(store, "") == sorted([*below, "runner/x", "ru"])
    assert keys_of(store, "nothing/") == []


def test_a_listing_starts_after_the_given_key(store: Store) -> None:
    names = ["t/0000-1/a", "t/0000-1/b", "t/0000-2/a", "t/0001-0/a"]
    for key in names:
        store.put(key, b"x")
    for position, key in enumerate(names):
        assert keys_of(store, "t/", start_after=key) == names[position + 1 :]
    assert keys_of(store, "t/", start_after="t/0000-2") == names[2:]
    assert keys_of(store, "t/", start_after="t/0000-1/aa") == names[1:]
    assert keys_of(store, "t/", start_after="t/~") == []


def test_delete_removes_what_exists_and_ignores_the_rest(store: Store) -> None:
    for key in ("a/1", "a/2", "b/1"):
        store.put(key, b"x")
    store.delete(["a/1", "a/3", "c/1", "b/1"])
    assert keys_of(store, "") == ["a/2"]
    store.delete([])
    store.delete(iter(["a/2"]))
    assert keys_of(store, "") == []


def test_a_large_file_comes_back_as_it_was(store: Store, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(os.urandom(20 * MEGABYTE + 1))
    store.put_file("checkpoints/1/state", source)
    assert store.size("checkpoints/1/state") == 20 * MEGABYTE + 1
    store.get_file("checkpoints/1/state", target)
    assert hashlib.sha256(target.read_bytes()).digest() == hashlib.sha256(source.read_bytes()).digest()


def test_a_download_never_replaces_a_local_file(store: Store, tmp_path: Path) -> None:
    store.put("a/b", b"remote")
    (tmp_path / "target").write_bytes(b"local")
    with pytest.raises(FileExistsError):
        store.get_file("a/b", tmp_path / "target")
    assert (tmp_path / "target").read_bytes() == b"local"


def test_mistakes_with_local_files_are_not_blamed_on_the_store(store: Store, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.put_file("a/b", tmp_path / "missing")
    store.put("a/b", b"x")
    with pytest.raises(FileNotFoundError):
        store.get_file("a/b", tmp_path / "missing folder" / "target")


def test_readers_see_one_object_or_another_while_it_is_replaced(atomic_store: Store) -> None:
    bodies = [bytes([byte]) * 300_000 for byte in range(4)]
    atomic_store.put("a/b", bodies[0])

    def read() -> set[bytes]:
        return {atomic_store.get("a/b") for _ in range(20)}

    with ThreadPoolExecutor(2) as pool:
        reading = [pool.submit(read) for _ in range(2)]
        turn = 0
        while not all(task.done() for task in reading):
            turn += 1
            atomic_store.put("a/b", bodies[turn % 4])
        assert set().union(*(task.result() for task in reading)) <= set(bodies)


def test_of_32_simultaneous_creators_exactly_one_wins(creating_store: Store) -> None:
    for race in range(3):
        barrier = threading.Barrier(32)

        def enter(number: int, key: str = f"log/{race}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                creating_store.create(key, f"writer {number}".encode())
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(32) as pool:
            winners = [number for number, won in enumerate(pool.map(enter, range(32))) if won]
        assert len(winners) == 1
        assert creating_store.get(f"log/{race}") == f"writer {winners[0]}".encode()


def test_create_never_replaces_and_is_visible_at_once(creating_store: Store) -> None:
    creating_store.create("log/0", b"first")
    assert keys_of(creating_store, "log/") == ["log/0"]
    with pytest.raises(AlreadyExists, match="log/0"):
        creating_store.create("log/0", b"second")
    creating_store.put("log/1", b"put")
    with pytest.raises(AlreadyExists):
        creating_store.create("log/1", b"created")
    assert (creating_store.get("log/0"), creating_store.get("log/1")) == (b"first", b"put")


def test_create_refuses_an_empty_object(creating_store: Store) -> None:
    with pytest.raises(ValueError, match="empty"):
        creating_store.create("log/0", b"")
    assert keys_of(creating_store, "") == []


def test_a_store_without_exclusive_create_says_so_and_writes_nothing(putting_store: Store) -> None:
    assert putting_store.tier == Tier.PUT
    with pytest.raises(Unsupported):
        putting_store.create("log/0", b"first")
    assert keys_of(putting_store, "") == []
