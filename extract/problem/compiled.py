"""Compiled loops: numba, with its cache wherever one can be written.

A function that is decorated here is compiled at its first call and kept on disk for the next run.
Nothing else imports numba, and no module imports this one before there is a problem to search.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """Compile a function of arrays at its first call.

    Loops release the interpreter's lock, so threads run side by side. Costs are never NaN and the
    sign of zero does not matter, so that minima are taken several at a time; sums are never
    reordered. An install that cannot be written to, and has no cache folder of the user's either,
    compiles in every process.
    """
    options: dict[str, Any] = {"nogil": True, "fastmath": {"nnan", "nsz"}, "error_model": "numpy"}
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # numba finds no folder that it may write to
        made = numba.njit(**options)(function)
    return made  # type: ignore[no-any-return]
