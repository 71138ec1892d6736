"""Minimisation over induced forests: all trees at once, the rest of the network being fixed.

A set of variables that induces a forest is minimised exactly by dynamic programming from the leaves
to the roots and back; levels of equal depth take a few array operations. Sets drawn at random hold
most of a sparse network, so that a handful of such moves settles it but for what a few central
variables decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .network import Floats, Ints, Network, joined, least_in, offsets, ranges


@dataclass(frozen=True)
class _Level:
    """Variables of one depth below the roots, as positions first..last in the forest."""

    first: int
    last: int
    half: Ints  # half-edges to the parents
    parent: Ints  # positions
    cells: Floats
    lookup: Ints  # per cell: the forest's row
    cell_starts: Ints
    target: Ints  # per entry sent: the forest's row of the parent


class Forest:
    """An induced forest of a network, with everything laid out for `minimise`."""

    def __init__(self, net: Network, order: Sequence[int], largest: int) -> None:
        """Take variables in order if they close no cycle and no tree exceeds `largest`."""
        self.net = net
        half = net.half
        levels = _grown(net, order, largest)
        self.variables = np.array([v for level in levels for v, _, _ in level], dtype=np.int64)
        count = len(self.variables)
        self.sizes = net.sizes[self.variables]
        self.rows = offsets(self.sizes)
        self.source = ranges(net.rows[self.variables], self.sizes)
        self.place = np.full(len(net), -1, dtype=np.int64)
        self.place[self.variables] = np.arange(count)
        inside = self.place >= 0
        h = np.flatnonzero(inside[half.owner] & ~inside[half.other])
        self.border = h
        self.border_size = net.sizes[half.owner[h]]
        self.border_rows = ranges(self.rows[self.place[half.owner[h]]], self.border_size)
        self.root = np.arange(count)
        self.levels: list[_Level] = []
        first = 0
        for depth, level in enumerate(levels):
            last = first + len(level)
            half_edges = np.array([e for _, _, e in level] if depth else [], dtype=np.int64)
            self.levels.append(self._level(first, last, half_edges))
            if depth:
                self.root[first:last] = self.root[self.levels[-1].parent]
            first = last
        self.inner = joined([level.half for level in self.levels], np.int64)

    def __len__(self) -> int:
        return len(self.variables)

    def _level(self, first: int, last: int, h: Ints) -> _Level:
        net, half = self.net, self.net.half
        parent = self.place[half.other[h]]
        size, above = net.sizes[half.owner[h]], net.sizes[half.other[h]]
        stretch = np.repeat(np.arange(len(h)), above)
        own = self.rows[self.place[half.owner[h]]]
        return _Level(
            first,
            last,
            h,
            parent,
            half.cells[ranges(half.start[h], size * above)],
            ranges(own[stretch], size[stretch]),
            offsets(size[stretch])[:-1],
            ranges(self.rows[parent], above),
        )

    def minimise(self, x: Ints, cost: Floats) -> Ints:
        """The best rows of the forest's variables, the others as in x; cost: [rows]."""
        half = self.net.half
        if not len(self):
            return x
        belief = cost[self.source]
        at = half.start[self.border] + x[half.other[self.border]] * self.border_size
        belief += np.bincount(
            self.border_rows, half.cells[ranges(at, self.border_size)], len(belief)
        )
        for level, above in zip(self.levels[:0:-1], self.levels[-2::-1], strict=True):
            sent = np.minimum.reduceat(level.cells + belief[level.lookup], level.cell_starts)
            low, high = self.rows[above.first], self.rows[above.last]
            belief[low:high] += np.bincount(level.target - low, sent, high - low)
        best = np.zeros(len(self), dtype=np.int64)
        for level in self.levels:
            low, high = self.rows[level.first], self.rows[level.last]
            sizes = self.sizes[level.first : level.last]
            score = belief[low:high]
            if len(level.half):
                at = half.start[level.half] + best[level.parent] * sizes
                score = score + half.cells[ranges(at, sizes)]
            starts = self.rows[level.first : level.last] - low
            best[level.first : level.last] = least_in(score, starts, sizes)
        out = x.copy()
        out[self.variables] = best
        return out

    def by_tree(self, x: Ints) -> Floats:
        """What each tree costs, with its tables to the rest; at the position of its root."""
        net, half = self.net, self.net.half
        total = np.zeros(len(self))
        total += np.bincount(
            self.root, net.cost[net.rows[self.variables] + x[self.variables]], len(self)
        )
        for h in (self.border, self.inner):
            o = half.owner[h]
            cells = half.cells[half.start[h] + x[half.other[h]] * net.sizes[o] + x[o]]
            total += np.bincount(self.root[self.place[o]], cells, len(self))
        return total


def _grown(net: Network, order: Sequence[int], largest: int) -> list[list[tuple[int, int, int]]]:
    """An induced forest by depth: (variable, parent, half-edge from it to the parent)."""
    half = net.half
    other = half.other[half.by_owner].tolist()
    edge = half.by_owner.tolist()
    owned = half.owned.tolist()
    reverse = half.reverse
    tree = list(range(len(net)))
    size = [1] * len(net)

    def root(i: int) -> int:
        while tree[i] != i:
            tree[i] = tree[tree[i]]
            i = tree[i]
        return i

    links: dict[int, list[tuple[int, int]]] = {}
    for i in order:
        found: list[tuple[int, int]] = []
        roots: list[int] = []
        total = 1
        for q in range(owned[i], owned[i + 1]):
            if other[q] not in links:
                continue
            r = root(other[q])
            total += size[r]
            if r in roots or total > largest:
                break
            roots.append(r)
            found.append((other[q], edge[q]))
        else:
            links[i] = found
            for (j, h), r in zip(found, roots, strict=True):
                links[j].append((i, int(reverse[h])))
                tree[r] = i
            size[i] = total
    roots_of = {root(i): i for i in reversed(links)}
    level = [(i, -1, -1) for i in sorted(roots_of.values())]
    out = []
    while level:
        out.append(level)
        level = [
            (j, i, int(reverse[h])) for i, parent, _ in level for j, h in links[i] if j != parent
        ]
    return out
