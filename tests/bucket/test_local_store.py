"""The local store where it differs from the others: files, folders, durability, sudden death."""

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bucketrl.bucket.errors import StoreError, Unsupported, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import Tier
from bucketrl.bucket.stores.local import LocalStore
from bucketrl.bucket.stores.memory import MemoryStore


@pytest.mark.parametrize("operation", ["put", "create"])
def test_an_object_is_on_disk_before_it_has_its_name_and_the_name_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    events: list[tuple[str, Path]] = []
    real = {name: getattr(os, name) for name in ("fsync", "link", "replace")}

    def fsync(descriptor: int) -> None:
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        real["fsync"](descriptor)

    def name_it(call: str, source: Path, target: Path) -> None:
        events.append(("name", target))
        real[call](source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", lambda source, target: name_it("link", source, target))
    monkeypatch.setattr(os, "replace", lambda source, target: name_it("replace", source, target))
    root = tmp_path / "new" / "bucket"
    getattr(LocalStore(root), operation)("log/0", b"record")

    named = events.index(("name", root / "log" / "0"))
    assert any(kind == "fsync" and path.parent == root / ".staging" for kind, path in events[:named])
    assert ("fsync", root / "log") in events[named:]
    for folder in (tmp_path, tmp_path / "new", root):
        assert ("fsync", folder) in events[:named], "a new folder's own name must survive too"


NAMES = st.text(alphabet="ab-.0é", min_size=1, max_size=3).filter(lambda name: name not in (".", ".."))
KEYS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)


def fits_a_file_system(keys: list[str]) -> bool:
    return not any(other.startswith(key + "/") for key in keys for other in keys)


@given(keys=st.lists(KEYS, min_size=1, max_size=8, unique=True).filter(fits_a_file_system), data=st.data())
def test_a_listing_equals_the_sorted_keys_whatever_they_are(
    tmp_path_factory: pytest.TempPathFactory, keys: list[str], data: st.DataObject
) -> None:
    """Asked for any folder, resumed after any key, folder or name that is none."""
    folders = sorted({key[: cut + 1] for key in keys for cut, letter in enumerate(key) if letter == "/"})
    prefix = data.draw(st.sampled_from(["", "nothing/", *folders]))
    start_after = data.draw(st.sampled_from(["", *keys, *folders]) | KEYS)
    local, memory = LocalStore(tmp_path_factory.mktemp("bucket")), MemoryStore()
    for key in keys:
        memory.put(key, key.encode())
        path = Path(local.url, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(key.encode())
    assert list(local.list(prefix, start_after)) == list(memory.list(prefix, start_after))


@pytest.mark.parametrize("key", ["", "/a", "a//b", "a/", "../a", "a/../b", "./a", ".staging/x", "a\0b"])
def test_a_key_that_could_leave_the_bucket_is_refused(tmp_path: Path, key: str) -> None:
    store = LocalStore(tmp_path / "bucket")
    for call in (lambda: store.put(key, b"x"), lambda: store.get(key), lambda: store.delete([key])):
        with pytest.raises(ValueError, match="not an object key"):
            call()
    assert not (tmp_path / "a").exists()


def test_a_key_below_another_object_is_an_error_of_the_store_not_a_lost_race(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a", b"x")
    with pytest.raises(StoreError, match="a/b") as caught:
        store.create("a/b", b"x")
    assert type(caught.value) is StoreError


def test_links_fifos_and_other_files_that_are_no_objects_are_not_listed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "bucket")
    store.put("a/object", b"x")
    (tmp_path / "bucket/a/link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "bucket/a/fifo")
    assert [info.key for info in store.list("")] == ["a/object"]


def test_a_file_system_without_links_is_demoted_to_tier_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As FUSE mounts of buckets are."""

    def link(source: Path, target: Path) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    store = LocalStore(tmp_path)
    with pytest.raises(Unsupported, match="hard links"):
        store.create("log/0", b"x")
    assert probe(store, write_id="w").tier == Tier.PUT
    assert list(store.list("")) == []


def test_folders_go_with_their_last_object_and_writers_do_not_notice(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("kept", b"x")

    def come_and_go(worker: int) -> None:
        for turn in range(100):
            key = f"a/b/{worker}-{turn}"
            store.create(key, b"x")
            store.delete([key])

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(come_and_go, range(4)))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".staging", "kept"]
    assert list((tmp_path / ".staging").iterdir()) == []


def test_a_full_disk_is_a_store_error_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    store = LocalStore(tmp_path)
    (tmp_path / ".staging").mkdir()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(StoreError, match="No space left"):
        store.put("object", b"x")
    assert [path.name for path in tmp_path.rglob("*")] == [".staging"]


def test_a_folder_that_may_not_be_written_is_the_users_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mkdir(self: Path, *args: object, **options: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with pytest.raises(UserError, match=f"{tmp_path}/bucket: Read-only file system"):
        probe(LocalStore(tmp_path / "bucket"), write_id="w")
