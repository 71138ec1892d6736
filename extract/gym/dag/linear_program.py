"""Linear and mixed-integer programs by HiGHS, which rows are added to between solutions.

Through `highspy` where it is installed, which goes on from the last basis; else through scipy,
which carries HiGHS too and solves from the start each time. Both give the same answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.gym.choices.choices import Flags, Ints

Floats = NDArray[np.float64]

#: Rows as (columns, coefficients, lower, upper).
Row = tuple[Sequence[int], Sequence[float], float, float]


@dataclass(frozen=True)
class Solved:
    """One solution: `x` is None where none was found; `bound` is proven either way."""

    x: Floats | None  # [columns]
    value: float
    bound: float
    optimal: bool
    infeasible: bool
    reduced: Floats | None = None  # [columns] reduced costs, linear programs only
    duals: Floats | None = None  # [rows] multipliers, linear programs only


class LinearProgram:
    """minimise cost · x with rows lower <= A x <= upper and bounds on columns."""

    def __init__(self, cost: Floats, lower: Floats, upper: Floats, rows: Sequence[Row]) -> None:
        self.cost, self.lower, self.upper = cost, lower.copy(), upper.copy()
        self.rows: list[Row] = []
        self._highs: Any = None
        if find_spec("highspy") is not None:
            self._highs = _model(cost, lower, upper)
        self.add(rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows at the end."""
        self.rows.extend(rows)
        if self._highs is None or not rows:
            return
        start, columns, values, low, high = _flat(rows)
        self._highs.addRows(len(rows), low, high, len(columns), start[:-1], columns, values)

    def widen(self, upper: Floats) -> int:
        """Add columns from 0 to `upper`, without cost, at the end; returns the first's number."""
        first, zeros = len(self.cost), np.zeros(len(upper))
        self.cost = np.concatenate((self.cost, zeros))
        self.lower = np.concatenate((self.lower, zeros))
        self.upper = np.concatenate((self.upper, upper))
        if self._highs is not None:
            no_rows = np.zeros(0, dtype=np.int32)
            starts = np.zeros(len(upper), dtype=np.int32)
            self._highs.addCols(len(upper), zeros, zeros, upper, 0, starts, no_rows, np.zeros(0))
        return first

    def reprice(self, cost: Floats) -> None:
        """Give the columns other costs."""
        self.cost = cost
        if self._highs is not None:
            every = np.arange(len(cost), dtype=np.int32)
            self._highs.changeColsCost(len(cost), every, cost)

    def fix(self, columns: Ints, value: float = 0.0) -> None:
        """Fix columns at a value."""
        self.lower[columns] = self.upper[columns] = value
        if self._highs is not None and len(columns):
            fixed = np.full(len(columns), value)
            self._highs.changeColsBounds(len(columns), columns.astype(np.int32), fixed, fixed)

    def relaxed(self, seconds: float) -> Solved:
        """The solution without integrality."""
        if self._highs is None:
            return self._scipy(None, seconds, 0.0)
        import highspy

        h = self._highs
        h.setOptionValue("time_limit", float(h.getRunTime() + seconds))
        h.run()
        status = h.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solved(None, np.inf, np.inf, False, True)
        if status != highspy.HighsModelStatus.kOptimal:
            return Solved(None, np.inf, -np.inf, False, False)
        solution = h.getSolution()
        value = float(h.getInfo().objective_function_value)
        return Solved(
            np.array(solution.col_value),
            value,
            value,
            True,
            False,
            np.array(solution.col_dual),
            np.array(solution.row_dual),
        )

    def integral(
        self,
        whole: Flags,
        seconds: float,
        gap: float,
        start: Floats | None,
        seed: int = 0,
    ) -> Solved:
        """The solution with the flagged columns integral, to an absolute gap; from `start`."""
        if self._highs is None:
            return self._scipy(whole, seconds, gap)
        import highspy

        h = self._highs
        kinds = np.where(whole, 1, 0).astype(np.uint8)
        h.changeColsIntegrality(len(kinds), np.arange(len(kinds), dtype=np.int32), kinds)
        h.setOptionValue("mip_rel_gap", 0.0)
        h.setOptionValue("mip_abs_gap", gap)
        h.setOptionValue("random_seed", seed)
        h.setOptionValue("time_limit", float(h.getRunTime() + seconds))
        if start is not None:
            guess = highspy.HighsSolution()
            guess.col_value = start.tolist()
            h.setSolution(guess)
        h.run()
        status = h.getModelStatus()
        if status == highspy.HighsModelStatus.kInfeasible:
            return Solved(None, np.inf, np.inf, False, True)
        info = h.getInfo()
        bound = float(info.mip_dual_bound)
        if info.primal_solution_status != 2:
            return Solved(None, np.inf, bound, False, False)
        x = np.array(h.getSolution().col_value)
        optimal = status == highspy.HighsModelStatus.kOptimal
        return Solved(x, float(info.objective_function_value), bound, optimal, False)

    def _scipy(self, whole: Flags | None, seconds: float, gap: float) -> Solved:
        from scipy.optimize import Bounds, LinearConstraint, linprog
        from scipy.sparse import csr_matrix

        from tapestry_egg.extract.gym.choices.mixed_integer import milp

        start, columns, values, low, high = _flat(self.rows)
        matrix = csr_matrix((values, columns, start), shape=(len(self.rows), len(self.cost)))
        options: dict[str, Any] = {"time_limit": max(seconds, 0.01)}
        if whole is not None:
            found = milp(
                self.cost,
                integrality=whole.astype(int),
                bounds=Bounds(self.lower, self.upper),
                constraints=LinearConstraint(matrix, low, high) if self.rows else (),
                options={**options, "mip_rel_gap": gap / max(1.0, float(np.abs(self.cost).sum()))},
            )
            bound = found.mip_dual_bound
            return Solved(
                found.x,
                np.inf if found.x is None else float(found.fun),
                -np.inf if bound is None else float(bound),
                found.status == 0,
                found.status == 2,
            )
        upper = np.isfinite(high)
        lower = np.isfinite(low)
        from scipy.sparse import vstack

        both = vstack([matrix[upper], -matrix[lower]]) if self.rows else None
        right = np.concatenate((high[upper], -low[lower])) if self.rows else None
        found = linprog(
            self.cost,
            A_ub=both,
            b_ub=right,
            bounds=np.column_stack((self.lower, self.upper)),
            method="highs",
            options=options,
        )
        if found.status == 2:
            return Solved(None, np.inf, np.inf, False, True)
        if found.status != 0:
            return Solved(None, np.inf, -np.inf, False, False)
        reduced = found.lower.marginals + found.upper.marginals
        return Solved(found.x, float(found.fun), float(found.fun), True, False, reduced)


def _flat(
    rows: Sequence[Row],
) -> tuple[NDArray[np.int32], NDArray[np.int32], Floats, Floats, Floats]:
    start = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(r[0]) for r in rows], out=start[1:])
    columns = np.fromiter((c for r in rows for c in r[0]), dtype=np.int32, count=int(start[-1]))
    values = np.fromiter((v for r in rows for v in r[1]), dtype=np.float64, count=int(start[-1]))
    low = np.array([r[2] for r in rows], dtype=np.float64)
    high = np.array([r[3] for r in rows], dtype=np.float64)
    return start, columns, values, low, high


def _model(cost: Floats, lower: Floats, upper: Floats) -> Any:
    import highspy

    h = highspy.Highs()
    h.setOptionValue("output_flag", False)
    h.setOptionValue("threads", 1)
    lp = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = len(cost), 0
    lp.col_cost_, lp.col_lower_, lp.col_upper_ = cost, lower, upper
    lp.a_matrix_.format_ = highspy.MatrixFormat.kColwise
    lp.a_matrix_.start_ = np.zeros(len(cost) + 1, dtype=np.int32)
    h.passModel(lp)
    return h
