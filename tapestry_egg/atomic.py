"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import os
import threading
from contextlib import suppress
from pathlib import Path

from .errors import TapestryError


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replace `path` with `content` in one step, creating its folder; text is written as UTF-8.

    A reader sees the old file or the new one, an interrupted write leaves nothing behind. Raises
    TapestryError where the folder cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except OSError as error:
        raise TapestryError(
            f"cannot be written: {error.strerror or error}",
            where=str(path),
            hint="Choose another folder, or make this one writable.",
        ) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
