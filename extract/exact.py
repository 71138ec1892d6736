"""Exact solution of small problems under one memory limit, as a mixed-integer program.

Lagrangian bounds cannot see between the corners of the convex hull; on problems small enough this
closes what they leave open. The formulation is the textbook one: a binary per row, a marginal per
legal pair of labels, and a memory row for every time at which a solution was caught above the
limit (added lazily).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .problem import Floats, Ints, Pair, Problem, Use, Variable

# Programs with more pair entries than this are left to the bounds.
ENTRIES = 60_000

# What the largest cost is scaled to; the memory limit is scaled to 1.
_LARGE = 1e4


@dataclass(frozen=True)
class Exact:
    """The best labelling within the limit, if one was found, and a proven bound on seconds."""

    rows: Ints | None
    bound: float


def small(problem: Problem) -> bool:
    """Whether a problem is of a size for this method."""
    return sum(p.seconds.size for p in problem.pairs) <= ENTRIES


def solve(problem: Problem, limit: float, seconds: float) -> Exact:
    """Minimise seconds with the peak within `limit` bytes, for at most `seconds` of time."""
    import time

    from scipy.optimize import Bounds, LinearConstraint, milp

    model = _Model(problem)
    deadline = time.perf_counter() + seconds
    bound = 0.0
    times: list[int] = []
    while True:
        left = deadline - time.perf_counter()
        if left <= 0.1:
            return Exact(None, bound)
        constraints = [LinearConstraint(model.equal, model.right, model.right)]
        if times:
            room = limit - problem.constant[times]
            unit = 1.0 / max(limit, 1.0)
            constraints.append(LinearConstraint(model.memory(times) * unit, -np.inf, room * unit))
        found = milp(
            model.cost * model.unit,
            integrality=model.integral,
            bounds=Bounds(0.0, model.possible),
            constraints=constraints,
            options={"time_limit": left, "mip_rel_gap": 1e-4},
        )
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, float(found.mip_dual_bound) / model.unit)
        if found.x is None:
            return Exact(None, float("inf") if found.status == 2 else bound)
        rows = model.rows(found.x)
        *_, profile = problem.evaluate(rows)
        over = np.flatnonzero(profile > limit * (1 + 1e-9))
        if not over.size:
            return Exact(rows, bound)
        worst = int(profile.argmax())
        fresh = [t for t in {worst, int(over[0]), int(over[-1])} if t not in times]
        if not fresh:  # over by less than the solver can tell
            return Exact(None, bound)
        times += fresh


def _most(amounts: Floats) -> float:
    return float(np.max(amounts[np.isfinite(amounts)], initial=0.0))


class _Model:
    """Columns: rows of all variables, then legal entries of all pairs."""

    def __init__(self, problem: Problem) -> None:
        from scipy.sparse import coo_matrix

        self.problem = problem
        sizes = [len(v) for v in problem.variables]
        self.start = np.concatenate(([0], np.cumsum(sizes)))
        cost = [np.concatenate([v.seconds for v in problem.variables])]
        data: list[Floats] = []
        row_at: list[Ints] = []
        column_at: list[Ints] = []
        count = 0

        def entries(rows: Ints, columns: Ints, value: float) -> None:
            row_at.append(rows)
            column_at.append(columns)
            data.append(np.full(len(columns), value))

        for i, size in enumerate(sizes):
            entries(np.full(size, count), self.start[i] + np.arange(size), 1.0)
            count += 1
        ones = count
        self.legal: list[tuple[NDArray[np.intp], NDArray[np.intp], int]] = []
        column = int(self.start[-1])
        for p in problem.pairs:
            la, lb = np.nonzero(np.isfinite(p.seconds))
            self.legal.append((la, lb, column))
            cost.append(p.seconds[la, lb])
            where = column + np.arange(len(la))
            for labels, mine, variable, n in (
                (la, p.label_a, p.a, p.seconds.shape[0]),
                (lb, p.label_b, p.b, p.seconds.shape[1]),
            ):
                entries(count + labels, where, 1.0)
                entries(count + mine, self.start[variable] + np.arange(len(mine)), -1.0)
                count += n
            column += len(la)
        self.cost = np.concatenate(cost)
        self.possible = np.isfinite(self.cost).astype(float)
        self.cost[~np.isfinite(self.cost)] = 0.0
        # The solver's tolerances are absolute, and costs are microseconds.
        parts: list[Variable | Pair] = [*problem.variables, *problem.pairs]
        self.unit = _LARGE / (max(_most(p.seconds) for p in parts) or 1.0)
        self.integral = np.zeros(column)
        self.integral[: self.start[-1]] = 1
        self.equal = coo_matrix(
            (np.concatenate(data), (np.concatenate(row_at), np.concatenate(column_at))),
            shape=(count, column),
        ).tocsr()
        self.right = np.concatenate((np.ones(ones), np.zeros(count - ones)))
        self.columns = column

    def memory(self, times: list[int]) -> Floats:
        """Bytes per column at each of the given times."""
        out = np.zeros((len(times), self.columns))

        def active(use: Use) -> list[int]:
            return [k for k, t in enumerate(times) if use.start <= t < use.end]

        for i, v in enumerate(self.problem.variables):
            for use in v.uses:
                for k in active(use):
                    out[k, self.start[i] : self.start[i + 1]] += use.amount
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for use in p.uses:
                for k in active(use):
                    out[k, column : column + len(la)] += use.amount[la, lb]
        return out

    def rows(self, x: Floats) -> Ints:
        """The labelling of a solution."""
        return np.array(
            [int(x[a:b].argmax()) for a, b in zip(self.start[:-1], self.start[1:], strict=True)]
        )
