"""The working form of an AND-OR choice problem, on which reductions act.

Costs are Python integers: floats are scaled by a common power of two, so that every comparison and
every sum that a reduction makes is exact. A node remembers the (class, node) pairs of the problem
that it stands for, so that an answer to the reduced form is an answer to the problem. No answer may
have a cycle.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem, Column

#: A scaled cost, with the constant; inf where there is none.
Scaled = int | float


class AndOr:
    """Classes of nodes, each node with the distinct classes that it needs.

    Dictionaries hold what is still there: `members[c]` the nodes of a class, `needs[n]` the
    classes of a node. `roots` are always active. `parts[n]` are the pairs that choosing n means,
    `fixed` those of nodes that are chosen in any case, and `constant` what these cost.
    """

    def __init__(self, scale: int) -> None:
        self.members: dict[int, list[int]] = {}
        self.needs: dict[int, frozenset[int]] = {}
        self.home: dict[int, int] = {}  # node -> class
        self.cost: dict[int, int] = {}
        self.parts: dict[int, tuple[tuple[int, int], ...]] = {}
        self.roots: set[int] = set()
        self.fixed: list[tuple[int, int]] = []
        self.constant = 0
        self.scale = scale  # a scaled cost is this multiple of the problem's
        # Node -> numbers of sets of nodes of which every answer has at least one. They follow from
        # the rest, but not for its linear relaxation.
        self.covers: dict[int, set[int]] = {}
        self.next_cover = 0
        self.next_node = 0

    def add(
        self, home: int, needs: Iterable[int], cost: int, parts: tuple[tuple[int, int], ...]
    ) -> int:
        """A new node; returns its number."""
        n = self.next_node
        self.next_node += 1
        self.members.setdefault(home, []).append(n)
        self.home[n] = home
        self.needs[n] = frozenset(needs)
        self.cost[n] = cost
        self.parts[n] = parts
        return n

    def remove(self, nodes: Iterable[int]) -> None:
        """Take nodes out; classes that are left empty stay, with no member."""
        touched = set()
        for n in nodes:
            touched.add(self.home.pop(n))
            del self.needs[n], self.parts[n], self.cost[n]
            self.covers.pop(n, None)
        for c in touched:
            self.members[c] = [n for n in self.members[c] if n in self.home]

    def cover(self, nodes: Iterable[int]) -> None:
        """Note that every answer has at least one of some nodes."""
        for n in nodes:
            self.covers.setdefault(n, set()).add(self.next_cover)
        self.next_cover += 1

    def uncover(self, node: int) -> None:
        """Forget the sets that hold a node that is chosen in any case."""
        met = self.covers.pop(node, set())
        if met:
            for n in list(self.covers):
                self.covers[n] -= met

    def negative(self) -> bool:
        """Whether any cost is below zero: choosing more may then be better."""
        return any(v < 0 for v in self.cost.values())

    def parents(self) -> dict[int, list[int]]:
        """Class -> the nodes that need it."""
        found: dict[int, list[int]] = {c: [] for c in self.members}
        for n, needs in self.needs.items():
            for d in needs:
                if d in found:
                    found[d].append(n)
                else:  # a class that is gone
                    found[d] = [n]
        return found

    def picks(self, chosen: Iterable[int]) -> list[tuple[int, int]]:
        """The (class, node) pairs of the problem that chosen nodes mean, with the fixed ones."""
        return [*self.fixed, *(p for n in chosen for p in self.parts[n])]

    def trimmed(self, chosen: dict[int, int]) -> dict[int, int]:
        """The part of a choice (class -> node) that the roots need."""
        todo = list(self.roots)
        found: dict[int, int] = {}
        while todo:
            c = todo.pop()
            if c not in found:
                found[c] = chosen[c]
                todo.extend(self.needs[chosen[c]])
        return found


def scaled(column: Column) -> tuple[list[int], int]:
    """A column as exact integers: (integers, the factor that made them so)."""
    if column.dtype.kind == "i":
        return column.tolist(), 1
    ratios = [float(v).as_integer_ratio() for v in column]
    factor = max((d for _, d in ratios), default=1)  # all denominators are powers of two
    return [n * (factor // d) for n, d in ratios], factor


def working_form(problem: ChoiceProblem) -> AndOr:
    """The working form of a problem of sums."""
    costs, scale = scaled(problem.cost)
    form = AndOr(scale)
    form.roots = set(problem.roots.tolist())
    form.members = {c: [] for c in range(len(problem.classes))}
    home, allowed = problem.node_class().tolist(), problem.allowed.tolist()
    for n, cost in enumerate(costs):
        if allowed[n]:
            form.add(home[n], problem.needs[n], cost, ((home[n], n),))
    return form


def choice_of(problem: ChoiceProblem, picks: Iterable[tuple[int, int]]) -> Choice:
    """The choice of (class, node) pairs, without those that nothing chosen needs."""
    given, kept = dict(picks), np.full(len(problem.classes), -1, dtype=np.int64)
    todo = problem.roots.tolist()
    while todo:
        c = todo.pop()
        if kept[c] < 0 and c in given:
            kept[c] = given[c]
            todo.extend(problem.needs[given[c]])
    return Choice(kept)
