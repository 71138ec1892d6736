"""Elimination: the best labelling over a few promising rows of every variable.

Variables are eliminated one after another, each leaving a table over those neighbours that are
still there ("bucket elimination", Dechter 1999). The cost grows with the product of the domains of
a variable and these neighbours. Programs are long and narrow, so a handful of rows per variable is
searched exactly in some hundredths of a second. Where a table would be too large, domains are cut
to the rows of labellings that are known already.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints

from .compiled import compiled
from .network import Network, State, starts
from .sweeps import least

# A variable has at most so many neighbours left when it is eliminated; beyond, it keeps one row.
_WIDEST = 24


class Order(NamedTuple):
    """The order of elimination, and what meets in each step, called a bucket.

    Bucket b is about variable `scopes[scope[b]]` and the neighbours that are eliminated later,
    which follow it there in the order of elimination. `pairs` are the network's pairs whose first
    end to be eliminated is that variable, and `parts` the earlier buckets whose tables are added.
    """

    scope: Ints  # [buckets + 1]
    scopes: Ints
    pair: Ints  # [buckets + 1]
    pairs: Ints
    part: Ints  # [buckets + 1]
    parts: Ints


def order_of(net: Network) -> Order:
    """An order that adds few links (the min-fill heuristic); what has one row alone is left out."""
    open_ = np.diff(net.row) > 1
    near: dict[int, set[int]] = {v: set() for v in np.flatnonzero(open_).tolist()}
    for a, b in net.ends[open_[net.ends].all(axis=1)].tolist():
        near[a].add(b)
        near[b].add(a)
    order = _min_fill(near)
    at = {v: k for k, (v, _) in enumerate(order)}
    last = len(order)
    scopes = [[v, *sorted(others, key=at.__getitem__)] for v, others in order]
    pairs: list[list[int]] = [[] for _ in order]
    for p, (a, b) in enumerate(net.ends.tolist()):
        first = min(at.get(a, last), at.get(b, last))
        if first < last:
            pairs[first].append(p)
    parts: list[list[int]] = [[] for _ in order]
    for k, scope in enumerate(scopes):
        if len(scope) > 1:
            parts[at[scope[1]]].append(k)
    return Order(*_ragged(scopes), *_ragged(pairs), *_ragged(parts))


def _ragged(lists: list[list[int]]) -> tuple[Ints, Ints]:
    return starts([len(x) for x in lists]), np.array([i for x in lists for i in x], dtype=np.int64)


def _min_fill(left: dict[int, set[int]]) -> list[tuple[int, set[int]]]:
    """Variables in the order of elimination, each with the neighbours that it has then."""

    def weight(v: int) -> tuple[int, int, int]:
        others = left[v]
        missing = sum(len(others) - 1 - len(others & left[u]) for u in others)
        return missing // 2, len(others), v

    weights = {v: weight(v) for v in left}
    heap = sorted(weights.values())
    order = []
    while heap:
        entry = heapq.heappop(heap)
        v = entry[-1]
        if weights.get(v) != entry:
            continue
        others = left.pop(v)
        del weights[v]
        order.append((v, others))
        for u in others:
            left[u] |= others
            left[u] -= {u, v}
        for u in others.union(*(left[u] for u in others)):
            if weights[u] != (new := weight(u)):
                weights[u] = new
                heapq.heappush(heap, new)
    return order


@compiled
def domains(net: Network, belief: Floats, keep: int, known: Ints) -> tuple[Ints, Ints]:
    """Rows to choose from: those of `known` labellings [known, variables], then the `keep` of the
    least belief, each once: [variables, most] and how many of each variable."""
    variables = len(net.row) - 1
    found = np.zeros((variables, keep + len(known)), dtype=np.int64)
    count = np.zeros(variables, dtype=np.int64)
    best = np.zeros(keep, dtype=np.int64)
    for v in range(variables):
        n = 0
        for k in range(len(known)):
            n = _join(found, v, n, known[k, v])
        held = least(belief, net.row[v], net.row[v + 1], best)
        for k in range(held):
            n = _join(found, v, n, best[k] - net.row[v])
        count[v] = n
    return found, count


@compiled
def _join(found: Ints, v: int, n: int, row: int) -> int:
    for k in range(n):
        if found[v, k] == row:
            return n
    found[v, n] = row
    return n + 1


@compiled
def fit(order: Order, count: Ints, cells: int, seed: int) -> float:
    """Cut domains, from their ends and in turn, until every table has at most so many cells; how
    many cells all tables have together."""
    total, turn = 0.0, seed
    for b in range(len(order.scope) - 1):
        begin, end = order.scope[b], order.scope[b + 1]
        while True:
            size, wide = 1.0, 0
            for k in range(begin, end):
                size *= count[order.scopes[k]]
                wide += count[order.scopes[k]] > 1
            if size <= cells and wide <= _WIDEST:
                total += size
                break
            turn = (turn * 1103515245 + 12345) % 2147483648
            which = turn % wide
            for k in range(begin, end):
                if count[order.scopes[k]] > 1:
                    if which == 0:
                        count[order.scopes[k]] //= 2
                        break
                    which -= 1
    return total


@compiled
def eliminate(net: Network, state: State, order: Order, rows: Ints, count: Ints) -> Ints:
    """The best labelling within domains `rows` [variables, most], `count` of each."""
    buckets = len(order.scope) - 1
    begins = np.zeros(buckets + 1, dtype=np.int64)
    for b in range(buckets):
        size = 1
        for k in range(order.scope[b] + 1, order.scope[b + 1]):
            size *= count[order.scopes[k]]
        begins[b + 1] = begins[b] + size
    cheapest = np.zeros(begins[buckets])
    choice = np.zeros(begins[buckets], dtype=np.int16)
    most = rows.shape[1]
    digit = np.zeros(64, dtype=np.int64)
    for b in range(buckets):
        begin, end = order.scope[b], order.scope[b + 1]
        width, v = end - begin - 1, order.scopes[begin]
        pairs, parts = order.pair[b + 1] - order.pair[b], order.part[b + 1] - order.part[b]
        own = count[v]
        # Costs of v's rows alone, and with each neighbour's, densely over domains.
        alone = np.empty(own)
        for r in range(own):
            alone[r] = state.cost[net.row[v] + rows[v, r]]
        dense = np.empty((pairs, most, most))
        axis = np.zeros(pairs, dtype=np.int64)  # the place in the scope of the other end, or -1
        for i in range(pairs):
            p = order.pairs[order.pair[b] + i]
            mine = 0 if net.ends[p, 0] == v else 1
            other = net.ends[p, 1 - mine]
            axis[i] = -1
            for k in range(width):
                if order.scopes[begin + 1 + k] == other:
                    axis[i] = k
            wide = net.shape[p, 1]
            for d in range(count[other]):
                theirs = net.labels[net.label[p, 1 - mine] + rows[other, d]]
                for r in range(own):
                    here = net.labels[net.label[p, mine] + rows[v, r]]
                    at = here * wide + theirs if mine == 0 else theirs * wide + here
                    dense[i, d, r] = state.tables[state.table[p] + at]
                    if axis[i] < 0:  # it has one row alone
                        alone[r] += dense[i, d, r]
        # Where the tables of earlier buckets lie, by v's row and by each neighbour's.
        step = np.zeros((parts, width + 1), dtype=np.int64)
        for i in range(parts):
            c = order.parts[order.part[b] + i]
            size = 1
            for k in range(order.scope[c + 1] - 1, order.scope[c], -1):
                u = order.scopes[k]
                if u == v:
                    step[i, width] = size
                for j in range(width):
                    if order.scopes[begin + 1 + j] == u:
                        step[i, j] = size
                size *= count[u]
        for k in range(width):
            digit[k] = 0
        offset = np.zeros(parts, dtype=np.int64)
        total = np.empty(own)
        for at in range(begins[b + 1] - begins[b]):
            for r in range(own):
                total[r] = alone[r]
            for i in range(pairs):
                if axis[i] < 0:
                    continue
                d = digit[axis[i]]
                for r in range(own):
                    total[r] += dense[i, d, r]
            for i in range(parts):
                from_ = begins[order.parts[order.part[b] + i]] + offset[i]
                for r in range(own):
                    total[r] += cheapest[from_ + r * step[i, width]]
            best = 0
            for r in range(1, own):
                if total[r] < total[best]:
                    best = r
            cheapest[begins[b] + at] = total[best]
            choice[begins[b] + at] = best
            for k in range(width - 1, -1, -1):  # the next entry: the last neighbour runs fastest
                u = order.scopes[begin + 1 + k]
                digit[k] += 1
                for i in range(parts):
                    offset[i] += step[i, k]
                if digit[k] < count[u]:
                    break
                for i in range(parts):
                    offset[i] -= step[i, k] * count[u]
                digit[k] = 0
    found = np.zeros(len(net.row) - 1, dtype=np.int64)
    for b in range(buckets - 1, -1, -1):
        at = 0
        for k in range(order.scope[b] + 1, order.scope[b + 1]):
            u = order.scopes[k]
            at = at * count[u] + found[u]
        found[order.scopes[order.scope[b]]] = choice[begins[b] + at]
    for v in range(len(found)):
        found[v] = rows[v, found[v]]
    return found
