"""S3 and compatible services through s3fs. Tier 1: `PutObject` with `If-None-Match: *`.

Retries are this module's business alone: s3fs and botocore are told not to, since a retry of theirs after
a lost reply looks like somebody else's object (`conditional.create` tells the difference).
"""

import errno
import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import s3fs
from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, ProfileNotFound

from bucketrl.bucket.errors import AlreadyExists, BucketrlError, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.retry import Transient, retrying
from bucketrl.bucket.store import ObjectInfo, Tier

T = TypeVar("T")

DELETE_BATCH = 1000
"""Keys per DeleteObjects call: the protocol's limit."""
DEFAULT_REGION = "us-east-1"
"""What compatible services expect when none is configured."""
_THROTTLED = {"SlowDown", "Throttling", "ThrottlingException", "RequestLimitExceeded", "TooManyRequests"}
_REFUSED = {"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}


class S3Store:
    """Implements `Store` below `s3://bucket/prefix`."""

    tier = Tier.CREATE

    def __init__(self, bucket: str, prefix: str, *, endpoint_url: str | None = None) -> None:
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self.url = f"s3://{bucket}/{prefix}"
        if endpoint_url:
            self.url += f"?endpoint_url={endpoint_url}"
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION") or DEFAULT_REGION
        self._fs = s3fs.S3FileSystem(
            endpoint_url=endpoint_url,
            client_kwargs={"region_name": region},
            config_kwargs={
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "connect_timeout": 10,
                "read_timeout": 60,
                # Compatible services do not all know the newer checksum trailers.
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._fs.retries = 1

    def get(self, key: str) -> bytes:
        return bytes(self._do(key, lambda: self._fs.cat_file(self._path(key))))

    def put(self, key: str, data: bytes) -> None:
        self._do(key, lambda: self._fs.call_s3("put_object", **self._name(key), Body=data))

    def create(self, key: str, data: bytes) -> None:
        if not data:
            raise ValueError(f"{key}: an object made by create must not be empty")

        def call() -> None:
            self._fs.call_s3("put_object", **self._name(key), Body=data, IfNoneMatch="*")

        self._do(key, call)

    def put_file(self, key: str, path: Path) -> None:
        self._do(key, lambda: self._fs.put_file(str(path), self._path(key)))

    def get_file(self, key: str, path: Path) -> None:
        if path.exists():
            raise FileExistsError(path)

        def call() -> None:
            path.unlink(missing_ok=True)
            self._fs.get_file(self._path(key), str(path))

        try:
            self._do(key, call)
        except BucketrlError:
            path.unlink(missing_ok=True)
            raise

    def size(self, key: str) -> int:
        return int(self._do(key, lambda: self._fs.call_s3("head_object", **self._name(key)))["ContentLength"])

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        request: dict[str, Any] = {"Bucket": self._bucket, "Prefix": self._prefix + prefix}
        if start_after:
            request["StartAfter"] = self._prefix + start_after
        while True:
            page = self._do(prefix, partial(self._fs.call_s3, "list_objects_v2", **request))
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
            request = {"Bucket": self._bucket, "Delete": {"Objects": batch, "Quiet": True}}
            reply = self._do("", partial(self._fs.call_s3, "delete_objects", **request))
            for failure in reply.get("Errors", ()):
                raise StoreError(f"{self.url}: cannot delete {failure['Key']}: {failure.get('Code')}")

    def _name(self, key: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + key}

    def _path(self, key: str) -> str:
        return f"{self._bucket}/{self._prefix}{key}"

    def _do(self, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            try:
                return call()
            except (OSError, BotoCoreError, ClientError, aiohttp.ClientError) as error:
                raise self._translate(key, error) from error

        return retrying(attempt)

    def _translate(self, key: str, error: BaseException) -> BucketrlError:
        """s3fs wraps the service's answer in an OSError; the answer itself says more."""
        answer = error if isinstance(error, ClientError) else error.__cause__
        where = f"{self.url}: {key}"
        if isinstance(answer, ClientError):
            return self._from_answer(where, answer)
        if isinstance(error, NoCredentialsError | ProfileNotFound) or isinstance(answer, NoCredentialsError):
            return UserError(
                f"bucket {self.url}: no credentials; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        if isinstance(error, FileNotFoundError):
            return NotFound(where)
        if isinstance(error, PermissionError):
            return UserError(
                f"bucket {self.url}: access denied; check the credentials and the bucket's policy"
            )
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return StoreError(f"{where}: {error.strerror}")
        return Transient(f"{where}: {type(error).__name__}: {error}")

    def _from_answer(self, where: str, answer: ClientError) -> BucketrlError:
        code = str(answer.response.get("Error", {}).get("Code", ""))
        metadata = answer.response.get("ResponseMetadata", {})
        status = int(metadata.get("HTTPStatusCode", 0))
        if code == "NoSuchBucket":
            return UserError(f"bucket {self.url}: does not exist; create it first")
        if code in _REFUSED or status in (401, 403):
            return UserError(f"bucket {self.url}: {code}; check the credentials and the bucket's policy")
        if code == "RequestTimeTooSkewed":
            return UserError(f"bucket {self.url}: this machine's clock is wrong; set it and try again")
        if code == "PreconditionFailed" or status == 412:
            return AlreadyExists(where)
        if code == "NotImplemented" or status == 501:
            return Unsupported(f"{where}: the service does not implement this request")
        if status == 404:
            return NotFound(where)
        if status in (409, 429) or status >= 500 or code in _THROTTLED or code == "RequestTimeout":
            return Transient(f"{where}: {code or status}", _retry_after(metadata.get("HTTPHeaders", {})))
        return StoreError(f"{where}: {code} (HTTP {status})")


def _retry_after(headers: dict[str, str]) -> float | None:
    try:
        return max(0.0, float(headers["retry-after"]))
    except (KeyError, ValueError):
        return None
