"""The probe reports what stores do, not what they claim, and cleans up behind it."""

from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.hub import StandInHub

from bucketrl.bucket.errors import StoreError, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.memory import MemoryStore


def test_a_sound_store_is_tier_1_and_left_as_it_was(tmp_path: Path) -> None:
    for store in (open_store(f"memory://{uuid4().hex}"), open_store(str(tmp_path / "bucket"))):
        report = probe(store, write_id="p")
        assert (report.tier, report.create_exclusive, report.messages) == (Tier.CREATE, True, ())
        assert list(store.list("")) == []


def test_a_tier_0_store_stays_tier_0() -> None:
    assert probe(HfStore("owner/name", "", api=StandInHub()), write_id="p").tier is Tier.PUT


def test_a_store_that_overwrites_on_create_is_demoted() -> None:
    class Careless(MemoryStore):
        def create(self, key: str, data: bytes) -> None:
            self.put(key, data)

    report = probe(Careless(), write_id="p")
    assert report.tier is Tier.PUT
    assert "exclusive" in report.messages[0]


def test_a_store_that_cannot_be_written_is_a_user_error() -> None:
    class ReadOnly(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise StoreError("read-only file system")

    with pytest.raises(UserError, match="cannot be written"):
        probe(ReadOnly(), write_id="p")
