"""Anything that fsspec opens. Tier 0: fsspec's own create-if-absent is not exclusive on most file systems.

A put is as whole as the backend's: that of an object store is, that of a remote file system (sftp, smb,
ftp) is not, and there a reader may meet half an object and quarantine it.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import fsspec

from bucketrl.bucket.counting import RequestKind, Requests
from bucketrl.bucket.errors import NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.retry import Transient, retrying
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores.download import new_file

logger = logging.getLogger(__name__)

T = TypeVar("T")

PUTS_WHOLE = frozenset({"gs", "gcs", "az", "abfs", "abfss", "oci", "oss", "tos"})
"""fsspec protocols of object stores, whose put is whole."""


class GenericStore:
    """Implements `Store` on an fsspec URL without credentials. `options` go to the file system. `requests` counts
    calls of fsspec: what a backend makes of one is its own business."""

    tier = Tier.PUT

    def __init__(self, url: str, *, sleep: Callable[[float], None] = time.sleep, **options: Any) -> None:
        self.url = url.rstrip("/")
        self._sleep = sleep
        self.requests = Requests()
        try:
            self._fs, root = fsspec.core.url_to_fs(self.url, skip_instance_cache=True, **options)
        except (ValueError, ImportError) as error:
            raise UserError(f"bucket URL {self.url}: {error}") from None
        self._root = root.rstrip("/")
        scheme = self.url.partition("://")[0]
        if scheme not in PUTS_WHOLE:
            logger.warning("%s: %s may show half-written objects; an object store is safer", self.url, scheme)

    def get(self, key: str) -> bytes:
        data = bytes(self._do("get", key, lambda: self._fs.cat_file(self._path(key))))
        self.requests.moved(down=len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._make_parent(key)
        self._do("put", key, lambda: self._fs.pipe_file(self._path(key), data))
        self.requests.moved(up=len(data))

    def create(self, key: str, data: bytes) -> None:
        raise Unsupported(f"{self.url}: no exclusive create here; the proxy must serialise commits")

    def put_file(self, key: str, path: Path) -> None:
        size = path.stat().st_size  # a missing local file is the caller's mistake, not a missing object
        self._make_parent(key)
        self._do("put", key, lambda: self._fs.put_file(str(path), self._path(key)))
        self.requests.moved(up=size)

    def get_file(self, key: str, path: Path) -> None:
        self.size(key)  # some backends make a local folder or an empty file of what is no object
        with new_file(path):
            self._do("get", key, lambda: self._fs.get_file(self._path(key), str(path)))
            self.requests.moved(down=path.stat().st_size)

    def size(self, key: str) -> int:
        self._fs.invalidate_cache()
        info = self._do("info", key, lambda: self._fs.info(self._path(key)))
        if info["type"] != "file":
            raise NotFound(f"{self.url}: {key}")
        return int(info["size"])

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self._fs.invalidate_cache()
        folder = self._path(prefix).rstrip("/")
        try:
            found = self._do("list", prefix, lambda: self._fs.find(folder, detail=True))
        except NotFound:
            return
        sizes = {name[len(self._root) :].lstrip("/"): int(info["size"]) for name, info in found.items()}
        for key in sorted(sizes):
            if key.startswith(prefix) and key > start_after:
                yield ObjectInfo(key, sizes[key])

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._do("delete", key, partial(self._fs.rm_file, self._path(key)))
            except NotFound:
                continue

    def sweep(self, older_than_s: float) -> int:
        return 0  # fsspec has no way to ask

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _make_parent(self, key: str) -> None:
        self._do("info", key, lambda: self._fs.makedirs(self._path(key).rpartition("/")[0], exist_ok=True))

    def _do(self, kind: RequestKind, key: str, call: Callable[[], T]) -> T:
        def attempt() -> T:
            self.requests.sent(kind)
            try:
                return call()
            except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
                raise NotFound(f"{self.url}: {key}") from None
            except PermissionError:
                raise UserError(f"bucket {self.url}: access refused; check the credentials") from None
            except (ConnectionError, TimeoutError) as error:
                raise Transient(f"{self.url}: {key}: {type(error).__name__}") from error
            except (OSError, NotImplementedError) as error:
                raise StoreError(f"{self.url}: {key}: {type(error).__name__}: {error}") from error

        return retrying(attempt, sleep=self._sleep)
