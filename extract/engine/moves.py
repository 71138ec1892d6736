"""Moves: one variable at a time, judged by true seconds and the true peak."""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .network import Network
from .sweeps import evaluate, least

# So many of the cheapest rows of a variable are tried in a move that looks at the memory profile.
_TRIED = 40

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
    if moments == 0:
        profile = np.zeros(1)
        moments = 1
    for _ in range(rounds):
        changed = False
        for v in range(len(rows)):
            own = net.row[v]
            size = net.row[v + 1] - own
            if size == 1:
                continue
            peak = 0.0
            for t in range(moments):
                peak = max(peak, profile[t])
            tight = peak > limit
            cost = _seconds(net, rows, v)
            now = cost[rows[v]]
            tried = least(cost, 0, size, order)
            if not tight and now <= cost[order[0]] + _ROUNDING * abs(now):
                continue
            best, best_peak, best_cost = rows[v], peak, now
            for k in range(tried):
                row = order[k]
                if not np.isfinite(cost[row]) or row == rows[v]:
                    continue
                if not tight and cost[row] >= now:
                    break
                first, last = change_of(net, rows, v, row, change)
                so_far, high = 0.0, -np.inf
                for t in range(first, last):
                    so_far += change[t]
                    change[t] = 0.0
                    high = max(high, profile[t] + so_far)
                change[last] = 0.0
                if tight and high <= best_peak * (1.0 + 1e-9):  # the peak may be elsewhere
                    for t in range(min(first, moments)):
                        high = max(high, profile[t])
                    for t in range(last, moments):
                        high = max(high, profile[t])
                if tight:
                    lower = high < best_peak * (1.0 - 1e-9)
                    if lower or (high <= best_peak * (1.0 + 1e-9) and cost[row] < best_cost):
                        best, best_peak, best_cost = row, high, cost[row]
                elif high <= limit * (1.0 + _ROUNDING):
                    best = row
                    break
            if best != rows[v]:
                first, last = change_of(net, rows, v, best, change)
                so_far = 0.0
                for t in range(first, last):
                    so_far += change[t]
                    change[t] = 0.0
                    profile[t] += so_far
                change[last] = 0.0
                rows[v] = best
                changed = True
        if not changed:
            break
    return rows


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
def change_of(net: Network, rows: Ints, v: int, row: int, change: Floats) -> tuple[int, int]:
    """Add to `change` [times + 1] where memory rises and falls if variable v takes another row.

    Returns from and up to which moment that is; (moments, 0) where it changes nowhere.
    """
    low, high = net.moments, 0
    for u in range(net.use[v], net.use[v + 1]):
        if net.begin[u] >= net.moments:  # the seconds of an event
            continue
        more = net.amounts[net.amount[u] + row] - net.amounts[net.amount[u] + rows[v]]
        change[net.begin[u]] += more
        change[net.end[u]] -= more
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
            low, high = min(low, net.begin[u]), max(high, net.end[u])
    return low, high
