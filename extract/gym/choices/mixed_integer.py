"""Mixed-integer programs, as HiGHS solves them."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from typing import Any

_LOCK = Lock()
#: How many programs are being solved in this process, and the output that it had before.
_solving, _output = 0, -1


def milp(cost: Any, **asked: Any) -> Any:
    """`scipy.optimize.milp`, whose solver writes nothing into the standard output.

    HiGHS prints a line now and then, whatever it is told ("HighsMipSolverData::..."), where others
    read a table or JSON. It goes to the standard error.
    """
    from scipy.optimize import milp

    with _output_to_errors():
        return milp(cost, **asked)


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """Of all threads that solve at a time the first turns the process's output, the last turns it
    back. A process without both streams is left as it is."""
    global _solving, _output
    with _LOCK:
        _solving += 1
        if _solving == 1:
            with suppress(OSError):
                _flush()
                _output = os.dup(1)
                os.dup2(2, 1)
    try:
        yield
    finally:
        with _LOCK:
            _solving -= 1
            if not _solving and _output >= 0:
                _flush()
                os.dup2(_output, 1)
                os.close(_output)
                _output = -1


def _flush() -> None:
    """What C's own buffer of the standard output holds leaves it now."""
    with suppress(OSError, TypeError, AttributeError):  # where there is no C library of that name
        ctypes.CDLL(None).fflush(None)
