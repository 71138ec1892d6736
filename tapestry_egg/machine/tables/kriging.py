"""Smoothing and interpolation of measured times over shapes: Gaussian processes (kriging).

Times of matrix products vary smoothly with the logarithms of their sizes, but for jumps where the
library takes another kernel; those it takes for a product and for its transpose are mostly the
same. The model is the usual one (Rasmussen and Williams, "Gaussian Processes for Machine Learning",
2006, chapter 2): log seconds = a plane + a smooth part + a rough part + noise. Its parameters are
one set for all tables; they were chosen by leaving out each row of XLA's tables in turn.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Variances of the parts of a log time, lengths in doublings of a size (of batch, m, n, k), and how
# much two dtypes of operands of equal width have in common. The kernel that a library takes goes by
# batch, m and n; it stays the same along k.
_SMOOTH, _SMOOTH_LENGTH = 0.3, 6.0
_ROUGH, _ROUGH_LENGTHS, _TRANSPOSED = 0.03, (0.3, 0.5, 0.5, 4.0), 0.9
_NOISE = 5e-4
_PLANE = 10.0
_SHARED = 0.99


@dataclass(frozen=True)
class Process:
    """What is known of log times at `points` [n, 4]: log2 of batch, m, n, k; and their column."""

    points: Array  # [n, 4]
    column: NDArray[np.int64]  # [n]
    values: Array  # [n], logarithms of seconds

    def covariance(self, points: Array, column: NDArray[np.int64]) -> Array:
        """[rows, n] covariances with what is known."""
        mine, theirs = points[:, None, :], self.points[None, :, :]
        apart = np.abs(mine - theirs)
        smooth = np.ones(apart.shape[:2])
        for a in range(apart.shape[2]):
            x = np.sqrt(3.0) * apart[:, :, a] / _SMOOTH_LENGTH
            smooth *= (1.0 + x) * np.exp(-x)  # Matérn 3/2
        lengths = np.array(_ROUGH_LENGTHS)
        straight = np.exp(-(apart / lengths).sum(axis=2))
        turned = np.exp(-(np.abs(mine - theirs[:, :, [0, 2, 1, 3]]) / lengths).sum(axis=2))
        rough = straight + _TRANSPOSED / 2 * (turned - straight)
        same = column[:, None] == self.column[None, :]
        parts = _SMOOTH * smooth + _ROUGH * rough
        plane = _PLANE * ((mine - 9.0) * (theirs - 9.0)).sum(axis=2)  # sizes around 2^9
        out: Array = np.where(same, 1.0, _SHARED) * parts + plane + _PLANE * same
        return out

    def _known(self) -> Array:
        known = self.covariance(self.points, self.column)
        known[np.diag_indices(len(known))] += _NOISE
        return known

    def predict(self, points: Array, column: int) -> Array:
        """Expected log times at other points of one column."""
        weights = solved(self._known(), self.values)
        near = self.covariance(points, np.full(len(points), column))
        out: Array = np.einsum("pn,n->p", near, weights)
        return out

    def left_out(self) -> Array:
        """What each row is expected to be from all the others, less what it is.

        Row i alone is left out by (K⁻¹y)_i / (K⁻¹)_ii, without solving again (Sundararajan and
        Keerthi, Neural Computation 13(5), 2001).
        """
        inverse = np.linalg.inv(self._known())
        out: Array = -(inverse @ self.values) / np.diag(inverse)
        return out


def solved(known: Array, values: Array) -> Array:
    """The solution of a positive definite system, [n, n] and [n], by Cholesky's factors.

    It rounds the same however many threads BLAS has, which `numpy.linalg` does not: costs, and so
    fronts, would differ from process to process.
    """
    count = len(known)
    lower = np.zeros_like(known)
    for j in range(count):
        rest = known[j:, j] - np.einsum("ik,k->i", lower[j:, :j], lower[j, :j])
        lower[j:, j] = rest / np.sqrt(rest[0])
    x = values.astype(np.float64)
    for j in range(count):
        x[j] = (x[j] - np.einsum("k,k->", lower[j, :j], x[:j])) / lower[j, j]
    for j in reversed(range(count)):
        x[j] = (x[j] - np.einsum("k,k->", lower[j + 1 :, j], x[j + 1 :])) / lower[j, j]
    return x
