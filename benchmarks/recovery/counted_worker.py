"""`bucketrl` with an engine that counts each token it draws where SIGKILL cannot lose the count.

The count lies in the file that TOKENS_FILE names, as 8 bytes, little-endian; it is mapped into memory.
"""

import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

from bucketrl.jobs.cli import main

TOKENS_FILE = "BUCKETRL_BENCHMARK_TOKENS_FILE"
"""Environment variable."""


def tokens_drawn(path: Path) -> int:
    """What the worker with this file has drawn so far."""
    return int(struct.unpack("<q", path.read_bytes())[0])


def count_into(path: Path) -> None:
    """Every token that this process draws from now on."""
    from bucketrl.rollout_worker.engines.decoding import DecodingBatch

    path.write_bytes(bytes(8))
    with path.open("r+b") as file:
        counter = mmap.mmap(file.fileno(), 8)
    sample = DecodingBatch._sample

    def counted(self: DecodingBatch, pending: Any, logits: Any) -> int:
        token = sample(self, pending, logits)
        struct.pack_into("<q", counter, 0, struct.unpack_from("<q", counter)[0] + 1)
        return token

    DecodingBatch._sample = counted  # type: ignore[method-assign]


if __name__ == "__main__":
    count_into(Path(os.environ[TOKENS_FILE]))
    sys.exit(main())
