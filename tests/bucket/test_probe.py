"""The probe reports what stores do, not what they claim, and cleans up behind it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.bucket.relayed import Relay
from tests.support.hub import BUCKET, StandInHub
from tests.support.relay import Answer

from bucketrl.bucket import keys
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, UserError
from bucketrl.bucket.probe import MOST_REQUESTS, probe
from bucketrl.bucket.retry import Transient
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.hf import HfStore
from bucketrl.bucket.stores.memory import MemoryStore


def test_a_sound_store_is_tier_1_and_left_as_it_was(tmp_path: Path) -> None:
    for store in (open_store(f"memory://{uuid4().hex}"), open_store(str(tmp_path / "bucket"))):
        store.put("log/00000000.json", b"x")
        report = probe(store, write_id="p")
        assert (report.tier, report.read_after_write, report.list_after_put) == (Tier.CREATE, True, True)
        assert (report.create_exclusive, report.messages) == (True, ())
        assert [info.key for info in store.list("")] == ["log/00000000.json"]


def test_everything_that_it_writes_is_below_the_probe_prefix() -> None:
    written: set[str] = set()

    class Watched(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            written.add(key)
            super().put(key, data)

        def create(self, key: str, data: bytes) -> None:
            written.add(key)
            super().create(key, data)

    probe(Watched(), write_id="p")
    assert len(written) == 2
    assert all(key.startswith(keys.PROBE_PREFIX + "p/") for key in written)


def test_it_costs_few_requests() -> None:
    store = MemoryStore()
    probe(store, write_id="p")
    assert store.requests.snapshot().total <= MOST_REQUESTS
    overwriting = Overwrites()
    probe(overwriting, write_id="p")
    assert overwriting.requests.snapshot().total <= MOST_REQUESTS
    hub = HfStore(BUCKET, "run", api=StandInHub())
    probe(hub, write_id="p")
    assert hub.requests.snapshot().total <= 10  # each put and get is a few requests of the Hub's


@pytest.mark.slow
@pytest.mark.parametrize("server_name", ["s3_server", "ministack", "rclone"])
def test_it_costs_few_requests_on_s3(relayed: Relay, s3_credentials: None) -> None:
    to = relayed(lambda method, before: None)
    probe(to.store, write_id="p")
    assert len(to.requests) - len(to.waits) <= MOST_REQUESTS  # a server may drop a connection now and then
    assert sum(to.waits) < 1  # no answer of the probe is waited for


@pytest.mark.slow
def test_a_store_that_is_down_is_asked_for_one_thing(relayed: Relay, s3_credentials: None) -> None:
    to = relayed(lambda method, before: Answer(503, "SlowDown"))
    with pytest.raises(UserError, match="cannot be written"):
        probe(to.store, write_id="p")
    assert to.requests == ["PUT"] * 6
    assert sum(to.waits) < 5


def test_a_tier_0_store_stays_tier_0_without_complaint() -> None:
    report = probe(HfStore(BUCKET, "run", api=StandInHub()), write_id="p")
    assert (report.tier, report.create_exclusive, report.messages) == (Tier.PUT, False, ())


class Overwrites(MemoryStore):
    """Ignores the condition, as some gateways do."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


class NobodyWins(MemoryStore):
    def create(self, key: str, data: bytes) -> None:
        raise AlreadyExists(key)


class LastWriterWins(MemoryStore):
    """Tells all but one that they lost, and yet keeps a loser's bytes."""

    def create(self, key: str, data: bytes) -> None:
        try:
            super().create(key, data)
        except AlreadyExists:
            self.put(key, data + b" overwritten")
            raise


class TwoWinners(MemoryStore):
    """Tells two creators that they won and keeps the object of the first racer among them."""

    creates = 0

    def create(self, key: str, data: bytes) -> None:
        self.creates += 1
        if self.creates == 2:
            self.put(key, min(data, self.get(key)))
        else:
            super().create(key, data)


@pytest.mark.parametrize("kind", [Overwrites, NobodyWins, LastWriterWins])
@pytest.mark.parametrize("racers", [1, 8])
def test_a_store_whose_create_is_not_exclusive_is_demoted(
    kind: Callable[[], MemoryStore], racers: int
) -> None:
    store = kind()
    report = probe(store, write_id="p", racers=racers)
    assert (report.tier, report.create_exclusive) == (Tier.PUT, False)
    assert report.messages == ("create-if-absent is not exclusive here: commits must go through the proxy",)
    assert list(store.list("")) == []


def test_a_race_with_two_winners_demotes_the_store_even_if_a_late_writer_loses() -> None:
    assert probe(TwoWinners(), write_id="p").tier is Tier.PUT


def test_a_winner_whose_reply_was_lost_is_still_the_winner() -> None:
    class LostReply(MemoryStore):
        def create(self, key: str, data: bytes) -> None:
            super().create(key, data)
            raise AlreadyExists("as a retry after a lost reply is told")

    assert probe(LostReply(), write_id="p").tier is Tier.CREATE


def test_a_store_that_lags_is_reported_not_refused() -> None:
    class Lagging(MemoryStore):
        def get(self, key: str) -> bytes:
            if key.endswith("/put"):
                raise NotFound(key)
            return super().get(key)

        def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
            return iter(())

    report = probe(Lagging(), write_id="p")
    assert (report.tier, report.read_after_write, report.list_after_put) == (Tier.CREATE, False, False)
    assert len(report.messages) == 2


def test_a_store_that_cannot_be_written_is_a_user_error_with_its_url() -> None:
    class ReadOnly(MemoryStore):
        def put(self, key: str, data: bytes) -> None:
            raise StoreError("read-only file system")

    with pytest.raises(UserError, match=r"memory://here: cannot be written: read-only file system"):
        probe(ReadOnly("here"), write_id="p")


def test_a_folder_below_a_file_is_a_user_error_with_its_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=f"{tmp_path}/file/bucket: cannot be written"):
        probe(open_store(str(tmp_path / "file" / "bucket")), write_id="p")


def test_a_failure_in_the_race_passes_through_and_is_cleaned_up() -> None:
    class Fails(MemoryStore):
        def create(self, key: str, data: bytes) -> None:
            raise Transient("503")

    store = Fails()
    with pytest.raises(StoreError, match="503"):
        probe(store, write_id="p")
    assert list(store.list("")) == []
