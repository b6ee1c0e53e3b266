"""What services and networks do to requests, done to an S3 store by a relay."""

import os
from pathlib import Path

import pytest
from tests.bucket.relayed import Relay, always, first
from tests.support.relay import Answer, CutBody, DropCondition, Fault, LoseReply, Stall

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores import s3
from bucketrl.bucket.stores.s3 import PART_BYTES, UPLOAD_ATTEMPTS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]

on_both_servers = pytest.mark.parametrize("server_name", ["s3_server", "ministack"])


@on_both_servers
def test_a_lost_reply_looks_like_a_lost_race_and_conditional_create_knows_better(
    relayed: Relay,
) -> None:
    to = relayed(first("PUT", LoseReply()))
    with pytest.raises(AlreadyExists):
        to.store.create("log/0", b"mine")
    assert to.requests == ["PUT", "PUT"]
    assert conditional.create(to.store, "log/1", b"mine") is None
    assert conditional.create(to.store, "log/1", b"theirs") == b"mine"


@on_both_servers
def test_an_undecided_conflict_is_tried_again(relayed: Relay) -> None:
    to = relayed(first("PUT", Answer(409, "ConditionalRequestConflict")))
    to.store.create("log/0", b"mine")
    assert to.requests == ["PUT", "PUT"]
    assert to.store.get("log/0") == b"mine"


def test_a_412_without_a_condition_element_is_a_lost_race(relayed: Relay) -> None:
    to = relayed(always("PUT", Answer(412, "PreconditionFailed")))
    with pytest.raises(AlreadyExists):
        to.store.create("log/0", b"mine")
    assert to.requests == ["PUT"]


@pytest.mark.parametrize(
    "fault",
    [
        Answer(503, "SlowDown"),
        Answer(429, "TooManyRequests"),
        Answer(500, "InternalError"),
        Answer(502, "no code that S3 knows"),
        Answer(409, "no code that S3 knows"),
        Answer(400, "RequestTimeout"),
        LoseReply(),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_what_may_pass_is_waited_out(relayed: Relay, fault: Fault, method: str) -> None:
    to = relayed(first(method, fault, times=2))
    to.store.put("a", b"x")
    assert to.store.get("a") == b"x"
    assert to.requests.count(method) == 3
    # aiohttp itself repeats a request once if a kept connection turns out to be closed.
    assert len(to.waits) == (1 if isinstance(fault, LoseReply) else 2)


@pytest.mark.parametrize("status", [429, 500, 503])
@pytest.mark.parametrize("method", ["PUT", "GET"])
def test_the_server_says_how_long_to_wait(relayed: Relay, status: int, method: str) -> None:
    to = relayed(first(method, Answer(status, "SlowDown", (("Retry-After", "7"),))))
    to.store.put("a", b"x")
    assert to.store.get("a") == b"x"
    assert to.waits == [7.0]


def test_an_answer_that_does_not_come_is_asked_for_again(
    relayed: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(s3, "READ_TIMEOUT_S", 0.5)
    to = relayed(lambda method, before: Stall(1.5) if before == 0 else None)
    assert conditional.create(to.store, "a", b"mine") is None
    assert to.store.get("a") == b"mine"
    assert len(to.waits) == 2


@on_both_servers
def test_a_body_that_is_cut_is_fetched_again(relayed: Relay, tmp_path: Path) -> None:
    to = relayed(first("GET", CutBody()))
    data = os.urandom(300_000)
    to.store.put("a", data)
    assert to.store.get("a") == data
    to.store.put("b", data)
    to.store.get_file("b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert to.requests.count("GET") == 4


def test_a_body_that_is_always_cut_leaves_no_half_file(relayed: Relay, tmp_path: Path) -> None:
    to = relayed(always("GET", CutBody()))
    to.store.put("a", os.urandom(300_000))
    with pytest.raises(StoreError):
        to.store.get_file("a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


@on_both_servers
def test_a_listing_that_fails_halfway_goes_on(relayed: Relay) -> None:
    to = relayed(first("GET", CutBody()))
    to.store.put("a/1", b"x")
    assert list(to.store.list("a/")) == [ObjectInfo("a/1", 1)]


def test_a_service_without_conditional_writes_says_so(relayed: Relay) -> None:
    to = relayed(always("PUT", Answer(501, "NotImplemented")))
    with pytest.raises(Unsupported):
        to.store.create("log/0", b"mine")
    assert to.requests == ["PUT"]


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_a_refusal_is_the_users_error_at_once(relayed: Relay, code: str) -> None:
    to = relayed(always("PUT", Answer(403, code)))
    with pytest.raises(UserError, match=rf"s3://{to.store.url[5:20]}.*{code}"):
        to.store.put("a", b"x")
    assert to.requests == ["PUT"]


def test_a_service_that_stays_down_is_a_store_error(relayed: Relay) -> None:
    to = relayed(always("PUT", Answer(500, "InternalError")))
    with pytest.raises(StoreError, match="InternalError"):
        to.store.put("a", b"x")
    assert len(to.requests) == len(to.waits) + 1 == 6


@on_both_servers
def test_a_gateway_that_ignores_the_condition_is_demoted(relayed: Relay) -> None:
    to = relayed(lambda method, before: DropCondition())
    report = probe(to.store, write_id="p")
    assert report.tier is Tier.PUT
    assert not report.create_exclusive
    assert any("not exclusive" in message for message in report.messages)
    assert list(to.store.list("")) == []


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of three parts."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART_BYTES + 1))
    return path


@on_both_servers
def test_a_failed_part_alone_is_sent_again(relayed: Relay, large: Path) -> None:
    to = relayed(first("PUT", Answer(500, "InternalError")))
    to.store.put_file("state", large)
    assert to.requests.count("PUT") == 4
    assert to.store.get("state") == large.read_bytes()


@on_both_servers
@pytest.mark.parametrize(
    "then", [None, Answer(404, "NoSuchUpload")], ids=["as the server says", "upload gone"]
)
def test_a_completion_whose_reply_was_lost_has_happened(
    relayed: Relay, large: Path, then: Fault | None
) -> None:
    posts = iter([None, LoseReply(), then])
    to = relayed(lambda method, before: next(posts, None) if method == "POST" else None)
    to.store.put_file("state", large)
    assert to.store.get("state") == large.read_bytes()


def test_a_completion_that_fails_inside_a_200_is_tried_again(relayed: Relay, large: Path) -> None:
    posts = iter([None, Answer(200, "InternalError")])
    to = relayed(lambda method, before: next(posts, None) if method == "POST" else None)
    to.store.put_file("state", large)
    assert to.requests.count("POST") == 3
    assert to.store.get("state") == large.read_bytes()


def test_an_upload_that_somebody_aborts_begins_again_whatever_was_there(relayed: Relay, large: Path) -> None:
    """An older object of the same size must not pass for the new one."""
    posts = iter([None, Answer(404, "NoSuchUpload")])
    to = relayed(lambda method, before: next(posts, None) if method == "POST" else None)
    to.store.put("state", bytes(large.stat().st_size))
    to.store.put_file("state", large)
    assert to.store.get("state") == large.read_bytes()


def test_an_upload_that_is_aborted_again_and_again_fails(relayed: Relay, large: Path) -> None:
    to = relayed(
        lambda method, before: Answer(404, "NoSuchUpload") if method == "POST" and before % 2 else None
    )
    with pytest.raises(StoreError, match="vanishes again and again"):
        to.store.put_file("state", large)
    assert to.requests.count("POST") == 2 * UPLOAD_ATTEMPTS


@on_both_servers
def test_an_upload_that_is_never_completed_shows_nothing(relayed: Relay, large: Path) -> None:
    posts = iter([None, Answer(400, "InvalidPart")])
    to = relayed(lambda method, before: next(posts) if method == "POST" else None)
    with pytest.raises(StoreError, match="InvalidPart"):
        to.store.put_file("state", large)
    assert to.requests[-1] == "DELETE"
    assert list(to.store.list("")) == []
    with pytest.raises(NotFound):
        to.store.get("state")
