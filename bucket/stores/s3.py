"""S3 and compatible services through s3fs. Tier 1: `PutObject` with `If-None-Match: *`.

Retries are this module's business: s3fs and botocore are told not to, since neither honours `Retry-After`
and both would multiply. (aiohttp still repeats a request once if a kept connection turns out to be closed.)
`s3_errors.py` says what each failure means.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

import s3fs

from bucketrl.bucket.counting import RequestKind, Requests
from bucketrl.bucket.errors import BucketrlError, NotFound, StoreError
from bucketrl.bucket.retry import retrying
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores.download import new_file
from bucketrl.bucket.stores.s3_errors import FAILURES, from_code, translate

logger = logging.getLogger(__name__)
# At DEBUG it logs whole requests and answers, the session token included.
logging.getLogger("botocore").setLevel(logging.WARNING)

T = TypeVar("T")

DELETE_BATCH = 1000
"""Keys per DeleteObjects call: the service's limit."""
PART_BYTES = 8 << 20
"""Of a multipart upload; files of more than two parts are sent so."""
MAX_PARTS = 10_000
UPLOAD_THREADS = 4
READ_THREADS = 8
"""Of one `get_files`. Connections of one client: 10."""
UPLOAD_ATTEMPTS = 3
"""Multipart uploads of one file, if they vanish before they are completed."""
CONNECT_TIMEOUT_S = 10
READ_TIMEOUT_S = 60
_KINDS: dict[str, RequestKind] = {"put_object": "put", "head_object": "info"}
"""Of operations sent by `_call`; all others belong to a multipart upload."""


class S3Store:
    """Implements `Store` below `s3://bucket/prefix`. Credentials and region are found as botocore finds them.

    A writer that is killed during a multipart upload leaves parts that no reader sees; `sweep` removes them.
    """

    tier = Tier.CREATE

    def __init__(
        self,
        bucket: str,
        prefix: str,
        *,
        endpoint_url: str | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self.requests = Requests()
        self._sleep = sleep
        self.url = f"s3://{bucket}/{prefix}"
        if endpoint_url:
            self.url += f"?endpoint_url={endpoint_url}"
        self._fs = s3fs.S3FileSystem(
            endpoint_url=endpoint_url,
            config_kwargs={
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "connect_timeout": CONNECT_TIMEOUT_S,
                "read_timeout": READ_TIMEOUT_S,
                # Compatible services do not all know the newer checksum trailers.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._fs.retries = 1

    def get(self, key: str) -> bytes:
        # One stream: s3fs otherwise asks for the size first, and reads ranges that may be of two objects.
        data = bytes(self._do("get", key, lambda: self._fs.cat_file(self._path(key), max_concurrency=1)))
        self.requests.moved(down=len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._call("put_object", key, Body=data)
        self.requests.moved(up=len(data))

    def create(self, key: str, data: bytes) -> None:
        if not data:
            raise ValueError(f"{key}: an object made by create must not be empty")
        self._call("put_object", key, kind="create", Body=data, IfNoneMatch="*")
        self.requests.moved(up=len(data))

    def put_file(self, key: str, path: Path) -> None:
        size = path.stat().st_size
        if size <= 2 * PART_BYTES:
            self.put(key, path.read_bytes())
            return
        for _ in range(UPLOAD_ATTEMPTS):
            if self._put_parts(key, path, size):
                self.requests.moved(up=size)
                return
        raise StoreError(f"{self.url}: {key}: its multipart upload vanishes again and again")

    def get_file(self, key: str, path: Path) -> None:
        with new_file(path):
            self._do("get", key, lambda: self._fs.get_file(self._path(key), str(path), max_concurrency=1))
            self.requests.moved(down=path.stat().st_size)

    def get_files(self, files: Sequence[tuple[str, Path]]) -> None:
        """`get_file` of each, for the time of few. Raises NotFound, with nothing written, if one is missing."""
        left: SimpleQueue[tuple[str, Path]] = SimpleQueue()
        for file in files:
            left.put(file)
        written: list[Path] = []
        failures: list[Exception] = []

        def read() -> None:
            with suppress(Empty):
                while True:
                    key, path = left.get_nowait()
                    try:
                        self.get_file(key, path)
                    except Exception as error:  # noqa: BLE001 - raised below
                        failures.append(error)
                    else:
                        written.append(path)

        # Daemons: a process that has to go must not wait for a store that hangs, as it would for a pool's threads.
        threads = [Thread(target=read, daemon=True) for _ in range(min(READ_THREADS, len(files)))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            for path in written:
                path.unlink()
            raise next((error for error in failures if not isinstance(error, NotFound)), failures[0])

    def size(self, key: str) -> int:
        return int(self._call("head_object", key)["ContentLength"])

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        while True:
            page = self._do("list", prefix, partial(self._fs.call_s3, "list_objects_v2", **request))
            for item in page.get("Contents", ()):
                key = item["Key"].removeprefix(self._prefix)
                if key > start_after:  # some services ignore StartAfter
                    yield ObjectInfo(key, int(item["Size"]))
            if not page.get("IsTruncated"):
                return
            request = request | {"ContinuationToken": page["NextContinuationToken"]}

    def delete(self, keys: Iterable[str]) -> None:
        names = iter([{"Key": self._prefix + key} for key in keys])
        while batch := list(islice(names, DELETE_BATCH)):
            self._do("delete", "delete", partial(self._delete, batch))

    def sweep(self, older_than_s: float) -> int:
        """Multipart uploads, which a lifecycle rule of the bucket (AbortIncompleteMultipartUpload) may remove
        as well. Services that cannot list them are left alone."""
        swept = 0
        try:
            for key, upload in self._unfinished(older_than_s):
                self._call("abort_multipart_upload", key, UploadId=upload)
                swept += 1
        except BucketrlError as error:
            logger.warning("unfinished uploads cannot be removed: %s", error)
        return swept

    def _unfinished(self, older_than_s: float) -> Iterator[tuple[str, str]]:
        """Key and id of uploads begun so long ago, by the service's clock."""
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix}
        while True:
            page = self._do("list", "", partial(self._fs.call_s3, "list_multipart_uploads", **request))
            now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
            for upload in page.get("Uploads", ()):
                if (now - upload["Initiated"]).total_seconds() > older_than_s:
                    yield upload["Key"].removeprefix(self._prefix), upload["UploadId"]
            if not page.get("IsTruncated"):
                return
            request |= {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def _delete(self, batch: Sequence[dict[str, str]]) -> None:
        reply = self._fs.call_s3(
            "delete_objects", Bucket=self._bucket, Delete={"Objects": batch, "Quiet": True}
        )
        for failure in reply.get("Errors", ()):
            raise from_code(self.url, failure.get("Key", ""), failure.get("Code", ""))

    def _put_parts(self, key: str, path: Path, size: int) -> bool:
        """False if the upload is gone: completed by an attempt whose reply was lost, or aborted by somebody
        (`sweep`). The object does not tell which, since an older one may have its size."""
        upload = self._call("create_multipart_upload", key)["UploadId"]
        try:
            parts = self._upload_parts(key, upload, path, size)
            self._call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts})
        except NotFound:
            return False
        except BucketrlError:
            self._abort(key, upload)
            raise
        return True

    def _upload_parts(self, key: str, upload: str, path: Path, size: int) -> Sequence[dict[str, Any]]:
        part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))

        def send(number: int) -> dict[str, Any]:
            with path.open("rb") as file:
                file.seek((number - 1) * part_bytes)
                data = file.read(part_bytes)
            reply = self._call("upload_part", key, UploadId=upload, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": reply["ETag"]}

        with ThreadPoolExecutor(UPLOAD_THREADS) as pool:
            return list(pool.map(send, range(1, -(-size // part_bytes) + 1)))

    def _abort(self, key: str, upload: str) -> None:
        try:
            self._call("abort_multipart_upload", key, UploadId=upload)
        except BucketrlError:
            pass  # the upload's own failure is what matters

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._prefix}{key}"

    def _call(self, operation: str, key: str, *, kind: RequestKind | None = None, **arguments: Any) -> Any:
        request = {"Bucket": self._bucket, "Key": self._prefix + key} | arguments
        kind = kind or _KINDS.get(operation, "part")
        return self._do(kind, key, partial(self._fs.call_s3, operation, **request))

    def _do(self, kind: RequestKind, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            self.requests.sent(kind)
            try:
                return call()
            except FAILURES as error:
                raise translate(self.url, key, error) from error

        return retrying(attempt, sleep=self._sleep)
