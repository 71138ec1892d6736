"""An AND-OR form as a mixed-integer program.

Columns: x per node, y per class. Rows: the nodes of a class sum to y; the nodes of class c that
need d sum to at most y_d (one row for all of them); y_d is at most the sum of the nodes that need
it; y_c <= y_d for classes that are always active together. Cycles are barred by loop formulas
(`program.py`) where a solution has them, or by a level per class of a cyclic component.
"""

from __future__ import annotations

import ctypes
import heapq
import math
import os
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import reduce as fold
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.gym.choices import Flags

from .closure import Closure, components, cyclic_components
from .form import AndOr, Scaled
from .greedy import Chosen, acyclic

# The largest cost of an objective that is not integral, in the unit of its program.
_LARGE = 100


@dataclass(frozen=True)
class Unit:
    """How scaled costs become a program's: divided by `step`; `integral` where all are multiples.

    Costs that are decimals of up to six digits count as integral: what binary fractions differ
    from them by is far below what tells two answers apart.
    """

    step: int | Fraction
    integral: bool

    def bound(self, value: float) -> Scaled:
        """A scaled lower bound from a program's, allowing for the tolerances of its solver."""
        if math.isinf(value):
            return value
        if not self.integral:
            return math.floor(Fraction(value - 1e-9 * max(1.0, abs(value))) * self.step)
        slack = max(1e-6, 1e-9 * abs(value))
        least = Fraction(math.ceil(value - slack)) * self.step
        if isinstance(self.step, int):
            return int(least)
        return math.floor(least - abs(least) * Fraction(1, 10**12))

    @property
    def gap(self) -> float:
        """The difference of program values below which two are the same."""
        return 1.0 - 1e-4 if self.integral else 1e-7


def unit_of(form: AndOr) -> Unit:
    """The unit for a form's costs."""
    costs = [v for v in form.cost.values() if v]
    if not costs:
        return Unit(1, True)
    scale = form.scale
    common = fold(math.gcd, costs, 0)
    largest = max(abs(v) for v in costs)
    if largest // common < 10**7:
        return Unit(common, True)
    for digits in range(1, 7):
        steps = [v * 10**digits / scale for v in costs]
        if max(map(abs, steps)) < 10**9 and all(
            abs(s - round(s)) <= 1e-9 * max(1.0, abs(s)) for s in steps
        ):
            return Unit(Fraction(scale, 10**digits), True)
    return Unit(Fraction(largest) / _LARGE, False)


class Model:
    """Columns and rows of one form; levels only after `add_levels`."""

    def __init__(self, form: AndOr, known: Closure | None) -> None:
        self.form = form
        self.unit = unit_of(form)
        self.nodes = sorted(form.home)
        self.classes = sorted(form.members)
        self.node_at = {n: i for i, n in enumerate(self.nodes)}
        self.class_at = {c: len(self.nodes) + i for i, c in enumerate(self.classes)}
        columns = len(self.nodes) + len(self.classes)
        cost = np.zeros(columns)
        cost[: len(self.nodes)] = [float(form.cost[n] / self.unit.step) for n in self.nodes]
        if self.unit.integral:
            cost = np.round(cost)
        lower = np.zeros(columns)
        lower[[self.class_at[r] for r in sorted(form.roots)]] = 1.0
        self.whole = np.arange(columns) < len(self.nodes)
        self.cuts = LoopCuts(form, self.node_at, self.class_at)
        self.program = LinearProgram(cost, lower, np.ones(columns), self._rows(known))

    def add_levels(self) -> None:
        """Bar every cycle: a class stands above those of its component that its node needs.

        level_c - level_d >= 1 - M + M x(c, d) in a component of M classes, where x(c, d) is the sum
        of c's nodes that need d. (Miller, Tucker and Zemlin, "Integer programming formulation of
        traveling salesman problems", 1960. What is added for tours does not hold here, where a
        class may need several.)
        """
        cyclic = self.cuts.cyclic
        if not cyclic:
            return
        size: dict[int, int] = {}
        for k in cyclic.values():
            size[k] = size.get(k, 0) + 1
        most = np.array([size[k] - 1.0 for k in cyclic.values()])
        first = self.program.widen(most)
        level_at = {c: first + i for i, c in enumerate(cyclic)}
        self.whole = np.concatenate((self.whole, np.zeros(len(cyclic), dtype=np.bool_)))
        edges: dict[tuple[int, int], list[int]] = {}
        for n, i in self.node_at.items():
            c = self.form.home[n]
            for d in sorted(self.form.needs[n]):
                if c in cyclic and cyclic.get(d) == cyclic[c]:
                    edges.setdefault((c, d), []).append(i)
        rows: list[Row] = []
        for (c, d), there in edges.items():
            m = float(size[cyclic[c]])
            columns = [level_at[c], level_at[d], *there]
            rows.append((columns, [1.0, -1.0, *[-m] * len(there)], 1.0 - m, np.inf))
        self.program.rows += rows

    def _rows(self, known: Closure | None) -> list[Row]:
        form, x, y = self.form, self.node_at, self.class_at
        rows: list[Row] = []
        edges: dict[tuple[int, int], list[int]] = {}
        for c in self.classes:
            members = [x[n] for n in form.members[c]]
            rows.append(([*members, y[c]], [1.0] * len(members) + [-1.0], 0.0, 0.0))
            for n in form.members[c]:
                for d in form.needs[n]:
                    edges.setdefault((c, d), []).append(x[n])
        for (c, d), members in edges.items():
            if d in form.roots:
                continue
            if len(members) == len(form.members[c]):
                rows.append(([y[c], y[d]], [1.0, -1.0], -np.inf, 0.0))
            else:
                rows.append(([*members, y[d]], [1.0] * len(members) + [-1.0], -np.inf, 0.0))
        for d, users in form.parents().items():
            if d not in form.roots:
                rows.append(
                    ([y[d], *(x[n] for n in users)], [1.0] + [-1.0] * len(users), -np.inf, 0.0)
                )
        covers: dict[int, list[int]] = {}
        for n in self.nodes:
            for k in sorted(form.covers.get(n, ())):
                covers.setdefault(k, []).append(x[n])
        for nodes in covers.values():
            rows.append((nodes, [1.0] * len(nodes), 1.0, np.inf))
        for (c, d), members in edges.items():
            if c < d and (d, c) in edges:
                both = [*members, *edges[d, c]]
                for end in (c, d):
                    rows.append(([*both, y[end]], [1.0] * len(both) + [-1.0], -np.inf, 0.0))
        if known is not None:
            present = {(r[0][0], r[0][1]) for r in rows if len(r[0]) == 2}
            for c in self.classes:
                if c not in form.roots:
                    for d in nearest(known, known.required, c) + nearest(known, known.above, c):
                        if d not in form.roots and (y[c], y[d]) not in present:
                            rows.append(([y[c], y[d]], [1.0, -1.0], -np.inf, 0.0))
        return rows

    def chosen(self, x: Floats) -> Chosen | None:
        """The choice of an integral solution, as far as the roots need it; None for a cycle."""
        picked: Chosen = {}
        for c in self.classes:
            picked[c] = max(self.form.members[c], key=lambda n: x[self.node_at[n]])
        return self.form.trimmed(picked) if acyclic(self.form, picked) else None


def nearest(known: Closure, sets: dict[int, int], c: int) -> list[int]:
    """Classes of a set that no other of it implies, twelve at most."""
    others = known.members(sets[c] & ~(1 << known.bit[c]))
    if len(others) > 2000:
        return []
    others.sort(key=lambda d: -sets[d].bit_count())
    found: list[int] = []
    covered = 0
    for d in others:
        if not covered >> known.bit[d] & 1:
            found.append(d)
            covered |= sets[d]
            if len(found) == 12:
                break
    return found


# Acyclicity as linear inequalities, found where a fractional solution violates them.
#
# A set V of classes is founded only through a node outside it: if class c of V is active, one of
# the nodes of V's classes without children in V is chosen, so  y_c <= sum of their x  (the loop
# formulas of answer set programming: Lin and Zhao, "ASSAT", 2004). Sets are found among classes
# that are not founded by nodes above a threshold, and as short cycles.


_THRESHOLDS = (0.5, 0.3, 0.15, 0.08, 0.04, 0.02, 0.01, 0.003, 0.0005)


@dataclass
class LoopCuts:
    """Separates loop formulas for one form; columns are those of its model."""

    form: AndOr
    node_at: dict[int, int]
    class_at: dict[int, int]
    made: set[tuple[frozenset[int], int]] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.cyclic = cyclic_components(self.form)
        self.parents = self.form.parents()
        # Only what is in a cyclic component can be unfounded by a cycle.
        self.classes = sorted(self.cyclic)

    def separate(self, x: Floats, seed: int, whole: bool = False) -> list[Row]:
        """Violated rows, the most violated first; for integral solutions one threshold is enough.

        An integral solution with a cycle always violates one that is found.
        """
        if not self.cyclic:
            return []
        tolerance = 1e-3
        found: dict[tuple[frozenset[int], int], float] = {}
        for threshold in (0.5,) if whole else _THRESHOLDS:
            for group in self._unfounded(x, threshold, tolerance):
                self._violated(x, group, tolerance, found, 3)
        for group in self._cycles(x, seed, 2 * tolerance, 5000 if whole else 800):
            self._violated(x, group, tolerance, found, 1)
        order = sorted(found, key=lambda k: (-found[k], k[1], len(k[0])))[: 2000 if whole else 600]
        rows = []
        for key in order:
            if key not in self.made:
                self.made.add(key)
                rows.append(self._row(*key))
        return rows

    def _outside(self, group: frozenset[int]) -> list[int]:
        """The nodes of a set's classes that need none of its classes."""
        return [
            n
            for c in sorted(group)
            for n in self.form.members[c]
            if group.isdisjoint(self.form.needs[n])
        ]

    def _row(self, group: frozenset[int], c: int) -> Row:
        columns = [self.class_at[c], *(self.node_at[n] for n in self._outside(group))]
        return columns, [1.0] + [-1.0] * (len(columns) - 1), -np.inf, 0.0

    def _violated(
        self,
        x: Floats,
        group: frozenset[int],
        tolerance: float,
        found: dict[tuple[frozenset[int], int], float],
        most: int,
    ) -> None:
        support = sum(x[self.node_at[n]] for n in self._outside(group))
        active = sorted(group, key=lambda c: (-x[self.class_at[c]], c))[:most]
        for c in active:
            violation = float(x[self.class_at[c]] - support)
            if violation > tolerance:
                found[group, c] = violation

    def _unfounded(self, x: Floats, threshold: float, least: float) -> Iterable[frozenset[int]]:
        """Strongly connected sets of classes that nodes of at least a threshold do not found."""
        form, cyclic = self.form, self.cyclic
        waits: dict[int, int] = {}
        ready = []
        for c in self.classes:
            for n in form.members[c]:
                if x[self.node_at[n]] >= threshold:
                    waits[n] = sum(1 for d in form.needs[n] if cyclic.get(d) == cyclic[c])
                    if not waits[n]:
                        ready.append(n)
        founded: set[int] = set()
        while ready:
            c = form.home[ready.pop()]
            if c in founded:
                continue
            founded.add(c)
            for p in self.parents[c]:
                if p in waits and cyclic.get(form.home[p]) == cyclic[c]:
                    waits[p] -= 1
                    if waits[p] == 0:
                        ready.append(p)
        low = max(least, threshold / 2)
        left = {c for c in self.classes if c not in founded and x[self.class_at[c]] > low}
        edges = {
            c: {
                d
                for n in form.members[c]
                if x[self.node_at[n]] >= threshold * 0.999
                for d in form.needs[n]
                if d in left
            }
            for c in sorted(left)
        }
        groups: dict[int, list[int]] = {}
        for c, k in components(edges).items():
            groups.setdefault(k, []).append(c)
        return [frozenset(g) for g in groups.values() if len(g) > 1]

    def _cycles(
        self, x: Floats, seed: int, tolerance: float, sources: int
    ) -> Iterable[frozenset[int]]:
        """Cycles of little slack, by Dijkstra from classes in a drawn order.

        The slack of an edge c -> d is y_c less the x of c's nodes that need d; a cycle is violated
        when its slacks add to less than the y of one of its classes.
        """
        form, cyclic = self.form, self.cyclic
        flow: dict[int, dict[int, float]] = {}
        for c in self.classes:
            for n in form.members[c]:
                value = float(x[self.node_at[n]])
                if value > 1e-7:
                    row = flow.setdefault(c, {})
                    for d in form.needs[n]:
                        if cyclic.get(d) == cyclic[c]:
                            row[d] = row.get(d, 0.0) + value
        out = {
            c: [(d, max(0.0, float(x[self.class_at[c]]) - v)) for d, v in row.items()]
            for c, row in flow.items()
        }
        starts = [c for c in out if x[self.class_at[c]] > tolerance]
        random.Random(seed).shuffle(starts)
        seen: set[frozenset[int]] = set()
        for start in starts[:sources]:
            cycle = _shortest_cycle(out, start, float(x[self.class_at[start]]) - tolerance)
            if cycle and cycle not in seen:
                seen.add(cycle)
                yield cycle


def _shortest_cycle(
    out: dict[int, list[tuple[int, float]]], start: int, limit: float
) -> frozenset[int] | None:
    distance = {start: 0.0}
    before: dict[int, int] = {}
    heap = [(0.0, start)]
    while heap:
        length, c = heapq.heappop(heap)
        if length > distance[c]:
            continue
        for d, slack in out.get(c, ()):
            total = length + slack
            if total >= limit:
                continue
            if d == start:
                cycle = {c}
                while c != start:
                    c = before[c]
                    cycle.add(c)
                return frozenset(cycle)
            if total < distance.get(d, np.inf):
                distance[d], before[d] = total, c
                heapq.heappush(heap, (total, d))
    return None


# Linear and mixed-integer programs by scipy's HiGHS, to which rows are added between solutions.


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
