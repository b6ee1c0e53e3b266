"""A private local folder for one process, where artefacts stand on their way to and from the bucket."""

import fcntl
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def scratch_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Yields a new folder `<prefix>…` in `parent`, which is created if need be; removed at the end.

    What killed processes left is removed first: each folder is locked by its process, and the system
    drops the lock however the process dies, so a folder whose lock can be had belongs to nobody.
    """
    parent.mkdir(parents=True, exist_ok=True)
    for abandoned in parent.glob(f"{prefix}*"):
        _remove_if_abandoned(abandoned)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_if_abandoned(folder: Path) -> None:
    try:
        with (folder / "lock").open("r") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    except OSError:
        return  # in use, just being made, or removed by somebody else at this moment
