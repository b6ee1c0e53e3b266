"""What a failed S3 request means for the caller. Pure.

s3fs wraps the service's answer in an OSError whose `errno` says little (412 is EINVAL, 409 is EIO); the
answer itself, botocore's ClientError, is its cause. Codes:
https://docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html
"""

import asyncio
from http.client import IncompleteRead

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    CredentialRetrievalError,
    HTTPClientError,
    IncompleteReadError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
from botocore.exceptions import ConnectionError as BotoConnectionError
from botocore.parsers import ResponseParserError

from bucketrl.bucket.errors import AlreadyExists, BucketrlError, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.retry import Transient, retry_after_s

_INTERRUPTED = (
    HTTPClientError,
    BotoConnectionError,
    IncompleteReadError,
    ResponseParserError,  # half an answer, or a gateway's HTML
    aiohttp.ClientError,
    asyncio.TimeoutError,
    ConnectionError,
    TimeoutError,
    IncompleteRead,
)
FAILURES = (OSError, BotoCoreError, ClientError, *_INTERRUPTED)
"""What a request may raise."""

_NO_CREDENTIALS = (
    NoCredentialsError,
    PartialCredentialsError,
    CredentialRetrievalError,
    ProfileNotFound,
    TokenRetrievalError,
    UnauthorizedSSOTokenError,
)
_REPEATABLE = {
    "ConditionalRequestConflict",
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
}
_REFUSED = {
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
}
_ABSENT = {"NoSuchKey", "NoSuchUpload"}


def translate(url: str, key: str, error: BaseException) -> BucketrlError:
    """The error to raise for `error`, one of FAILURES, met with `key` in the store `url`."""
    answer = error if isinstance(error, ClientError) else error.__cause__
    if isinstance(answer, ClientError):
        metadata = answer.response.get("ResponseMetadata", {})
        return from_code(
            url,
            key,
            str(answer.response.get("Error", {}).get("Code", "")),
            int(metadata.get("HTTPStatusCode", 0)),
            retry_after_s(metadata.get("HTTPHeaders", {}).get("retry-after")),
        )
    if isinstance(error, _NO_CREDENTIALS):
        return UserError(
            f"bucket {url}: no usable credentials ({type(error).__name__}); set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY"
        )
    message = f"{url}: {key}: {type(error).__name__}: {error}"
    return Transient(message) if isinstance(error, _INTERRUPTED) else StoreError(message)


def from_code(
    url: str, key: str, code: str, status: int = 0, retry_after: float | None = None
) -> BucketrlError:
    """The same for a service's error code. `status`: of the HTTP answer, 0 if the code came within a 200."""
    where = f"{url}: {key}"
    name = code or f"HTTP {status}"
    if code == "NoSuchBucket":
        return UserError(f"bucket {url}: does not exist; create it first")
    if code == "RequestTimeTooSkewed":
        return UserError(f"bucket {url}: this machine's clock is wrong ({code}); set it")
    if code in _REFUSED or status in (401, 403):
        return UserError(f"bucket {url}: access refused ({name}); check the credentials and their rights")
    if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
        return UserError(f"bucket {url}: lies in another region ({code}); set AWS_DEFAULT_REGION to its own")
    if code == "PreconditionFailed" or status == 412:
        return AlreadyExists(where)
    if code == "NotImplemented" or status == 501:
        return Unsupported(f"{where}: the service does not implement this request")
    if code in _ABSENT or status == 404:
        return NotFound(where)
    if code in _REPEATABLE or status in (408, 409, 429) or status >= 500:
        return Transient(f"{where}: {name}", retry_after)
    return StoreError(f"{where}: {name}")
