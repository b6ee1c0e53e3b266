"""What services and networks do to requests, done to an S3 store by a relay."""

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from uuid import uuid4

import pytest
from tests.support.relay import Answer, CutBody, DropCondition, Fault, LoseReply, faulty_relay
from tests.support.s3 import CREDENTIALS, S3Server, moto_server

from bucketrl.bucket import conditional
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.s3 import PART_BYTES, S3Store

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("s3_credentials")]

Spoil = Callable[[str, int], Fault | None]
"""(method, how often it met this path before) -> the fault."""


class Relayed:
    """A store behind a relay, its requests counted and its waits written down, not waited."""

    def __init__(self, server: S3Server, spoil: Spoil, stack: ExitStack) -> None:
        self.requests: list[str] = []
        self.waits: list[float] = []

        def plan(method: str, path: str, before: int) -> Fault | None:
            self.requests.append(method)
            return spoil(method, before)

        relay = stack.enter_context(faulty_relay(server, plan))
        self.store = S3Store(
            relay.bucket, uuid4().hex, endpoint_url=relay.endpoint_url, sleep=self.waits.append
        )


@pytest.fixture
def relayed(s3_server: S3Server) -> Iterator[Callable[[Spoil], Relayed]]:
    with ExitStack() as stack:
        yield lambda spoil: Relayed(s3_server, spoil, stack)


def first(method: str, fault: Fault, times: int = 1) -> Spoil:
    return lambda met, before: fault if met == method and before < times else None


def always(method: str, fault: Fault) -> Spoil:
    return lambda met, before: fault if met == method else None


def test_a_lost_reply_looks_like_a_lost_race_and_conditional_create_knows_better(
    relayed: Callable[[Spoil], Relayed],
) -> None:
    to = relayed(first("PUT", LoseReply()))
    with pytest.raises(AlreadyExists):
        to.store.create("log/0", b"mine")
    assert to.requests == ["PUT", "PUT"]
    assert conditional.create(to.store, "log/1", b"mine") is None
    assert conditional.create(to.store, "log/1", b"theirs") == b"mine"


def test_an_undecided_conflict_is_tried_again(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(first("PUT", Answer(409, "ConditionalRequestConflict")))
    to.store.create("log/0", b"mine")
    assert to.requests == ["PUT", "PUT"]
    assert to.store.get("log/0") == b"mine"


def test_a_412_without_a_condition_element_is_a_lost_race(relayed: Callable[[Spoil], Relayed]) -> None:
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
def test_what_may_pass_is_waited_out(relayed: Callable[[Spoil], Relayed], fault: Fault, method: str) -> None:
    to = relayed(first(method, fault, times=2))
    to.store.put("a", b"x")
    assert to.store.get("a") == b"x"
    assert to.requests.count(method) == 3
    # aiohttp itself repeats a request once if a kept connection turns out to be closed.
    assert len(to.waits) == (1 if isinstance(fault, LoseReply) else 2)


def test_the_server_says_how_long_to_wait(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(first("PUT", Answer(503, "SlowDown", (("Retry-After", "7"),))))
    to.store.put("a", b"x")
    assert to.waits == [7.0]


def test_a_body_that_is_cut_is_fetched_again(relayed: Callable[[Spoil], Relayed], tmp_path: Path) -> None:
    to = relayed(first("GET", CutBody()))
    data = os.urandom(300_000)
    to.store.put("a", data)
    assert to.store.get("a") == data
    to.store.put("b", data)
    to.store.get_file("b", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == data
    assert to.requests.count("GET") == 4


def test_a_body_that_is_always_cut_leaves_no_half_file(
    relayed: Callable[[Spoil], Relayed], tmp_path: Path
) -> None:
    to = relayed(always("GET", CutBody()))
    to.store.put("a", os.urandom(300_000))
    with pytest.raises(StoreError):
        to.store.get_file("a", tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_a_listing_that_fails_halfway_goes_on(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(first("GET", CutBody()))
    to.store.put("a/1", b"x")
    assert list(to.store.list("a/")) == [ObjectInfo("a/1", 1)]


def test_a_service_without_conditional_writes_says_so(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(always("PUT", Answer(501, "NotImplemented")))
    with pytest.raises(Unsupported):
        to.store.create("log/0", b"mine")
    assert to.requests == ["PUT"]


@pytest.mark.parametrize("code", ["AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_a_refusal_is_the_users_error_at_once(relayed: Callable[[Spoil], Relayed], code: str) -> None:
    to = relayed(always("PUT", Answer(403, code)))
    with pytest.raises(UserError, match=rf"s3://{to.store.url[5:20]}.*{code}"):
        to.store.put("a", b"x")
    assert to.requests == ["PUT"]


def test_a_service_that_stays_down_is_a_store_error(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(always("PUT", Answer(500, "InternalError")))
    with pytest.raises(StoreError, match="InternalError"):
        to.store.put("a", b"x")
    assert len(to.requests) == len(to.waits) + 1 == 6


def test_a_service_that_nobody_answers_for_is_a_store_error() -> None:
    store = S3Store("bucket", "run", endpoint_url="http://127.0.0.1:9", sleep=lambda _: None)
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:9"):
        store.get("a")


def test_a_gateway_that_ignores_the_condition_is_demoted(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(lambda method, before: DropCondition())
    report = probe(to.store, write_id="p")
    assert report.tier is Tier.PUT
    assert not report.create_exclusive
    assert any("not exclusive" in message for message in report.messages)
    assert list(to.store.list("")) == []


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


def test_deletions_go_in_batches(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(lambda *_: None)
    to.store.put("a/0000", b"x")
    to.store.put("a/1000", b"x")
    to.requests.clear()
    to.store.delete(f"a/{number:04d}" for number in range(1001))
    assert to.requests == ["POST", "POST"]
    assert list(to.store.list("")) == []


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """A file of three parts."""
    path = tmp_path / "large"
    path.write_bytes(os.urandom(2 * PART_BYTES + 1))
    return path


def test_a_failed_part_alone_is_sent_again(relayed: Callable[[Spoil], Relayed], large: Path) -> None:
    to = relayed(first("PUT", Answer(500, "InternalError")))
    to.store.put_file("state", large)
    assert to.requests.count("PUT") == 4
    assert to.store.get("state") == large.read_bytes()


def test_a_completion_whose_reply_was_lost_has_happened(
    relayed: Callable[[Spoil], Relayed], large: Path
) -> None:
    posts = iter([None, LoseReply(), Answer(404, "NoSuchUpload")])
    to = relayed(lambda method, before: next(posts) if method == "POST" else None)
    to.store.put_file("state", large)
    assert to.store.get("state") == large.read_bytes()


def test_an_upload_that_is_never_completed_shows_nothing(
    relayed: Callable[[Spoil], Relayed], large: Path
) -> None:
    posts = iter([None, Answer(400, "InvalidPart")])
    to = relayed(lambda method, before: next(posts) if method == "POST" else None)
    with pytest.raises(StoreError, match="InvalidPart"):
        to.store.put_file("state", large)
    assert to.requests[-1] == "DELETE"
    assert list(to.store.list("")) == []
    with pytest.raises(NotFound):
        to.store.get("state")


def test_one_read_is_one_request_also_when_it_misses(relayed: Callable[[Spoil], Relayed]) -> None:
    to = relayed(lambda *_: None)
    with pytest.raises(NotFound):
        to.store.get("a")
    assert to.requests == ["GET"]
    to.store.put("a", b"x")
    to.store.get("a")
    assert to.requests == ["GET", "PUT", "GET"]


def test_no_secret_is_logged_or_said(
    relayed: Callable[[Spoil], Relayed], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="bucketrl")
    said = []
    for fault in (Answer(403, "SignatureDoesNotMatch"), Answer(503, "SlowDown"), Answer(400, "Odd")):
        to = relayed(always("PUT", fault))
        with pytest.raises((UserError, StoreError)) as caught:
            to.store.put("a", b"x")
        said.append(str(caught.value))
    assert "trying again" in caplog.text
    for secret in (CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]):
        assert secret not in caplog.text + "".join(said)
