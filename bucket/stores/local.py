"""A folder as a store. Tier 1: create-if-absent is `link(2)`, which fails if the name exists.

Every object is written under a hidden name first, flushed to disk, then given its name in one system call,
so a reader or a crash never meets half an object. The folder must be on one file system.
"""

import errno
import io
import logging
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from bucketrl.bucket.counting import Requests
from bucketrl.bucket.errors import AlreadyExists, NotFound, StoreError, Unsupported, UserError
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores.download import new_file

logger = logging.getLogger(__name__)

STAGING = ".staging"
"""Folder below the root for what is not an object yet; never listed. A killed writer leaves its file there,
which `sweep` removes."""

_CHUNK = 1 << 20
_NAMING_ATTEMPTS = 100
_NO_SUCH_OBJECT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EXDEV)
"""What `link(2)` answers on file systems without hard links: FUSE mounts of buckets, FAT, some network shares."""
_DENIED = (errno.EACCES, errno.EPERM, errno.EROFS)


class LocalStore:
    """Implements `Store` below `root`, which is created when the first object is written."""

    tier = Tier.CREATE

    def __init__(self, root: Path) -> None:
        self.url = str(root)
        self.requests = Requests()
        """Operations on the folder: nobody bills them, but a run can be compared with one on a service."""
        self._root = root
        try:
            occupied = root.exists() and not root.is_dir()
        except OSError as error:
            raise self._failed("", error) from error
        if occupied:
            raise UserError(f"bucket {root}: is a file; give a folder")

    def get(self, key: str) -> bytes:
        self.requests.sent("get")
        try:
            data = self._path(key).read_bytes()
        except _NO_SUCH_OBJECT:
            raise NotFound(f"{self.url}: {key}") from None
        except OSError as error:
            raise self._failed(key, error) from error
        self.requests.moved(down=len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self._write(key, io.BytesIO(data), exclusive=False)

    def create(self, key: str, data: bytes) -> None:
        if not data:
            raise ValueError(f"{key}: an object made by create must not be empty")
        self._write(key, io.BytesIO(data), exclusive=True)

    def put_file(self, key: str, path: Path) -> None:
        with path.open("rb") as source:
            self._write(key, source, exclusive=False)

    def get_file(self, key: str, path: Path) -> None:
        self.requests.sent("get")
        with new_file(path):
            try:
                with self._path(key).open("rb") as source, path.open("xb") as target:
                    shutil.copyfileobj(source, target, _CHUNK)
                    self.requests.moved(down=target.tell())
            except _NO_SUCH_OBJECT:
                raise NotFound(f"{self.url}: {key}") from None
            except OSError as error:
                raise self._failed(key, error) from error

    def size(self, key: str) -> int:
        self.requests.sent("info")
        path = self._path(key)
        try:
            if path.is_file():
                return path.stat().st_size
        except _NO_SUCH_OBJECT:
            pass  # deleted in between
        except OSError as error:
            raise self._failed(key, error) from error
        raise NotFound(f"{self.url}: {key}")

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.requests.sent("list")
        return self._walk(prefix, start_after)

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self.requests.sent("delete")
            path = self._path(key)
            try:
                path.unlink()
            except _NO_SUCH_OBJECT:
                continue
            except OSError as error:
                raise self._failed(key, error) from error
            self._remove_empty(path.parent)

    def sweep(self, older_than_s: float) -> int:
        """Files under `.staging`. Ages are by the file system's clock, which may be another machine's."""
        staging = self._root / STAGING
        swept = 0
        try:
            with tempfile.NamedTemporaryFile(dir=staging) as fresh:
                now = os.stat(fresh.name).st_mtime
                for entry in os.scandir(staging):
                    if now - entry.stat(follow_symlinks=False).st_mtime > older_than_s:
                        os.unlink(entry.path)
                        swept += 1
        except FileNotFoundError:
            pass  # nothing was ever written here, or another sweep is at it
        except OSError as error:
            logger.warning("%s: unfinished files cannot be removed: %s", self.url, error.strerror or error)
        return swept

    def _walk(self, prefix: str, start_after: str) -> Iterator[ObjectInfo]:
        """Objects below the folder `prefix` in key order: a folder sorts as its name with "/" behind."""
        try:
            # Long folders are listed from near their end. "0" follows "/": a name that sorts before `start_after`
            # with it does so as a file and as a folder.
            found = os.scandir(self._root / prefix)
            entries = [entry for entry in found if f"{prefix}{entry.name}0" > start_after]
        except (FileNotFoundError, NotADirectoryError):
            return
        except OSError as error:
            raise self._failed(prefix, error) from error
        named = {_listed_as(prefix, entry): entry for entry in entries if _counts(prefix, entry)}
        for key, entry in sorted(named.items()):
            if key.endswith("/"):
                # A folder is left out whole if all of its keys sort before `start_after`.
                if key > start_after or start_after.startswith(key):
                    yield from self._walk(key, start_after)
            elif key > start_after:
                try:
                    yield ObjectInfo(key, entry.stat(follow_symlinks=False).st_size)
                except FileNotFoundError:
                    continue  # deleted since the scan

    def _write(self, key: str, source: BinaryIO, *, exclusive: bool) -> None:
        self.requests.sent("create" if exclusive else "put")
        path = self._path(key)
        staged = self._root / STAGING / uuid.uuid4().hex
        try:
            _make_folders(staged.parent)
            try:
                _write_through(staged, source)
                size = staged.stat().st_size
                self._give_name(key, staged, path, exclusive=exclusive)
                self.requests.moved(up=size)
            finally:
                staged.unlink(missing_ok=True)
        except OSError as error:
            raise self._failed(key, error) from error

    def _give_name(self, key: str, staged: Path, path: Path, *, exclusive: bool) -> None:
        for _ in range(_NAMING_ATTEMPTS):
            try:
                _make_folders(path.parent)
                if exclusive:
                    self._link(key, staged, path)
                else:
                    os.replace(staged, path)
            except FileNotFoundError:
                continue  # a deletion has removed the folder, empty until now
            try:
                _sync_folder(path.parent)
            except FileNotFoundError:
                pass  # the object is deleted again already, and its folder with it
            return
        raise StoreError(f"{self.url}: {key}: its folder is removed again and again")

    def _link(self, key: str, staged: Path, path: Path) -> None:
        try:
            os.link(staged, path)
        except FileExistsError:
            raise AlreadyExists(f"{self.url}: {key}") from None
        except OSError as error:
            if error.errno in _NO_LINKS:
                raise Unsupported(f"{self.url}: this file system has no hard links") from error
            raise

    def _remove_empty(self, folder: Path) -> None:
        """An object store has no folders; here they must not pile up once their objects are gone."""
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty
            folder = folder.parent

    def _path(self, key: str) -> Path:
        parts = key.split("/")
        if any(part in ("", ".", "..") for part in parts) or parts[0] == STAGING or "\0" in key:
            raise ValueError(f"not an object key: {key!r}")
        return self._root.joinpath(*parts)

    def _failed(self, key: str, error: OSError) -> StoreError | UserError:
        if error.errno in _DENIED:
            return UserError(
                f"bucket {self.url}: {error.strerror}; give a folder that this user may read and write"
            )
        return StoreError(f"{self.url}: {key}: {error.strerror or error}")


def _counts(prefix: str, entry: "os.DirEntry[str]") -> bool:
    if not prefix and entry.name == STAGING:
        return False
    return entry.is_dir(follow_symlinks=False) or entry.is_file(follow_symlinks=False)


def _listed_as(prefix: str, entry: "os.DirEntry[str]") -> str:
    return prefix + entry.name + ("/" if entry.is_dir(follow_symlinks=False) else "")


def _write_through(path: Path, source: BinaryIO) -> None:
    with path.open("xb") as target:
        shutil.copyfileobj(source, target, _CHUNK)
        target.flush()
        os.fsync(target.fileno())


def _make_folders(folder: Path) -> None:
    """With every new name flushed: an object must not vanish with its folder's entry after a power cut."""
    if folder.is_dir():
        return
    _make_folders(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if _is_no_folder(folder):
            raise
    _sync_folder(folder.parent)


def _is_no_folder(path: Path) -> bool:
    """Something else stands there. Another writer's folder may be gone again by now: the caller finds that out."""
    try:
        return not stat.S_ISDIR(path.stat().st_mode)  # one look: between two it may come and go
    except FileNotFoundError:
        return False


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
