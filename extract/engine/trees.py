"""Trees: many variables at a time, each tree of them solved exactly beside all others as they are.

A connected set of variables without a cycle among them is minimised by passing costs from its
leaves to its root and back. A pass goes through all variables, in trees that are drawn at random.
"""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .moves import BLOCK, change_of
from .network import Network, State

# Seconds that are equal may differ by this share for rounding.
_ROUNDING = 1e-12


@compiled
def draw(random: Ints, below: int) -> int:
    """A number from 0 up to before `below` (Lehmer's generator; Park and Miller, 1988); `random`
    [1] is its state, from 1 up to before 2^31 - 1."""
    random[0] = random[0] * 48271 % 2147483647
    return int(random[0] % below)


@compiled
def descend_trees(
    net: Network,
    state: State,
    rows: Ints,
    profile: Floats,
    limit: float,
    largest: int,
    random: Ints,
) -> None:
    """Go through all variables once, in trees of at most `largest`, and give each tree the rows
    that cost least at the prices of `state`; `rows` [variables] change in place.

    With a `profile` [moments] of the rows, which follows them, a tree changes only if that takes no
    more seconds, and the profile stays within the limit wherever it rises.
    """
    variables = len(net.row) - 1
    order = np.arange(variables)
    for k in range(variables - 1, 0, -1):
        other = draw(random, k + 1)
        order[k], order[other] = order[other], order[k]
    tree, met = np.zeros(variables, dtype=np.int64), np.zeros(variables, dtype=np.int64)
    edge, waiting = np.zeros(variables, dtype=np.int64), np.zeros(len(net.links), dtype=np.int64)
    members, before = np.zeros(variables, dtype=np.int64), np.zeros(variables, dtype=np.int64)
    belief, change = np.empty(int(net.row[variables])), np.zeros(net.times + 1)
    marks = np.zeros(net.times // BLOCK + 1, dtype=np.bool_)
    within = len(profile) > 0
    number = 0
    for k in range(variables):
        s = int(order[k])
        if tree[s] or net.row[s + 1] - net.row[s] == 1:
            continue
        number += 1
        count = _grow(net, s, number, largest, random, tree, met, edge, waiting, members)
        for m in range(count):
            v = members[m]
            before[m] = rows[v]
        _solve(net, state, rows, belief, number, count, tree, edge, members)
        changed = False
        for m in range(count):
            changed = changed or rows[members[m]] != before[m]
        if not within or not changed:
            continue
        now = _seconds(net, rows, tree, number, count, members)
        for m in range(count):
            v = members[m]
            rows[v], before[m] = before[m], rows[v]
        then = _seconds(net, rows, tree, number, count, members)
        kept = now <= then + _ROUNDING * abs(then)
        if kept:
            low, high = net.times, 0
            for m in range(count):
                v = members[m]
                if rows[v] != before[m]:
                    first, last = change_of(net, rows, v, before[m], change, marks)
                    low, high = min(low, first), max(high, last)
                    rows[v], before[m] = before[m], rows[v]
            so_far = 0.0
            for t in range(low, min(high, net.moments)):
                so_far += change[t]
                if so_far > 0.0 and profile[t] + so_far > limit:
                    kept = False
                    break
            so_far = 0.0
            for t in range(low, high + 1):
                so_far += change[t]
                change[t] = 0.0
                if kept and t < net.moments:
                    profile[t] += so_far
            if not kept:
                for m in range(count):
                    rows[members[m]] = before[m]


@compiled
def _grow(
    net: Network,
    start: int,
    number: int,
    largest: int,
    random: Ints,
    tree: Ints,
    met: Ints,
    edge: Ints,
    waiting: Ints,
    members: Ints,
) -> int:
    """Grow a tree from a variable, of those that are in none; how many `members` it has. `edge`
    becomes the link, 2 * pair + end, by which each is joined, -1 for the first."""
    count, left = 1, 0
    members[0], edge[start], tree[start] = start, -1, number
    at = 0
    while True:
        v = members[at]
        for i in range(net.link[v], net.link[v + 1]):  # what is next to the newest one
            link = net.links[i] ^ 1
            other = net.ends[link >> 1, link & 1]
            if tree[other] or net.row[other + 1] - net.row[other] == 1:
                continue
            met[other] += 1
            if met[other] == 1:
                waiting[left] = link
                left += 1
        found = False
        while left and count < largest:
            k = draw(random, left)
            link = waiting[k]
            left -= 1
            waiting[k] = waiting[left]
            other = net.ends[link >> 1, link & 1]
            if met[other] == 1:  # it closes no cycle
                members[count], edge[other], tree[other] = other, link, number
                at, count, found = count, count + 1, True
                break
        if not found:
            break
    for m in range(count):
        v = members[m]
        for i in range(net.link[v], net.link[v + 1]):
            met[net.ends[net.links[i] >> 1, 1 - (net.links[i] & 1)]] = 0
    return count


@compiled
def _solve(
    net: Network,
    state: State,
    rows: Ints,
    belief: Floats,
    number: int,
    count: int,
    tree: Ints,
    edge: Ints,
    members: Ints,
) -> None:
    """Give a tree's members their best rows."""
    for m in range(count):
        v = members[m]
        own, size = net.row[v], net.row[v + 1] - net.row[v]
        for r in range(size):
            belief[own + r] = state.cost[own + r]
        for i in range(net.link[v], net.link[v + 1]):
            p, end = net.links[i] >> 1, net.links[i] & 1
            other = net.ends[p, 1 - end]
            if tree[other] == number:  # by the edge that joins them: there is no cycle
                continue
            label, step, at = _stretch(net, state, p, end, rows[other])
            for r in range(size):
                belief[own + r] += state.tables[at + step * net.labels[label + r]]
    for m in range(count - 1, 0, -1):
        v = members[m]
        own, size = net.row[v], net.row[v + 1] - net.row[v]
        p, end = edge[v] >> 1, edge[v] & 1
        parent = net.ends[p, 1 - end]
        above, most = net.row[parent], net.row[parent + 1] - net.row[parent]
        for a in range(most):
            label, step, at = _stretch(net, state, p, end, a)
            low = np.inf
            for r in range(size):
                low = min(low, belief[own + r] + state.tables[at + step * net.labels[label + r]])
            belief[above + a] += low
    for m in range(count):
        v = members[m]
        own, size = net.row[v], net.row[v + 1] - net.row[v]
        if m:
            p, end = edge[v] >> 1, edge[v] & 1
            label, step, at = _stretch(net, state, p, end, rows[net.ends[p, 1 - end]])
            for r in range(size):
                belief[own + r] += state.tables[at + step * net.labels[label + r]]
        best = rows[v]
        for r in range(size):
            if belief[own + r] < belief[own + best]:
                best = r
        rows[v] = best


@compiled
def _stretch(net: Network, state: State, p: int, end: int, row: int) -> tuple[int, int, int]:
    """Where one end of a pair finds its costs beside a row of the other: where its labels start,
    how far entries are apart, and where they begin in the tables."""
    label = net.labels[net.label[p, 1 - end] + row]
    if end == 0:
        return net.label[p, 0], net.shape[p, 1], state.table[p] + label
    return net.label[p, 1], 1, state.table[p] + label * net.shape[p, 1]


@compiled
def _seconds(net: Network, rows: Ints, tree: Ints, number: int, count: int, members: Ints) -> float:
    """Seconds of a tree's members and of the pairs that they are in."""
    total = 0.0
    for m in range(count):
        v = members[m]
        total += net.seconds[net.row[v] + rows[v]]
        for i in range(net.link[v], net.link[v + 1]):
            p, end = net.links[i] >> 1, net.links[i] & 1
            if end == 1 and tree[net.ends[p, 0]] == number:
                continue  # counted at the other end
            a = net.labels[net.label[p, 0] + rows[net.ends[p, 0]]]
            b = net.labels[net.label[p, 1] + rows[net.ends[p, 1]]]
            total += net.pair_seconds[net.entry[p] + a * net.shape[p, 1] + b]
    return total
