"""An AND-OR form as a mixed-integer program.

Columns: x per node, y per class. Rows: the nodes of a class sum to y; the nodes of class c that
need d sum to at most y_d (one row for all of them); y_d is at most the sum of the nodes that need
it; y_c <= y_d for classes that are always active together. Cycles are barred by loop formulas
(`cuts.py`) where a solution has them, or by a level per class of a cyclic component.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce as fold

import numpy as np

from .closure import Closure
from .cuts import LoopCuts
from .form import AndOr, Scaled
from .greedy import Chosen, acyclic
from .linear_program import Floats, LinearProgram, Row

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

    def __init__(self, form: AndOr, known: Closure | None, limit: int | None = None) -> None:
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
        rows = self._rows(known)
        if limit is not None:
            second = form.costs[1]
            room = float(limit - form.constant[1])
            columns_of = list(range(len(self.nodes)))
            rows.append((columns_of, [float(second[n]) for n in self.nodes], -np.inf, room))
        self.program = LinearProgram(cost, lower, np.ones(columns), rows)

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


def nearest(known: Closure, sets: dict[int, int], c: int, most: int = 12) -> list[int]:
    """Classes of a set that no other of it implies."""
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
            if len(found) == most:
                break
    return found
