"""Classes that choose alike are one: what a choice problem's tables say of that, exactly.

Tables of programs mostly say that two neighbours choose alike: each row allows at most one of the
other's. Such rows stand or fall together. Rows that no row of a neighbour allows, and rows that
another one replaces at no cost, go.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

Flags = NDArray[np.bool_]

# A variable's rows are compared where that takes no more than so many steps.
_COMPARED = 1 << 22


@compiled
def root(parent: Ints, x: int) -> int:
    """The root of x in a union-find forest; the path to it is halved."""
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x


@compiled
def _join(parent: Ints, x: int, y: int) -> None:
    a, b = root(parent, x), root(parent, y)
    parent[max(a, b)] = min(a, b)


@compiled
def join(
    start: Ints, alive: Flags, first: Ints, second: Ints, cell: Ints, legal: Flags
) -> tuple[Ints, Ints]:
    """Drop nodes that no node of a neighbour allows, and join classes that determine each other.

    Class c has the nodes `start[c] .. start[c + 1]`; pair p joins classes `first[p]` and
    `second[p]`, its table `legal` starts at `cell[p]`. `alive` [nodes] is changed in place. Returns
    the class that stands for each class [classes], the first that is one with it, and likewise the
    node that stands for each node [nodes].
    """
    classes, nodes = len(start) - 1, len(alive)
    group, one = np.arange(classes), np.arange(nodes)
    says = np.zeros(len(first), dtype=np.bool_)  # whether a table may still say something
    widest = 1
    for p in range(len(first)):
        for k in range(cell[p], cell[p + 1]):
            if not legal[k]:
                says[p] = True
                break
        widest = max(widest, start[second[p] + 1] - start[second[p]])
    supported = np.zeros(widest, dtype=np.int64)
    touched, again = np.ones(classes, dtype=np.bool_), np.zeros(classes, dtype=np.bool_)
    dead, last = np.zeros(nodes, dtype=np.bool_), np.full(nodes, -1)
    while True:
        joined = False
        for p in range(len(first)):
            a, b = first[p], second[p]
            if not says[p] or not (touched[a] or touched[b]):
                continue
            same = root(group, a) == root(group, b)
            rows, wide, most = start[a + 1] - start[a], start[b + 1] - start[b], 0
            for j in range(wide):
                supported[j] = 0
            for i in range(rows):
                x = start[a] + i
                if not alive[x]:
                    continue
                count = 0
                for j in range(wide):
                    y = start[b] + j
                    if legal[cell[p] + i * wide + j] and alive[y]:
                        if not same or root(one, x) == root(one, y):
                            count += 1
                            supported[j] += 1
                most = max(most, count)
                if count == 0:
                    alive[x], again[a] = False, True
            for j in range(wide):
                most = max(most, supported[j])
                if alive[start[b] + j] and supported[j] == 0:
                    alive[start[b] + j], again[b] = False, True
            if most > 1:
                continue
            says[p] = False
            if not same:
                joined = True
                _join(group, a, b)
                for i in range(rows):
                    for j in range(wide):
                        x, y = start[a] + i, start[b] + j
                        if legal[cell[p] + i * wide + j] and alive[x] and alive[y]:
                            _join(one, x, y)
        # What is one falls together, and is nothing where two nodes of a class are in it.
        for x in range(nodes):
            dead[x], last[x] = False, -1
        for c in range(classes):
            for x in range(start[c], start[c + 1]):
                r = root(one, x)
                if not alive[x] or last[r] == c:
                    dead[r] = True
                last[r] = c
        changed = joined
        for c in range(classes):
            for x in range(start[c], start[c + 1]):
                if alive[x] and dead[root(one, x)]:
                    alive[x], again[c] = False, True
            changed = changed or again[c]
            touched[c], again[c] = joined or again[c], False
        if not changed:
            break
    for c in range(classes):
        group[c] = root(group, c)
    for x in range(nodes):
        one[x] = root(one, x)
    return group, one


@compiled
def tables(
    start: Ints,
    first: Ints,
    second: Ints,
    cell: Ints,
    legal: Flags,
    values: Floats,
    variable: Ints,
    row: Ints,
    begin: Ints,
    cost: Floats,
    entry: Ints,
    size: int,
) -> Floats:
    """The sums of tables over the rows of variables, those of pair p from `entry[p]` on; [size].

    `variable` [classes] and `row` [nodes], -1 for none, say what classes and nodes have become;
    what is between two classes of one variable is added to `cost`, whose rows lie from `begin` on.
    """
    found = np.zeros(size)
    for p in range(len(first)):
        a, b = first[p], second[p]
        v, w = variable[a], variable[b]
        high = begin[max(v, w) + 1] - begin[max(v, w)]
        wide = start[b + 1] - start[b]
        for i in range(start[a + 1] - start[a]):
            x = row[start[a] + i]
            if x < 0:
                continue
            for j in range(wide):
                y = row[start[b] + j]
                if y < 0 or (v == w and x != y):
                    continue
                k = cell[p] + i * wide + j
                value = values[k] if legal[k] else np.inf
                if v == w:
                    cost[begin[v] + x] += value
                elif v < w:
                    found[entry[p] + x * high + y] += value
                else:
                    found[entry[p] + y * high + x] += value
    return found


@compiled
def replaced(
    begin: Ints,
    cost: Floats,
    first: Ints,
    second: Ints,
    entry: Ints,
    cells: Floats,
    link: Ints,
    links: Ints,
    use: Ints,
    amount: Ints,
    amounts: Ints,
) -> Flags:
    """[rows] which rows some neighbour allows no row, or another row replaces at no cost, whatever
    neighbours choose.

    Variable v has the rows `begin[v] .. begin[v + 1]`, is in the pairs `links[link[v] ..] >> 1` (as
    their first or second end), and occupies the `amounts` from `amount[u]` on for the uses
    `use[v] .. use[v + 1]`.
    """
    gone = np.zeros(len(cost), dtype=np.bool_)
    for v in range(len(begin) - 1):
        own, size = begin[v], begin[v + 1] - begin[v]
        work = 0
        for i in range(link[v], link[v + 1]):
            p, end = links[i] >> 1, links[i] & 1
            other = second[p] if end == 0 else first[p]
            work += size * size * (begin[other + 1] - begin[other])
        for x in range(size):  # does some neighbour allow it no row?
            for i in range(link[v], link[v + 1]):
                p, end = links[i] >> 1, links[i] & 1
                other = second[p] if end == 0 else first[p]
                count = begin[other + 1] - begin[other]
                step, at = (1, count) if end == 0 else (size, 1)
                legal = False
                for k in range(count):
                    if not gone[begin[other] + k]:
                        legal = legal or cells[entry[p] + x * at + k * step] < np.inf
                gone[own + x] = gone[own + x] or not legal
        if work > _COMPARED:
            continue
        for x in range(size):  # is it replaced by some y that stays?
            if gone[own + x]:
                continue
            for y in range(size):
                if y == x or gone[own + y] or not cost[own + y] <= cost[own + x]:
                    continue
                rise, less = cost[own + y] - cost[own + x], True
                for u in range(use[v], use[v + 1]):
                    if amounts[amount[u] + y] > amounts[amount[u] + x]:
                        less = False
                        break
                if not less:
                    continue
                for i in range(link[v], link[v + 1]):
                    p, end = links[i] >> 1, links[i] & 1
                    other = second[p] if end == 0 else first[p]
                    count = begin[other + 1] - begin[other]
                    step, at = (1, count) if end == 0 else (size, 1)
                    worst = -np.inf
                    for k in range(count):
                        if gone[begin[other] + k]:
                            continue
                        mine = cells[entry[p] + y * at + k * step]
                        its = cells[entry[p] + x * at + k * step]
                        if its < np.inf:
                            worst = max(worst, mine - its)
                    rise += worst
                    if rise > 0.0:
                        break
                if rise <= 0.0:
                    gone[own + x] = True
                    break
    return gone


@compiled
def beyond(
    begin: Ints, use: Ints, span: Ints, amount: Ints, amounts: Floats, room: Floats
) -> Flags:
    """[rows] which rows are beyond the `room` [moments] that there is where all else takes its
    least. `amounts` are those above the least of each use; its `span` is from and up to which
    moment; the rest is as in `replaced`."""
    gone = np.zeros(begin[len(begin) - 1], dtype=np.bool_)
    change = np.zeros(len(room) + 1)
    for v in range(len(begin) - 1):
        own, size = begin[v], begin[v + 1] - begin[v]
        low, high = len(room), 0
        for u in range(use[v], use[v + 1]):
            low, high = min(low, span[u, 0]), max(high, span[u, 1])
        if size * (high - low) > _COMPARED:
            continue
        for r in range(size):
            for u in range(use[v], use[v + 1]):
                change[span[u, 0]] += amounts[amount[u] + r]
                change[span[u, 1]] -= amounts[amount[u] + r]
            used = 0.0
            for t in range(low, high + 1):
                used += change[t]
                change[t] = 0.0
                if t < len(room) and used > room[t]:
                    gone[own + r] = True
    return gone
