"""A stand-in for the Hugging Face Hub client, not the real one: the real one needs the network and hf_xet.

It keeps the signatures, return types and errors of `huggingface_hub.HfApi`'s bucket methods.
"""

import hashlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import httpx2
from huggingface_hub import BucketFile, BucketFolder
from huggingface_hub.errors import BucketBatchError, BucketNotFoundError, EntryNotFoundError


def hub_response(status: int, headers: dict[str, str] | None = None) -> httpx2.Response:
    request = httpx2.Request("POST", "https://stand-in.invalid/api/buckets/me/runs/batch")
    return httpx2.Response(status, headers=headers, request=request)


class HfApiStandIn:
    """Has one bucket, `me/runs`. `next_errors` are raised by the next calls, one each."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.next_errors: list[Exception] = []
        self.calls: list[str] = []

    def batch_bucket_files(
        self,
        bucket_id: str,
        *,
        add: list[tuple[str | Path | bytes, str]] | None = None,
        delete: list[str] | None = None,
    ) -> None:
        self._begin("batch", bucket_id)
        for source, destination in add or ():
            self.files[destination] = source if isinstance(source, bytes) else Path(source).read_bytes()
        failures = [{"path": path, "error": "not found"} for path in delete or () if path not in self.files]
        for path in delete or ():
            self.files.pop(path, None)
        if failures:
            error = BucketBatchError("some operations failed", response=hub_response(422))
            error.failures = failures
            raise error

    def get_bucket_paths_info(self, bucket_id: str, paths: Iterable[str]) -> Iterator[BucketFile]:
        self._begin("paths-info", bucket_id)
        return iter([self._info(path) for path in paths if path in self.files])

    def list_bucket_tree(
        self, bucket_id: str, prefix: str | None = None, *, recursive: bool | None = None
    ) -> Iterator[BucketFile | BucketFolder]:
        """Filters by text, as the documentation says, in no order; folders are in the listing."""
        self._begin("tree", bucket_id)
        assert recursive
        paths = sorted((p for p in self.files if p.startswith(prefix or "")), key=lambda p: p[::-1])
        folders = {str(Path(path).parent) for path in paths} - {"."}
        yield from (BucketFolder(type="directory", path=path) for path in folders)
        yield from (self._info(path) for path in paths)

    def download_bucket_files(
        self,
        bucket_id: str,
        files: list[tuple[str, str | Path]],
        *,
        raise_on_missing_files: bool = False,
    ) -> None:
        self._begin("download", bucket_id)
        assert raise_on_missing_files
        for remote, local in files:
            if remote not in self.files:
                raise EntryNotFoundError(f"1 file(s) not found in bucket '{bucket_id}': {remote}")
            Path(local).write_bytes(self.files[remote])

    def _begin(self, call: str, bucket_id: str) -> None:
        self.calls.append(call)
        if self.next_errors:
            raise self.next_errors.pop(0)
        if bucket_id != "me/runs":
            raise BucketNotFoundError("404 Client Error", response=hub_response(404))

    def _info(self, path: str) -> BucketFile:
        data = self.files[path]
        return BucketFile(type="file", path=path, size=len(data), xetHash=hashlib.sha256(data).hexdigest())
