"""What every store's `get_file` does with the local file, whatever the transfer does."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_file(path: Path) -> Iterator[None]:
    """The block may write `path`; if it fails, no half of a file stays behind.

    Raises FileExistsError if `path` exists, FileNotFoundError if its folder does not: both are the caller's
    mistakes and must not look like the store's.
    """
    if path.exists():
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    if not path.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path.parent))
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
