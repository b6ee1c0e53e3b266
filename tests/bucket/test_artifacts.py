"""Artefacts: published whole, fetched verified, on the local disk whole or not at all."""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.bucket.builders import file_ref

from bucketrl.bucket import artifacts, keys
from bucketrl.bucket.errors import IntegrityError, NotFound, StoreError
from bucketrl.bucket.records import FileRef
from bucketrl.bucket.store import Store

PREFIX = keys.policy(3, 1)
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights", "shards/0.bin": b"\0" * 3000}


def no_sleep(_: float) -> None:
    pass


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write(tmp_path / "adapter", FILES)


def write(folder: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_publish_names_every_file_with_size_and_digest_in_order(memory: Store, folder: Path) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    assert refs == tuple(file_ref(PREFIX + name, data) for name, data in FILES.items())
    assert {ref.key: memory.get(ref.key) for ref in refs} == {PREFIX + n: d for n, d in FILES.items()}


def test_fetch_makes_the_folder_that_was_published(memory: Store, folder: Path, tmp_path: Path) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    target = tmp_path / "cache" / "v3"
    assert artifacts.fetch(memory, refs, target, sleep=no_sleep) == target
    assert content(target) == FILES
    assert os.listdir(target.parent) == ["v3"]


def test_a_verified_target_is_not_downloaded_again(memory: Store, folder: Path, tmp_path: Path) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    target = artifacts.fetch(memory, refs, tmp_path / "v3", sleep=no_sleep)
    memory.delete([ref.key for ref in refs])
    artifacts.fetch(memory, refs, target, sleep=no_sleep)
    assert content(target) == FILES


@pytest.mark.parametrize(
    "damage", [{"adapter_config.json": b"{ "}, {"extra": b"x"}, {"shards/0.bin": b"\0" * 2999}]
)
def test_a_damaged_target_is_replaced_whole(
    memory: Store, folder: Path, tmp_path: Path, damage: dict[str, bytes]
) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    target = write(tmp_path / "v3", FILES | damage)
    artifacts.fetch(memory, refs, target, sleep=no_sleep)
    assert content(target) == FILES


def test_one_flipped_bit_is_refused_and_leaves_nothing(memory: Store, folder: Path, tmp_path: Path) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    memory.put(PREFIX + "adapter_model.safetensors", b"weighus")
    with pytest.raises(IntegrityError, match=r"adapter_model\.safetensors: sha256 is"):
        artifacts.fetch(memory, refs, tmp_path / "cache" / "v3", sleep=no_sleep)
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda store: store.put(PREFIX + "adapter_config.json", b"{"), "1 bytes, want 2"),
        (lambda store: store.delete([PREFIX + "adapter_config.json"]), "it is not in the bucket"),
    ],
)
def test_torn_and_missing_objects_are_refused(
    memory: Store, folder: Path, tmp_path: Path, change: Any, reason: str
) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    change(memory)
    with pytest.raises(IntegrityError, match=reason):
        artifacts.fetch(memory, refs, tmp_path / "v3", sleep=no_sleep)
    with pytest.raises(IntegrityError, match=reason):
        artifacts.read_verified(memory, refs[0], sleep=no_sleep)
    assert not (tmp_path / "v3").exists()


class Lagging:
    """The first `stale` reads of each key see an older state of the bucket."""

    def __init__(self, store: Store, older: dict[str, bytes], stale: int) -> None:
        self._store = store
        self._older = older
        self._stale = stale
        self._reads: dict[str, int] = {}

    def get(self, key: str) -> bytes:
        self._reads[key] = self._reads.get(key, 0) + 1
        if self._reads[key] > self._stale:
            return self._store.get(key)
        if key not in self._older:
            raise NotFound(key)
        return self._older[key]

    def get_file(self, key: str, path: Path) -> None:
        data = self.get(key)
        with path.open("xb") as file:  # the contract: `path` must not exist
            file.write(data)


@pytest.mark.parametrize("older", [{}, {PREFIX + name: b"old" for name in FILES}])
def test_an_eventually_consistent_store_is_read_again(
    memory: Store, folder: Path, tmp_path: Path, older: dict[str, bytes]
) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    waits: list[float] = []
    store: Any = Lagging(memory, older, stale=len(artifacts.RETRY_DELAYS_S))
    assert artifacts.read_verified(store, refs[0], sleep=waits.append) == b"{}"
    assert waits == list(artifacts.RETRY_DELAYS_S)
    store = Lagging(memory, older, stale=len(artifacts.RETRY_DELAYS_S))
    artifacts.fetch(store, refs, tmp_path / "v3", sleep=no_sleep)
    assert content(tmp_path / "v3") == FILES


def test_a_store_failure_passes_through_and_leaves_nothing(
    memory: Store, folder: Path, tmp_path: Path
) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)

    class Down:
        def get_file(self, key: str, path: Path) -> None:
            if key.endswith(".json"):
                return memory.get_file(key, path)
            raise StoreError("503")

    store: Any = Down()
    with pytest.raises(StoreError, match="503"):
        artifacts.fetch(store, refs, tmp_path / "cache" / "v3", sleep=no_sleep)
    assert os.listdir(tmp_path / "cache") == []


def test_the_faster_of_two_processes_wins(memory: Store, folder: Path, tmp_path: Path) -> None:
    refs = artifacts.publish(memory, PREFIX, folder)
    target = tmp_path / "v3"

    class Rival:
        def get_file(self, key: str, path: Path) -> None:
            memory.get_file(key, path)
            if key == refs[-1].key:
                write(target, FILES)

    store: Any = Rival()
    assert artifacts.fetch(store, refs, target, sleep=no_sleep) == target
    assert content(target) == FILES
    assert sorted(os.listdir(tmp_path)) == ["adapter", "v3"]


@pytest.mark.parametrize(
    "names",
    [
        ["policy/00000003-e0001/../../../etc/passwd"],
        ["run.json"],
        ["policy/00000003-e0001/a", "policy/00000004-e0001/b"],
        ["policy/00000003-e0001/a", "policy/00000003-e0001/a"],
        [],
    ],
)
def test_references_that_are_no_single_artefact_are_refused(
    memory: Store, tmp_path: Path, names: list[str]
) -> None:
    refs = [FileRef(key=name, size=0, sha256="") for name in names]
    with pytest.raises(IntegrityError):
        artifacts.fetch(memory, refs, tmp_path / "v3", sleep=no_sleep)
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_fetched_is_not_published(memory: Store, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no files to publish"):
        artifacts.publish(memory, PREFIX, write(tmp_path / "empty", {"sub/x": b""}) / "nothing")
    with pytest.raises(ValueError, match="no key for a file"):
        artifacts.publish(memory, PREFIX, write(tmp_path / "hidden", {".hidden": b"x"}))
    (write(tmp_path / "link", {"a": b"x"}) / "b").symlink_to("a")
    with pytest.raises(ValueError, match="neither a regular file"):
        artifacts.publish(memory, PREFIX, tmp_path / "link")
