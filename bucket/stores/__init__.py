"""`open_store`: a bucket URL becomes a store. Backends import their libraries only when they are used."""

from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import parse_qs, urlsplit

from bucketrl.bucket.errors import UserError
from bucketrl.bucket.store import Store


def open_store(url: str) -> Store:
    """The store behind a bucket URL; each URL holds one run.

    A path or `file://` (tier 1), `s3://bucket/prefix[?endpoint_url=http://host:port]` (tier 1; the endpoint
    may also come from AWS_ENDPOINT_URL), `hf://buckets/owner/name[/prefix]` (tier 0), `memory://name` (tier
    1, this process only), and whatever else fsspec opens (tier 0). Credentials come from the environment.
    Raises UserError for a URL that cannot be a bucket.
    """
    if not url.strip():
        raise UserError("bucket URL: is empty; give a folder, s3://bucket/prefix or hf://buckets/owner/name")
    parts = urlsplit(url)
    if "@" in parts.netloc:
        raise UserError(
            f"bucket URL {parts.scheme}://…: carries credentials; take them out of the URL and put them into "
            "the environment"
        )
    openers: dict[str, Callable[[], Store]] = {
        "": lambda: _local(Path(url)),
        "file": lambda: _local(Path(parts.netloc + parts.path)),
        "memory": lambda: _memory(parts.netloc + parts.path),
        "s3": lambda: _s3(parts.netloc, parts.path, parse_qs(parts.query)),
        "hf": lambda: _hf(parts.netloc + parts.path),
    }
    return openers.get(parts.scheme, lambda: _generic(url))()


def _local(path: Path) -> Store:
    from bucketrl.bucket.stores.local import LocalStore

    return LocalStore(path.expanduser().absolute())


def _memory(name: str) -> Store:
    from bucketrl.bucket.stores.memory import MemoryStore

    return MemoryStore.named(name)


def _s3(bucket: str, path: str, query: dict[str, list[str]]) -> Store:
    unknown = sorted(set(query) - {"endpoint_url"})
    if unknown:
        raise UserError(f"bucket URL s3://{bucket}{path}: unknown option {unknown[0]!r}; known: endpoint_url")
    if not bucket:
        raise UserError(f"bucket URL s3://{path}: names no bucket")
    try:
        from bucketrl.bucket.stores.s3 import S3Store
    except ImportError as error:
        _missing("s3", error)
    return S3Store(bucket, path.strip("/"), endpoint_url=query.get("endpoint_url", [None])[0])


def _hf(path: str) -> Store:
    kind, _, rest = path.partition("/")
    owner, _, rest = rest.partition("/")
    name, _, prefix = rest.partition("/")
    if kind != "buckets" or not owner or not name:
        raise UserError(f"bucket URL hf://{path}: want hf://buckets/<owner>/<name>[/<prefix>]")
    try:
        from bucketrl.bucket.stores.hf import HfStore
    except ImportError as error:
        _missing("hf", error)
    return HfStore(f"{owner}/{name}", prefix.strip("/"))


def _generic(url: str) -> Store:
    from bucketrl.bucket.stores.generic import GenericStore

    return GenericStore(url)


def _missing(extra: str, error: ImportError) -> NoReturn:
    raise UserError(
        f"{extra}:// needs the package {error.name}, which is not installed: pip install 'bucketrl[{extra}]'"
    ) from None
