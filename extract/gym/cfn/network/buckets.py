"""Minimisation over induced subgraphs of small width, by bucket elimination.

Variables are eliminated one after another, each leaving a table over those neighbours that are
still there (Dechter, "Bucket elimination", 1999). Where the least such table would be too large, a
central variable is left as it is instead; which one is drawn, so that another draw frees it.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import prod

import numpy as np

from .network import Floats, Ints, Network, offsets, ranges


@dataclass(frozen=True)
class _Bucket:
    """A variable and those neighbours that are eliminated later, in that order.

    Shapes have an axis per variable of the scope, the bucket's own first; -1 for the length of an
    axis that a table has, 1 otherwise.
    """

    place: int  # in the order of elimination
    scope: tuple[int, ...]  # variables
    sizes: tuple[int, ...]  # their rows
    tables: tuple[tuple[int, tuple[int, ...]], ...]  # (half-edge, shape)
    next: int  # the bucket that the rest goes to, -1 for none
    shape: tuple[int, ...]  # of the rest there


class Buckets:
    """An order of elimination for most of a network, with everything laid out for `minimise`."""

    def __init__(self, net: Network, rng: np.random.Generator, cells: int) -> None:
        """Draw an order; no table has more than `cells` entries."""
        self.net = net
        half = net.half
        order = _drawn(net, rng, cells)
        at = {v: k for k, (v, _) in enumerate(order)}
        self.variables = np.array([v for v, _ in order], dtype=np.int64)
        self.exact = len(order) == len(net)
        sizes = net.sizes[self.variables]
        self.rows = offsets(sizes)
        self.source = ranges(net.rows[self.variables], sizes)
        inside = np.full(len(net), -1, dtype=np.int64)
        inside[self.variables] = np.arange(len(order))
        h = np.flatnonzero((inside[half.owner] >= 0) & (inside[half.other] < 0))
        self.border = h
        self.border_size = net.sizes[half.owner[h]]
        self.border_rows = ranges(self.rows[inside[half.owner[h]]], self.border_size)
        scopes = [(v, *sorted(near, key=at.__getitem__)) for v, near in order]
        tables: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in order]
        within = np.flatnonzero((inside[half.owner] >= 0) & (inside[half.other] >= 0))
        # From the later variable's side: rows of the earlier one come first in its table.
        within = within[inside[half.owner[within]] > inside[half.other[within]]]
        for e in within.tolist():
            later, v = int(half.owner[e]), int(half.other[e])
            k = at[v]
            shape = [1] * len(scopes[k])
            shape[0] = int(net.sizes[v])
            shape[scopes[k].index(later)] = int(net.sizes[later])
            tables[k].append((e, tuple(shape)))
        self.buckets = []
        for k, scope in enumerate(scopes):
            goes, shape = -1, []
            if len(scope) > 1:
                goes = at[scope[1]]
                rest = set(scope[1:])
                shape = [int(net.sizes[v]) if v in rest else 1 for v in scopes[goes]]
            sizes_of = tuple(int(net.sizes[v]) for v in scope)
            self.buckets.append(_Bucket(k, scope, sizes_of, tuple(tables[k]), goes, tuple(shape)))

    def minimise(self, x: Ints, cost: Floats) -> Ints:
        """The best rows of all variables of the order, the others as in x; cost: [rows]."""
        best = [total.argmin(axis=0) for total in self.totals(x, cost)]
        out = x.copy()
        for b in reversed(self.buckets):
            out[b.scope[0]] = best[b.place][tuple(out[v] for v in b.scope[1:])]
        return out

    def totals(self, x: Ints, cost: Floats) -> list[Floats]:
        """Per bucket, the least cost of what was eliminated up to it, over its scope."""
        half = self.net.half
        belief = cost[self.source]
        at = half.start[self.border] + x[half.other[self.border]] * self.border_size
        belief += np.bincount(
            self.border_rows, half.cells[ranges(at, self.border_size)], len(belief)
        )
        rest: list[list[tuple[tuple[int, ...], Floats]]] = [[] for _ in self.buckets]
        out: list[Floats] = []
        for k, b in enumerate(self.buckets):
            total = belief[self.rows[k] : self.rows[k + 1]].reshape(-1, *(1,) * (len(b.scope) - 1))
            for e, shape in b.tables:
                start = int(half.start[e])
                total = total + half.cells[start : start + prod(shape)].reshape(shape)
            for shape, table in rest[k]:
                total = total + table.reshape(shape)
            rest[k] = []
            if total.ndim > 1 and total.shape != b.sizes:
                total = np.broadcast_to(total, b.sizes)
            out.append(total)
            if b.next >= 0:
                rest[b.next].append((b.shape, total.min(axis=0)))
        return out


def _drawn(net: Network, rng: np.random.Generator, cells: int) -> list[tuple[int, set[int]]]:
    """Variables in the order of elimination, each with its neighbours then; some are left out."""
    near: dict[int, set[int]] = {i: set() for i in range(len(net))}
    for a, b in zip(net.first.tolist(), net.second.tolist(), strict=True):
        near[a].add(b)
        near[b].add(a)
    size = np.log(net.sizes).tolist()
    most = float(np.log(cells))
    noise = rng.random(len(net)).tolist()

    def weight(i: int) -> float:
        return size[i] + sum(size[j] for j in near[i]) + 0.5 * noise[i]

    weights = {i: weight(i) for i in near}
    heap = [(w, i) for i, w in weights.items()]
    heapq.heapify(heap)
    out: list[tuple[int, set[int]]] = []
    left: set[int] = set()
    while heap:
        w, i = heapq.heappop(heap)
        if i not in near or weights[i] != w:
            continue
        large = w > most + 0.5 * noise[i]
        if large:  # leave out a variable of many neighbours, and look again
            heapq.heappush(heap, (w, i))
            i = max((i, *near[i]), key=lambda j: (len(near[j]) + 1) * (0.5 + noise[j]))
        gone = near.pop(i)
        for j in gone:
            near[j].discard(i)
        if large:
            left.add(i)
        else:
            out.append((i, gone))
            for j in gone:
                near[j] |= gone
                near[j].discard(j)
        for j in gone:
            weights[j] = weight(j)
            heapq.heappush(heap, (weights[j], j))
    return [(i, others - left) for i, others in out]
