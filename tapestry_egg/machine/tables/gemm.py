"""The shape of a product of matrices, as kernels that compute one are timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import itemsize

Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Gemm(Generic[Amount]):
    """`batch` products of m×k by k×n matrices on one device, and dtypes of operands and result.

    The four counts are numbers, or arrays of one length.
    """

    batch: Amount
    m: Amount
    n: Amount
    k: Amount
    lhs: str
    rhs: str
    out: str

    @property
    def dtype(self) -> str:
        """The dtype in which it computes: the wider of the two."""
        return self.rhs if itemsize(self.rhs) > itemsize(self.lhs) else self.lhs
