"""Elimination over a tree decomposition: exact for AND-OR forms of small treewidth.

Classes are eliminated one after another. What is left of those that went is a table over their
neighbours that are still there: which of these are demanded, which already have their node, and
which reach which, for the least cost. The size of the tables grows with the width of the order, not
with the form. (For bounded treewidth the time is linear: Goharshady, Lam and Parreaux, "Fast and
Optimal Extraction for Sparse Equality Graphs", OOPSLA 2024; Sun, Zhang and Ni, "E-graphs as
circuits", 2024.)
"""

from __future__ import annotations

import heapq
import time
from dataclasses import dataclass
from typing import Any

from .closure import cyclic_components
from .form import AndOr

#: Classes demanded, classes that have their node (bits), and pairs (a, b): a reaches b.
State = tuple[int, int, frozenset[tuple[int, int]]]
#: A cost with the way back to the nodes chosen: a node, a pair of ways, or nothing.
Entry = tuple[int, Any]
Table = dict[State, Entry]

#: Orders wider than this are not tried.
WIDEST = 12

_NOTHING: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True)
class Eliminated:
    """The least cost of a form (scaled, with the constant) and its nodes; None for no answer."""

    best: tuple[int, tuple[int, ...]] | None
    width: int


class TooWide(Exception):
    """The tables grew beyond the limit, or time was up."""


def eliminate(
    form: AndOr,
    deadline: float,
    most: int | None = None,
    entries: int = 400_000,
    widest: int = WIDEST,
) -> Eliminated | None:
    """One best answer of a form.

    `most` drops what reaches that cost (scaled, with the constant), where no cost is negative: no
    answer then means that nothing is better. None when the form is too wide, its tables get more
    than `entries`, or time is up. Cycles must be forbidden in the form.
    """
    order = elimination_order(form, widest)
    if order is None:
        return None
    try:
        return _Elimination(form, deadline, most, entries).run(*order)
    except TooWide:
        return None


def elimination_order(form: AndOr, widest: int) -> tuple[list[int], int] | None:
    """Classes by least degree, with the width; None when it is above `widest`.

    Two classes are neighbours when one node has both, as its own class or as a child.
    """
    near: dict[int, set[int]] = {c: set() for c in form.members}
    for n, needs in form.needs.items():
        scope = needs | {form.home[n]}
        if len(scope) > widest + 1:
            return None
        for c in scope:
            near[c] |= scope
    for c, others in near.items():
        others.discard(c)
    heap = [(len(others), c) for c, others in near.items()]
    heapq.heapify(heap)
    order: list[int] = []
    width = 0
    while heap:
        degree, c = heapq.heappop(heap)
        if c not in near or degree != len(near[c]):
            continue
        if degree > widest:
            return None
        width = max(width, degree)
        order.append(c)
        others = near.pop(c)
        for d in others:
            near[d] |= others
            near[d] -= {c, d}
            heapq.heappush(heap, (len(near[d]), d))
    return order, width


def chosen_nodes(way: Any) -> tuple[int, ...]:
    """The nodes at the end of a way back."""
    found = []
    todo = [way]
    while todo:
        step = todo.pop()
        if isinstance(step, tuple):
            todo.extend(step)
        elif step is not None:
            found.append(step)
    return tuple(sorted(found))


class _Elimination:
    def __init__(self, form: AndOr, deadline: float, most: int | None, entries: int) -> None:
        self.form = form
        self.deadline = deadline
        self.negative = form.negative()
        self.room: int | None = None
        if most is not None and not self.negative:
            self.room = most - form.constant
        self.limit = entries
        self.cyclic = cyclic_components(form)
        self.bit = {c: 1 << i for i, c in enumerate(form.members)}
        self.made = 0

    def run(self, order: list[int], width: int) -> Eliminated:
        form = self.form
        tables: dict[int, list[tuple[set[int], Table]]] = {c: [] for c in order}
        at = {c: i for i, c in enumerate(order)}
        groups: dict[int, dict[int, list[int]]] = {c: {} for c in order}
        for n, needs in form.needs.items():
            first = min((form.home[n], *needs), key=at.__getitem__)
            groups[first].setdefault(form.home[n], []).append(n)
        start: Entry = (0, None)
        done: list[Table] = []
        for c in order:
            scope: set[int] = {c}
            table: Table = {(0, 0, _NOTHING): start}
            for more, other in sorted(tables.pop(c), key=lambda t: len(t[1])):
                table = self._joined(table, other)
                scope |= more
            # What the class itself may be goes last: by then its demand is known.
            for home in sorted(groups[c], key=lambda h: h == c):
                nodes = groups[c][home]
                table = self._chosen(table, home, nodes)
                scope.update([home], *(form.needs[n] for n in nodes))
            table = self._projected(table, c)
            scope.discard(c)
            if scope:
                tables[min(scope, key=at.__getitem__)].append((scope, table))
            else:
                done.append(table)
        total: Table = {(0, 0, _NOTHING): start}
        for table in done:
            total = self._joined(total, table)
        found = total.get((0, 0, _NOTHING))
        if found is None:
            return Eliminated(None, width)
        value, way = found
        return Eliminated((value + form.constant, chosen_nodes(way)), width)

    def _put(self, table: Table, state: State, entry: Entry) -> None:
        self.made += 1
        if self.made % 1024 == 0 and time.perf_counter() > self.deadline:
            raise TooWide
        if self.room is not None and entry[0] >= self.room:
            return
        held = table.get(state)
        if held is None:
            if len(table) >= self.limit:
                raise TooWide
            table[state] = entry
        elif entry[0] < held[0]:
            table[state] = entry

    def _joined(self, one: Table, two: Table) -> Table:
        if len(two) == 1 or len(one) == 1:
            one, two = (one, two) if len(two) == 1 else (two, one)
        found: Table = {}
        for (demand_a, given_a, reach_a), (value_a, way_a) in one.items():
            for (demand_b, given_b, reach_b), (value_b, way_b) in two.items():
                if given_a & given_b:
                    continue
                reach = reach_a
                if reach_b:
                    together = _closed(reach_a, reach_b)
                    if together is None:
                        continue
                    reach = together
                self._put(
                    found,
                    (demand_a | demand_b, given_a | given_b, reach),
                    (value_a + value_b, (way_a, way_b)),
                )
        return found

    def _chosen(self, table: Table, home: int, nodes: list[int]) -> Table:
        """Every entry as it is, and with each of the nodes as the choice of their class."""
        form, own = self.form, self.bit[home]
        found: Table = dict(table)
        options = []
        for n in nodes:
            demand = 0
            for d in form.needs[n]:
                demand |= self.bit[d]
            pairs = _NOTHING
            if home in self.cyclic:
                component = self.cyclic[home]
                pairs = frozenset(
                    (home, d) for d in form.needs[n] if self.cyclic.get(d) == component
                )
            options.append((n, demand, pairs, form.cost[n]))
        for (demanded, given, reach), (value, way) in table.items():
            if given & own:
                continue
            for n, demand, pairs, cost in options:
                after = reach
                if pairs:
                    together = _closed(reach, pairs)
                    if together is None:
                        continue
                    after = together
                state = demanded | demand, given | own, after
                self._put(found, state, (value + cost, (way, n)))
        return found

    def _projected(self, table: Table, c: int) -> Table:
        """Entries in which class c is demanded and has its node, or neither."""
        own, keep = self.bit[c], ~self.bit[c]
        root = c in self.form.roots
        found: Table = {}
        for (demanded, given, reach), entry in table.items():
            wanted, has = root or bool(demanded & own), bool(given & own)
            if wanted != has:
                continue
            if reach:
                reach = frozenset(p for p in reach if c not in p)
            self._put(found, (demanded & keep, given & keep, reach), entry)
        if self.negative:
            return found
        return self._undominated(found)

    def _undominated(self, table: Table) -> Table:
        """Without entries beside which another of the same classes reaches and costs less."""
        if not self.cyclic:
            return table
        groups: dict[tuple[int, int], list[frozenset[tuple[int, int]]]] = {}
        found: Table = {}
        for state, entry in sorted(table.items(), key=lambda s: (s[1][0], len(s[0][2]))):
            demanded, given, reach = state
            rivals = groups.setdefault((demanded, given), [])
            if any(r <= reach for r in rivals):
                continue
            rivals.append(reach)
            found[state] = entry
        return found


def _closed(
    one: frozenset[tuple[int, int]], two: frozenset[tuple[int, int]]
) -> frozenset[tuple[int, int]] | None:
    """The transitive closure of two relations, of which the first is closed; None for a cycle."""
    if two <= one:
        return one
    pairs = set(one)
    for a, b in two:
        if (a, b) in pairs:
            continue
        before = {x for x, y in pairs if y == a} | {a}
        after = {y for x, y in pairs if x == b} | {b}
        if not before.isdisjoint(after):
            return None
        pairs.update((x, y) for x in before for y in after)
    return frozenset(pairs)
