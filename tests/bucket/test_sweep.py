"""What killed writers leave behind is dropped by age; what is being written is not."""

import os
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.s3 import S3Server

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.local import STAGING, LocalStore
from bucketrl.bucket.stores.memory import MemoryStore

HOUR = 3600.0


def test_a_folder_drops_old_staging_files_only(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/b", b"x")
    old, new = tmp_path / STAGING / "old", tmp_path / STAGING / "new"
    for path in (old, new):
        path.write_bytes(b"half")
    past = new.stat().st_mtime - HOUR
    os.utime(old, (past, past))
    assert store.sweep(2 * HOUR) == 0
    assert store.sweep(HOUR / 2) == 1
    assert sorted(path.name for path in (tmp_path / STAGING).iterdir()) == ["new"]
    assert store.get("a/b") == b"x"


def test_a_store_that_nothing_was_written_to_has_nothing_to_drop(tmp_path: Path) -> None:
    assert LocalStore(tmp_path / "nowhere").sweep(HOUR) == 0
    assert not (tmp_path / "nowhere").exists()
    assert MemoryStore().sweep(HOUR) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_s3_drops_old_multipart_uploads_of_this_run_only(
    ministack: S3Server, caplog: pytest.LogCaptureFixture
) -> None:
    """Not on moto, which says that every upload was begun in 2010."""
    run = uuid4().hex
    store, other = open_store(ministack.url(run)), open_store(ministack.url(f"{run}-other"))
    for one in (store, other):
        for number in range(3):
            one._call("create_multipart_upload", f"checkpoints/{number}/state")  # type: ignore[attr-defined]
    assert store.sweep(HOUR) == 0
    assert store.sweep(-HOUR) == 3
    assert store.sweep(-HOUR) == 0
    assert other.sweep(-HOUR) == 3
    assert caplog.messages == []


@pytest.mark.slow
@pytest.mark.usefixtures("s3_credentials")
def test_a_service_that_cannot_list_uploads_is_left_alone(
    s3_server: S3Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(s3_server.url(uuid4().hex))

    def refuse(*_arguments: object, **_options: object) -> None:
        raise UserError("access refused")

    monkeypatch.setattr(store, "_do", refuse)
    assert store.sweep(HOUR) == 0
    assert "unfinished uploads cannot be removed: access refused" in caplog.text
