"""An end that is kept: work in Python is interrupted when its time is up.

By the process's interval timer, so in the main thread of a POSIX system; elsewhere methods end by
looking at the clock. What must not be left half done is put under `held`.
"""

from __future__ import annotations

import _weakrefset
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


class TimeUp(BaseException):
    """The deadline has come."""


_depth = 0


@contextmanager
def held() -> Iterator[None]:
    """Finish what is inside, even if the deadline comes meanwhile."""
    global _depth
    if threading.current_thread() is not threading.main_thread():
        yield  # the deadline comes to the main thread only, which alone counts
        return
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1


# How often, in seconds, it is asked whether an end has come, and after how many it is tried again.
_ASKED, _LATER = 0.1, 0.005


def end_as_interrupted() -> None:
    """Let a request to end (SIGTERM) do what Ctrl-C does: what was found until then is kept.

    Neither is lost where it comes while a callback of the garbage collector runs (JAX has one).
    """
    if threading.current_thread() is not threading.main_thread():
        return
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background of a shell
        signal.signal(signal.SIGINT, _interrupt)


#: The modules, and the functions in them, that remove what a weak reference led to.
_WEAK, _REMOVING = (weakref.__file__, _weakrefset.__file__), ("remove", "_remove")


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _collecting(frame):
        raise KeyboardInterrupt
    again = threading.Timer(_LATER, os.kill, (os.getpid(), number))
    again.daemon = True
    again.start()


def _collecting(frame: FrameType | None) -> bool:
    """Whether a callback of the garbage collector runs, or of a weak reference that a dictionary or
    a set has: what they raise is lost."""
    callbacks = {getattr(c, "__code__", None) for c in gc.callbacks}
    while frame is not None:
        code = frame.f_code
        if code in callbacks or (code.co_filename in _WEAK and code.co_name in _REMOVING):
            return True
        frame = frame.f_back
    return False


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C inside compiled code as well.

    A call of compiled code that is interrupted, while it is loaded for example, ends in a
    SystemError, whose cause, or the cause of that, is the KeyboardInterrupt.
    """
    try:
        yield
    except SystemError as error:
        cause: BaseException | None = error
        while isinstance(cause, SystemError):
            cause = cause.__cause__
        if isinstance(cause, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        raise


@contextmanager
def ends_at(deadline: float, over: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise `TimeUp` inside when the deadline (`time.perf_counter`) comes, or what else is `over`,
    which is asked now and then."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(
        signal, "setitimer"
    ):
        with interruptible():
            yield
        return

    def left() -> float:
        seconds = max(1e-3, deadline - time.perf_counter())
        return seconds if over is None else min(seconds, _ASKED)

    rung = False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung
        if _depth or _collecting(frame):
            signal.setitimer(signal.ITIMER_REAL, _LATER)
        elif over is not None and time.perf_counter() < deadline and not over():
            signal.setitimer(signal.ITIMER_REAL, left())
        else:
            rung = True
            raise TimeUp

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, left())
    try:
        with interruptible():
            yield
    except Exception as error:
        # A library's C code that calls Python raises an error of its own in the end's place: NumPy
        # says of arrays of records that it cannot compare them.
        if rung:
            raise TimeUp from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
