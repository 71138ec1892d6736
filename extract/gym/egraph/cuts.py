"""Acyclicity as linear inequalities, found where a fractional solution violates them.

A set V of classes is founded only through a node outside it: if class c of V is active, one of the
nodes of V's classes without children in V is chosen, so  y_c <= sum of their x  (the loop formulas
of answer set programming: Lin and Zhao, "ASSAT", 2004). Sets are found among classes that are not
founded by nodes above a threshold, and as short cycles.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from .closure import components, cyclic_components
from .form import AndOr
from .linear_program import Floats, Row

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
