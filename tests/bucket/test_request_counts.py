"""Stores count what they send, repetitions included, and read together what they can."""

import threading
from collections.abc import Callable
from pathlib import Path

import httpx2
import pytest
from tests.support.hub import BUCKET, StandInHub

from bucketrl.bucket import artifacts
from bucketrl.bucket.counting import Requests, requests_of
from bucketrl.bucket.errors import AlreadyExists, IntegrityError, NotFound
from bucketrl.bucket.reading import get_together
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.local import LocalStore
from bucketrl.bucket.stores.memory import MemoryStore


def hf(hub: StandInHub | None = None) -> HfStore:
    return HfStore(BUCKET, "run", api=hub or StandInHub(), sleep=lambda _: None)


STORES: dict[str, Callable[[Path], Store]] = {
    "memory": lambda _: MemoryStore(),
    "local": lambda folder: LocalStore(folder / "bucket"),
}


@pytest.mark.parametrize("name", STORES)
def test_each_operation_is_counted_whether_or_not_it_finds_anything(name: str, tmp_path: Path) -> None:
    store = STORES[name](tmp_path)
    store.put("a/1", b"12345")
    store.create("a/2", b"123")
    with pytest.raises(AlreadyExists):
        store.create("a/2", b"123")
    store.get("a/1")
    with pytest.raises(NotFound):
        store.get("a/3")
    store.get_file("a/2", tmp_path / "copy")
    store.put_file("a/4", tmp_path / "copy")
    list(store.list("a/"))
    store.size("a/1")
    store.delete(["a/1"])
    counts = requests_of(store)
    assert counts.by_kind == {"put": 2, "create": 2, "get": 3, "list": 1, "info": 1, "delete": 1}
    assert (counts.total, counts.bytes_up, counts.bytes_down) == (10, 11, 8)


def test_a_repeated_request_is_counted_again() -> None:
    hub = StandInHub()
    hub.next_errors = [httpx2.ConnectError("refused")]
    store = hf(hub)
    store.put("a", b"x")
    assert requests_of(store).by_kind == {"put": 2, "token": 2}


def test_a_store_that_does_not_count_has_sent_nothing() -> None:
    class Wrapper:
        url = "wrapped"

    assert requests_of(Wrapper()).total == 0  # type: ignore[arg-type]


def test_counting_from_many_threads_loses_nothing() -> None:
    requests = Requests()
    threads = [threading.Thread(target=lambda: [requests.sent("get") for _ in range(2000)]) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert requests.snapshot().total == 16_000


def test_files_of_one_adapter_cost_one_download(tmp_path: Path) -> None:
    store = hf()
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_text(name)
    files = artifacts.publish(store, "policy/00000001-e0001/", tmp_path / "adapter")
    before = requests_of(store).total
    folder = artifacts.fetch(store, files, tmp_path / "fetched")
    assert requests_of(store).total - before == 2
    assert (folder / "adapter_config.json").read_text() == "adapter_config.json"


@pytest.mark.parametrize("damage", ["missing", "other bytes"])
def test_a_download_together_is_verified_file_by_file(damage: str, tmp_path: Path) -> None:
    store = hf()
    (tmp_path / "adapter").mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).write_text(name)
    files = artifacts.publish(store, "policy/00000001-e0001/", tmp_path / "adapter")
    if damage == "missing":
        store.delete([files[1].key])
    else:
        store.put(files[1].key, b"something else")
    with pytest.raises(IntegrityError, match="adapter_model"):
        artifacts.fetch(store, files, tmp_path / "fetched", sleep=lambda _: None)
    assert not (tmp_path / "fetched").exists()


def test_of_several_files_all_or_none_are_downloaded(tmp_path: Path) -> None:
    store = hf()
    store.put("a", b"x")
    with pytest.raises(NotFound):
        store.get_files([("a", tmp_path / "a"), ("b", tmp_path / "b")])
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_had_together_is_left_to_be_asked_for_alone() -> None:
    store = hf()
    store.put("a", b"x")
    store.put("b", b"y")
    assert get_together(store, ["a", "b"]) == {"a": b"x", "b": b"y"}
    assert get_together(store, ["a", "c"]) == {}
    assert get_together(MemoryStore(), ["a"]) == {}
