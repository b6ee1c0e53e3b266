"""Credentials show in no log at DEBUG, no error with all its causes, no repr: every store, every fault."""

import io
import logging
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError
from tests.bucket.relayed import Relay
from tests.support.hub import BUCKET, StandInHub, hub_response
from tests.support.relay import Answer, Fault, LoseReply
from tests.support.s3 import S3Server
from tests.support.stores import Kind, opener, parameters

from bucketrl.bucket.errors import BucketrlError, UserError
from bucketrl.bucket.probe import probe
from bucketrl.bucket.store import Store
from bucketrl.bucket.stores import open_store
from bucketrl.bucket.stores.hf import HfStore

SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "test-secret-not-to-be-shown",
    "AWS_SESSION_TOKEN": "session-token-not-to-be-shown",
    "HF_TOKEN": "hf_NotToBeShownNotToBeShown",
}


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, s3_credentials: None) -> Iterator[Callable[[str], None]]:
    """Collects text; at the end neither it nor anything logged since may contain a secret."""
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    everything = io.StringIO()
    handler = logging.StreamHandler(everything)
    root = logging.getLogger()
    monkeypatch.setattr(root, "level", logging.DEBUG)
    root.addHandler(handler)
    logging.getLogger("bucketrl").debug("logs are kept")
    yield lambda text: print(text, file=everything)
    root.removeHandler(handler)
    text = everything.getvalue()
    assert "logs are kept" in text
    assert [name for name, value in SECRETS.items() if value in text] == []


def use(store: Store, folder: Path, said: Callable[[str], None]) -> list[BucketrlError]:
    """Each operation once; what fails is told with all its causes."""
    source = folder / "source"
    source.write_bytes(bytes(17 << 20))
    operations: list[Callable[[], Any]] = [
        lambda: probe(store, write_id="p"),
        lambda: store.put("a", b"x"),
        lambda: store.create("b", b"x"),
        lambda: store.get("a"),
        lambda: store.get("nothing"),
        lambda: store.put_file("large", source),
        lambda: store.get_file("large", folder / "target"),
        lambda: list(store.list("")),
        lambda: store.delete(["a"]),
    ]
    errors = []
    for operation in operations:
        try:
            operation()
        except BucketrlError as error:
            said("".join(traceback.format_exception(error)) + repr(error))
            errors.append(error)
    said(f"{store!r} {store} {vars(store)}")
    return errors


@pytest.mark.parametrize("kind", parameters(lambda kind: not kind.relay))
def test_by_a_sound_store(
    kind: Kind, request: pytest.FixtureRequest, tmp_path: Path, said: Callable[[str], None]
) -> None:
    with ExitStack() as stack:
        use(opener(kind, request, tmp_path, stack)(), tmp_path, said)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        Answer(403, "SignatureDoesNotMatch"),
        Answer(400, "ExpiredToken"),
        Answer(429, "TooManyRequests"),
        Answer(400, "a code that nobody knows"),
        LoseReply(),
    ],
    ids=str,
)
def test_by_s3_that_fails(relayed: Relay, fault: Fault, tmp_path: Path, said: Callable[[str], None]) -> None:
    assert use(relayed(lambda method, before: fault).store, tmp_path, said)


@pytest.mark.slow
def test_by_s3_that_refuses_the_signature(
    rclone: S3Server, tmp_path: Path, said: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = "wrong-secret-not-to-be-shown"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    monkeypatch.setitem(SECRETS, "AWS_SECRET_ACCESS_KEY", wrong)
    errors = use(open_store(rclone.url("refused")), tmp_path, said)
    assert len(errors) == 9
    assert all(isinstance(error, UserError) and "access refused" in str(error) for error in errors)


@pytest.mark.parametrize(
    "error",
    [
        HfHubHTTPError("401 Client Error", response=hub_response(401)),
        HfHubHTTPError("429 Client Error", response=hub_response(429, {"Retry-After": "1"})),
        httpx2.ConnectError("refused"),
        RuntimeError("internal error of the transfer library"),
    ],
    ids=lambda error: str(error),
)
def test_by_the_hub_stand_in_that_fails(
    error: Exception, tmp_path: Path, said: Callable[[str], None]
) -> None:
    hub = StandInHub()
    hub.next_errors += [error] * 40
    assert use(HfStore(BUCKET, "run", api=hub, sleep=lambda _: None), tmp_path, said)
