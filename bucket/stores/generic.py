"""Anything that fsspec opens. Tier 0: fsspec's own create-if-absent is not exclusive on most file systems."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from bucketrl.bucket.errors import NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.store import ObjectInfo, Tier


class GenericStore:
    """Implements `Store` on an fsspec URL."""

    tier = Tier.PUT

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        try:
            self._fs, self._root = fsspec.core.url_to_fs(self.url, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise UserError(f"bucket URL {self.url}: {error}") from None
        self._root = self._root.rstrip("/")

    def get(self, key: str) -> bytes:
        return bytes(self._do(key, self._fs.cat_file, self._path(key)))

    def put(self, key: str, data: bytes) -> None:
        self._make_parent(key)
        self._do(key, self._fs.pipe_file, self._path(key), data)

    def create(self, key: str, data: bytes) -> None:
        raise Unsupported(f"{self.url}: no exclusive create through {self._fs.protocol}")

    def put_file(self, key: str, path: Path) -> None:
        self._make_parent(key)
        self._do(key, self._fs.put_file, str(path), self._path(key))

    def get_file(self, key: str, path: Path) -> None:
        if path.exists():
            raise FileExistsError(path)
        self.size(key)  # some backends leave an empty local file behind where there is no object
        self._do(key, self._fs.get_file, self._path(key), str(path))

    def size(self, key: str) -> int:
        return int(self._do(key, self._fs.info, self._path(key))["size"])

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder = prefix.rpartition("/")[0]
        self._fs.invalidate_cache()
        try:
            found = self._fs.find(self._path(folder) if folder else self._root, detail=True)
        except FileNotFoundError:
            return
        infos = [
            ObjectInfo(name[len(self._root) :].lstrip("/"), int(info["size"])) for name, info in found.items()
        ]
        for info in sorted(infos, key=lambda info: info.key):
            if info.key.startswith(prefix) and info.key > start_after:
                yield info

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._do(key, self._fs.rm_file, self._path(key))
            except NotFound:
                continue

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _make_parent(self, key: str) -> None:
        self._do(key, self._fs.makedirs, self._path(key).rpartition("/")[0], exist_ok=True)

    def _do(self, key: str, call: Any, *arguments: Any, **options: Any) -> Any:
        try:
            return call(*arguments, **options)
        except FileNotFoundError:
            raise NotFound(f"{self.url}: {key}") from None
        except PermissionError:
            raise UserError(f"bucket {self.url}: access denied; check the credentials") from None
        except (OSError, NotImplementedError) as error:
            raise StoreError(f"{self.url}: {key}: {type(error).__name__}: {error}") from error
