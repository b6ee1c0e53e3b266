"""Folders of files in the bucket (adapters, checkpoints): published whole, fetched verified.

A folder exists for readers only once a commit names each of its files with size and sha256, so a
half-published one needs no clean-up before the next attempt.
"""

import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from bucketrl.bucket import keys
from bucketrl.bucket.errors import IntegrityError, Missing, NotFound
from bucketrl.bucket.pause import pause
from bucketrl.bucket.reading import download
from bucketrl.bucket.records import FileRef, sha256_hex
from bucketrl.bucket.store import Store

logger = logging.getLogger(__name__)

T = TypeVar("T")

RETRY_DELAYS_S = (0.2, 0.5, 1.0)
"""Waits between readings of an object that does not match its reference yet (eventual consistency)."""


def publish(store: Store, prefix: str, folder: Path) -> tuple[FileRef, ...]:
    """Puts every file below `folder` under `prefix` (ends in "/"), in name order.

    Raises ValueError if there is nothing to publish, anything but regular files and folders, or a name
    that `fetch` would refuse.
    """
    refs = []
    for path in sorted(folder.rglob("*"), key=lambda found: found.relative_to(folder).as_posix()):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise ValueError(f"{path} is neither a regular file nor a folder")
        if path.is_dir():
            continue
        size, digest = _measure(path)
        ref = FileRef(key=prefix + path.relative_to(folder).as_posix(), size=size, sha256=digest)
        if keys.parse_artifact(ref.key) is None:
            raise ValueError(f"{ref.key!r} is no key for a file of an adapter or a checkpoint")
        store.put_file(ref.key, path)
        refs.append(ref)
    if not refs:
        raise ValueError(f"{folder} has no files to publish")
    return tuple(refs)


def fetch(
    store: Store, files: Sequence[FileRef], target: Path, *, sleep: Callable[[float], None] = pause
) -> Path:
    """Makes `target` a local folder with exactly the named files, verified; returns it.

    It appears by one rename after every file is on disk, so it is whole or absent after a crash. A
    `target` that already verifies is kept, any other is replaced.
    Raises IntegrityError if an object is missing or does not match its reference after some retries.
    """
    names = _local_names(files)
    if _verifies(target, files, names):
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        fresh = staging / "fresh"
        paths = [fresh / name for name in names]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
        download(store, [(ref.key, path) for ref, path in zip(files, paths, strict=True)])
        for ref, path in zip(files, paths, strict=True):
            if not (path.exists() and _measure(path) == (ref.size, ref.sha256)):
                _with_retries(partial(_download, store, ref, path), ref, sleep)
        _fsync_tree(fresh)
        if target.exists():
            target.rename(staging / "stale")
        try:
            fresh.rename(target)
        except OSError:
            # Another process was faster; its folder counts if it is the same.
            if not _verifies(target, files, names):
                raise
        _fsync_folder(target.parent)
    finally:
        shutil.rmtree(staging)
    return target


def read_verified(store: Store, ref: FileRef, *, sleep: Callable[[float], None] = pause) -> bytes:
    """The object's bytes. Raises IntegrityError as `fetch` does."""

    def read() -> bytes:
        data = store.get(ref.key)
        _check(ref, len(data), sha256_hex(data))
        return data

    return _with_retries(read, ref, sleep)


def _with_retries(attempt: Callable[[], T], ref: FileRef, sleep: Callable[[float], None]) -> T:
    delays = iter(RETRY_DELAYS_S)
    while True:
        try:
            return attempt()
        except NotFound:
            problem: IntegrityError = Missing(f"{ref.key}: the log names it, but it is not in the bucket")
        except IntegrityError as error:
            problem = error
        delay = next(delays, None)
        if delay is None:
            raise problem
        logger.info("%s; reading again in %.1f s", problem, delay)
        sleep(delay)


def _download(store: Store, ref: FileRef, path: Path) -> None:
    path.unlink(missing_ok=True)
    store.get_file(ref.key, path)
    _check(ref, *_measure(path))


def _check(ref: FileRef, size: int, digest: str) -> None:
    if size != ref.size:
        raise IntegrityError(f"{ref.key}: {size} bytes, want {ref.size}")
    if digest != ref.sha256:
        raise IntegrityError(f"{ref.key}: sha256 is {digest[:16]}…, want {ref.sha256[:16]}…")


def _local_names(files: Sequence[FileRef]) -> list[str]:
    """Each file's path below the folder. Raises IntegrityError unless all belong to one artefact."""
    parsed = [keys.parse_artifact(ref.key) for ref in files]
    for ref, parts in zip(files, parsed, strict=True):
        if parts is None:
            raise IntegrityError(f"{ref.key[:128]!r} is not a file of an adapter or a checkpoint")
    folders = {folder for folder, _ in filter(None, parsed)}
    names = [name for _, name in filter(None, parsed)]
    if len(folders) != 1 or len(set(names)) != len(names):
        raise IntegrityError(f"files of {sorted(folders)}: want distinct files of one adapter or checkpoint")
    return names


def _verifies(target: Path, files: Sequence[FileRef], names: Sequence[str]) -> bool:
    """Whether `target` holds the named files, each right, and no other."""
    found = {path.relative_to(target).as_posix() for path in target.rglob("*") if not path.is_dir()}
    return found == set(names) and all(
        _measure(target / name) == (ref.size, ref.sha256) for ref, name in zip(files, names, strict=True)
    )


def _measure(path: Path) -> tuple[int, str]:
    """Size in bytes and sha256 of a local file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _fsync_tree(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_dir():
            _fsync_folder(path)
        else:
            with path.open("rb") as file:
                os.fsync(file.fileno())
    _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
