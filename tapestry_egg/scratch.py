"""Scratch folders and temporary files that are gone after a kill too.

A process that is killed cannot clean up after itself. So what is temporary is locked as long as
someone works on it, and whoever comes next removes what nobody holds any more.
"""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # no locks: what is temporary is removed when it is left, not after kills
    fcntl = None  # type: ignore[assignment]

# What has this name and is not held is removed: nobody calls a folder of their own so.
_PREFIX = ".tapestry-egg-scratch-"
_sweeping = threading.Lock()


@contextmanager
def scratch() -> Iterator[Path]:
    """A folder of one's own, removed at the end."""
    if _sweeping.acquire(blocking=False):  # once in a process: it is never released
        for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
            remove_unheld(path)
    with ExitStack() as stack:
        while True:
            folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
            # Whoever sweeps may remove it, as one that nobody holds, until it is locked.
            with suppress(FileNotFoundError):
                stack.enter_context(locked(folder))
                if folder.is_dir():
                    break
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file or folder, which ends with the process at the latest; whether it is
    held. Without `wait` it is not where another, or another thread, has it."""
    if fcntl is None:
        yield wait
        return
    number = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            held = True
        except OSError:  # another has it, or the file system has no locks
            held = wait
        yield held
    finally:
        os.close(number)


def remove_unheld(path: Path) -> None:
    """Remove a temporary file or folder of this user that nobody holds."""
    if fcntl is None:
        return
    with suppress(OSError):
        at = path.lstat()
        if at.st_uid != os.getuid() or not (stat.S_ISDIR(at.st_mode) or stat.S_ISREG(at.st_mode)):
            return
        with locked(path, wait=False) as free:
            if free and path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif free:
                path.unlink(missing_ok=True)
