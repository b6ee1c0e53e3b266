"""What services and networks do to requests, done to an S3 store by a relay."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.s3 import Answer, CutBody, DropCondition, Fault, LoseReply, S3Server, faulty_relay

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, StoreError, Unsupported, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import Store, Tier
from bucketrl.bucket.stores import open_store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]


def plan(method: str, path: str, before: int) -> Fault | None:
    """The key says what happens to it."""
    name = path.rpartition("/")[2]
    first = before == 0
    if method == "PUT":
        if name.startswith("lost") and first:
            return LoseReply()
        if name.startswith("conflict") and first:
            return Answer(409, "ConditionalRequestConflict")
        if name.startswith("plain412"):
            return Answer(412, "PreconditionFailed")
        if name.startswith("busy") and before < 2:
            return Answer(503, "SlowDown", (("Retry-After", "0"),))
        if name.startswith("throttled") and first:
            return Answer(429, "TooManyRequests")
        if name.startswith("missing501"):
            return Answer(501, "NotImplemented")
        if name.startswith("forbidden"):
            return Answer(403, "AccessDenied")
        if name.startswith("down"):
            return Answer(500, "InternalError")
    if method == "GET" and name.startswith("cut") and first:
        return CutBody()
    return None


@pytest.fixture
def store(s3_server: S3Server) -> Iterator[Store]:
    with faulty_relay(s3_server, plan) as relay:
        yield open_store(relay.url(uuid4().hex))


def test_a_lost_reply_is_recognised_as_ones_own_write(store: Store) -> None:
    assert conditional.create(store, "lost", b"mine") is None
    assert conditional.create(store, "lost", b"theirs") == b"mine"


def test_an_undecided_conflict_is_tried_again(store: Store) -> None:
    assert conditional.create(store, "conflict", b"mine") is None


def test_a_412_without_explanation_is_a_lost_race(store: Store) -> None:
    with pytest.raises(AlreadyExists):
        store.create("plain412", b"mine")


@pytest.mark.parametrize("key", ["busy", "throttled"])
def test_throttling_is_waited_out(store: Store, key: str) -> None:
    store.put(key, b"x")
    assert store.get(key) == b"x"


def test_a_body_that_is_cut_is_fetched_again(store: Store, tmp_path: Path) -> None:
    store.put("cut", b"0123456789" * 1000)
    assert store.get("cut") == b"0123456789" * 1000
    store.put("cut-file", b"0123456789" * 1000)
    store.get_file("cut-file", tmp_path / "got")
    assert (tmp_path / "got").read_bytes() == b"0123456789" * 1000


def test_a_service_without_conditional_writes_says_so(store: Store) -> None:
    with pytest.raises(Unsupported):
        store.create("missing501", b"mine")


def test_a_refusal_names_the_bucket_and_no_secret(store: Store) -> None:
    with pytest.raises(UserError, match="AccessDenied") as caught:
        store.put("forbidden", b"x")
    assert "testing" not in str(caught.value).replace("bucketrl-tests", "")


def test_a_service_that_stays_down_is_a_store_error(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bucketrl.bucket.retry.time.sleep", lambda _: None)
    with pytest.raises(StoreError, match="InternalError"):
        store.put("down", b"x")


def test_a_gateway_that_ignores_the_condition_is_demoted(s3_server: S3Server) -> None:
    with faulty_relay(s3_server, lambda *_: DropCondition()) as relay:
        report = probe(open_store(relay.url(uuid4().hex)), write_id="p")
    assert report.tier is Tier.PUT
    assert not report.create_exclusive
    assert any("not exclusive" in message for message in report.messages)


def test_a_bucket_that_does_not_exist_is_a_user_error(s3_server: S3Server) -> None:
    with pytest.raises(UserError, match="does not exist"):
        open_store(f"s3://no-such-bucket/run?endpoint_url={s3_server.endpoint_url}").put("a", b"x")
