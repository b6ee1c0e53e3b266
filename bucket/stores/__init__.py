"""`open_store`: a bucket URL becomes a store. Backends import their libraries only when they are used."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qs

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.store import Store

_BUCKET_NAME = re.compile(r"[A-Za-z0-9._-]+")
_HF_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*")
_USER_PART_IS_A_PLACE = ("abfs", "abfss")
"""Azure writes `container@account`."""


def open_store(url: str) -> Store:
    """The store behind a bucket URL; each URL holds one run.

    A path or `file://` (tier 1), `s3://bucket/prefix[?endpoint_url=http://host:port]` (tier 1; without the
    option AWS_ENDPOINT_URL_S3 and AWS_ENDPOINT_URL count), `hf://buckets/owner/name[/prefix]` (tier 0),
    `memory://name` (tier 1, this process only), and whatever else fsspec opens (tier 0). Credentials come
    from the environment alone. Raises UserError for a URL that cannot be a bucket.
    """
    if not url.strip():
        raise UserError("bucket URL: is empty; give a folder, s3://bucket/prefix or hf://buckets/owner/name")
    scheme, separator, rest = url.partition("://")
    if not separator:
        return _local(url)
    if _carries_credentials(scheme, rest):
        raise UserError(
            f"bucket URL {scheme}://…: carries credentials; take them out of the URL and put them into the "
            "environment"
        )
    openers: dict[str, Callable[[str], Store]] = {"file": _local, "memory": _memory, "s3": _s3, "hf": _hf}
    return openers[scheme](rest) if scheme in openers else _generic(scheme, rest)


def _carries_credentials(scheme: str, rest: str) -> bool:
    if scheme in ("file", "memory"):
        return False
    user, separator, _ = re.split(r"[/?#]", rest, maxsplit=1)[0].rpartition("@")
    return bool(separator) and not (scheme in _USER_PART_IS_A_PLACE and ":" not in user)


def _local(path: str) -> Store:
    from bucketrl.bucket.stores.local import LocalStore

    return LocalStore(Path(path).expanduser().absolute())


def _memory(name: str) -> Store:
    from bucketrl.bucket.stores.memory import MemoryStore

    return MemoryStore.named(name)


def _s3(rest: str) -> Store:
    location, _, query = rest.partition("?")
    bucket, _, path = location.partition("/")
    options = parse_qs(query, keep_blank_values=True)
    unknown = sorted(set(options) - {"endpoint_url"})
    if unknown:
        raise UserError(f"bucket URL s3://{location}: unknown option {unknown[0]!r}; known: endpoint_url")
    if not _BUCKET_NAME.fullmatch(bucket):
        raise UserError(f"bucket URL s3://{location}: {bucket!r} is no bucket name; want s3://bucket/prefix")
    prefix = _prefix(f"s3://{location}", path)
    endpoint = _endpoint(options["endpoint_url"][-1] if options else None)
    try:
        from bucketrl.bucket.stores.s3 import S3Store
    except ImportError as error:
        _missing("s3", error)
    return S3Store(bucket, prefix, endpoint_url=endpoint)


def _endpoint(option: str | None) -> str | None:
    sources = {
        "endpoint_url": option,
        "AWS_ENDPOINT_URL_S3": os.environ.get("AWS_ENDPOINT_URL_S3"),
        "AWS_ENDPOINT_URL": os.environ.get("AWS_ENDPOINT_URL"),
    }
    for name, value in sources.items():
        if value is None or (value == "" and name != "endpoint_url"):
            continue
        scheme, _, rest = value.partition("://")
        if "@" in value:
            raise UserError(f"{name}: carries credentials; put them into the environment, not into a URL")
        if scheme not in ("http", "https") or not rest:
            raise UserError(f"{name}: {value!r} is no endpoint; want http://host:port or https://host")
        return value
    return None


def _hf(path: str) -> Store:
    kind, _, rest = path.partition("/")
    owner, _, rest = rest.partition("/")
    name, _, prefix = rest.partition("/")
    if kind != "buckets" or not _HF_NAME.fullmatch(owner) or not _HF_NAME.fullmatch(name):
        raise UserError(f"bucket URL hf://{path}: want hf://buckets/<owner>/<name>[/<prefix>]")
    prefix = _prefix(f"hf://{path}", prefix)
    try:
        from bucketrl.bucket.stores.hf import HfStore
    except ImportError as error:
        _missing("hf", error)
    return HfStore(f"{owner}/{name}", prefix)


def _generic(scheme: str, rest: str) -> Store:
    if "::" in scheme or "?" in rest:
        # Both may carry secrets, so the URL is not repeated.
        raise UserError(
            f"bucket URL {scheme.partition('::')[0]}://…: chained URLs and options are not supported here; "
            "configure fsspec through the environment"
        )
    from bucketrl.bucket.stores.generic import GenericStore

    return GenericStore(f"{scheme}://{rest}")


def _prefix(url: str, path: str) -> str:
    """Without the outer slashes. Raises UserError if some service or tool would read it as another one."""
    prefix = path.strip("/")
    if prefix and any(part in ("", ".", "..") for part in prefix.split("/")):
        raise UserError(f"bucket URL {url}: the prefix has an empty, '.' or '..' part; remove it")
    return prefix


def _missing(extra: str, error: ImportError) -> NoReturn:
    raise UserError(
        f"{extra}:// needs the package {error.name}, which is not installed: pip install 'bucketrl[{extra}]'"
    ) from None
