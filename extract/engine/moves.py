"""Moves: one variable at a time, judged by true seconds and the true peak."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .network import Flags, Network
from .sweeps import evaluate, least

# So many of the cheapest rows of a variable are tried in a move that looks at the memory profile.
_TRIED = 40

#: So many moments are one block.
BLOCK = 64

# Shares by which seconds and peaks that are equal may differ for rounding.
_ROUNDING = 1e-12


@compiled
def descend(net: Network, rows: Ints, limit: float, rounds: int) -> Ints:
    """Improve a labelling's seconds while its peak is within the limit; above it, lower the peak.

    Goes through all variables in turn, so many rounds or until nothing changes.
    """
    given, rows = rows, np.empty(len(rows), dtype=np.int64)
    for v in range(len(rows)):
        rows[v] = given[v]
    moments = net.moments
    profile = evaluate(net, rows)[2]
    change, order = np.zeros(net.times + 1), np.zeros(_TRIED, dtype=np.int64)
    marks = np.zeros(net.times // BLOCK + 1, dtype=np.bool_)
    if moments == 0:
        profile = np.zeros(1)
        moments = 1
    # The most that is held before each moment, from it on, and in each block of moments. A move
    # within a limit that is kept changes only the last.
    before, after = np.full(moments + 1, -np.inf), np.full(moments + 1, -np.inf)
    tops = np.empty(len(marks))
    _top(profile, tops, 0, moments)
    known, tight = False, False
    for _ in range(rounds):
        changed = False
        for v in range(len(rows)):
            own = net.row[v]
            size = net.row[v + 1] - own
            if size == 1:
                continue
            if not known:
                for t in range(moments):
                    before[t + 1] = max(before[t], profile[t])
                for t in range(moments - 1, -1, -1):
                    after[t] = max(after[t + 1], profile[t])
                tight, known = max(after[0], 0.0) > limit, True
            cost = _seconds(net, rows, v)
            now = cost[rows[v]]
            tried = least(cost, 0, size, order)
            if not tight and now <= cost[order[0]] + _ROUNDING * abs(now):
                continue
            best, best_peak, best_cost = rows[v], max(after[0], 0.0), now
            for k in range(tried):
                row = order[k]
                if not np.isfinite(cost[row]) or row == rows[v]:
                    continue
                if not tight and cost[row] >= now:
                    break
                first, last = change_of(net, rows, v, row, change, marks)
                high = _highest(profile, tops, change, marks, first, last)
                if tight and high <= best_peak * (1.0 + 1e-9):  # the peak may be elsewhere
                    high = max(high, before[min(first, moments)], after[min(last, moments)])
                if tight:
                    lower = high < best_peak * (1.0 - 1e-9)
                    if lower or (high <= best_peak * (1.0 + 1e-9) and cost[row] < best_cost):
                        best, best_peak, best_cost = row, high, cost[row]
                elif high <= limit * (1.0 + _ROUNDING):
                    best, best_peak = row, high
                    break
            if best != rows[v]:
                first, last = change_of(net, rows, v, best, change, marks)
                so_far = 0.0
                for t in range(first, last):
                    so_far += change[t]
                    change[t] = 0.0
                    profile[t] += so_far
                change[last] = 0.0
                _top(profile, tops, first, last)
                rows[v] = best
                changed, known = True, not tight and best_peak <= limit
        if not changed:
            break
    return rows


@compiled
def _top(profile: Floats, tops: Floats, first: int, last: int) -> None:
    """Note the most that is held in each block with a moment from `first` up to before `last`."""
    for b in range(first // BLOCK, (last - 1) // BLOCK + 1):
        tops[b] = -np.inf
        for t in range(b * BLOCK, min((b + 1) * BLOCK, len(profile))):
            tops[b] = max(tops[b], profile[t])


@compiled
def _highest(
    profile: Floats, tops: Floats, change: Floats, marks: Flags, first: int, last: int
) -> float:
    """The most that is held from `first` up to before `last` after a `change`, which is nothing
    then. Blocks that have no mark are not gone through."""
    so_far, high = 0.0, -np.inf
    at = first
    while at < last:
        b = at // BLOCK
        end = (b + 1) * BLOCK
        if marks[b] or at % BLOCK or end > last:
            end = min(end, last)
            for t in range(at, end):
                so_far += change[t]
                change[t] = 0.0
                high = max(high, profile[t] + so_far)
            marks[b] = False
        else:
            high = max(high, tops[b] + so_far)
        at = end
    change[last] = 0.0
    marks[last // BLOCK] = False
    return high


@compiled
def _seconds(net: Network, rows: Ints, v: int) -> Floats:
    """Seconds of every row of one variable with all others as they are, but for a constant."""
    own = net.row[v]
    size = net.row[v + 1] - own
    cost = np.empty(size)
    for r in range(size):
        cost[r] = net.seconds[own + r]
    for i in range(net.link[v], net.link[v + 1]):
        p, end = net.links[i] >> 1, net.links[i] & 1
        other = net.ends[p, 1 - end]
        theirs = net.labels[net.label[p, 1 - end] + rows[other]]
        wide = net.shape[p, 1]
        for r in range(size):
            mine = net.labels[net.label[p, end] + r]
            at = mine * wide + theirs if end == 0 else theirs * wide + mine
            cost[r] += net.pair_seconds[net.entry[p] + at]
    return cost


@compiled
def change_of(
    net: Network, rows: Ints, v: int, row: int, change: Floats, marks: Flags
) -> tuple[int, int]:
    """Add to `change` [times + 1] where memory rises and falls if variable v takes another row, and
    mark the blocks of moments in which it does.

    Returns from and up to which moment that is; (moments, 0) where it changes nowhere.
    """
    low, high = net.moments, 0
    for u in range(net.use[v], net.use[v + 1]):
        if net.begin[u] >= net.moments:  # the seconds of an event
            continue
        more = net.amounts[net.amount[u] + row] - net.amounts[net.amount[u] + rows[v]]
        change[net.begin[u]] += more
        change[net.end[u]] -= more
        marks[net.begin[u] // BLOCK] = marks[net.end[u] // BLOCK] = True
        low, high = min(low, net.begin[u]), max(high, net.end[u])
    variables = len(net.row) - 1
    for i in range(net.link[v], net.link[v + 1]):
        p, end = net.links[i] >> 1, net.links[i] & 1
        part = variables + p
        if net.use[part] == net.use[part + 1]:
            continue
        other = net.ends[p, 1 - end]
        theirs = net.labels[net.label[p, 1 - end] + rows[other]]
        wide = net.shape[p, 1]
        mine, was = net.labels[net.label[p, end] + row], net.labels[net.label[p, end] + rows[v]]
        if end == 0:
            at, before = mine * wide + theirs, was * wide + theirs
        else:
            at, before = theirs * wide + mine, theirs * wide + was
        for u in range(net.use[part], net.use[part + 1]):
            if net.begin[u] >= net.moments:
                continue
            more = net.amounts[net.amount[u] + at] - net.amounts[net.amount[u] + before]
            change[net.begin[u]] += more
            change[net.end[u]] -= more
            marks[net.begin[u] // BLOCK] = marks[net.end[u] // BLOCK] = True
            low, high = min(low, net.begin[u]), max(high, net.end[u])
    return low, high
