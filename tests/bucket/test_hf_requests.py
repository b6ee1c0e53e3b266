"""What `HfStore` says that an operation costs is what the real Hub client sends.

The client's requests go to a stand-in of the Hub's bucket endpoints; of the transfer library only its one request
to the Hub, for a token, is imitated (hf_xet 1.8.0 sends one for each upload and each group of downloads).
"""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from huggingface_hub import HfApi
from huggingface_hub.utils import set_client_factory
from huggingface_hub.utils._http import default_client_factory

from bucketrl.bucket.errors import NotFound
from bucketrl.bucket.stores.hf import PAGE, HfStore

HUB = "http://hub.invalid"
OBJECT = b"content"


class Hub:
    """`names` exist. Counts requests to the API, and to the resolver, which has a limit of its own."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self.api = 0
        self.resolver = 0

    def answer(self, request: httpx2.Request) -> httpx2.Response:
        path = request.url.path
        self.api += path.startswith("/api/buckets/")  # not what the client asks once about itself
        self.resolver += "/resolve/" in path
        if path.endswith("/paths-info"):
            wanted = json.loads(request.content)["paths"]
            return httpx2.Response(200, json=[self._file(name) for name in wanted if name in self.names])
        if path.endswith("/batch"):
            return httpx2.Response(200, json={})
        if "/tree" in path:
            return self._page(request)
        headers = {
            "X-Xet-Hash": "0" * 64,
            "X-Xet-Refresh-Route": f"{HUB}/api/buckets/owner/name/xet-read-token",
            "X-Linked-Size": str(len(OBJECT)),
        }
        return httpx2.Response(200, headers=headers)

    def _page(self, request: httpx2.Request) -> httpx2.Response:
        names, start = sorted(self.names), int(request.url.params.get("cursor", "0"))
        more = start + PAGE < len(names)
        headers = (
            {"Link": f'<{HUB}/api/buckets/owner/name/tree?cursor={start + PAGE}>; rel="next"'} if more else {}
        )
        return httpx2.Response(
            200, json=[self._file(n) for n in names[start : start + PAGE]], headers=headers
        )

    @staticmethod
    def _file(name: str) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(OBJECT), "xetHash": "0" * 64}


class Transfers:
    """`hf_xet.XetSession`, as far as the client uses it: asks for a token when something is to be moved."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    @contextmanager
    def new_upload_commit(self, **_: Any) -> Iterator[Any]:
        self._hub.api += 1
        done = SimpleNamespace(xet_info=SimpleNamespace(hash="0" * 64, file_size=len(OBJECT)))
        handle = SimpleNamespace(result=lambda: done)
        yield SimpleNamespace(
            start_upload_bytes=lambda *_, **__: handle, start_upload_file=lambda *_, **__: handle
        )

    @contextmanager
    def new_file_download_group(self, **_: Any) -> Iterator[Any]:
        self._hub.api += 1
        yield SimpleNamespace(start_download_file=lambda _, path: Path(path).write_bytes(OBJECT))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[HfStore, Hub]]]:
    def open_with(*names: str) -> tuple[HfStore, Hub]:
        hub = Hub(*names)
        set_client_factory(lambda: httpx2.Client(transport=httpx2.MockTransport(hub.answer)))
        monkeypatch.setattr("huggingface_hub.utils._xet.get_xet_session", lambda: Transfers(hub))
        return HfStore("owner/name", "", api=HfApi(endpoint=HUB, token="hf_none")), hub

    yield open_with
    set_client_factory(default_client_factory)


def get_missing(store: HfStore) -> None:
    with pytest.raises(NotFound):
        store.get("missing")


OPERATIONS: dict[str, tuple[Callable[[HfStore, Path], object], int]] = {
    "get": (lambda store, _: store.get("a"), 2),
    "get of two files together": (
        lambda store, folder: store.get_files([("a", folder / "a"), ("b", folder / "b")]),
        2,
    ),
    "get of nothing": (lambda store, _: get_missing(store), 1),
    "put": (lambda store, _: store.put("c", OBJECT), 2),
    "size": (lambda store, _: store.size("a"), 1),
    "list": (lambda store, _: list(store.list("")), 1),
    "delete": (lambda store, _: store.delete(["a"]), 1),
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_costs_what_is_counted(
    name: str, opened: Callable[..., tuple[HfStore, Hub]], tmp_path: Path
) -> None:
    store, hub = opened("a", "b")
    operate, cost = OPERATIONS[name]
    operate(store, tmp_path)
    assert hub.api == cost
    assert store.requests.snapshot().total == cost
    assert hub.resolver == (1 if name.startswith("get") and "nothing" not in name else 0)


def test_each_page_of_a_listing_is_a_request(opened: Callable[..., tuple[HfStore, Hub]]) -> None:
    store, hub = opened(*(f"x{number}" for number in range(2 * PAGE + 1)))
    assert len(list(store.list(""))) == 2 * PAGE + 1
    assert hub.api == store.requests.snapshot().total == 3
