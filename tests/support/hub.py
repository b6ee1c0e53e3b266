"""A stand-in for the Hugging Face Hub client, in memory. It is not the Hub, which needs the network.

It has the signatures, types and errors of the bucket methods of `huggingface_hub.HfApi` that `HfStore` uses.
"""

import hashlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx2
from huggingface_hub import BucketFile, BucketFolder
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, EntryNotFoundError

BUCKET = "owner/name"


def hub_response(status: int, headers: dict[str, str] | None = None) -> httpx2.Response:
    request = httpx2.Request("POST", f"https://stand-in.invalid/api/buckets/{BUCKET}/batch")
    return httpx2.Response(status, headers=headers, request=request)


class StandInHub:
    """One bucket, `owner/name`. `next_errors` are raised by the next calls, one each."""

    def __init__(self) -> None:
        self.next_errors: list[Exception] = []
        self._objects: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[bytes | str | Path, str]] | None = None,
        delete: list[str] | None = None,
    ) -> None:
        """Applies what it can; a deletion of what is not there is reported as failed (the strictest reading
        of the documentation)."""
        self._begin(bucket_id)
        with self._lock:
            for source, name in add or ():
                self._objects[name] = source if isinstance(source, bytes) else Path(source).read_bytes()
            missing = [name for name in delete or () if self._objects.pop(name, None) is None]
        if missing:
            error = BucketBatchError("operations failed", response=hub_response(422))
            error.failures = [{"path": name, "error": "not found"} for name in missing]
            raise error

    def list_bucket_tree(
        self, bucket_id: str, prefix: str | None = None, *, recursive: bool | None = None
    ) -> Iterator[BucketFile | BucketFolder]:
        """In no useful order, with folders, filtered by text as documented."""
        assert recursive
        self._begin(bucket_id)
        with self._lock:
            found = [self._info(name) for name in self._objects if name.startswith(prefix or "")]
        folders = {str(Path(file.path).parent) for file in found} - {"."}
        yield from (BucketFolder(type="directory", path=path) for path in folders)
        yield from sorted(found, key=lambda file: file.xet_hash)

    def get_bucket_paths_info(self, bucket_id: str, paths: Iterable[str]) -> Iterator[BucketFile]:
        self._begin(bucket_id)
        with self._lock:
            found = [self._info(path) for path in paths if path in self._objects]
        yield from found

    def download_bucket_files(
        self,
        bucket_id: str,
        files: list[tuple[str, str | Path]],
        *,
        raise_on_missing_files: bool = False,
    ) -> None:
        assert raise_on_missing_files
        self._begin(bucket_id)
        for name, target in files:
            with self._lock:
                data = self._objects.get(name)
            if data is None:
                raise EntryNotFoundError(f"1 file(s) not found in bucket '{bucket_id}': {name}")
            Path(target).write_bytes(data)

    def _begin(self, bucket_id: str) -> None:
        if self.next_errors:
            raise self.next_errors.pop(0)
        if bucket_id != BUCKET:
            raise BucketNotFoundError("404 Client Error", response=hub_response(404))

    def _info(self, name: str) -> BucketFile:
        data = self._objects[name]
        digest = hashlib.sha256(data + name.encode()).hexdigest()
        return BucketFile(type="file", path=name, size=len(data), xetHash=digest)
