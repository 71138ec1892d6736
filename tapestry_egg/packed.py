"""Files that may be gzipped: their bytes, within bounds."""

from __future__ import annotations

import gzip
import io
import zlib
from pathlib import Path

from .atomic import write_atomic
from .errors import TapestryError

#: Bytes of a decompressed file: a few kilobytes of gzip can stand for gigabytes of nothing.
_MOST_BYTES = 4 << 30


def read_unpacked(path: str | Path, error: type[TapestryError]) -> bytes:
    """The bytes of a file, decompressed. Raises `error` where it cannot be read."""
    try:
        data = Path(path).read_bytes()
    except (OSError, ValueError) as e:  # a path with a zero byte is a ValueError
        raise error(
            f"cannot be read: {getattr(e, 'strerror', None) or e}", where=str(path)
        ) from None
    return unpacked(data, path, error)


def write_packed(path: str | Path, data: bytes) -> None:
    """Write a file, whole or not at all; compressed, always alike, where its name ends in `.gz`.

    Raises TapestryError where its folder cannot be written.
    """
    write_atomic(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def unpacked(data: bytes, path: str | Path, error: type[TapestryError]) -> bytes:
    """The bytes of a file that was read, decompressed. Raises `error` where they cannot be."""
    if data[:2] != b"\x1f\x8b":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            out = file.read(_MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as e:
        raise error(f"cannot be decompressed: {e}", where=str(path)) from None
    if len(out) > _MOST_BYTES:
        raise error(f"more than {_MOST_BYTES} bytes when decompressed", where=str(path))
    return out
