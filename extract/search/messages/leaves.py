"""Leaves: variables that are folded into a neighbour, exactly, before messages are passed.

A variable of one row adds its pairs' costs to its neighbours; one with a single neighbour left adds
the least that it and their pair cost. Again and again: what stays is the core. Leaves that hang
alike, as in equal layers, are folded together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints, Problem

from .batches import Side, picked
from .pricing import Tables, places

Link = tuple[int, bool]  # a pair's number, and whether the variable is its first end


@dataclass(frozen=True, eq=False)
class _Group:
    """Variables `members`, each linked by a pair of one kind, its first end if `is_a`, to one of
    `others`; `at` are the pairs' places among their kind, `own` and `there` where the rows of
    either lie."""

    members: Ints  # [members], variables
    others: Ints  # [members], variables
    kind: int
    is_a: bool
    at: slice | Ints  # [members]
    own: Ints  # [members, rows]
    there: Ints  # [members, rows]


class Leaves:
    """The leaves of one problem, in the order of their folding."""

    def __init__(
        self, problem: Problem, tables: Tables, sides: list[tuple[Side, Side]], row_start: Ints
    ) -> None:
        self.problem, self.tables, self.sides, self.row_start = problem, tables, sides, row_start
        around: list[list[Link]] = [[] for _ in problem.variables]
        for k, p in enumerate(problem.pairs):
            around[p.a].append((k, True))
            around[p.b].append((k, False))
        single, order = self._order(around)
        level: dict[int, int] = {}
        hung: dict[int, list[Link]] = {}
        self.ends: list[int] = []  # what is left of trees: their least cost is a constant
        for i, link in order:
            depth = level.get(i, 1)
            if link is None:
                self.ends.append(i)
                continue
            hung.setdefault(depth, []).append(link)
            j = self._other(link)
            level[j] = max(level.get(j, 1), depth + 1)
        self.single = np.array(single, dtype=np.int64)
        alone = set(single)
        self.first = self._groups(
            # A pair of two such variables is counted from its first end.
            [
                (k, is_a)
                for i in single
                for k, is_a in around[i]
                if is_a or self._other((k, is_a)) not in alone
            ]
        )
        self.groups = [g for depth in sorted(hung) for g in self._groups(hung[depth])]
        self.folded = {*single, *(i for i, _ in order)}

    def _order(self, around: list[list[Link]]) -> tuple[list[int], list[tuple[int, Link | None]]]:
        """Variables of one row, then those with one neighbour left or none, with the pair to it."""
        there = [dict.fromkeys(links) for links in around]
        gone = {i for i, v in enumerate(self.problem.variables) if len(v) == 1}
        for i in gone:
            for k, is_a in around[i]:
                j = self._other((k, is_a))
                there[j].pop((k, not is_a), None)
        todo = [i for i, links in enumerate(there) if i not in gone and len(links) <= 1]
        order: list[tuple[int, Link | None]] = []
        while todo:
            i = todo.pop()
            if i in gone:
                continue
            gone.add(i)
            link = next(iter(there[i]), None)
            order.append((i, link))
            if link is not None:
                j = self._other(link)
                there[j].pop((link[0], not link[1]))
                if len(there[j]) <= 1:
                    todo.append(j)
        return [i for i, v in enumerate(self.problem.variables) if len(v) == 1], order

    def _other(self, link: Link) -> int:
        pair = self.problem.pairs[link[0]]
        return pair.b if link[1] else pair.a

    def _groups(self, links: list[Link]) -> list[_Group]:
        alike: dict[tuple[int, bool], list[int]] = {}
        for k, is_a in links:
            alike.setdefault((int(self.tables.kind_of[k]), is_a), []).append(k)
        out = []
        for (kind, is_a), numbers in alike.items():
            pairs = [self.problem.pairs[k] for k in numbers]
            members = np.array([p.a if is_a else p.b for p in pairs], dtype=np.int64)
            others = np.array([p.b if is_a else p.a for p in pairs], dtype=np.int64)
            at = places(self.tables.place[np.array(numbers)])
            own, there = self._rows(members), self._rows(others)
            out.append(_Group(members, others, kind, is_a, at, own, there))
        return out

    def _rows(self, variables: Ints) -> Ints:
        rows = len(self.problem.variables[variables[0]])
        return self.row_start[variables, None] + np.arange(rows)

    def fold(self, costs: Floats) -> float:
        """Add to the rows of the core, in place, what the leaves cost at least; what is left over
        is returned."""
        for g in self.first:
            table = self.tables.kinds[g.kind].table[g.at]
            mine, theirs = self._ends(g)
            row = picked(table, np.repeat(mine.labels, len(g.members)), g.is_a)
            np.add.at(costs, g.there, theirs.spread(row))
        constant = float(costs[self.row_start[self.single]].sum())
        for g in self.groups:
            table = self.tables.kinds[g.kind].table[g.at]
            mine, theirs = self._ends(g)
            least = mine.least(costs.take(g.own))
            if g.is_a:
                up = (least[:, :, None] + table).min(axis=1)
            else:
                up = (least[:, None, :] + table).min(axis=2)
            np.add.at(costs, g.there, theirs.spread(up))
        return constant + sum(float(self._own(costs, i).min()) for i in self.ends)

    def complete(self, rows: Ints, costs: Floats) -> Ints:
        """A labelling of the core with the best rows of the leaves; `costs` as `fold` left them."""
        rows = rows.copy()
        rows[self.single] = 0
        for i in self.ends:
            rows[i] = int(self._own(costs, i).argmin())
        for g in reversed(self.groups):
            mine, theirs = self._ends(g)
            labels = theirs.labels[rows[g.others]]
            toward = picked(self.tables.kinds[g.kind].table[g.at], labels, not g.is_a)
            rows[g.members] = (costs.take(g.own) + mine.spread(toward)).argmin(axis=1)
        return rows

    def _ends(self, g: _Group) -> tuple[Side, Side]:
        a, b = self.sides[g.kind]
        return (a, b) if g.is_a else (b, a)

    def _own(self, costs: Floats, i: int) -> Floats:
        start = int(self.row_start[i])
        return costs[start : start + len(self.problem.variables[i])]
