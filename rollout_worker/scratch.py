"""A private local folder for one process, removed when it ends and, if it is killed, by the next one."""

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PREFIX = "worker-"


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Yields a new folder in `parent`, which is created if need be.

    Each folder is locked by its process, and the system drops the lock when the process dies in whatever
    way: a folder whose lock can be had belongs to nobody and is removed.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield folder
        finally:
            remove_folder(folder)


def _remove_abandoned(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            with (folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_folder(folder)
        except OSError:
            # In use, just being made, or removed by somebody else at this moment.
            continue


def remove_folder(folder: Path) -> None:
    """Removes `folder` with all it holds. A failure costs disk space only: it is logged."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except OSError as error:
        logger.warning("cannot remove %s: %s", folder, error)
