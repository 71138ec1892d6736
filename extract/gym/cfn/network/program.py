"""Small networks as mixed-integer programs, with rows of memory added when they are violated.

A binary per row of a variable, a share per legal cell of a table (the local marginal polytope), and
a row for every time at which a solution was caught above the limit. The solver is HiGHS in scipy,
which works in floating point: its bound is taken with a margin.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry_egg.extract.gym.choices.mixed_integer import milp

from .network import Floats, Ints, Network, offsets, ranges

#: Networks with more legal cells than this are left to other methods.
CELLS = 150_000

# What the largest cost is scaled to; where the first fails, the second. HiGHS lets reduced costs be
# negative by a tolerance; with all columns at most 1, so much times their number may be missing
# from its bound, and some rounding.
_LARGE, _TOLERANCE, _ROUNDING = (1e10, 1e5), 1e-7, 1e-12

# So many times are added at once, the worst of as many stretches above the limit.
_BATCH = 8


@dataclass(frozen=True)
class Programmed:
    """The best rows found within the limits, if any, and a bound on the cost."""

    x: Ints | None
    bound: float
    infeasible: bool = False


def fits(net: Network) -> bool:
    """Whether a network is of a size for this method."""
    return 0 < len(net) and int(np.isfinite(net.cells).sum()) <= CELLS and not net.wide


def solve(net: Network, seconds: float, times: Ints) -> Programmed:
    """Minimise the cost within the limits for some seconds; `times` are those to limit at once."""
    deadline = time.perf_counter() + seconds
    bound = -np.inf
    for large in _LARGE:
        found = _scaled(net, deadline, times, large)
        bound = max(bound, found.bound)
        if found.x is not None:
            break
    return Programmed(found.x, bound, found.infeasible)


def _scaled(net: Network, deadline: float, times: Ints, large: float) -> Programmed:
    from scipy.optimize import Bounds, LinearConstraint
    from scipy.sparse import vstack

    model = _Model(net, large)
    limited = [int(t) for t in times]
    memory = [model.memory(t) for t in limited]
    relaxed = True  # first without integrality: it is fast, and finds most rows of memory
    bound = -np.inf
    while True:
        left = deadline - time.perf_counter()
        if left <= 0.05:
            return Programmed(None, bound)
        constraints = [LinearConstraint(model.equal, model.right, model.right)]
        if memory:
            rows = vstack(memory).tocsr()
            constraints.append(LinearConstraint(rows, -np.inf, model.free(limited)))
        found = milp(
            model.cost * model.unit,
            integrality=None if relaxed else model.integral,
            bounds=Bounds(0.0, 1.0),
            constraints=constraints,
            options={"time_limit": left, "mip_rel_gap": 0.0},
        )
        if found.status == 2:
            return Programmed(None, float("inf"), infeasible=True)
        dual = found.mip_dual_bound if not relaxed else found.fun if found.status == 0 else None
        if dual is not None and np.isfinite(dual):
            proven = float(dual) / model.unit + net.constant
            margin = _TOLERANCE * model.columns / model.unit + _ROUNDING * abs(proven)
            bound = max(bound, proven - margin)
        if found.x is None:
            return Programmed(None, bound)
        over = model.over(found.x)
        fresh = _worst(over, limited, 1e-9 * model.limit)
        if fresh:
            limited += fresh
            memory += [model.memory(t) for t in fresh]
            continue
        if relaxed:
            relaxed = False
            continue
        x = model.labelling(found.x)
        if not net.fits(x):  # above a limit by less than the solver can tell
            fresh = _worst(net.over(x), limited, 0.0)
            if not fresh:
                return Programmed(None, bound)
            limited += fresh
            memory += [model.memory(t) for t in fresh]
            continue
        return Programmed(x, bound)


def _worst(over: Floats, known: list[int], margin: float) -> list[int]:
    """The times furthest above the limit, one from each of some stretches."""
    above = np.flatnonzero(over > margin)
    if not len(above):
        return []
    parts = np.array_split(above, min(_BATCH, len(above)))
    worst = {int(part[over[part].argmax()]) for part in parts}
    return sorted(worst - set(known))


class _Model:
    """Columns: rows of all variables, then legal cells of all tables."""

    def __init__(self, net: Network, large: float) -> None:
        from scipy.sparse import csr_matrix

        self.net = net
        rows = len(net.cost)
        legal = np.flatnonzero(np.isfinite(net.cells))
        a, b = net.sizes[net.first], net.sizes[net.second]
        start = offsets(a * b)
        edge = np.searchsorted(start, legal, side="right") - 1
        row, column = np.divmod(legal - start[edge], b[edge])
        self.cost = np.concatenate((net.cost, net.cells[legal]))
        self.columns = len(self.cost)
        cell = rows + np.arange(len(legal))
        # One of each variable's rows; a row's share is that of its cells, in every table.
        first_row, second_row = offsets(a)[:-1], offsets(b)[:-1]
        variables, left, right = len(net), int(a.sum()), int(b.sum())
        at = [np.repeat(np.arange(variables), net.sizes)]
        to = [np.arange(rows)]
        value = [np.ones(rows)]
        for base, which, ends, sizes, index in (
            (variables, first_row, net.first, a, row),
            (variables + left, second_row, net.second, b, column),
        ):
            at += [base + which[edge] + index, base + np.arange(int(sizes.sum()))]
            to += [cell, ranges(net.rows[ends], sizes)]
            value += [np.ones(len(cell)), -np.ones(int(sizes.sum()))]
        count = variables + left + right
        entries = (np.concatenate(value), (np.concatenate(at), np.concatenate(to)))
        self.equal = csr_matrix(entries, shape=(count, self.columns))
        self.right = np.zeros(count)
        self.right[:variables] = 1.0
        self.integral = np.zeros(self.columns)
        self.integral[:rows] = 1
        most = float(np.abs(self.cost).max(initial=0.0))
        self.unit = large / most if most > 1e-200 else 1.0
        self.limit = float(max(net.uses.room.max(initial=1), 1))

    def memory(self, t: int) -> Any:
        """What columns occupy at a time, as a share of what is free."""
        from scipy.sparse import csr_matrix

        uses = self.net.uses
        there = np.flatnonzero((uses.lower <= t) & (t < uses.upper))
        lengths = np.diff(uses.start)[there]
        entries = ranges(uses.start[there], lengths)
        columns = self.net.use_rows[entries]
        share = uses.amount[entries] / max(float(uses.room[t]), 1.0)
        return csr_matrix((share, (np.zeros(len(columns), int), columns)), (1, self.columns))

    def free(self, times: list[int]) -> Floats:
        """What is free at some times, in the unit of their rows: 1, or 0 where nothing is."""
        room = self.net.uses.room[times]
        return room / np.maximum(room, 1)

    def over(self, x: Floats) -> Floats:
        """By how much the limit is exceeded at every time by shares of rows."""
        uses = self.net.uses
        amount = x[self.net.use_rows] * uses.amount
        if not len(uses):
            return np.zeros(len(uses.room))
        each = np.add.reduceat(amount, uses.start[:-1])
        steps = np.bincount(uses.lower, each, len(uses.room) + 1).astype(np.float64)
        steps -= np.bincount(uses.upper, each, len(uses.room) + 1)
        used: Floats = np.cumsum(steps[:-1])
        return used - uses.room.astype(np.float64)

    def labelling(self, x: Floats) -> Ints:
        """The row of every variable with the largest share."""
        rows = self.net.rows
        return np.array([int(x[a:b].argmax()) for a, b in itertools.pairwise(rows)], dtype=np.int64)
