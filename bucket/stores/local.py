"""A folder as a store. Tier 1: create-if-absent is `link(2)`, which fails if the name exists.

Every object is written under a hidden name first, flushed to disk, then given its name in one system call,
so a reader or a crash never meets half an object. The folder must be on one file system.
"""

import errno
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, UserError
from bucketrl.bucket.store import ObjectInfo, Tier

STAGING = ".staging"


class LocalStore:
    """Implements `Store` below `root`, which is created when the first object is written."""

    tier = Tier.CREATE

    def __init__(self, root: Path) -> None:
        if root.exists() and not root.is_dir():
            raise UserError(f"bucket {root}: is a file; give a folder")
        self.url = str(root)
        self._root = root

    def get(self, key: str) -> bytes:
        try:
            return self._path(key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFound(f"{self.url}: {key}") from None
        except OSError as error:
            raise self._failed(key, error) from error

    def put(self, key: str, data: bytes) -> None:
        self._write(key, data, exclusive=False)

    def create(self, key: str, data: bytes) -> None:
        self._write(key, data, exclusive=True)

    def put_file(self, key: str, path: Path) -> None:
        self._write(key, path, exclusive=False)

    def get_file(self, key: str, path: Path) -> None:
        try:
            with self._path(key).open("rb") as source, path.open("xb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise NotFound(f"{self.url}: {key}") from None
        except OSError as error:
            raise self._failed(key, error) from error

    def size(self, key: str) -> int:
        path = self._path(key)
        try:
            if path.is_file():
                return path.stat().st_size
        except OSError as error:
            raise self._failed(key, error) from error
        raise NotFound(f"{self.url}: {key}")

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        folder, _, rest = prefix.rpartition("/")
        yield from self._walk(folder, f"{folder}/{rest}" if folder else rest, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            try:
                self._path(key).unlink(missing_ok=True)
            except OSError as error:
                raise self._failed(key, error) from error

    def _walk(self, folder: str, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Objects below `folder` in key order: a folder sorts as its name with "/" behind."""
        try:
            entries = list(os.scandir(self._root / folder))
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failed(folder, error) from error
        named = []
        for entry in entries:
            if entry.name == STAGING and not folder:
                continue
            is_folder = entry.is_dir(follow_symlinks=False)
            key = f"{folder}/{entry.name}" if folder else entry.name
            named.append((key + "/" if is_folder else key, is_folder, entry))
        for key, is_folder, entry in sorted(named, key=lambda item: item[0]):
            if is_folder:
                # Nothing below can match if the folder sorts entirely before `start_after` or off the prefix.
                below = key.startswith(prefix) or prefix.startswith(key)
                if below and (key > start_after or start_after.startswith(key)):
                    yield from self._walk(key[:-1], prefix, start_after)
            elif key.startswith(prefix) and key > start_after:
                try:
                    yield ObjectInfo(key, entry.stat(follow_symlinks=False).st_size)
                except FileNotFoundError:
                    continue  # deleted since the scan

    def _write(self, key: str, source: bytes | Path, *, exclusive: bool) -> None:
        path = self._path(key)
        staged = self._root / STAGING / uuid.uuid4().hex
        try:
            _make_folders(staged.parent)
            _make_folders(path.parent)
            try:
                with staged.open("xb") as target:
                    if isinstance(source, Path):
                        with source.open("rb") as data:
                            shutil.copyfileobj(data, target, 1 << 20)
                    else:
                        target.write(source)
                    target.flush()
                    os.fsync(target.fileno())
                if exclusive:
                    os.link(staged, path)
                else:
                    os.replace(staged, path)
            finally:
                staged.unlink(missing_ok=True)
            _sync_folder(path.parent)
        except FileExistsError:
            raise AlreadyExists(f"{self.url}: {key}") from None
        except OSError as error:
            raise self._failed(key, error) from error

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if not key or any(part in ("", ".", "..") for part in parts) or parts[0] == STAGING or "\0" in key:
            raise ValueError(f"not an object key: {key!r}")
        return self._root.joinpath(*parts)

    def _failed(self, key: str, error: OSError) -> StoreError | UserError:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            return UserError(
                f"bucket {self.url}: {error.strerror} for {key}; give a folder that this user may write"
            )
        return StoreError(f"{self.url}: {key}: {error.strerror or error}")


def _make_folders(folder: Path) -> None:
    """With every new name flushed: an object must not vanish with its folder's entry after a power cut."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    folder.mkdir(exist_ok=True)
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
