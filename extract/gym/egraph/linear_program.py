"""Linear and mixed-integer programs by scipy's HiGHS, to which rows are added between solutions."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fractions import Fraction
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.gym.choices import Flags

Floats = NDArray[np.float64]

#: Rows as (columns, coefficients, lower, upper).
Row = tuple[Sequence[int], Sequence[float], float, float]


@dataclass(frozen=True)
class Solved:
    """One solution: `x` is None where none was found; `bound` is proven either way. Reduced costs
    and multipliers are those of linear programs."""

    x: Floats | None = None  # [columns]
    value: float = np.inf
    bound: float = -np.inf
    optimal: bool = False
    infeasible: bool = False
    reduced: Floats | None = None  # [columns]
    duals: Floats | None = None  # [rows]


class LinearProgram:
    """minimise cost · x with rows lower <= A x <= upper and bounds on columns."""

    def __init__(self, cost: Floats, lower: Floats, upper: Floats, rows: Sequence[Row]) -> None:
        self.cost, self.lower, self.upper = cost, lower.copy(), upper.copy()
        self.rows: list[Row] = list(rows)

    def widen(self, upper: Floats) -> int:
        """Add columns from 0 to `upper`, without cost, at the end; returns the first's number."""
        first, zeros = len(self.cost), np.zeros(len(upper))
        self.cost = np.concatenate((self.cost, zeros))
        self.lower = np.concatenate((self.lower, zeros))
        self.upper = np.concatenate((self.upper, upper))
        return first

    def fix(self, columns: Sequence[int], value: float = 0.0) -> None:
        """Fix columns at a value."""
        at = np.array(columns, dtype=np.int64)
        self.lower[at] = self.upper[at] = value

    def relaxed(self, seconds: float) -> Solved:
        """The solution without integrality."""
        from scipy.optimize import linprog
        from scipy.sparse import vstack

        matrix, low, high = self._matrix()
        above, below = np.isfinite(high), np.isfinite(low)
        found = linprog(
            self.cost,
            A_ub=vstack([matrix[above], -matrix[below]]) if self.rows else None,
            b_ub=np.concatenate((high[above], -low[below])) if self.rows else None,
            bounds=np.column_stack((self.lower, self.upper)),
            method="highs",
            options={"time_limit": max(seconds, 0.01)},
        )
        if found.status != 0:
            return Solved(infeasible=found.status == 2)
        duals = np.zeros(len(self.rows))
        if self.rows:
            duals[above] += found.ineqlin.marginals[: above.sum()]
            duals[below] -= found.ineqlin.marginals[above.sum() :]
        reduced, value = found.lower.marginals + found.upper.marginals, float(found.fun)
        return Solved(found.x, value, value, True, False, reduced, duals)

    def integral(self, whole: Flags, seconds: float, gap: float) -> Solved:
        """The solution with the flagged columns integral, to an absolute gap."""
        from scipy.optimize import Bounds, LinearConstraint, milp

        matrix, low, high = self._matrix()
        with _output_to_errors():
            found = milp(
                self.cost,
                integrality=whole.astype(int),
                bounds=Bounds(self.lower, self.upper),
                constraints=LinearConstraint(matrix, low, high) if self.rows else (),
                options={
                    "time_limit": max(seconds, 0.01),
                    "mip_rel_gap": gap / max(1.0, float(np.abs(self.cost).sum())),
                },
            )
        bound = -np.inf if found.mip_dual_bound is None else float(found.mip_dual_bound)
        value = np.inf if found.x is None else float(found.fun)
        return Solved(found.x, value, bound, found.status == 0, found.status == 2)

    def checked(self, solved: Solved) -> float:
        """The value of a relaxation as its multipliers prove it in exact arithmetic."""
        if solved.duals is None:
            return -math.inf
        rows = self.rows[: len(solved.duals)]
        found = dual_bound(self.cost, self.lower, self.upper, rows, solved.duals)
        return -math.inf if found is None else min(solved.value, float(found))

    def _matrix(self) -> tuple[Any, Floats, Floats]:
        """The rows, sparse, and what they are at least and at most."""
        from scipy.sparse import csr_matrix

        start = np.cumsum([0, *(len(r[0]) for r in self.rows)])
        columns = np.fromiter((c for r in self.rows for c in r[0]), np.int32, int(start[-1]))
        values = np.fromiter((v for r in self.rows for v in r[1]), np.float64, int(start[-1]))
        low = np.array([r[2] for r in self.rows], dtype=np.float64)
        high = np.array([r[3] for r in self.rows], dtype=np.float64)
        shape = len(self.rows), len(self.cost)
        return csr_matrix((values, columns, start), shape=shape), low, high


def dual_bound(
    cost: Floats, lower: Floats, upper: Floats, rows: Sequence[Row], multipliers: Floats
) -> Fraction | None:
    """The bound on cost · x that multipliers of the rows prove; None where they prove none.

    Any multipliers prove a bound (weak duality): the rows' sides weighted by them, plus for each
    column the least that its remaining cost can add within its bounds. A positive multiplier leans
    on its row's lower side, a negative one on the upper; one whose side is infinite counts as zero.
    """
    remaining = [Fraction(c) for c in cost.tolist()]
    total = Fraction(0)
    for (columns, coefficients, low, high), y in zip(rows, multipliers.tolist(), strict=True):
        side = low if y > 0 else high
        if not y or math.isinf(side):
            continue
        weight = Fraction(y)
        total += weight * Fraction(float(side))
        for j, a in zip(columns, coefficients, strict=True):
            remaining[j] -= weight * Fraction(float(a))
    for value, least, most in zip(remaining, lower.tolist(), upper.tolist(), strict=True):
        if value:
            end = least if value > 0 else most
            if math.isinf(end):
                return None
            total += value * Fraction(end)
    return total


_LOCK = Lock()


@contextmanager
def _output_to_errors() -> Iterator[None]:
    """HiGHS prints a line now and then, whatever it is told, where others read a table or JSON: it
    goes to the standard error. A process without both streams is left as it is."""
    with _LOCK:
        output = -1
        with suppress(OSError):
            _flush()
            output = os.dup(1)
            os.dup2(2, 1)
        try:
            yield
        finally:
            if output >= 0:
                _flush()
                os.dup2(output, 1)
                os.close(output)


def _flush() -> None:
    """What C's own buffer of the standard output holds leaves it now."""
    with suppress(OSError, TypeError, AttributeError):  # where there is no C library of that name
        ctypes.CDLL(None).fflush(None)
