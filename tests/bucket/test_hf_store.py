"""The Hugging Face store against a stand-in of the Hub's client: what its errors become."""

from collections.abc import Callable

import httpx2
import pytest
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from tests.support.hub import BUCKET, StandInHub, hub_response

from bucketrl.bucket.errors import NotFound, StoreError, UserError
from bucketrl.bucket.store import ObjectInfo
from bucketrl.bucket.stores.hf import HfStore


def failing(hub: StandInHub, *errors: Exception) -> tuple[HfStore, list[float]]:
    hub.next_errors += errors
    waits: list[float] = []
    return HfStore(BUCKET, "run", api=hub, sleep=waits.append), waits


def http_error(status: int, headers: dict[str, str] | None = None) -> HfHubHTTPError:
    return HfHubHTTPError(f"{status} from the stand-in", response=hub_response(status, headers))


def test_a_rate_limit_is_waited_out_as_long_as_the_hub_says() -> None:
    store, waits = failing(StandInHub(), http_error(429, {"Retry-After": "12"}))
    store.put("a", b"x")
    assert waits == [12.0]
    assert store.get("a") == b"x"


@pytest.mark.parametrize(
    "error",
    [
        http_error(503),
        httpx2.ReadTimeout("timed out"),
        httpx2.ConnectError("refused"),
        ConnectionError("Network error of the transfer library"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_may_pass_is_tried_again_and_then_reported(error: Exception) -> None:
    store, waits = failing(StandInHub(), error)
    store.put("a", b"x")
    assert len(waits) == 1
    store, waits = failing(StandInHub(), error, error, error)
    with pytest.raises(StoreError, match=type(error).__name__):
        store.put("a", b"x")
    assert len(waits) == 2


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (http_error(401), "HF_TOKEN"),
        (http_error(403), "HF_TOKEN"),
        (PermissionError("the transfer library's authentication error"), "HF_TOKEN"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
    ],
)
def test_what_the_user_must_change_is_said_at_once(error: Exception, says: str) -> None:
    store, waits = failing(StandInHub(), error)
    with pytest.raises(UserError, match=f"{BUCKET}/run.*{says}"):
        store.put("a", b"x")
    assert waits == []


@pytest.mark.parametrize(
    "call",
    [lambda store: store.put("a", b"x"), lambda store: store.get("a"), lambda store: list(store.list("a/"))],
)
def test_a_bucket_that_does_not_exist_is_named(call: Callable[[HfStore], object]) -> None:
    store = HfStore("owner/other", "", api=StandInHub())
    with pytest.raises(UserError, match=r"owner/other: does not exist"):
        call(store)


def test_an_error_without_a_rule_is_reported_once() -> None:
    store, waits = failing(StandInHub(), RuntimeError("internal error of the transfer library"))
    with pytest.raises(StoreError, match="RuntimeError"):
        store.put("a", b"x")
    assert waits == []


def test_an_object_that_vanishes_during_its_download_is_not_found() -> None:
    store, _ = failing(StandInHub(), FileNotFoundError("gone"))
    with pytest.raises(NotFound):
        store.get("a")


def test_the_prefix_of_one_run_hides_the_next() -> None:
    hub = StandInHub()
    one, ten = HfStore(BUCKET, "run-1", api=hub), HfStore(BUCKET, "run-10", api=hub)
    one.put("log/0", b"x")
    ten.put("log/0", b"longer")
    assert list(one.list("")) == [ObjectInfo("log/0", 1)]
    assert list(ten.list("log/")) == [ObjectInfo("log/0", 6)]


def test_deletions_that_the_hub_did_not_do_are_tried_again() -> None:
    class Stubborn(StandInHub):
        refusals = 1

        def batch_bucket_files(self, bucket_id: str, **operations: object) -> None:
            if "delete" in operations and self.refusals:
                self.refusals -= 1
                super().batch_bucket_files(bucket_id, delete=["run/not there, so the hub reports a failure"])
            super().batch_bucket_files(bucket_id, **operations)  # type: ignore[arg-type]

    store, waits = failing(Stubborn())
    store.put("a", b"x")
    store.delete(["a"])
    assert len(waits) == 1
    assert list(store.list("")) == []
