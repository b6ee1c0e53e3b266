"""Reading several objects at once, where a store has that for the requests, or the time, of few."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from bucketrl.bucket.errors import NotFound
from bucketrl.bucket.store import Store


@runtime_checkable
class ReadsMany(Protocol):
    """A store that downloads many objects together."""

    def get_files(self, files: Sequence[tuple[str, Path]]) -> None:
        """`Store.get_file` of each (key, path). Raises NotFound, with nothing written, if one is missing."""


def download(store: Store, files: Sequence[tuple[str, Path]]) -> None:
    """Downloads to new paths those of `files` (key, path) that the store gives together: all or none of them.
    Whoever finds a path missing asks for that object alone."""
    if len(files) > 1 and isinstance(store, ReadsMany):
        try:
            store.get_files(files)
        except NotFound:
            return


def get_together(store: Store, keys: Sequence[str]) -> dict[str, bytes]:
    """The objects under `keys`, if the store gives them together; else nothing."""
    if not isinstance(store, ReadsMany):
        return {}
    with tempfile.TemporaryDirectory() as folder:
        paths = {key: Path(folder) / str(number) for number, key in enumerate(keys)}
        download(store, list(paths.items()))
        return {key: path.read_bytes() for key, path in paths.items() if path.exists()}
