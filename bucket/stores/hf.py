"""Hugging Face buckets through the native API. Tier 0: it has no conditional write, so the proxy must
serialise commits. (Its S3 gateway honours `If-None-Match`: use `s3://` with that endpoint for tier 1.)

Counted is what the Hub counts as API requests, as huggingface_hub 2.4.0 and hf_xet 1.8.0 make them: a token and
a batch for a put; a look at the paths and a token for a download of any number of files (and a HEAD to the
resolver, which has a limit of its own, five times as high); a page of 1,000 files and folders for a listing.
What the Hub client repeats by itself is not seen here.
"""

import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    BucketBatchError,
    BucketNotFoundError,
    EntryNotFoundError,
    HfHubHTTPError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import disable_progress_bars

from bucketrl.bucket.counting import RequestKind, Requests
from bucketrl.bucket.errors import BucketrlError, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.retry import Transient, retry_after_s, retrying
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores.download import new_file

T = TypeVar("T")

DELETE_BATCH = 1000
"""Operations per batch request."""
PAGE = 1000
"""Files and folders per page of a listing."""
ATTEMPTS = 3
"""Few: the Hub client has retried each request already."""
_FAILURES = (
    HfHubHTTPError,
    EntryNotFoundError,
    httpx2.HTTPError,
    OSError,  # hf_xet: ConnectionError, PermissionError, FileNotFoundError
    RuntimeError,  # hf_xet: whatever else goes wrong in a transfer
)


class HfStore:
    """Implements `Store` below `hf://buckets/<bucket_id>/<prefix>`. The token comes from HF_TOKEN or the
    machine's login. `api` is the Hub client (`HfApi`), replaceable for tests."""

    tier = Tier.PUT

    def __init__(
        self,
        bucket_id: str,
        prefix: str,
        *,
        api: Any = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket_id = bucket_id
        self._prefix = prefix + "/" if prefix else ""
        self._sleep = sleep
        self.requests = Requests()
        self.url = f"hf://buckets/{bucket_id}/{prefix}".rstrip("/")
        if api is None:
            disable_progress_bars()  # one per object would drown a role's log
            api = HfApi(library_name="bucketrl")
        self._api = api

    def get(self, key: str) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "object"
            self.get_file(key, path)
            return path.read_bytes()

    def put(self, key: str, data: bytes) -> None:
        self._add(key, data)
        self.requests.moved(up=len(data))

    def create(self, key: str, data: bytes) -> None:
        raise Unsupported(f"{self.url}: Hugging Face buckets have no conditional write; use the proxy")

    def put_file(self, key: str, path: Path) -> None:
        size = path.stat().st_size  # a missing local file is the caller's mistake, not a missing object
        self._add(key, str(path))
        self.requests.moved(up=size)

    def get_file(self, key: str, path: Path) -> None:
        self.get_files([(key, path)])

    def get_files(self, files: Sequence[tuple[str, Path]]) -> None:
        """`get_file` of each, for the requests of one. Raises NotFound, with nothing written, if one is missing."""
        wanted = [(self._prefix + key, str(path)) for key, path in files]
        where = ", ".join(key for key, _ in files)

        def download() -> None:
            self._api.download_bucket_files(self._bucket_id, wanted, raise_on_missing_files=True)
            self.requests.sent("token")

        with ExitStack() as kept:
            for _, path in files:
                kept.enter_context(new_file(path))
            self._do("get", where, download)
        self.requests.moved(down=sum(path.stat().st_size for _, path in files))

    def size(self, key: str) -> int:
        name = self._prefix + key
        found = self._do("info", key, lambda: list(self._api.get_bucket_paths_info(self._bucket_id, [name])))
        if not found:
            raise NotFound(f"{self.url}: {key}")
        return int(found[0].size)

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder = (self._prefix + prefix).rstrip("/") or None

        def call() -> list[ObjectInfo]:
            tree = list(self._api.list_bucket_tree(self._bucket_id, folder, recursive=True))
            self.requests.sent("list", max(0, len(tree) - 1) // PAGE)  # beyond the first page
            return [
                ObjectInfo(item.path.removeprefix(self._prefix), int(item.size))
                for item in tree
                if item.type == "file" and item.path.startswith(self._prefix + prefix)
            ]

        try:
            found = self._do("list", prefix, call)
        except NotFound:
            return
        for info in sorted(found, key=lambda info: info.key):
            if info.key > start_after:
                yield info

    def delete(self, keys: Iterable[str]) -> None:
        names = iter([self._prefix + key for key in keys])
        while batch := list(islice(names, DELETE_BATCH)):
            self._do("delete", "delete", partial(self._delete, batch))

    def sweep(self, older_than_s: float) -> int:
        return 0  # the service drops what no batch has named

    def _delete(self, batch: Sequence[str]) -> None:
        try:
            self._api.batch_bucket_files(self._bucket_id, delete=batch)
        except BucketBatchError as error:
            # An operation that failed because its object is gone has done its work.
            self.requests.sent("info")
            left = list(self._api.get_bucket_paths_info(self._bucket_id, batch))
            if left:
                raise Transient(f"{self.url}: {left[0].path} is still there after its deletion") from error

    def _add(self, key: str, source: bytes | str) -> None:
        def add() -> None:
            self.requests.sent("token")
            self._api.batch_bucket_files(self._bucket_id, add=[(source, self._prefix + key)])

        self._do("put", key, add)

    def _do(self, kind: RequestKind, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            self.requests.sent(kind)
            try:
                return call()
            except _FAILURES as error:
                raise self._translate(key, error) from error

        return retrying(attempt, attempts=ATTEMPTS, base_s=1.0, sleep=self._sleep)

    def _translate(self, key: str, error: Exception) -> BucketrlError:
        where = f"{self.url}: {key}"
        response = getattr(error, "response", None)
        status = int(getattr(response, "status_code", 0) or 0)
        if isinstance(error, OfflineModeIsEnabled):
            return UserError(
                f"bucket {self.url}: HF_HUB_OFFLINE is set; unset it to use a Hugging Face bucket"
            )
        if isinstance(error, BucketNotFoundError | RepositoryNotFoundError):
            return UserError(
                f"bucket {self.url}: does not exist, or HF_TOKEN may not see it; create it or set the token"
            )
        if isinstance(error, PermissionError | LocalTokenNotFoundError) or status in (401, 403):
            return UserError(f"bucket {self.url}: access refused; set HF_TOKEN to a token that may write it")
        if isinstance(error, EntryNotFoundError | FileNotFoundError) or status == 404:
            return NotFound(where)
        message = f"{where}: {type(error).__name__}" + (f" (HTTP {status})" if status else "")
        interrupted = isinstance(error, httpx2.TransportError | ConnectionError | TimeoutError)
        if interrupted or isinstance(error, BucketBatchError) or status in (408, 429) or status >= 500:
            header = response.headers.get("retry-after") if response is not None else None
            return Transient(message, retry_after_s(header))
        return StoreError(message)
