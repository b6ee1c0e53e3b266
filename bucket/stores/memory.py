"""A store in this process's memory, for tests. Tier 1."""

import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from bucketrl.bucket.counting import Requests
from bucketrl.bucket.errors import AlreadyExists, NotFound
from bucketrl.bucket.store import ObjectInfo, Tier
from bucketrl.bucket.stores.download import new_file


class MemoryStore:
    """Implements `Store`. Two stores opened by one name share their objects."""

    tier = Tier.CREATE
    _named: ClassVar[dict[str, "MemoryStore"]] = {}

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self.requests = Requests()
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> "MemoryStore":
        return cls._named.setdefault(name, cls(name))

    def get(self, key: str) -> bytes:
        self.requests.sent("get")
        try:
            data = self._objects[key]
        except KeyError:
            raise NotFound(f"{self.url}: {key}") from None
        self.requests.moved(down=len(data))
        return data

    def put(self, key: str, data: bytes) -> None:
        self.requests.sent("put")
        with self._lock:
            self._objects[key] = bytes(data)
        self.requests.moved(up=len(data))

    def create(self, key: str, data: bytes) -> None:
        if not data:
            raise ValueError(f"{key}: an object made by create must not be empty")
        self.requests.sent("create")
        with self._lock:
            if key in self._objects:
                raise AlreadyExists(f"{self.url}: {key}")
            self._objects[key] = bytes(data)
        self.requests.moved(up=len(data))

    def put_file(self, key: str, path: Path) -> None:
        self.put(key, path.read_bytes())

    def get_file(self, key: str, path: Path) -> None:
        data = self.get(key)
        with new_file(path):
            path.write_bytes(data)

    def size(self, key: str) -> int:
        self.requests.sent("info")
        try:
            return len(self._objects[key])
        except KeyError:
            raise NotFound(f"{self.url}: {key}") from None

    def list(self, prefix: str, start_after: str = "") -> Iterator[ObjectInfo]:
        self.requests.sent("list")
        with self._lock:
            found = [
                ObjectInfo(key, len(data))
                for key, data in self._objects.items()
                if key.startswith(prefix) and key > start_after
            ]
        return iter(sorted(found, key=lambda info: info.key))

    def delete(self, keys: Iterable[str]) -> None:
        self.requests.sent("delete")
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def sweep(self, older_than_s: float) -> int:
        return 0  # nothing outlives this process
