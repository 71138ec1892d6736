"""Exact solution of small problems under one memory limit, as a mixed-integer program.

Lagrangian bounds cannot see between the corners of the convex hull; on problems small enough this
closes what they leave open. The formulation is the textbook one: a binary per row, a marginal per
legal pair of labels, and a memory row for every time at which a solution was caught above the
limit (added lazily).

The solver cannot be stopped after so much work, only by the clock. So what a program will take is
estimated from its size, and one that is too large for the work that is left is not begun; the clock
ends only one that takes far longer than others of its size.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Use, Variable
from tapestry_egg.work import Work

from .mixed_integer import milp

if TYPE_CHECKING:
    from scipy.optimize import Bounds, LinearConstraint

# Programs of more columns than this are left to the bounds, which the front's notes count: one of
# this size takes about 25 units of work, a good part of the usual 90.
COLUMNS = 40_000

# A program of so many columns takes about a unit of work, others by the square of theirs (measured
# on the example of README, 12 224 columns, and on random problems of 5 191 columns).
_COLUMNS_PER_UNIT = 8_000

#: So many nodes of branch and bound are worth the proof of one limit. No measurement of it is kept;
#: limits that it leaves open are counted in the front's notes.
NODES = 200
# So many take as long as what comes before the first.
_AS_LONG = 50

# The solver's word for a program without solutions.
_NONE = 2

# What the largest cost is scaled to; the memory limit is scaled to 1. By so much more may be held
# in the solver's program: its presolve loses plans that hold as much as the limit.
_LARGE, _MORE = 1e4, 1e-6


@dataclass(frozen=True)
class Exact:
    """The best labelling within the limit, if one was found, and a proven bound on seconds;
    whether the solver was ended `by_clock`."""

    rows: Ints | None  # [variables]
    bound: float
    by_clock: bool = False


def small(problem: Problem) -> bool:
    """Whether a problem is of a size for this method."""
    return columns(problem) <= COLUMNS


def units(problem: Problem) -> float:
    """About how much work it is to solve a problem under one limit."""
    return (columns(problem) / _COLUMNS_PER_UNIT) ** 2


def columns(problem: Problem) -> int:
    """Rows of all variables and legal entries of all pairs."""
    legal = sum(int(np.isfinite(p.seconds).sum()) for p in problem.pairs)
    return sum(len(v) for v in problem.variables) + legal


def solve(
    problem: Problem,
    limit: float,
    seconds: float,
    gap: float = 1e-4,
    decisive: Sequence[int] = (),
    work: Work | None = None,
    nodes: int = 10**9,
    shares: Sequence[Floats] = (),
) -> Exact:
    """Minimise seconds, to the share `gap`, with the peak within `limit` bytes, for at most
    `seconds` of time and so many `nodes` of branch and bound.

    `decisive` times, at which memory is known to be short, have a row from the start. Where there
    is a timeline so have paths, by the `shares` of its events in them, and others as solutions turn
    up that take longer. What the solver does is added to `work`, as far as it can be told.
    """
    from scipy.optimize import Bounds, LinearConstraint

    model = _Model(problem)
    deadline = time.perf_counter() + seconds
    bound = 0.0
    times = sorted(set(decisive)) if limit < np.inf else []
    timeline = problem.timeline
    paths = [model.path(x) for x in shares or ([] if timeline is None else [timeline.evenly()])]
    while True:
        left = deadline - time.perf_counter()
        if left <= 0.1:
            return Exact(None, bound, True)
        constraints = [LinearConstraint(model.equal, model.right, model.right)]
        if times:
            unit = 1.0 / max(limit, 1.0)
            most_held = limit * unit * (1.0 + _MORE)
            constraints.append(LinearConstraint(model.memory(times) * unit, -np.inf, most_held))
        cost, integral, most = model.cost * model.unit, model.integral, model.possible
        if timeline is not None:  # one more column: the seconds of the longest path
            constraints = [_widened(c) for c in constraints]
            rows_ = np.column_stack((np.array(paths) * model.unit, -np.ones(len(paths))))
            constraints.append(LinearConstraint(rows_, -np.inf, 0.0))
            cost = np.append(np.zeros(len(cost)), 1.0)
            integral, most = np.append(integral, 0.0), np.append(most, np.inf)
        options = {"time_limit": left, "node_limit": nodes, "mip_rel_gap": gap}
        found = _solved(cost, integral, Bounds(0.0, most), constraints, options)
        late = time.perf_counter() >= deadline
        visited = int(found.mip_node_count or 0)
        nodes = max(1, nodes - visited)
        if work is not None:
            work.add_units(units(problem) * (1.0 + visited / _AS_LONG))
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, float(found.mip_dual_bound) / model.unit)
        if found.x is None:
            return Exact(None, float("inf") if found.status == _NONE else bound, late)
        rows = model.rows(found.x)
        true, _, profile = problem.evaluate(rows)
        over = np.flatnonzero(profile > limit * (1 + 1e-9))
        if not over.size:
            if timeline is None or true <= bound * (1 + 2 * gap) or late:
                return Exact(rows, bound, late)
            fresh_path = model.path(timeline.shares(problem.lengths(rows)))
            if any(np.allclose(fresh_path, known, rtol=1e-9, atol=0.0) for known in paths):
                return Exact(rows, bound, late)
            paths.append(fresh_path)
            continue
        worst = int(profile.argmax())
        fresh = sorted({worst, int(over[0]), int(over[-1])}.difference(times))
        if not fresh:  # over by less than the solver can tell
            return Exact(None, bound, late)
        times += fresh


def _solved(
    cost: Floats,
    integral: Floats,
    bounds: Bounds,
    constraints: Sequence[LinearConstraint],
    options: dict[str, Any],
) -> Any:
    """What the solver finds. That there is nothing it must find twice: its presolve says so of
    some programs that have solutions."""
    found = None
    for presolve in (True, False):
        if found is None or found.status == _NONE:
            found = milp(
                cost,
                integrality=integral,
                bounds=bounds,
                constraints=constraints,
                options={**options, "presolve": presolve},
            )
    return found


def _widened(constraint: LinearConstraint) -> LinearConstraint:
    """The same constraint on one more column, which it does not touch."""
    from scipy.optimize import LinearConstraint
    from scipy.sparse import csr_matrix, hstack

    more = csr_matrix((constraint.A.shape[0], 1))
    return LinearConstraint(hstack([csr_matrix(constraint.A), more]), constraint.lb, constraint.ub)


def least_peak(
    problem: Problem,
    known: float,
    seconds: float,
    decisive: Sequence[int],
    work: Work | None = None,
    nodes: int = 10**9,
) -> tuple[float, bool]:
    """Bytes that every peak has at least, from some times alone at which memory is short, and
    whether the clock ended the solver; `known` is a peak that some labelling has.

    Where this meets what is known, it does so much sooner than a program that is infeasible.
    """
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import csr_matrix, hstack

    model, times = _Model(problem), sorted(set(decisive))
    begun = time.perf_counter()
    if seconds <= 0.1:
        return 0.0, True
    unit = 1.0 / max(known, 1.0)
    columns = len(model.cost)
    memory = np.column_stack((model.memory(times) * unit, -np.ones(len(times))))
    equal = hstack([model.equal, csr_matrix((len(model.right), 1))])
    found = milp(
        np.append(np.zeros(columns), 1.0),
        integrality=np.append(model.integral, 0.0),
        bounds=Bounds(np.zeros(columns + 1), np.append(model.possible, np.inf)),
        constraints=[
            LinearConstraint(equal, model.right, model.right),
            LinearConstraint(memory, -np.inf, 0.0),
        ],
        options={"time_limit": seconds, "node_limit": nodes, "mip_rel_gap": 1e-6},
    )
    if work is not None:
        visited = int(found.mip_node_count or 0)
        work.add_units(units(problem) * (1.0 + visited / _AS_LONG))
    bound = found.mip_dual_bound
    proven = float(bound) / unit if bound is not None and np.isfinite(bound) else 0.0
    return proven, time.perf_counter() - begun >= seconds


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

    def path(self, shares: Floats) -> Floats:
        """Seconds per column on a path in which events have such shares."""
        out = np.zeros(self.columns)
        for i, v in enumerate(self.problem.variables):
            for span in v.spans:
                out[self.start[i] : self.start[i + 1]] += shares[span.event] * span.amount
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for span in p.spans:
                out[column : column + len(la)] += shares[span.event] * span.amount[la, lb]
        return out

    def rows(self, x: Floats) -> Ints:
        """The labelling of a solution."""
        return np.array(
            [int(x[a:b].argmax()) for a, b in zip(self.start[:-1], self.start[1:], strict=True)]
        )
