"""Moves that keep every limit: a forest's trees change one after another where they still fit.

Trees of a forest are independent in cost, the rest being fixed, but share memory. Each tree's best
rows at some prices are an offer; offers that lower the cost are taken in the order of what they
gain at the prices, if they fit into what is free at every time.
"""

from __future__ import annotations

import numpy as np

from tapestry_egg.extract.gym.cfn.network.forest import Forest
from tapestry_egg.extract.gym.cfn.network.network import Floats, Ints, Network, ranges


def change_of_uses(net: Network, changed: Ints, x: Ints, y: Ints) -> tuple[Ints, Ints, Ints, Ints]:
    """What changes in memory from x to y: (which of `changed`, lower, upper, amount more)."""
    first, last = net.of_variable[changed], net.of_variable[changed + 1]
    use = ranges(first, last - first)
    which = np.repeat(np.arange(len(changed)), last - first)
    v, start = changed[which], net.uses.start[use]
    more = net.uses.amount[start + y[v]] - net.uses.amount[start + x[v]]
    keep = np.flatnonzero(more)
    use = use[keep]
    return which[keep], net.uses.lower[use], net.uses.upper[use], more[keep]


def trade(
    net: Network, forest: Forest, x: Ints, cost: Floats, price: Floats, slack: Ints
) -> tuple[Ints, float]:
    """Take what fits of a forest's best rows at priced costs: (rows, change of cost).

    `slack` is what is free at every time, and is kept up to date.
    """
    y = forest.minimise(x, cost)
    changed = np.flatnonzero(x != y)
    if not len(changed):
        return x, 0.0
    gain = forest.by_tree(y) - forest.by_tree(x)
    root = forest.root[forest.place[changed]]
    which, lower, upper, more = change_of_uses(net, changed, x, y)
    of = root[which]
    until = np.concatenate(([0.0], np.cumsum(price)))
    paid = gain + np.bincount(of, (until[upper] - until[lower]) * more, len(forest))
    offers = np.unique(root)
    offers = offers[gain[offers] <= 0]
    offers = offers[np.argsort(paid[offers], kind="stable")]
    by_use, by_variable = np.argsort(of, kind="stable"), np.argsort(root, kind="stable")
    lower, upper, more = lower[by_use], upper[by_use], more[by_use]
    use_at = np.searchsorted(of[by_use], np.stack((offers, offers + 1)))
    variable_at = np.searchsorted(root[by_variable], np.stack((offers, offers + 1)))
    x = x.copy()
    total = 0.0
    for k, offer in enumerate(offers.tolist()):
        a, b = int(use_at[0, k]), int(use_at[1, k])
        if a < b and not take(slack, lower[a:b], upper[a:b], more[a:b]):
            continue
        v = changed[by_variable[variable_at[0, k] : variable_at[1, k]]]
        x[v] = y[v]
        total += float(gain[offer])
    return x, total


def take(slack: Ints, lower: Ints, upper: Ints, more: Ints) -> bool:
    """Occupy more (or less) over some stretches of time if it fits; whether it did."""
    if len(more) == 1:
        a, b, m = int(lower[0]), int(upper[0]), int(more[0])
        if m > 0 and int(slack[a:b].min()) < m:
            return False
        slack[a:b] -= m
        return True
    at = np.concatenate((lower, upper))
    by_time = np.argsort(at, kind="stable")
    at = at[by_time]
    total = np.cumsum(np.concatenate((more, -more))[by_time])
    last = np.append(at[1:] > at[:-1], False)  # of the events at one time
    start, end, total = at[:-1][last[:-1]], at[1:][last[:-1]], total[last]
    if not len(start):
        return True
    changes = list(zip(start.tolist(), end.tolist(), total.tolist(), strict=True))
    if any(m > 0 and int(slack[a:b].min()) < m for a, b, m in changes):
        return False
    for a, b, m in changes:
        slack[a:b] -= m
    return True
