"""The working form of an AND-OR choice problem, on which reductions act.

Costs are Python integers: floats are scaled by a common power of two, so that every comparison and
every sum that a reduction makes is exact. A node remembers the (class, node) pairs of the problem
that it stands for, so that an answer to the reduced form is an answer to the problem.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Column, Ints


class AndOr:
    """Classes of nodes, each node with the distinct classes that it needs.

    Dictionaries hold what is still there: `members[c]` the nodes of a class, `needs[n]` the
    classes of a node. `roots` are always active. `parts[n]` are the pairs that choosing n means,
    `fixed` those of nodes that are chosen in any case, and `constant` what these cost.
    """

    def __init__(self, objectives: int, acyclic: bool, scales: Sequence[int]) -> None:
        self.members: dict[int, list[int]] = {}
        self.needs: dict[int, frozenset[int]] = {}
        self.home: dict[int, int] = {}  # node -> class
        self.costs: tuple[dict[int, int], ...] = tuple({} for _ in range(objectives))
        self.parts: dict[int, tuple[tuple[int, int], ...]] = {}
        self.roots: set[int] = set()
        self.fixed: list[tuple[int, int]] = []
        self.constant = [0] * objectives
        self.scales = tuple(scales)  # a scaled cost is this multiple of the problem's
        self.acyclic = acyclic
        # Node -> numbers of sets of nodes of which every answer has at least one. They follow from
        # the rest, but not for its linear relaxation.
        self.covers: dict[int, set[int]] = {}
        self.next_cover = 0
        self.next_node = 0
        self.log: list[tuple[str, int, int, int, int]] = []  # name, nodes and classes: was, is

    @property
    def cost(self) -> dict[int, int]:
        """Costs of the first objective."""
        return self.costs[0]

    def add(
        self,
        home: int,
        needs: Iterable[int],
        costs: Sequence[int],
        parts: tuple[tuple[int, int], ...],
    ) -> int:
        """A new node; returns its number."""
        n = self.next_node
        self.next_node += 1
        self.members.setdefault(home, []).append(n)
        self.home[n] = home
        self.needs[n] = frozenset(needs)
        for column, value in zip(self.costs, costs, strict=True):
            column[n] = value
        self.parts[n] = parts
        return n

    def remove(self, nodes: Iterable[int]) -> None:
        """Take nodes out; classes that are left empty stay, with no member."""
        touched = set()
        for n in nodes:
            touched.add(self.home.pop(n))
            del self.needs[n], self.parts[n]
            self.covers.pop(n, None)
            for column in self.costs:
                del column[n]
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
        return any(v < 0 for column in self.costs for v in column.values())

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

    def value(self, chosen: Iterable[int], objective: int = 0) -> Fraction:
        """What chosen nodes cost, with the constant, in the problem's unit."""
        column = self.costs[objective]
        total = self.constant[objective] + sum(column[n] for n in chosen)
        return Fraction(total, self.scales[objective])

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

    def copy(self) -> AndOr:
        """An independent copy; the log is not taken along."""
        other = AndOr(len(self.costs), self.acyclic, self.scales)
        other.members = {c: list(m) for c, m in self.members.items()}
        other.needs, other.home = dict(self.needs), dict(self.home)
        other.costs = tuple(dict(column) for column in self.costs)
        other.parts, other.roots = dict(self.parts), set(self.roots)
        other.fixed, other.constant = list(self.fixed), list(self.constant)
        other.next_node, other.next_cover = self.next_node, self.next_cover
        other.covers = {n: set(k) for n, k in self.covers.items()}
        return other


def scaled(column: Column) -> tuple[list[int], int]:
    """A column as exact integers: (integers, the factor that made them so)."""
    if column.dtype.kind == "i":
        return column.tolist(), 1
    ratios = [float(v).as_integer_ratio() for v in column]
    factor = max((d for _, d in ratios), default=1)  # all denominators are powers of two
    return [n * (factor // d) for n, d in ratios], factor


def working_form(problem: ChoiceProblem) -> AndOr:
    """The working form of a problem without pairs and limits.

    A node of several classes becomes a class of its own, which a free node in each of them needs.
    """
    columns = [scaled(column) for column in problem.costs]
    form = AndOr(len(columns), problem.acyclic, [factor for _, factor in columns])
    form.roots = {int(r) for r in problem.roots}
    if problem.all_active:
        form.roots = set(range(len(problem.classes)))
    form.members = {c: [] for c in range(len(problem.classes))}
    children, start = problem.children.tolist(), problem.child_start.tolist()
    home, allowed = problem.node_class().tolist(), problem.allowed.tolist()
    hidden = len(problem.classes)
    for n in range(len(problem.nodes)):
        if not allowed[n]:
            continue
        costs = [values[n] for values, _ in columns]
        needs = children[start[n] : start[n + 1]]
        more = problem.provided_by(n).tolist() if problem.provides.size else []
        if not more:
            form.add(home[n], needs, costs, ((home[n], n),))
            continue
        form.add(hidden, needs, costs, ())
        for c in dict.fromkeys([home[n], *more]):
            form.add(c, (hidden,), [0] * len(columns), ((c, n),))
        hidden += 1
    return form


def problem_choice(problem: ChoiceProblem, form: AndOr, chosen: Iterable[int]) -> Choice:
    """The problem's choice that chosen nodes of a form mean, without what is not needed."""
    node = np.full(len(problem.classes), -1, dtype=np.int64)
    for c, n in form.picks(chosen):
        node[c] = n
    return trim(problem, node)


def trim(problem: ChoiceProblem, node: Sequence[int] | Ints) -> Choice:
    """A choice without the nodes of classes that nothing chosen needs."""
    todo = list(range(len(node))) if problem.all_active else problem.roots.tolist()
    given: list[int] = np.asarray(node).tolist()
    kept = [-1] * len(given)
    while todo:
        c = todo.pop()
        if kept[c] < 0 <= given[c]:
            kept[c] = given[c]
            todo.extend(problem.needs[kept[c]])
    return Choice(np.array(kept, dtype=np.int64))
