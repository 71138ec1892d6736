"""Seconds by bytes of one collective in groups of one size, from times measured at some sizes.

The trend is that of a message sent in chunks one behind another: a delay, what goes by bytes, and
between them the square root of both, with chunks as large as is best (Chan et al., "Collective
communication: theory, practice, and experience", 2007, section 4). What times say beside it is
smoothed in log bytes (kriging, an exponential covariance): closely where times are steady, hardly
at small messages, whose times scatter by half from one measurement to the next. The result never
falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median

import numpy as np
from numpy.typing import NDArray

from .kriging import solved

Array = NDArray[np.float64]

#: Powers of the bytes in the trend.
_POWERS = (0.0, 0.5, 1.0)
#: Standard deviation of what stands beside the trend, over how many doublings it changes, and the
#: noise of a large message's time; in logarithms. Chosen by leaving out rows of XLA's tables.
_BESIDE, _LENGTH, _STEADY = 0.1, 4.0, 0.02
#: Bytes from which times are steady; and noise over the mean size of what a monotone fit leaves.
SMALL = 2.0**20
_NOISE = 1.5
_PER_DOUBLING = 4  # points of the curve


@dataclass(frozen=True, eq=False)
class Series:
    """Seconds by bytes of one collective in groups of `group` among `devices` devices.

    Bytes are of the whole tensor for all_gather and reduce_scatter, else of one device's. `noise`
    is how far the logarithms of times of small messages scatter.
    """

    kind: str
    dtype: str
    devices: int
    group: int
    log_bytes: Array  # natural logarithms, ascending
    log_seconds: Array  # as measured
    noise: float = 0.0

    @cached_property
    def _curve(self) -> tuple[Array, Array]:
        return _curve(self.log_bytes, self.log_seconds, self.noise)

    def at(self, log_bytes: Array) -> Array:
        """Log seconds at log bytes.

        Below the first point the time is that of the first; above the last it goes by bytes.
        """
        return _along(self._curve, log_bytes)

    def left_out(self) -> Array:
        """Relative errors, each point predicted from all the others."""
        found = []
        for k in range(len(self.log_bytes)):
            x, y = np.delete(self.log_bytes, k), np.delete(self.log_seconds, k)
            there = _along(_curve(x, y, self.noise), self.log_bytes[k : k + 1])
            found.append(float(np.expm1(there[0] - self.log_seconds[k])))
        return np.array(found)


def scatter(series: Sequence[Series]) -> float:
    """How far times of small messages scatter in a table, by what the nearest non-decreasing times
    leave of them (their mean size in logarithms; 0 where there are none)."""
    left = [
        np.abs(rising(s.log_seconds) - s.log_seconds)[s.log_bytes < np.log(SMALL)] for s in series
    ]
    known = np.concatenate(left) if left else np.zeros(0)
    return _NOISE * float(known.mean()) if len(known) else 0.0


def rising(values: Array) -> Array:
    """The non-decreasing sequence nearest to `values` in the sum of absolute differences.

    Pool adjacent violators, pools standing at their medians (Robertson and Waltman, "On estimating
    monotone parameters", Annals of Mathematical Statistics 39, 1968).
    """
    pools: list[tuple[list[float], float]] = []  # with their medians
    for v in values.tolist():
        pool, middle = [v], v
        while pools and pools[-1][1] > middle:
            pool = pools.pop()[0] + pool
            middle = median(pool)
        pools.append((pool, middle))
    return np.array([middle for pool, middle in pools for _ in pool])


def _along(curve: tuple[Array, Array], log_bytes: Array) -> Array:
    x, y = curve
    out: Array = np.interp(log_bytes, x, y) + np.maximum(log_bytes - x[-1], 0.0)
    return out


def _curve(log_bytes: Array, log_seconds: Array, noise: float) -> tuple[Array, Array]:
    """(log bytes, log seconds) between which the curve is straight: the measured sizes and some
    between them."""
    if len(log_bytes) < 2:
        return log_bytes, log_seconds
    low, high = float(log_bytes[0]), float(log_bytes[-1])
    count = int(np.ceil(_PER_DOUBLING * (high - low) / np.log(2.0))) + 1
    x = np.unique(np.concatenate([np.linspace(low, high, count), log_bytes]))
    share = _trend(log_bytes, log_seconds)
    beside = log_seconds - _trended(log_bytes, share)
    spread = _STEADY + noise / (1.0 + np.exp(log_bytes) / SMALL)
    apart = np.abs(log_bytes[:, None] - log_bytes[None, :]) / np.log(2.0)
    known = _BESIDE**2 * np.exp(-apart / _LENGTH)
    near = np.abs(x[:, None] - log_bytes[None, :]) / np.log(2.0)
    weight, found = np.ones(len(log_bytes)), np.zeros(len(log_bytes))
    for _ in range(5):  # Student's t of four degrees: what stands far off counts little
        noisy = known + np.diag(spread**2 / weight)
        found = solved(noisy, beside)
        rest = (spread**2 / weight * found) ** 2 / spread**2
        weight = 5.0 / (4.0 + rest)
    y = _trended(x, share) + np.einsum("pn,n->p", _BESIDE**2 * np.exp(-near / _LENGTH), found)
    return x, rising(y)


def _trended(log_bytes: Array, share: Array) -> Array:
    powers = np.exp(np.multiply.outer(log_bytes, np.array(_POWERS)))
    out: Array = np.log(np.einsum("np,p->n", powers, share))
    return out


def _trend(log_bytes: Array, log_seconds: Array) -> Array:
    """Coefficients of the powers, none below 0, for the least sum of relative errors: least squares
    with weights anew until they are those of absolute errors."""
    relative = np.exp(np.multiply.outer(log_bytes, np.array(_POWERS)) - log_seconds[:, None])
    scale = relative.max(axis=0)
    relative /= scale
    error, found = np.ones(len(log_bytes)), np.zeros(len(_POWERS))
    for _ in range(25):
        root = 1.0 / np.sqrt(np.maximum(error, 0.02))
        found = _nonnegative(relative * root[:, None], root, found)
        error = np.abs(np.einsum("np,p->n", relative, found) - 1.0)
    out: Array = found / scale
    return out


def _nonnegative(columns: Array, values: Array, near: Array) -> Array:
    """The x ≥ 0 of least |columns · x - values|, for a few columns (Lawson and Hanson, "Solving
    least squares problems", 1974, chapter 23), begun where `near` is above 0. SciPy's takes a third
    of a second to import."""
    x = np.zeros(columns.shape[1])
    held = np.flatnonzero(near).tolist()  # columns whose coefficient is above 0
    if held and len(values) > len(x):  # else several are best, whichever comes first
        best = _least_squares(columns[:, held], values)
        if best.min() > 0.0:
            x[held] = best
    held = np.flatnonzero(x).tolist()
    small = 1e-14 * float(np.abs(columns).sum() * np.abs(values).max(initial=0.0))
    while len(held) < len(x):
        rising_ = np.einsum("np,n->p", columns, values - np.einsum("np,p->n", columns, x))
        rising_[held] = 0.0
        if rising_.max() <= small:
            break
        held.append(int(rising_.argmax()))
        while held:
            best = _least_squares(columns[:, held], values)
            if best.min() > 0.0:
                x[held] = best
                break
            now = x[held]
            share = min(float(a / (a - b)) for a, b in zip(now, best, strict=True) if b <= 0.0)
            x[held] = now + share * (best - now)
            x[x <= 1e-15 * x.max()] = 0.0
            held = [k for k in held if x[k] > 0.0]
    return x


def _least_squares(columns: Array, values: Array) -> Array:
    """The x of least |columns · x - values|, columns made orthogonal one after another, twice; of
    one that depends on those before it 0. Rounds the same however many threads BLAS has."""
    count = columns.shape[1]
    upper, basis, rest = np.zeros((count, count)), columns.copy(), values.copy()
    x = np.zeros(count)
    for j in range(count):
        for _ in range(2):
            along = np.einsum("ni,n->i", basis[:, :j], basis[:, j])
            basis[:, j] -= np.einsum("ni,i->n", basis[:, :j], along)
            upper[:j, j] += along
        upper[j, j] = np.sqrt(np.einsum("n,n->", basis[:, j], basis[:, j]))
        if upper[j, j] <= 1e-12 * np.abs(columns[:, j]).max():
            upper[j, j] = 0.0
            basis[:, j] = 0.0
            continue
        basis[:, j] /= upper[j, j]
        x[j] = np.einsum("n,n->", basis[:, j], rest)
        rest -= x[j] * basis[:, j]
    for j in reversed(range(count)):
        x[j] = (x[j] - np.einsum("k,k->", upper[j, j + 1 :], x[j + 1 :])) / (upper[j, j] or np.inf)
    return x
