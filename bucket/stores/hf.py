"""Hugging Face buckets through the native API. Tier 0: it has no conditional write, so the proxy must
serialise commits. (Its S3 gateway honours `If-None-Match`: use `s3://` with that endpoint for tier 1.)
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

from bucketrl.bucket.errors import BucketrlError, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.retry import Transient, retrying
from bucketrl.bucket.store import ObjectInfo, Tier

T = TypeVar("T")

DELETE_BATCH = 1000
"""Operations per batch request."""


class HfStore:
    """Implements `Store` below `hf://buckets/<bucket_id>/<prefix>`. The token comes from HF_TOKEN or the
    machine's login. `api` is the Hub client, replaceable for tests."""

    tier = Tier.PUT

    def __init__(self, bucket_id: str, prefix: str, *, api: Any = None) -> None:
        self._bucket_id = bucket_id
        self._prefix = prefix + "/" if prefix else ""
        self.url = f"hf://buckets/{bucket_id}/{prefix}".rstrip("/")
        self._api = api if api is not None else HfApi(library_name="bucketrl")

    def get(self, key: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            self.get_file(key, path)
            return path.read_bytes()

    def put(self, key: str, data: bytes) -> None:
        self._batch(key, add=[(data, self._prefix + key)])

    def create(self, key: str, data: bytes) -> None:
        raise Unsupported(f"{self.url}: Hugging Face buckets have no conditional write; use the proxy")

    def put_file(self, key: str, path: Path) -> None:
        self._batch(key, add=[(str(path), self._prefix + key)])

    def get_file(self, key: str, path: Path) -> None:
        if path.exists():
            raise FileExistsError(path)
        name = self._prefix + key

        def call() -> None:
            self._api.download_bucket_files(self._bucket_id, [(name, str(path))], raise_on_missing_files=True)

        self._do(key, call)

    def size(self, key: str) -> int:
        found = self._do(
            key, lambda: list(self._api.get_bucket_paths_info(self._bucket_id, [self._prefix + key]))
        )
        if not found:
            raise NotFound(f"{self.url}: {key}")
        return int(found[0].size)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder = (self._prefix + prefix).rstrip("/")

        def call() -> list[ObjectInfo]:
            tree = self._api.list_bucket_tree(self._bucket_id, folder or None, recursive=True)
            return [
                ObjectInfo(item.path.removeprefix(self._prefix), int(item.size))
                for item in tree
                if getattr(item, "size", None) is not None
            ]

        try:
            found = self._do(prefix, call)
        except NotFound:
            return
        for info in sorted(found, key=lambda info: info.key):
            if info.key.startswith(prefix) and info.key > start_after:
                yield info

    def delete(self, keys: Iterable[str]) -> None:
        names = iter([self._prefix + key for key in keys])
        while batch := list(islice(names, DELETE_BATCH)):
            self._batch("", delete=batch)

    def _batch(self, key: str, **operations: Any) -> None:
        self._do(key, lambda: self._api.batch_bucket_files(self._bucket_id, **operations))

    def _do(self, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return call()
            except (HfHubHTTPError, EntryNotFoundError, httpx2.HTTPError, OSError) as error:
                raise self._translate(key, error) from error

        return retrying(attempt)

    def _translate(self, key: str, error: Exception) -> BucketrlError:
        where = f"{self.url}: {key}"
        response = getattr(error, "response", None)
        status = int(getattr(response, "status_code", 0) or 0)
        if isinstance(error, EntryNotFoundError) or (status == 404 and key):
            return NotFound(where)
        if status in (401, 403):
            return UserError(f"bucket {self.url}: access denied; set HF_TOKEN to a token that may write it")
        if status == 404:
            return UserError(f"bucket {self.url}: does not exist; create it first")
        if status == 429 or status >= 500 or isinstance(error, httpx2.TransportError):
            return Transient(f"{where}: {type(error).__name__}", _retry_after(response))
        return StoreError(f"{where}: {type(error).__name__}: HTTP {status}")


def _retry_after(response: Any) -> float | None:
    try:
        return max(0.0, float(response.headers["retry-after"]))
    except (AttributeError, KeyError, ValueError):
        return None
