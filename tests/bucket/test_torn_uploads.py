"""A writer killed in the middle of an upload changes nothing: readers see what was there, and may write."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.relay import Answer, Fault, faulty_relay
from tests.support.s3 import S3Server

from bucketrl.bucket.errors import NotFound
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.s3 import PART_BYTES

WRITER = """
import sys
from pathlib import Path
from bucketrl.bucket.stores import open_store
open_store(sys.argv[1]).put_file("a/object", Path(sys.argv[2]))
"""
LIMIT_S = 60


@contextmanager
def writing(url: str, source: Path) -> Iterator[None]:
    """A process that uploads `source`; it is killed at the end of the block."""
    process = subprocess.Popen([sys.executable, "-c", WRITER, url, str(source)])
    try:
        yield
    finally:
        assert process.poll() is None, "the writer has ended by itself"
        process.kill()
        process.wait()


def begin(store: Store, before: bytes | None) -> None:
    if before is not None:
        store.put("a/object", before)


def assert_untouched(store: Store, before: bytes | None) -> None:
    if before is None:
        with pytest.raises(NotFound):
            store.get("a/object")
        assert list(store.list("")) == []
        store.create("a/object", b"new")
    else:
        assert store.get("a/object") == before
        store.put("a/object", b"new")
    assert store.get("a/object") == b"new"
    assert [info.key for info in store.list("")] == ["a/object"]


@pytest.mark.parametrize("before", [None, b"the old object"])
def test_a_local_writer(tmp_path: Path, before: bytes | None) -> None:
    store = open_store(str(tmp_path / "bucket"))
    begin(store, before)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with writing(str(tmp_path / "bucket"), pipe), pipe.open("wb") as half:
        half.write(bytes(3 << 20))
        half.flush()
        staging = tmp_path / "bucket" / ".staging"
        deadline = time.monotonic() + LIMIT_S
        while not any(file.stat().st_size > 1 << 20 for file in staging.glob("*")):
            assert time.monotonic() < deadline, "the writer never began"
            time.sleep(0.02)
    assert_untouched(store, before)


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
@pytest.mark.parametrize("name", ["s3_server", "ministack", "rclone"])
@pytest.mark.parametrize(
    ("withheld", "before"), [("PUT", None), ("POST", b"the old object")], ids=["parts", "completion"]
)
def test_a_multipart_writer(
    request: pytest.FixtureRequest, tmp_path: Path, name: str, withheld: str, before: bytes | None
) -> None:
    """Killed when its first parts are there, or all of them and only the completion is missing."""
    server: S3Server = request.getfixturevalue(name)
    source = tmp_path / "source"
    source.write_bytes(bytes(2 * PART_BYTES + 1))
    reached, killed = threading.Event(), threading.Event()
    seen: list[str] = []

    def plan(method: str, path: str, before: int) -> Fault | None:
        seen.append(method)
        if (method, seen.count(method)) != (withheld, 2):
            return None
        reached.set()
        killed.wait(LIMIT_S)
        return Answer(500, "InternalError")

    prefix = uuid4().hex
    store = open_store(server.url(prefix))
    begin(store, before)
    with faulty_relay(server, plan) as relay:
        with writing(relay.url(prefix), source):
            assert reached.wait(LIMIT_S), "the writer never came so far"
        killed.set()
    assert_untouched(store, before)
