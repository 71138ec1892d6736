"""Elimination: the best labelling over a few promising rows of every variable.

Variables are eliminated one after another, each leaving a table over those neighbours that are
still there ("bucket elimination", Dechter 1999). The cost grows with the product of the domains of
a variable and these neighbours: programs are long and narrow, so the graph of an extraction problem
has a small treewidth (at most 5 for a transformer's train step), and a handful of rows per
variable, those with the least beliefs in message passing, is searched exactly in some hundredths of
a second. Where the product is too large, domains are cut down to rows of labellings that are known
already, some variables here, others the next time.

Buckets that wait for nothing of each other and are linked alike, as in equal layers, are eliminated
together.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints, pooled
from tapestry_egg.extract.search.messages.dual import Dual

# A bucket's table has at most this many entries: a megabyte. No measurement of it is kept. Where it
# cuts domains the labelling may be worse than the best; gaps tell, as bounds do without this.
_CELLS = 1 << 17

# So many entries are eliminated at once, half a megabyte, so that they stay in the processor's
# cache. No measurement of it is kept; it orders the work alone.
_TOGETHER = 1 << 16

# Calls per variable that it takes to find the order, per group of buckets, and per variable that
# what is asked for has rows of.
SET_UP, _PER_GROUP, _PER_VARIABLE = 100, 30, 4

Shape = tuple[int, ...]  # per axis of a bucket's table: the axis of a smaller one there, or -1


@dataclass(frozen=True, eq=False)
class _Level:
    """Buckets linked alike that wait for nothing of each other.

    `scope[m]` is the variable of bucket m and those neighbours that are eliminated later, in the
    order of elimination. `pairs` and `left` say how pairs of the core and what earlier buckets
    left are shaped in their tables, and which they are: per bucket one number.
    """

    buckets: Ints  # [buckets], their numbers
    scope: Ints  # [buckets, axes], variables
    pairs: tuple[tuple[Shape, Ints], ...]  # each [buckets]
    left: tuple[tuple[Shape, Ints], ...]  # each [buckets]


class Elimination:
    """The order of elimination of one problem's core, and the minimisation along it."""

    def __init__(self, dual: Dual, cells: int = _CELLS) -> None:
        self.dual = dual
        self.cells = cells
        self.held = True  # whether the last minimisation was over all the rows asked for
        edges, pairs = dual.edges, dual.problem.pairs
        near: dict[int, set[int]] = {int(i): set() for i in dual.core}
        for k in edges:
            pair = pairs[k]
            near[pair.a].add(pair.b)
            near[pair.b].add(pair.a)
        order = _min_fill(near)
        at = {i: k for k, (i, _) in enumerate(order)}
        self.scopes = [(i, *sorted(others, key=at.__getitem__)) for i, others in order]
        self.levels = self._levels(edges, at)
        self._gather(edges, at)
        dual.work.add(SET_UP * len(self.scopes), 0)

    # A bucket is a variable with the neighbours that are left when its turn comes. Its table is
    # minimised over the variable, and what remains, over the neighbours, is added to the bucket of
    # whichever of them comes next. So buckets form a forest, and one waits only for those below it:
    # those of one depth whose tables are shaped alike are done together, as arrays.

    def _levels(self, edges: Sequence[int], at: Mapping[int, int]) -> list[_Level]:
        scopes = self.scopes
        pairs: list[list[tuple[Shape, int]]] = [[] for _ in scopes]
        for n, k in enumerate(edges):
            pair = self.dual.problem.pairs[k]
            ends = sorted((pair.a, pair.b), key=at.__getitem__)
            pairs[at[ends[0]]].append((_shape(ends, scopes[at[ends[0]]]), n))
        left: list[list[tuple[Shape, int]]] = [[] for _ in scopes]
        depth = [0] * len(scopes)
        for k, (_, *later) in enumerate(scopes):
            if later:  # what is left goes to the next of these to be eliminated
                # `later` stands in the order of elimination, so its first is that one.
                n = at[later[0]]
                left[n].append((_shape(later, scopes[n]), k))
                depth[n] = max(depth[n], depth[k] + 1)
        alike: dict[tuple[int, object], list[int]] = {}
        for k, scope in enumerate(scopes):
            pairs[k].sort()
            left[k].sort()
            shapes = tuple(s for s, _ in pairs[k]), tuple(s for s, _ in left[k])
            alike.setdefault((depth[k], (len(scope), *shapes)), []).append(k)
        return [
            _Level(
                np.array(members, dtype=np.int64),
                np.array([scopes[k] for k in members], dtype=np.int64),
                _columns([pairs[k] for k in members]),
                _columns([left[k] for k in members]),
            )
            for _, members in sorted(alike.items(), key=lambda entry: entry[0][0])
        ]

    def _gather(self, edges: Sequence[int], at: Mapping[int, int]) -> None:
        """Where the labels and tables of the core's pairs lie, to read all of them at once."""
        pairs = [self.dual.problem.pairs[k] for k in edges]
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
        domains, sizes = self._domains(known, keep)
        self.held = self._fit(sizes, rng)
        return self._minimise(domains, sizes)

    def _domains(self, known: Sequence[Ints], keep: int) -> tuple[Ints, Ints]:
        """Distinct rows of every variable, in order: [variables, most]; how many: [variables]."""
        rows = np.column_stack((*known, self.dual.promising(keep)))
        fresh = np.ones(rows.shape, dtype=bool)
        for k in range(1, rows.shape[1]):
            fresh[:, k] = (rows[:, :k] != rows[:, k, None]).all(axis=1)
        order = np.argsort(~fresh, axis=1, kind="stable")
        return np.take_along_axis(rows, order, axis=1), fresh.sum(axis=1)

    def _fit(self, sizes: Ints, rng: np.random.Generator) -> bool:
        """Cut domains, at random but from their ends, until every bucket's table is small;
        whether they were so from the start."""
        held = True
        for level in self.levels:
            entries = sizes[level.scope].astype(float).prod(axis=1)
            for scope in level.scope[entries > self.cells].tolist():
                while prod(sizes[scope].tolist()) > self.cells:
                    # Rows of known labellings stand first (`_domains`), so the last to go is that
                    # of the first labelling: what is found is never worse than it.
                    wide = [i for i in scope if sizes[i] > 1]
                    sizes[wide[rng.integers(len(wide))]] //= 2
                    held = False
        return held

    def _minimise(self, domains: Ints, sizes: Ints) -> Ints:
        """The best labelling within the domains; leaves take what is best for it."""
        dual = self.dual
        calls, entries = _PER_VARIABLE * len(domains), 0
        tables = self._tables(domains)
        left: list[Floats] = [np.zeros(0)] * len(self.scopes)
        taken: list[tuple[Ints, Ints]] = []  # (scopes, best place of the first given the others')
        for level in self.levels:
            for some in _equal(sizes[level.scope], self.cells):
                scope, shape = level.scope[some], sizes[level.scope[some[0]]].tolist()
                own = dual.costs.take(dual.row_start[scope[:, 0], None] + domains[scope[:, 0]])
                total = own[:, : shape[0]].reshape(-1, shape[0], *(1,) * (len(shape) - 1))
                for places, numbers in level.pairs:
                    m, n = (shape[places.index(axis)] for axis in (0, 1))
                    total = total + _fitted(tables[numbers[some], :m, :n], places)
                for places, numbers in level.left:
                    total = total + _fitted(np.stack([left[k] for k in numbers[some]]), places)
                choice = total.argmin(axis=1)
                best = total.min(axis=1)
                taken.append((scope, choice))
                tables_added = len(level.pairs) + len(level.left)
                calls += _PER_GROUP + 4 * tables_added + len(some)
                entries += (6 + 2 * tables_added) * len(some) * prod(shape)
                for k, table in zip(level.buckets[some], best, strict=True):
                    left[k] = table
        picked = np.zeros(len(domains), dtype=np.int64)
        # Backwards: the neighbours in a bucket were eliminated later, so they are known by now.
        for scope, choice in reversed(taken):
            later = [picked[scope[:, d]] for d in range(1, scope.shape[1])]
            picked[scope[:, 0]] = choice[(np.arange(len(scope)), *later)]
        rows = np.zeros(len(domains), dtype=np.int64)
        rows[dual.core] = domains[dual.core, picked[dual.core]]
        dual.work.add(calls, entries)
        return dual.complete(rows)

    def _tables(self, domains: Ints) -> Floats:
        """The cost of every pair of the core over two domains, the earlier variable's first."""
        first = self.first_label.take(self.first_start[:, None] + domains[self.first])
        second = self.second_label.take(self.second_start[:, None] + domains[self.second])
        first, second = first * self.first_step, second * self.second_step
        at = self.start[:, None, None] + first[:, :, None] + second[:, None, :]
        return self.dual.tables.flat.take(at)


def _shape(variables: Sequence[int], scope: Sequence[int]) -> Shape:
    return tuple(variables.index(i) if i in variables else -1 for i in scope)


def _columns(entries: Sequence[Sequence[tuple[Shape, int]]]) -> tuple[tuple[Shape, Ints], ...]:
    """Entries of buckets linked alike, by place: the shape that all have, and each one's number."""
    return tuple(
        (column[0][0], np.array([n for _, n in column], dtype=np.int64))
        for column in zip(*entries, strict=True)
    )


def _fitted(tables: Floats, places: Shape) -> Floats:
    """Tables [members, ...] with axes of length one where a bucket's table has more."""
    return tables.reshape(
        len(tables), *(tables.shape[1 + axis] if axis >= 0 else 1 for axis in places)
    )


def _equal(shapes: Ints, most: int) -> list[Ints]:
    """Rows that are equal, in groups whose tables have few entries together."""
    groups: dict[bytes, list[int]] = {}
    if (shapes == shapes[0]).all():
        groups[b""] = list(range(len(shapes)))
    else:
        for m, shape in enumerate(np.ascontiguousarray(shapes)):
            groups.setdefault(shape.tobytes(), []).append(m)
    out = []
    for members in groups.values():
        count = max(1, min(most, _TOGETHER) // max(int(shapes[members[0]].prod()), 1))
        out += [np.array(members[k : k + count]) for k in range(0, len(members), count)]
    return out


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
