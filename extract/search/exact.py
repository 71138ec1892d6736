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
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.problem import Floats, Ints, Pair, Problem, Use, Variable
from tapestry_egg.work import Work

from .dual import Prices
from .products import dot

if TYPE_CHECKING:
    from scipy.optimize import LinearConstraint
    from scipy.sparse import coo_matrix

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

# Near so many of the known prices other shares of what may be merged are tried.
_NEAR = 2
# The share of a gap that is asked for where bytes are paid for.
_SHARE = 0.3
# So many steps towards prices of what may be merged.
_STEPS = 16

# What the largest cost is scaled to; the memory limit is scaled to 1.
_LARGE = 1e4


@dataclass(frozen=True)
class Exact:
    """The best labelling within the limit, if one was found, and a proven bound on seconds;
    whether the solver was ended `by_clock`."""

    rows: Ints | None  # [variables]
    bound: float
    by_clock: bool = False


def small(problem: Problem) -> bool:
    """Whether a problem is of a size for this method."""
    return _columns(problem) <= COLUMNS


def units(problem: Problem) -> float:
    """About how much work it is to solve a problem under one limit."""
    return (_columns(problem) / _COLUMNS_PER_UNIT) ** 2


def _columns(problem: Problem) -> int:
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
    known: Sequence[Prices] = (),
) -> Exact:
    """Minimise seconds, to the share `gap`, with the peak within `limit` bytes, for at most
    `seconds` of time and so many `nodes` of branch and bound.

    `decisive` times, at which memory is known to be short, have a row from the start. Where there
    is a timeline so have paths, by the shares of its events in `known` prices, and others as
    solutions turn up that take longer; so has what may be merged, and what it holds at such prices.
    What the solver does is added to `work`, as far as it can be told.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    model = _Model(problem)
    deadline = time.perf_counter() + seconds
    bound = 0.0
    times = sorted(set(decisive)) if limit < np.inf else []
    additive = problem.timeline is None and problem.merging is None
    paths = [] if additive else [model.path(x, limit) for x in known or (_evenly(problem),)]
    if problem.merging is not None:
        paths = paths[:1]  # others as they are wanted
    while True:
        left = deadline - time.perf_counter()
        if left <= 0.1:
            return Exact(None, bound, True)
        constraints = [LinearConstraint(model.equal, model.right, model.right)]
        if model.once is not None:
            constraints.append(LinearConstraint(model.once, -np.inf, model.at_most))
        if times:
            unit = 1.0 / max(limit, 1.0)
            constraints.append(LinearConstraint(model.memory(times) * unit, -np.inf, limit * unit))
        cost, integral, most = model.cost * model.unit, model.integral, model.possible
        paid, narrow = 0.0, gap
        if not additive:  # one more column: by how much another path is longer than the first
            constraints = [_widened(c) for c in constraints]
            first, paid = paths[0]
            narrow = _SHARE * gap if paid else gap  # what is paid for bytes is no part of seconds
            if len(paths) > 1:
                rows_ = np.array([row - first for row, _ in paths[1:]]) * model.unit
                right = np.array([own - paid for _, own in paths[1:]]) * model.unit
                rows_ = np.column_stack((rows_, -np.ones(len(rows_))))
                constraints.append(LinearConstraint(csr_matrix(rows_), -np.inf, right))
            cost = np.append(first * model.unit, 1.0)
            integral, most = np.append(integral, 0.0), np.append(most, np.inf)
        found = milp(
            cost,
            integrality=integral,
            bounds=Bounds(0.0, most),
            constraints=constraints,
            options={"time_limit": left, "node_limit": nodes, "mip_rel_gap": narrow},
        )
        late = time.perf_counter() >= deadline
        visited = int(found.mip_node_count or 0)
        nodes = max(1, nodes - visited)
        if work is not None:
            work.add_units(units(problem) * (1.0 + visited / _AS_LONG))
        if found.mip_dual_bound is not None and np.isfinite(found.mip_dual_bound):
            bound = max(bound, float(found.mip_dual_bound) / model.unit - paid)
        if found.x is None:
            return Exact(None, float("inf") if found.status == 2 else bound, late)
        rows = model.rows(found.x)
        profile = problem.evaluate_apart(rows)[2]
        over = np.flatnonzero(profile > limit * (1 + 1e-9))
        if not over.size:
            if additive or late:
                return Exact(rows, bound, late)
            here = known[:_NEAR] if problem.merging is not None else ()
            fresh_paths = [model.path(priced(problem, rows, x), limit) for x in (None, *here)]
            entries = model.entries(rows)
            more = [x for x in fresh_paths if dot(x[0], entries) - x[1] > bound * (1 + 2 * gap)]
            if not more:
                return Exact(rows, bound, late)
            paths += more
            continue
        worst = int(profile.argmax())
        fresh = sorted({worst, int(over[0]), int(over[-1])}.difference(times))
        if not fresh:  # over by less than the solver can tell
            return Exact(None, bound, late)
        times += fresh


def priced(problem: Problem, rows: Ints, near: Prices | None = None) -> Prices:
    """Prices of events at which a labelling is as long as it is, or of what it makes that may be
    merged at which it costs much; bytes cost what they do in prices that are `near`."""
    free = Prices(0.0, np.zeros(problem.times)) if near is None else near
    merging = problem.merging
    if merging is None:
        assert problem.timeline is not None
        return replace(free, events=problem.timeline.shares(problem.lengths(rows)))
    relations = merging.relations(np.concatenate(([0.0], np.cumsum(free.bytes))))
    made = np.bincount(problem.made(rows), minlength=len(merging)).astype(np.float64)
    mixture = merging.better(merging.evenly(relations), made, relations, _STEPS)
    return replace(free, events=merging.shares(mixture))


def _evenly(problem: Problem) -> Prices:
    free = Prices(0.0, np.zeros(problem.times))
    if problem.merging is not None:
        return replace(free, events=np.zeros(len(problem.merging)))
    assert problem.timeline is not None
    return replace(free, events=problem.timeline.evenly())


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
    from scipy.optimize import Bounds, LinearConstraint, milp
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
    """Columns: rows of all variables, then legal entries of all pairs, then what is merged of
    copies that may be made more than once."""

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
        self._merged(column)
        column += len(self.again)
        self.cost = np.concatenate([*cost, np.zeros(len(self.again))])
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

    def _merged(self, first: int) -> None:
        """Columns from number `first` on for collectives whose copy others make, too: what is made
        more than once is not merged. `once` [rows, columns] is at most `at_most`."""
        merging = self.problem.merging
        self.again: Ints = np.zeros(0, dtype=np.int64)
        self.once: coo_matrix | None = None
        if merging is None:
            return
        made: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(merging)
        for i, v in enumerate(self.problem.variables):
            for sent in v.sent:
                for n, e in enumerate(sent.events.tolist()):
                    made[e] = self.start[i] + np.flatnonzero(sent.which == n)
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for sent in p.sent:
                which = sent.which[la, lb]
                for n, e in enumerate(sent.events.tolist()):
                    made[e] = column + np.flatnonzero(which == n)
        self.made = made
        slots = merging.others
        self.again = np.array(sorted(slots), dtype=np.int64)
        rows: list[Ints] = []
        columns: list[Ints] = []
        signs: list[Floats] = []
        at_most: list[float] = []

        def row(own: int, others: Ints, sign: float, most: float) -> None:
            entries = np.append(others, own)
            rows.append(np.full(len(entries), len(at_most)))
            columns.append(entries)
            signs.append(np.append(np.full(len(others), sign), 1.0))
            at_most.append(most)

        for n, e in enumerate(self.again.tolist()):
            row(first + n, made[e], -1.0, 0.0)
            for other in slots[e]:
                row(first + n, made[other], 1.0, 1.0)
        if at_most:
            from scipy.sparse import coo_matrix

            where = np.concatenate(rows), np.concatenate(columns)
            shape = len(at_most), first + len(self.again)
            self.once = coo_matrix((np.concatenate(signs), where), shape=shape).tocsr()
        self.at_most = np.array(at_most)

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

    def path(self, prices: Prices, limit: float) -> tuple[Floats, float]:
        """Seconds per column on a path in which events have such shares; or at such shares of what
        may be merged, and prices of bytes up to the limit. And what bytes up to it cost."""
        shares = prices.events
        assert shares is not None
        if self.problem.merging is not None:
            some = np.flatnonzero(prices.bytes) if limit < np.inf else np.zeros(0, dtype=np.int64)
            if prices.bytes.any() and not len(some):
                shares = np.zeros_like(shares)  # what waits costs nothing
            paid = np.einsum("t,tc->c", prices.bytes[some], self.memory(some.tolist()))
            less = self.problem.merging.less(shares)
            return self._priced(less) + paid, limit * float(prices.bytes[some].sum() or 0.0)
        out = np.zeros(self.columns)
        for i, v in enumerate(self.problem.variables):
            for span in v.spans:
                out[self.start[i] : self.start[i + 1]] += shares[span.event] * span.amount
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for span in p.spans:
                out[column : column + len(la)] += shares[span.event] * span.amount[la, lb]
        return out, 0.0

    def _priced(self, less: Floats) -> Floats:
        """Seconds per column, where collectives that may be merged cost so much less."""
        out = self.cost.copy()
        less = less.copy()
        out[self.columns - len(self.again) :] = less[self.again]
        less[self.again] = 0.0
        for i, v in enumerate(self.problem.variables):
            for sent in v.sent:
                some = np.append(less[sent.events], 0.0)[sent.which]
                out[self.start[i] : self.start[i + 1]] += some
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            for sent in p.sent:
                out[column : column + len(la)] += np.append(less[sent.events], 0.0)[
                    sent.which[la, lb]
                ]
        return out

    def entries(self, rows: Ints) -> Floats:
        """The solution that a labelling is."""
        out = np.zeros(self.columns)
        out[self.start[:-1] + rows] = 1.0
        for p, (la, lb, column) in zip(self.problem.pairs, self.legal, strict=True):
            here = (la == p.label_a[rows[p.a]]) & (lb == p.label_b[rows[p.b]])
            out[column + np.flatnonzero(here)] = 1.0
        if self.problem.merging is not None:
            merging, made = self.problem.merging, self.problem.made(rows)
            alone = made[np.bincount(merging.copy[made])[merging.copy[made]] == 1]
            out[self.columns - len(self.again) :] = np.isin(self.again, alone)
        return out

    def rows(self, x: Floats) -> Ints:
        """The labelling of a solution."""
        return np.array(
            [int(x[a:b].argmax()) for a, b in zip(self.start[:-1], self.start[1:], strict=True)]
        )
