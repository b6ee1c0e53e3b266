"""One suite for every store: what `bucket/store.py` promises, each backend keeps."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.hub import StandInHub
from tests.support.s3 import S3Server

from bucketrl.bucket.errors import AlreadyExists, NotFound, Unsupported, UserError
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.hf import HfStore

WRITERS = 32

BACKENDS = ["memory", "local", pytest.param("s3", marks=pytest.mark.slow), "generic", "hf stand-in"]


@pytest.fixture(params=BACKENDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    name = uuid4().hex
    match request.param:
        case "memory":
            yield open_store(f"memory://{name}")
        case "local":
            yield open_store(str(tmp_path / "bucket"))
        case "s3":
            request.getfixturevalue("s3_credentials")
            server: S3Server = request.getfixturevalue("s3_server")
            yield open_store(server.url(name))
        case "generic":
            yield open_store(f"local://{tmp_path}/bucket")
        case _:
            yield HfStore("owner/name", "run", api=StandInHub())


def test_an_object_is_read_back_whole(store: Store) -> None:
    store.put("a/b", b"first")
    store.put("a/b", b"second, longer")
    assert store.get("a/b") == b"second, longer"
    assert store.size("a/b") == 14


def test_a_missing_object_is_not_found(store: Store, tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        store.get("a/b")
    with pytest.raises(NotFound):
        store.size("a/b")
    with pytest.raises(NotFound):
        store.get_file("a/b", tmp_path / "missing")
    assert not (tmp_path / "missing").exists()


def test_listings_are_ordered_and_resume_after_a_key(store: Store) -> None:
    """Also where folder names sort differently from their contents ("a-b" < "a/b")."""
    names = ["x/a", "x/a-b/c", "x/a/b", "x/a/c/d", "x/b", "y/a"] if not _is_folders(store) else (
        ["x/a-b/c", "x/a/b", "x/a/c/d", "x/b", "y/a"]
    )  # fmt: skip
    for name in reversed(names):
        store.put(name, name.encode())
    expected = sorted(name for name in names if name.startswith("x/"))
    assert [info.key for info in store.list("x/")] == expected
    assert [info.size for info in store.list("x/")] == [len(name) for name in expected]
    for cut in [*expected, "x/a0", "x/"]:
        assert [info.key for info in store.list("x/", cut)] == [name for name in expected if name > cut]
    assert list(store.list("nothing/")) == []


def _is_folders(store: Store) -> bool:
    """A file and a folder cannot share a name there."""
    return "://" not in store.url or store.url.startswith(("file", "local"))


def test_deleting_forgets_and_forgives(store: Store) -> None:
    store.put("a", b"1")
    store.put("b", b"2")
    store.delete(["a", "never-there"])
    assert [info.key for info in store.list("")] == ["b"]


def test_large_files_travel_whole(store: Store, tmp_path: Path) -> None:
    data = os.urandom(1 << 20) * 20
    (tmp_path / "up").write_bytes(data)
    store.put_file("big/object", tmp_path / "up")
    store.get_file("big/object", tmp_path / "down")
    assert (tmp_path / "down").read_bytes() == data
    with pytest.raises(FileExistsError):
        store.get_file("big/object", tmp_path / "down")


def test_create_has_exactly_one_winner_among_many_writers(store: Store) -> None:
    if store.tier < Tier.CREATE:
        with pytest.raises(Unsupported):
            store.create("log/0", b"mine")
        return
    for race in range(5):
        barrier = threading.Barrier(WRITERS)

        def enter(number: int, race: int = race, barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                store.create(f"log/{race}", f"writer {number}".encode() * 100)
            except AlreadyExists:
                return False
            return True

        with ThreadPoolExecutor(WRITERS) as pool:
            wins = list(pool.map(enter, range(WRITERS)))
        assert wins.count(True) == 1
        assert store.get(f"log/{race}") == f"writer {wins.index(True)}".encode() * 100


def test_readers_never_see_half_an_object(store: Store) -> None:
    versions = [bytes([65 + i]) * 200_000 for i in range(4)]
    store.put("hot", versions[0])
    stop = threading.Event()
    seen: list[bytes] = []

    def read() -> None:
        while not stop.is_set():
            seen.append(store.get("hot"))

    reader = threading.Thread(target=read)
    reader.start()
    for version in versions * 5:
        store.put("hot", version)
    stop.set()
    reader.join()
    assert all(data in versions for data in seen)


def test_a_writer_killed_in_the_middle_leaves_nothing_to_see(tmp_path: Path) -> None:
    """SIGKILL while a local store streams a large object: not listed, not readable, the key still free."""
    root = tmp_path / "bucket"
    (tmp_path / "large").write_bytes(os.urandom(1 << 20) * 256)
    code = (
        "import sys; from pathlib import Path; from bucketrl.bucket.stores import open_store\n"
        "store = open_store(sys.argv[1]); store.put('a', b'1'); print('go', flush=True)\n"
        "while True: store.put_file('torn', Path(sys.argv[2])); store.delete(['torn'])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(root), str(tmp_path / "large")], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    staging = root / ".staging"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        sizes = [entry.stat().st_size for entry in _existing(staging)]
        if any(0 < size < 200 << 20 for size in sizes):
            break
    process.send_signal(signal.SIGKILL)
    process.wait()
    store = open_store(str(root))
    assert [info.key for info in store.list("")] == ["a"]
    store.create("torn", b"whole")
    assert store.get("torn") == b"whole"


def _existing(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if path.exists()]
    except FileNotFoundError:
        return []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "is empty"),
        ("s3://key:very-secret@bucket/run", "credentials"),
        ("s3://bucket/run?endpoint=http://x", "unknown option 'endpoint'"),
        ("s3:///run", "no bucket"),
        ("hf://models/owner/name", "hf://buckets/<owner>/<name>"),
        ("nonsense://x/y", "nonsense"),
    ],
)
def test_a_bad_url_is_one_clear_error_without_secrets(url: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        open_store(url)
    assert "very-secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bucket_url_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_store(str(tmp_path / "file"))


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/../b", ".staging/x"])
def test_keys_that_could_leave_the_bucket_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ValueError, match="not an object key"):
        open_store(str(tmp_path)).put(key, b"x")
