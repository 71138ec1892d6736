"""Products of arrays that round the same on every call.

BLAS divides a product among as many threads as a process happens to have and adds up in another
order for other numbers of them; a search in a worker process would differ from one here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def dot(a: Floats, b: Floats) -> float:
    """The sum of the products of two rows of numbers."""
    return float(np.einsum("i,i->", a, b))


def matrix_product(a: Floats, b: Floats, out: Floats) -> None:
    """Write a [m, k] times b [k, n] into `out` [m, n]."""
    np.einsum("mk,kn->mn", a, b, out=out)
