"""A Parquet object that carries the digest of itself, so that one object is verifiable on its own.

The footer's key-value metadata holds `object_sha256`: the sha256 of the whole object with those 64 digits
replaced by "0". It is found and checked in the raw bytes: a torn or corrupt object never reaches a Parquet
reader, and nothing outside the object (no listing, no proxy) is needed to judge it.
"""

import hashlib
import re
import struct

from bucketrl.bucket.errors import IntegrityError

SEAL_KEY = "object_sha256"
UNSEALED = "0" * 64
"""Value to write under `SEAL_KEY` before `seal`."""

_MAGIC = b"PAR1"
_SEAL = re.compile(SEAL_KEY.encode() + rb"\x18\x40([0-9a-f]{64})")
"""Thrift's compact encoding of the metadata entry: the key, then field 2 (0x18), a string of 64 bytes."""


def seal(data: bytes) -> bytes:
    """`data`, a Parquet file written with `SEAL_KEY: UNSEALED`, sealed."""
    start = _find(data)
    if data[start : start + 64] != UNSEALED.encode():
        raise ValueError("already sealed")
    return data[:start] + _digest(data, start) + data[start + 64 :]


def check_seal(data: bytes) -> None:
    """Raises IntegrityError unless `data` is, byte for byte, what `seal` returned."""
    start = _find(data)
    if data[start : start + 64] != _digest(data, start):
        raise IntegrityError(f"wrong digest: the bytes do not match their {SEAL_KEY}")


def _digest(data: bytes, start: int) -> bytes:
    digest = hashlib.sha256(data[:start])
    digest.update(UNSEALED.encode())
    digest.update(data[start + 64 :])
    return digest.hexdigest().encode()


def _find(data: bytes) -> int:
    """Offset of the 64 digits. Raises IntegrityError if there is not exactly one seal in the footer."""
    if len(data) < 12 or data[:4] != _MAGIC or data[-4:] != _MAGIC:
        raise IntegrityError("not a Parquet file, or cut short")
    (footer_size,) = struct.unpack("<I", data[-8:-4])
    footer = len(data) - 8 - footer_size
    if footer < 4:
        raise IntegrityError("not a Parquet file: its footer is longer than the file")
    found = [match.start(1) for match in _SEAL.finditer(data, footer, len(data) - 8)]
    if len(found) != 1:
        raise IntegrityError(f"{len(found)} {SEAL_KEY} entries in the Parquet footer, want exactly 1")
    return found[0]
