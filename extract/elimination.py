"""Elimination: the best labelling over a few promising rows of every variable.

Variables are eliminated one after another, each leaving a table over those neighbours that are
still there ("bucket elimination", Dechter 1999). The cost grows with the product of the domains of
a variable and these neighbours: programs are long and narrow, so the graph of an extraction problem
has a small treewidth (at most 5 for a transformer's train step), and a handful of rows per
variable, those with the least beliefs in message passing, is searched exactly in some hundredths of
a second. Where the product is too large, domains are cut down to rows of labellings that are known
already, some variables here, others the next time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .dual import Dual
from .problem import Floats, Ints, pooled

# A bucket's table has at most this many entries.
_CELLS = 1 << 17


@dataclass(frozen=True)
class _Bucket:
    """A variable, and those neighbours that are eliminated later, in the order of elimination.

    Shapes say for each axis of the bucket's table which axis of a smaller one belongs there; -1 for
    none.
    """

    variable: int
    later: tuple[int, ...]
    pairs: tuple[tuple[int, tuple[int, ...]], ...]  # (pair of the core, its shape here)
    next: int = -1  # the bucket that what is left goes to, and its shape there
    axes: tuple[int, ...] = ()


class Elimination:
    """The order of elimination of one problem's core, and the minimisation along it."""

    def __init__(self, dual: Dual, cells: int = _CELLS) -> None:
        self.dual = dual
        self.cells = cells
        self.held = True  # whether the last minimisation was over all the rows asked for
        core = {int(i) for i in dual.core}
        edges = [k for k, e in enumerate(dual.edges) if e.pair.a in core and e.pair.b in core]
        near: dict[int, set[int]] = {i: set() for i in core}
        for k in edges:
            pair = dual.edges[k].pair
            near[pair.a].add(pair.b)
            near[pair.b].add(pair.a)
        order = _min_fill(near)
        at = {i: k for k, (i, _) in enumerate(order)}
        scopes = [(i, *sorted(others, key=at.__getitem__)) for i, others in order]
        inside: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in scopes]
        for n, k in enumerate(edges):
            ends = sorted((dual.edges[k].pair.a, dual.edges[k].pair.b), key=at.__getitem__)
            scope = scopes[at[ends[0]]]
            inside[at[ends[0]]].append((n, _shape(ends, scope)))
        self.buckets = [
            _Bucket(i, later, tuple(pairs), at[later[0]], _shape(later, scopes[at[later[0]]]))
            if later
            else _Bucket(i, later, tuple(pairs))
            for (i, *rest), pairs in zip(scopes, inside, strict=True)
            for later in (tuple(rest),)
        ]
        self._gather(edges, at)

    def _gather(self, edges: Sequence[int], at: Mapping[int, int]) -> None:
        """Where the labels and tables of the core's pairs lie, to read all of them at once."""
        pairs = [self.dual.edges[k].pair for k in edges]
        ahead = np.array([at[p.a] < at[p.b] for p in pairs], dtype=bool)
        a, b = (np.array([getattr(p, end) for p in pairs], dtype=np.int64) for end in "ab")
        width = np.array([p.seconds.shape[1] for p in pairs], dtype=np.int64)
        self.start = self.dual.tables.start[np.array(edges, dtype=np.int64)]
        self.first, self.second = np.where(ahead, a, b), np.where(ahead, b, a)
        self.first_step = np.where(ahead, width, 1)[:, None]
        self.second_step = np.where(ahead, 1, width)[:, None]
        firsts = [p.label_a if t else p.label_b for p, t in zip(pairs, ahead, strict=True)]
        seconds = [p.label_b if t else p.label_a for p, t in zip(pairs, ahead, strict=True)]
        self.first_label, self.first_start = pooled(firsts)
        self.second_label, self.second_start = pooled(seconds)

    def improve(self, known: Sequence[Ints], keep: int, rng: np.random.Generator) -> Ints:
        """The best labelling made of the rows of `known` labellings and of the `keep` rows with the
        least belief, at the dual's prices.

        As good as each of `known` if all their rows fit, and as good as the first in any case.
        """
        domains = self._domains(known, keep)
        self.held = self._fit(domains, rng)
        return self._minimise(domains)

    def _domains(self, known: Sequence[Ints], keep: int) -> dict[int, Ints]:
        best = self.dual.promising(keep)
        taken = np.stack(known, axis=1).tolist()
        return {
            b.variable: np.array(
                list(dict.fromkeys(taken[b.variable] + best[b.variable].tolist())), dtype=np.int64
            )
            for b in self.buckets
        }

    def _fit(self, domains: dict[int, Ints], rng: np.random.Generator) -> bool:
        """Cut domains, at random but from their ends, until every bucket's table is small;
        whether they were so from the start."""
        held = True
        for b in self.buckets:
            scope = (b.variable, *b.later)
            while prod(len(domains[i]) for i in scope) > self.cells:
                wide = [i for i in scope if len(domains[i]) > 1]
                i = wide[rng.integers(len(wide))]
                domains[i] = domains[i][: len(domains[i]) // 2]
                held = False
        return held

    def _minimise(self, domains: dict[int, Ints]) -> Ints:
        """The best labelling within the domains; leaves take what is best for it."""
        dual = self.dual
        tables = self._tables(domains)
        left: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in self.buckets]
        choices: list[Ints] = []
        for k, b in enumerate(self.buckets):
            total = dual.folded[b.variable][domains[b.variable]].reshape(-1, *(1,) * len(b.later))
            for edge, shape in b.pairs:
                table = tables[edge]
                total = total + table.reshape(*(table.shape[x] if x >= 0 else 1 for x in shape))
            for axes, table in left[k]:
                total = total + table.reshape(*(table.shape[x] if x >= 0 else 1 for x in axes))
            left[k] = []
            choices.append(total.argmin(axis=0))
            if b.later:
                left[b.next].append((b.axes, total.min(axis=0)))
        rows = np.zeros(len(dual.unary), dtype=np.int64)
        picked: dict[int, int] = {}
        for b, best in zip(reversed(self.buckets), reversed(choices), strict=True):
            picked[b.variable] = int(best[tuple([picked[i] for i in b.later])])
            rows[b.variable] = domains[b.variable][picked[b.variable]]
        return dual.complete(rows)

    def _tables(self, domains: dict[int, Ints]) -> list[Floats]:
        """The cost of every pair of the core over two domains, the earlier variable's first."""
        dual = self.dual
        widest = max((len(d) for d in domains.values()), default=0)
        padded = np.zeros((len(dual.unary), widest), dtype=np.int64)
        for i, d in domains.items():
            padded[i, : len(d)] = d
        first = self.first_label[self.first_start[:, None] + padded[self.first]] * self.first_step
        second = self.second_label[self.second_start[:, None] + padded[self.second]]
        second = second * self.second_step
        at = self.start[:, None, None] + first[:, :, None] + second[:, None, :]
        cells = dual.tables.flat[at]
        sizes = np.array([len(domains.get(i, ())) for i in range(len(dual.unary))])
        return [
            table[:n, :m]
            for table, n, m in zip(
                cells, sizes[self.first].tolist(), sizes[self.second].tolist(), strict=True
            )
        ]


def _shape(variables: Sequence[int], scope: Sequence[int]) -> tuple[int, ...]:
    return tuple(variables.index(i) if i in variables else -1 for i in scope)


def _min_fill(near: dict[int, set[int]]) -> list[tuple[int, set[int]]]:
    """Variables in the order of elimination that adds the fewest links, each with the neighbours
    that it has then (the min-fill heuristic)."""
    near = {i: set(others) for i, others in near.items()}

    def weight(i: int) -> tuple[int, int, int]:
        others = near[i]
        missing = sum(len(others) - 1 - len(others & near[j]) for j in others)
        return (missing // 2, len(others), i)

    weights = {i: weight(i) for i in near}
    heap = sorted(weights.values())
    order = []
    while heap:
        entry = heapq.heappop(heap)
        i = entry[-1]
        if weights.get(i) != entry:
            continue
        others = near.pop(i)
        del weights[i]
        order.append((i, others))
        for j in others:
            near[j] |= others
            near[j] -= {i, j}
        for j in others.union(*(near[j] for j in others)):
            if weights[j] != (new := weight(j)):
                weights[j] = new
                heapq.heappush(heap, new)
    return order
