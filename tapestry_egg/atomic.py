"""Writing files so that they appear whole or not at all."""

from __future__ import annotations

import glob
import os
import re
import threading
from contextlib import suppress
from pathlib import Path

from .errors import TapestryError
from .scratch import locked, remove_unheld

# `.NAME.PROCESS-THREAD.tmp`, beside the file NAME that it will be.
_TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9]+-[0-9]+\.tmp", re.DOTALL)


def write_atomic(path: str | Path, content: str | bytes) -> None:
    """Replace `path` with `content` in one step, creating its folder; text is written as UTF-8.

    A reader sees the old file or the new one, an interrupted write leaves nothing behind, and what
    a killed one left goes with the next write of the file. Raises TapestryError where the folder
    cannot be written.
    """
    path = Path(path)
    data = content.encode() if isinstance(content, str) else content
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for other in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
            found = _TEMPORARY.fullmatch(other.name)
            if found and found["name"] == path.name:
                remove_unheld(other)
        written = False
        while not written:
            temporary.touch()
            # It may be removed, as one that nobody holds, before it is locked.
            with suppress(FileNotFoundError), locked(temporary):
                with temporary.open("r+b") as file:
                    file.write(data)
                os.replace(temporary, path)
                written = True
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_writable(path: str | Path) -> None:
    """See that `path` could be written, before the work that is to go there; its folder is made.

    Raises TapestryError where the folder cannot be written.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.touch()
        temporary.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> TapestryError:
    return TapestryError(
        f"cannot be written: {error.strerror or error}",
        where=str(path),
        hint="Choose another folder, or make this one writable.",
    )
