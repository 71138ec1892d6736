"""The shape of a product of matrices, as kernels that compute one are timed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import itemsize

Amount = TypeVar("Amount", float, NDArray[np.float64])


@dataclass(frozen=True, slots=True)
class Convolved(Generic[Amount]):
    """What paces a convolution beside its implicit product of matrices.

    `form` is 0, 1 where it is the gradient of weights, and 2 more where its channels are in groups
    (4 where these windows move along one dim and it is no gradient);
    `channels` the geometric mean of those of a group that it reads and makes; `padded` the bytes of
    an operand that is padded, or of a result that is cut out of a padded one, before it or after.
    Numbers, or arrays of one length.
    """

    form: Amount
    channels: Amount
    padded: Amount


@dataclass(frozen=True, slots=True)
class Gemm(Generic[Amount]):
    """`batch` products of m×k by k×n matrices on one device, and dtypes of operands and result.

    The four counts are numbers, or arrays of one length. `convolved` is there where it is the
    implicit product of a convolution; `precision` is high or highest where one is asked for.
    """

    batch: Amount
    m: Amount
    n: Amount
    k: Amount
    lhs: str
    rhs: str
    out: str
    convolved: Convolved[Amount] | None = None
    precision: str = ""

    @property
    def dtype(self) -> str:
        """The dtype in which it computes: the wider of the two, and the precision that is asked
        for, as `float32@highest`."""
        wider = self.rhs if itemsize(self.rhs) > itemsize(self.lhs) else self.lhs
        return f"{wider}@{self.precision}" if self.precision else wider
