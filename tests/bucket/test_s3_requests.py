"""How the S3 store asks: which requests, with which settings, and what it says if they are wrong."""

import threading
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from tests.bucket.relayed import Relay, Relayed
from tests.support.s3 import S3Server, moto_server

from bucketrl.bucket.errors import NotFound, StoreError, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.s3 import READ_THREADS, S3Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]


def test_a_service_that_nobody_answers_for_is_a_store_error() -> None:
    store = S3Store("bucket", "run", endpoint_url="http://127.0.0.1:9", sleep=lambda _: None)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        store.get("a")


def test_a_bucket_that_does_not_exist_is_named(s3_server: S3Server) -> None:
    store = open_store(f"s3://no-such-bucket/run?endpoint_url={s3_server.endpoint_url}")
    for call in (
        lambda: store.put("a", b"x"),
        lambda: store.get("a"),
        lambda: list(store.list("")),
        lambda: probe(store, write_id="p"),
    ):
        with pytest.raises(UserError, match=r"no-such-bucket.*does not exist"):
            call()


def test_missing_credentials_are_the_users_error(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(UserError, match="AWS_ACCESS_KEY_ID"):
        open_store(s3_server.url("run")).put("a", b"x")


def test_no_region_need_be_configured(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    store = open_store(s3_server.url(uuid4().hex))
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_the_endpoint_may_come_from_the_environment(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint_url)
    store = open_store(f"s3://{s3_server.bucket}/{uuid4().hex}")
    store.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_long_listing_comes_page_by_page_and_lazily() -> None:
    with moto_server(page=3) as server, ExitStack() as stack:
        to = Relayed(server, lambda *_: None, stack)
        names = [f"t/{number:02d}" for number in range(10)]
        for name in names:
            to.store.put(name, b"x")
        to.requests.clear()
        listing = to.store.list("t/")
        assert next(listing).key == "t/00"
        assert len(to.requests) == 1
        assert ["t/00", *(info.key for info in listing)] == names
        assert len(to.requests) == 4
        assert [info.key for info in to.store.list("t/", start_after="t/04")] == names[5:]


def test_deletions_go_in_batches(relayed: Relay) -> None:
    to = relayed(lambda *_: None)
    to.store.put("a/0000", b"x")
    to.store.put("a/1000", b"x")
    to.requests.clear()
    to.store.delete(f"a/{number:04d}" for number in range(1001))
    assert to.requests == ["POST", "POST"]
    assert list(to.store.list("")) == []


def test_one_read_is_one_request_also_when_it_misses(relayed: Relay) -> None:
    to = relayed(lambda *_: None)
    with pytest.raises(NotFound):
        to.store.get("a")
    assert to.requests == ["GET"]
    to.store.put("a", b"x")
    to.store.get("a")
    assert to.requests == ["GET", "PUT", "GET"]


def test_objects_are_read_together(s3_server: S3Server, tmp_path: Path) -> None:
    store = open_store(s3_server.url(uuid4().hex))
    assert isinstance(store, S3Store)
    files = [(f"trajectories/{number}", tmp_path / str(number)) for number in range(20)]
    for key, _ in files:
        store.put(key, key.encode())
    store.get_files(files)
    assert [path.read_text() for _, path in files] == [key for key, _ in files]


def test_of_objects_read_together_all_or_none_are_written(s3_server: S3Server, tmp_path: Path) -> None:
    store = open_store(s3_server.url(uuid4().hex))
    assert isinstance(store, S3Store)
    store.put("a", b"x")
    store.put("c", b"x")
    with pytest.raises(NotFound, match=r"b$"):
        store.get_files([(key, tmp_path / key) for key in "abc"])
    assert list(tmp_path.iterdir()) == []


def test_so_many_are_read_at_a_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together = threading.Barrier(READ_THREADS, timeout=20)
    store = S3Store("bucket", "run", endpoint_url="http://127.0.0.1:9")
    daemons = []

    def get_file(key: str, path: Path) -> None:
        together.wait()
        daemons.append(threading.current_thread().daemon)

    monkeypatch.setattr(store, "get_file", get_file)
    store.get_files([(str(number), tmp_path / str(number)) for number in range(2 * READ_THREADS)])
    assert daemons == [True] * 2 * READ_THREADS  # none that an exit would wait for
