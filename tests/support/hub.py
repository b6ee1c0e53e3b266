"""A stand-in for the part of `huggingface_hub.HfApi` that `HfStore` uses, in memory. It imitates the
client's documented behaviour (last writer wins, missing paths skipped or raised); it is not the Hub."""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.errors import EntryNotFoundError


@dataclass(frozen=True)
class StandInFile:
    path: str
    size: int


class StandInHub:
    """One bucket."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[bytes | str, str]] | None = None,
        delete: list[str] | None = None,
    ) -> None:
        with self._lock:
            for source, name in add or ():
                self._objects[name] = Path(source).read_bytes() if isinstance(source, str) else bytes(source)
            for name in delete or ():
                self._objects.pop(name, None)

    def list_bucket_tree(
        self, bucket_id: str, prefix: str | None = None, *, recursive: bool | None = None
    ) -> Iterator[StandInFile]:
        with self._lock:
            found = [StandInFile(name, len(data)) for name, data in self._objects.items()]
        return iter([item for item in found if not prefix or item.path.startswith(prefix + "/")])

    def get_bucket_paths_info(self, bucket_id: str, paths: Iterable[str]) -> list[StandInFile]:
        with self._lock:
            return [StandInFile(path, len(self._objects[path])) for path in paths if path in self._objects]

    def download_bucket_files(
        self, bucket_id: str, files: list[tuple[str, str]], *, raise_on_missing_files: bool = False
    ) -> None:
        for name, target in files:
            with self._lock:
                data = self._objects.get(name)
            if data is not None:
                Path(target).write_bytes(data)
            elif raise_on_missing_files:
                raise EntryNotFoundError(f"{name} not found in bucket {bucket_id}")
