"""Answers within the limits before a network is reduced: at once, and better ones soon.

The rows that occupy least are the first answer where no table forbids them; otherwise what is
reachable is searched. Trees of a forest then change where it lowers the cost and still fits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np

from tapestry_egg.extract.gym.cfn.network.forest import Forest
from tapestry_egg.extract.gym.cfn.network.network import Ints, Network, offsets
from tapestry_egg.extract.gym.cfn.network.reach import lightest, reach

from .trades import trade

# The largest tree of each forest, in turns: where little is free, small offers fit more often.
_TREES = (6, 40, 400)

# What float64 sums may have added to a bound, as a share of what is added.
_ROUNDING = 2.0**-44


def opening(
    net: Network, seconds: float, seed: int = 0, clock: Callable[[], float] = time.perf_counter
) -> Iterator[tuple[Ints, float]]:
    """Ever better rows within the limits, and their costs, for some seconds; perhaps none."""
    begun = clock()
    rng = np.random.default_rng(seed)
    x = lightest(net)
    value = plain_value(net, x)
    if not (np.isfinite(value) and net.fits(x)):
        found = reach(net, seconds, rng, clock)
        if found.over > 0:
            return
        x, value = found.x, net.value(found.x)
    yield x, value
    if net.wide:
        return
    slack, free = net.slack(x), np.zeros(len(net.uses.room))
    k = 0
    while clock() - begun < seconds and k < 100:
        order = rng.permutation(len(net)).tolist()
        forest = Forest(net, order, _TREES[k % len(_TREES)])
        x, change = trade(net, forest, x, net.cost, free, slack)
        k += 1
        if change < 0:
            yield x, net.value(x)


def plain_bound(net: Network) -> float:
    """The least of every row and of every table: no answer costs less."""
    least = np.minimum.reduceat(net.cost, net.rows[:-1]) if len(net) else np.zeros(0)
    if len(net.first):
        start = offsets(net.sizes[net.first] * net.sizes[net.second])[:-1]
        least = np.append(least, np.minimum.reduceat(net.cells, start))
    margin = _ROUNDING * (float(np.abs(least).sum()) + abs(net.constant))
    return float(least.sum()) + net.constant - margin


def plain_value(net: Network, x: Ints) -> float:
    """`Network.value`, without the half-edges, which large networks take long to lay out."""
    sizes = net.sizes[net.first] * net.sizes[net.second]
    at = np.cumsum(sizes) - sizes + x[net.first] * net.sizes[net.second] + x[net.second]
    rows = float(net.cost[net.rows[:-1] + x].sum())
    return rows + float(net.cells[at].sum()) + net.constant
