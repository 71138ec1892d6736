"""Elimination: the best labelling over a few promising rows of every variable.

Variables are eliminated one after another, each leaving a table over those neighbours that are
still there ("bucket elimination", Dechter 1999). The cost grows with the product of the domains of
a variable and these neighbours. Programs are long and narrow, so a handful of rows per variable is
searched exactly in some hundredths of a second. Where a table would be too large, domains are cut
to the rows of labellings that are known already.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

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
    named = np.flatnonzero(open_)
    number = np.cumsum(open_) - 1
    ends = number[net.ends[open_[net.ends].all(axis=1)]]
    order, begin, near = _min_fill(len(named), ends)
    at = np.full(len(open_), len(order), dtype=np.int64)
    at[named[order]] = np.arange(len(order))
    scopes = [
        [v, *sorted(others, key=at.__getitem__)]
        for k, v in enumerate(named[order].tolist())
        for others in [named[near[begin[k] : begin[k + 1]]].tolist()]
    ]
    pairs: list[list[int]] = [[] for _ in scopes]
    for p, first in enumerate(at[net.ends].min(axis=1, initial=len(order)).tolist()):
        if first < len(order):
            pairs[first].append(p)
    parts: list[list[int]] = [[] for _ in scopes]
    for k, scope in enumerate(scopes):
        if len(scope) > 1:
            parts[at[scope[1]]].append(k)
    return Order(*_ragged(scopes), *_ragged(pairs), *_ragged(parts))


def _ragged(lists: list[list[int]]) -> tuple[Ints, Ints]:
    return starts([len(x) for x in lists]), np.array([i for x in lists for i in x], dtype=np.int64)


@compiled
def _min_fill(variables: int, ends: Ints) -> tuple[Ints, Ints, Ints]:
    """Variables in the order of elimination; where those neighbours begin that each has left then;
    and all these. Links are bits, 63 to a word; `at[v, :held[v]]` are the words of variable v in
    which there are any or have been, so that a step takes no longer in a longer program."""
    words = (variables + 62) // 63
    links = np.zeros((variables, words), dtype=np.int64)
    at = np.zeros((variables, words), dtype=np.int64)
    held = np.zeros(variables, dtype=np.int64)
    for k in range(len(ends)):
        for mine, other in ((ends[k, 0], ends[k, 1]), (ends[k, 1], ends[k, 0])):
            _link(links, at, held, mine, other // 63, 1 << (other % 63))
    others = np.empty(variables, dtype=np.int64)
    more = np.empty(variables, dtype=np.int64)
    # Weights, and a tree over them whose nodes have the variable of the least weight below.
    weights = np.full(variables + 1, np.iinfo(np.int64).max, dtype=np.int64)
    leaves = 1
    while leaves < variables:
        leaves *= 2
    least = np.full(2 * leaves, variables, dtype=np.int64)
    for v in range(variables):
        weights[v] = _weight(links, at, held, v, others)
        least[leaves + v] = v
    for n in range(leaves - 1, 0, -1):
        least[n] = _lighter(weights, least[2 * n], least[2 * n + 1])
    order = np.empty(variables, dtype=np.int64)
    begin = np.zeros(variables + 1, dtype=np.int64)
    near = np.empty(16 * variables + 16, dtype=np.int64)
    stale = np.zeros(variables, dtype=np.bool_)
    waiting = np.empty(variables, dtype=np.int64)
    for step in range(variables):
        v = least[1]
        order[step] = v
        _weigh(weights, least, v, np.iinfo(np.int64).max)
        count = _linked(links, at, held, v, others)
        begin[step + 1] = begin[step] + count
        if begin[step + 1] > len(near):
            longer = np.empty(2 * begin[step + 1], dtype=np.int64)
            longer[: begin[step]] = near[: begin[step]]
            near = longer
        near[begin[step] : begin[step + 1]] = others[:count]
        for k in range(count):
            u = others[k]
            for n in range(held[v]):
                _link(links, at, held, u, at[v, n], links[v, at[v, n]])
            for x in (u, v):
                links[u, x // 63] &= ~(1 << (x % 63))
        left = 0
        for k in range(count):
            found = _linked(links, at, held, others[k], more)
            for n in range(-1, found):
                u = others[k] if n < 0 else more[n]
                if not stale[u]:
                    stale[u] = True
                    waiting[left] = u
                    left += 1
        for k in range(left):
            u = waiting[k]
            stale[u] = False
            _weigh(weights, least, u, _weight(links, at, held, u, more))
    return order, begin, near[: begin[variables]]


@compiled
def _link(links: Ints, at: Ints, held: Ints, v: int, word: int, bits: int) -> None:
    """Link a variable to those of some bits of a word."""
    if bits and not links[v, word]:
        known = False
        for n in range(held[v]):
            known |= at[v, n] == word
        if not known:
            at[v, held[v]] = word
            held[v] += 1
    links[v, word] |= bits


@compiled
def _lighter(weights: Ints, a: int, b: int) -> int:
    """The one of two variables that has the lesser weight."""
    return a if weights[a] <= weights[b] else b


@compiled
def _weigh(weights: Ints, least: Ints, v: int, weight: int) -> None:
    """Give a variable another weight."""
    weights[v] = weight
    n = (len(least) // 2 + v) // 2
    while n:
        least[n] = _lighter(weights, least[2 * n], least[2 * n + 1])
        n //= 2


@compiled
def _linked(links: Ints, at: Ints, held: Ints, v: int, found: Ints) -> int:
    """The variables that one is linked to, and how many these are."""
    count = 0
    for n in range(held[v]):
        word = at[v, n]
        left = links[v, word]
        while left:
            found[count] = 63 * word + _ones((left & -left) - 1)
            count += 1
            left &= left - 1
    return count


@compiled
def _ones(word: int) -> int:
    """How many bits of a word are set (Warren, Hacker's Delight, 2012, 5-1)."""
    word -= (word >> 1) & 0x5555555555555555
    word = (word & 0x3333333333333333) + ((word >> 2) & 0x3333333333333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F0F0F0F0F
    return ((word * 0x0101010101010101) >> 56) & 0x7F


@compiled
def _weight(links: Ints, at: Ints, held: Ints, v: int, others: Ints) -> int:
    """How many links eliminating a variable adds; of as many, how many neighbours it has, and which
    it is."""
    count = _linked(links, at, held, v, others)
    missing = 0
    for k in range(count):
        missing += count - 1
        for n in range(held[v]):
            word = at[v, n]
            missing -= _ones(links[v, word] & links[others[k], word])
    return ((min(missing // 2, (1 << 22) - 1) * (1 << 20)) + count) * (1 << 20) + v


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
