"""Exact solution of small problems within limits on memory and joules, as a mixed-integer program.

Lagrangian bounds cannot see between the corners of the convex hull; on problems small enough this
closes what they leave open. The formulation is the textbook one: a binary per row, a marginal per
legal pair of labels, a row for the joules where they have a limit, and a memory row for every time
at which a solution was caught above the limit (added lazily).

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
from tapestry_egg.products import dot
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

# What the largest cost is scaled to; limits are scaled to 1. By so much more may be held, and
# spent, in the solver's program: its presolve loses plans that hold as much as the limit.
_LARGE, _MORE = 1e4, 1e-6

# Without whole numbers a program takes such a share of what it takes with them (measured on the
# example of README). Of its columns those first that come to no more than so much above that, as
# shares; what is left out comes to more than is asked for by this share at least, for the solver's
# tolerances.
_RELAXED, _NEAR, _SLACK = 0.06, (0.01, 0.04), 1e-5
# What such a program takes as a rule, as a share of what a whole one does.
_BELOW = 0.25

# Fewer joules than this are scaled as if they were so many.
_LEAST = 1e-12


@dataclass(frozen=True)
class Exact:
    """The best labelling within the limits, if one was found, and a proven bound on seconds;
    whether the solver was ended `by_clock`."""

    rows: Ints | None  # [variables]
    bound: float
    by_clock: bool = False


def small(problem: Problem) -> bool:
    """Whether a problem is of a size for this method."""
    return columns(problem) <= COLUMNS


def units(problem: Problem) -> float:
    """About how much work it is to solve a problem within one pair of limits, of which no plan is
    known."""
    return (columns(problem) / _COLUMNS_PER_UNIT) ** 2


def units_below(problem: Problem) -> float:
    """About how much work that is where a plan is known, and only faster ones are looked for."""
    return _BELOW * units(problem)


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
    joules: float = np.inf,
    known: float = np.inf,
) -> Exact:
    """Minimise seconds, to the share `gap`, with the peak within `limit` bytes and no more than
    `joules` of all devices, for at most `seconds` of time and so many `nodes` of branch and bound.

    `decisive` times, at which memory is known to be short, have a row from the start. Where there
    is a timeline so have paths, by the `shares` of its events in them, and others as solutions turn
    up that take longer. Where some plan within the limits is `known`, by its seconds, the bound is
    no more than these, and without a timeline columns that only slower ones have are left out. What
    the solver does is added to `work`, as far as it can be told.
    """
    model = _Model(problem)
    deadline = time.perf_counter() + seconds
    times = sorted(set(decisive)) if limit < np.inf else []
    timeline = problem.timeline
    paths = [model.path(x) for x in shares or ([] if timeline is None else [timeline.evenly()])]
    within = _Within(model, limit, joules, deadline, work or Work(), times)
    if timeline is not None or known == np.inf:
        return within.best(np.arange(model.columns), gap, nodes, paths)
    return within.faster(known, gap, nodes)


class _Within:
    """A program within limits: what is the best of some of its columns."""

    def __init__(
        self,
        model: _Model,
        limit: float,
        joules: float,
        deadline: float,
        work: Work,
        times: list[int],
    ) -> None:
        self.model, self.limit, self.joules = model, limit, joules
        self.deadline, self.work, self.times = deadline, work, times
        self.visited = 0

    def faster(self, known: float, gap: float, nodes: int) -> Exact:
        """The best labelling, of which one of so many seconds is known.

        A column adds what it costs at the prices of the relaxation to what that takes (its reduced
        cost); those that come to more than is known are in nothing faster. Most do, and of the rest
        those first that come to little more than the relaxation: what is best is there as a rule.
        """
        relaxed = self._relaxed()
        if relaxed is None:
            return self.best(np.arange(self.model.columns), gap, nodes, [])
        value, reduced = relaxed
        if value == np.inf:
            return Exact(None, np.inf)
        bound = min(value / self.model.unit, known)
        for share in (*_NEAR, np.inf):
            most = min(known, value / self.model.unit * (1.0 + share))
            kept = np.flatnonzero(value + reduced <= most * self.model.unit * (1.0 + _SLACK))
            found = self.best(kept, gap, max(1, nodes - self.visited), [])
            bound = max(bound, min(found.bound, most))
            # What is left out takes more than this.
            if found.bound < most or most == known or found.by_clock:
                return Exact(found.rows, bound, found.by_clock)
        raise AssertionError("unreachable")

    def _relaxed(self) -> tuple[float, Floats] | None:
        """The least (scaled) cost of the program without whole numbers, infinite where it has no
        solution, and the reduced costs of its columns; None where the solver ended without."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_matrix

        model = self.model
        while True:
            left = self.deadline - time.perf_counter()
            if left <= 0.1:
                return None
            rows, most = self._limits(np.arange(model.columns))
            # The solver's presolve takes longer than all that is left to do without it, and says
            # that there is nothing of some programs that have solutions (`_solved`).
            found = linprog(
                model.cost * model.unit,
                A_ub=None if rows is None else csr_matrix(rows),
                b_ub=most,
                A_eq=model.equal,
                b_eq=model.right,
                bounds=np.column_stack((np.zeros(model.columns), model.possible)),
                method="highs",
                options={"time_limit": left, "presolve": False},
            )
            self.work.add_units(_RELAXED * units(model.problem))
            if found.status == _NONE:
                return np.inf, np.zeros(model.columns)
            if found.x is None or found.status:
                return None
            if not self._more_times(model.held(found.x)):
                return float(found.fun), found.lower.marginals

    def _limits(self, columns: Ints) -> tuple[Any, Floats | None]:
        """What some columns have of what is limited, and how much of each all may have."""
        rows = []
        if self.times:
            rows.append(self.model.memory(self.times)[:, columns] / max(self.limit, 1.0))
        if self.joules < np.inf:
            rows.append(self.model.joules[np.newaxis, columns] / max(self.joules, _LEAST))
        if not rows:
            return None, None
        every = np.vstack(rows)
        # A limit of less than a byte is one of none.
        most = np.full(len(every), 1.0 + _MORE)
        most[: len(self.times)] *= self.limit / max(self.limit, 1.0)
        return every, most

    def _more_times(self, profile: Floats) -> bool:
        """Count memory at more times, where a solution holds too much; whether there are some."""
        over = np.flatnonzero(profile > self.limit * (1.0 + 2.0 * _MORE))
        if not over.size:
            return False
        worst = int(profile.argmax())
        fresh = {worst, int(over[0]), int(over[-1])}.difference(self.times)
        self.times = sorted(fresh.union(self.times))
        return bool(fresh)

    def best(self, columns: Ints, gap: float, nodes: int, paths: list[Floats]) -> Exact:
        """The best labelling of some columns."""
        from scipy.optimize import Bounds, LinearConstraint

        model, problem = self.model, self.model.problem
        timeline = problem.timeline
        if not model.is_whole(columns):
            return Exact(None, float("inf"))
        equal = model.equal[:, columns]
        bound, share = 0.0, len(columns) / model.columns
        while True:
            left = self.deadline - time.perf_counter()
            if left <= 0.1:
                return Exact(None, bound, True)
            constraints = [LinearConstraint(equal, model.right, model.right)]
            rows_, most_ = self._limits(columns)
            if rows_ is not None:
                constraints.append(LinearConstraint(rows_, -np.inf, most_))
            cost, integral = model.cost[columns] * model.unit, model.integral[columns]
            most = model.possible[columns]
            if timeline is not None:  # one more column: the seconds of the longest path
                constraints = [_widened(c) for c in constraints]
                each = np.array(paths)[:, columns] * model.unit
                each = np.column_stack((each, -np.ones(len(paths))))
                constraints.append(LinearConstraint(each, -np.inf, 0.0))
                cost = np.append(np.zeros(len(cost)), 1.0)
                integral, most = np.append(integral, 0.0), np.append(most, np.inf)
            options = {"time_limit": left, "node_limit": nodes, "mip_rel_gap": gap}
            found = _solved(cost, integral, Bounds(0.0, most), constraints, options)
            late = time.perf_counter() >= self.deadline
            visited = int(found.mip_node_count or 0)
            self.visited += visited
            nodes = max(1, nodes - visited)
            self.work.add_units(units(problem) * share**2 * (1.0 + visited / _AS_LONG))
            if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
                bound = max(bound, float(found.mip_dual_bound) / model.unit)
            if found.x is None:
                return Exact(None, float("inf") if found.status == _NONE else bound, late)
            x = np.zeros(model.columns)
            x[columns] = found.x[: len(columns)]
            rows = model.rows(x)
            true, took, profile = problem.evaluate(rows)
            over = np.flatnonzero(profile > self.limit * (1 + 1e-9))
            if not over.size and took > self.joules * (1 + 1e-9):  # by less than can be told
                return Exact(None, bound, late)
            if not over.size:
                if timeline is None or true <= bound * (1 + 2 * gap) or late:
                    return Exact(rows, bound, late)
                fresh_path = model.path(timeline.shares(problem.lengths(rows)))
                if any(np.allclose(fresh_path, known, rtol=1e-9, atol=0.0) for known in paths):
                    return Exact(rows, bound, late)
                paths.append(fresh_path)
                continue
            worst = int(profile.argmax())
            fresh = sorted({worst, int(over[0]), int(over[-1])}.difference(self.times))
            if not fresh:  # over by less than the solver can tell
                return Exact(None, bound, late)
            self.times = sorted({*self.times, *fresh})


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
        spent = [np.concatenate([v.joules for v in problem.variables])]
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
            spent.append(p.joules[la, lb])
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
        self.joules = np.where(self.possible > 0.0, np.concatenate(spent), 0.0)
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

    def is_whole(self, columns: Ints) -> bool:
        """Whether every variable has a row among some columns, in order."""
        of = np.searchsorted(columns, self.start)
        return bool((np.diff(of) > 0).all())

    def held(self, x: Floats) -> Floats:
        """Bytes at each time of a solution, whole or not."""
        change = np.zeros(self.problem.times + 1)

        def add(use: Use, amount: float) -> None:
            change[use.start] += amount
            change[use.end] -= amount

        for i, v in enumerate(self.problem.variables):
            for use in v.uses:
                add(use, dot(x[self.start[i] : self.start[i + 1]], use.amount))
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for use in p.uses:
                add(use, dot(x[column : column + len(la)], use.amount[la, lb]))
        held: Floats = np.cumsum(change)[:-1]
        return held

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
