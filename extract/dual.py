"""Dual bounds of the extraction problem by sequential tree-reweighted message passing.

For given prices (joules in seconds, bytes at each time in seconds) the priced problem is an
ordinary pairwise model. Messages reparametrise it; every sweep yields a lower bound on its optimum
(Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", 2006) and a
labelling by sequential decoding, which `elimination.py` improves. A bound at given prices bounds
the constrained problem at *any* limits: seconds ≥ D − Σ_t price_t · peak − price_J · joules.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .pricing import Tables
from .problem import Floats, Ints, Pair, Problem, Variable

# Relative error of a bound, a sum of some thousand terms of a pass, twice over.
_ROUNDING = 1e-12


Messages = list[tuple[Floats, Floats]]  # per pair: to its first and to its second variable


@dataclass(frozen=True)
class Prices:
    """What a joule and a byte at each time cost, in seconds."""

    joule: float
    bytes: Floats  # [times]


@dataclass(frozen=True)
class Cut:
    """One valid inequality: seconds ≥ value − bytes_price·peak − joule_price·joules.

    It holds for plans whose peak is at most `peak`.
    """

    value: float
    bytes_price: float
    joule_price: float
    peak: float = float("inf")

    def at(self, peak: float, joules: float) -> float:
        """The bound on seconds of any plan within these limits."""
        if peak > self.peak:
            return 0.0
        taken = self.bytes_price * peak if self.bytes_price else 0.0
        taken += self.joule_price * joules if self.joule_price else 0.0
        # At very high prices two large numbers are subtracted: what rounding may have added goes.
        return self.value - taken - _ROUNDING * (abs(self.value) + taken)


class _Side:
    """How one end of a pair groups the variable's rows into labels, ready for grouped minima."""

    __slots__ = ("identity", "labels", "order", "starts", "variable")

    def __init__(self, variable: int, labels: Ints, count: int) -> None:
        self.variable = variable
        self.labels = labels
        self.identity = len(labels) == count and bool((labels == np.arange(count)).all())
        self.order = np.argsort(labels, kind="stable")
        self.starts = np.searchsorted(labels[self.order], np.arange(count))

    def least(self, rows: Floats) -> Floats:
        """Per label: the least value among its rows."""
        if self.identity:
            return rows
        return np.minimum.reduceat(rows[self.order], self.starts)

    def spread(self, labels: Floats) -> Floats:
        """Per row: the value of its label."""
        return labels if self.identity else labels[self.labels]


class _Edge:
    __slots__ = ("a", "b", "from_a", "from_b", "pair", "table", "to_a", "to_b")

    def __init__(self, pair: Pair, table: Floats) -> None:
        self.pair = pair
        la, lb = pair.seconds.shape
        self.a = _Side(pair.a, pair.label_a, la)
        self.b = _Side(pair.b, pair.label_b, lb)
        self.to_a = np.zeros(la)
        self.to_b = np.zeros(lb)
        self.table = table


def _leaves(
    problem: Problem, around: list[list[tuple[_Edge, bool]]]
) -> list[tuple[int, list[tuple[_Edge, bool]]]]:
    """Variables to fold away, in order: those of one row, then again and again those with one
    neighbour left. With each, its pairs to variables that are still there."""
    there = [set(range(len(links))) for links in around]
    gone: set[int] = set()
    out: list[tuple[int, list[tuple[_Edge, bool]]]] = []
    position = [{id(e): k for k, (e, _) in enumerate(links)} for links in around]

    def fold(i: int) -> list[int]:
        links = [around[i][k] for k in sorted(there[i])]
        out.append((i, links))
        gone.add(i)
        touched = []
        for e, is_a in links:
            j = e.pair.b if is_a else e.pair.a
            there[j].discard(position[j][id(e)])
            touched.append(j)
        return touched

    for i, v in enumerate(problem.variables):
        if len(v) == 1 and around[i]:
            fold(i)
    todo = [i for i in range(len(around)) if i not in gone and around[i] and len(there[i]) <= 1]
    while todo:
        i = todo.pop()
        if i in gone or len(there[i]) > 1:
            continue
        for j in fold(i):
            if j not in gone and len(there[j]) <= 1:
                todo.append(j)
    return out


def _most(amounts: Floats) -> float:
    return float(np.max(amounts[np.isfinite(amounts)], initial=0.0))


class Dual:
    """Message state over one problem; prices may change between sweeps, messages stay warm."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        n = len(problem.variables)
        self.tables = Tables(problem.pairs)
        self.edges = [_Edge(p, t) for p, t in zip(problem.pairs, self.tables.views, strict=True)]
        self.around: list[list[tuple[_Edge, bool]]] = [[] for _ in range(n)]
        for e in self.edges:
            self.around[e.pair.a].append((e, True))
            self.around[e.pair.b].append((e, False))
        self.leaves = _leaves(problem, self.around)
        folded = {i for i, _ in self.leaves} | {i for i in range(n) if not self.around[i]}
        self.core = np.array([i for i in range(n) if i not in folded], dtype=np.int64)
        # Neighbours within the core, by whether a pass in order meets them after or before.
        self.later: list[list[tuple[_Edge, bool]]] = [[] for _ in range(n)]
        self.earlier: list[list[tuple[_Edge, bool]]] = [[] for _ in range(n)]
        for e in self.edges:
            a, b = e.pair.a, e.pair.b
            if a in folded or b in folded:
                continue
            first, second = min(a, b), max(a, b)
            self.later[first].append((e, first == a))
            self.earlier[second].append((e, second == a))
        self.inner = [f + g for f, g in zip(self.later, self.earlier, strict=True)]
        self.share = [
            1.0 / max(len(f), len(g), 1) for f, g in zip(self.later, self.earlier, strict=True)
        ]
        parts: list[Variable | Pair] = [*problem.variables, *problem.pairs]
        self.most_seconds = sum(_most(p.seconds) for p in parts)
        self.most_joules = sum(_most(p.joules) for p in parts)
        uses = [(u.start, u.end, _most(u.amount)) for p in parts for u in p.uses]
        self.most_bytes = np.array(uses).reshape(-1, 3)
        self.beliefs: list[Floats] = [np.zeros(len(v)) for v in problem.variables]
        self.rows = Tables(problem.variables)
        self.unary = self.rows.views
        self.price(Prices(0.0, np.zeros(problem.times)))

    def price(self, prices: Prices) -> None:
        """Set the prices; costs of rows and pairs follow."""
        self.prices = prices
        total = np.concatenate(([0.0], np.cumsum(prices.bytes)))
        start, end = self.most_bytes[:, :2].astype(np.int64).T
        most = self.most_seconds + prices.joule * self.most_joules
        most += float((total[end] - total[start]) @ self.most_bytes[:, 2])
        # More than any legal labelling costs at these prices, so that none that is not legal pays.
        self.forbidden = 4.0 * most + 1e-6
        self.rows.price(prices.joule, total, self.forbidden)
        self.tables.price(prices.joule, total, self.forbidden)
        self._fold()

    def _fold(self) -> None:
        """Fold the leaves into their neighbours, exactly; what stays is the core."""
        self.folded = [u for u in self.unary]
        self.constant = 0.0
        touched: set[int] = set()

        def add(i: int, more: Floats) -> None:
            if i not in touched:
                touched.add(i)
                self.folded[i] = self.folded[i].copy()
            self.folded[i] += more

        for i, links in self.leaves:
            if len(links) == 1:
                e, is_a = links[0]
                if is_a:
                    up = np.minimum.reduce(e.a.least(self.folded[i])[:, None] + e.table)
                    add(e.pair.b, e.b.spread(up))
                else:
                    up = np.minimum.reduce(e.b.least(self.folded[i]) + e.table, 1)
                    add(e.pair.a, e.a.spread(up))
                continue
            self.constant += float(self.folded[i].min())  # one row, or alone
            for e, is_a in links:
                if is_a:
                    add(e.pair.b, e.b.spread(e.table[e.a.labels[0]]))
                else:
                    add(e.pair.a, e.a.spread(e.table[:, e.b.labels[0]]))
        for i in range(len(self.unary)):
            if not self.around[i]:
                self.constant += float(self.folded[i].min())

    def belief(self, i: int) -> Floats:
        """Unary costs plus all incoming messages, within the core."""
        out = self.folded[i].copy()
        for e, is_a in self.inner[i]:
            if is_a:
                out += e.to_a if e.a.identity else e.to_a[e.a.labels]
            else:
                out += e.to_b if e.b.identity else e.to_b[e.b.labels]
        return out

    def messages(self) -> Messages:
        """The state of message passing; a sweep makes new arrays and leaves these."""
        return [(e.to_a, e.to_b) for e in self.edges]

    def resume(self, messages: Messages) -> None:
        """Go on from an earlier state."""
        for e, (to_a, to_b) in zip(self.edges, messages, strict=True):
            e.to_a, e.to_b = to_a, to_b

    def sweep(self) -> Cut:
        """One forward and one backward pass; returns the bound that the backward pass proves."""
        self._pass(self.core, self.later)
        value = self._pass(self.core[::-1], self.earlier) + self.constant
        constant = float(self.prices.bytes @ self.problem.constant)
        return Cut(value + constant, float(self.prices.bytes.sum()), self.prices.joule)

    def _pass(self, order: Ints, onward: list[list[tuple[_Edge, bool]]]) -> float:
        bound = 0.0
        least_of = np.minimum.reduce
        for i in order:
            belief = self.beliefs[i] = self.belief(i)
            least = least_of(belief)
            bound += least
            if not onward[i]:
                continue
            belief -= least  # in place: beliefs are kept for their order alone
            belief *= self.share[i]
            for e, is_a in onward[i]:
                if is_a:
                    outgoing = e.a.least(belief) - e.to_a
                    message = least_of(outgoing[:, None] + e.table)
                    low = least_of(message)
                    message -= low
                    e.to_b = message
                else:
                    outgoing = e.b.least(belief) - e.to_b
                    message = least_of(outgoing + e.table, 1)
                    low = least_of(message)
                    message -= low
                    e.to_a = message
                bound += low
        return float(bound)

    def decode(self) -> Ints:
        """A labelling: in order, the best row given earlier choices and later ones' messages."""
        rows = np.zeros(len(self.unary), dtype=np.int64)
        for i in self.core:
            cost = self.folded[i].copy()
            for e, is_a in self.later[i]:
                cost += e.a.spread(e.to_a) if is_a else e.b.spread(e.to_b)
            for e, is_a in self.earlier[i]:
                cost += self._toward(e, is_a, rows)
            rows[i] = int(cost.argmin())
        return self.complete(rows)

    def complete(self, rows: Ints) -> Ints:
        """A labelling of the core, with the best rows of what was folded away."""
        rows = rows.copy()
        for i in range(len(rows)):
            if not self.around[i]:
                rows[i] = int(self.unary[i].argmin())
        for i, links in reversed(self.leaves):
            cost = self.folded[i].copy()
            for e, is_a in links:
                cost += self._toward(e, is_a, rows)
            rows[i] = int(cost.argmin())
        return rows

    def _toward(self, e: _Edge, is_a: bool, rows: Ints) -> Floats:
        """Pair costs per row of one end, the other end fixed."""
        if is_a:
            return e.a.spread(e.table[:, e.pair.label_b[rows[e.pair.b]]])
        return e.b.spread(e.table[e.pair.label_a[rows[e.pair.a]], :])
