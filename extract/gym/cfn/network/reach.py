"""What memory is reachable: answers that exceed the limits least, and a bound on all such.

Costs are left aside but for what they forbid. Where usage stands above the limits, weights of times
grow (multiplicative weights for a matrix game); the least weighted usage, whose weights sum to 1,
is never above the least excess that any answer has at its worst time (weak duality).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from .forest import Forest
from .messages import Messages
from .network import Floats, Ints, Network, dot, least_in, offsets, ranges

# The rate at which weights grow, per share of the largest excess; it falls with the rounds.
_RATE = 2.0

# So many forests are moved over at once, and so many sweeps bound what is weighted.
_MOVES, _SWEEPS = 3, 3

# What float64 sums may have added to a bound, as a share of the sums.
_ROUNDING = 2.0**-44


@dataclass(frozen=True)
class Reach:
    """The rows that exceed the limits least, by how much at their worst time, and a bound on that.

    Not above 0: they fit. A bound above 0: nothing does.
    """

    x: Ints
    time: int
    over: float
    bound: float


def lightest(net: Network) -> Ints:
    """Of every variable, the row that occupies least over its time, whatever tables say."""
    return least_in(_weighted(net, np.ones(len(net.uses.room))), net.rows[:-1], net.sizes)


def reach(
    net: Network,
    seconds: float,
    rng: np.random.Generator,
    clock: Callable[[], float] = time.perf_counter,
    rounds: int = 400,
    least: bool = False,
) -> Reach:
    """Search for rows within the limits for some seconds, or until it is known whether there are
    any; with `least`, until no rows exceed the limits less, or are below them by more."""
    begun = clock()
    bare = _bare(net)
    x = lightest(net)
    best = _worst(net, bare, x)
    bound = _apart(net)
    if best.over <= bound:
        return replace(best, bound=bound)
    messages = Messages(bare)
    room = net.uses.room.astype(np.float64)
    if not len(room):
        weight = room
    else:
        weight = np.zeros(len(room))
        weight[int(net.over(x).argmax())] = 1.0
    total = np.zeros(len(weight))
    for k in range(rounds):
        cost = _weighted(net, weight)
        for _ in range(_SWEEPS):
            lowest = messages.sweep(cost)
        paid = dot(weight, room)
        margin = _ROUNDING * (paid + float(cost.sum()) + bare.half.forbidden)
        bound = max(bound, lowest - paid - margin)
        y = messages.decode(cost)
        for z in (y, x):
            for _ in range(_MOVES):
                forest = Forest(bare, rng.permutation(len(net)).tolist(), len(net))
                z = forest.minimise(z, cost)
            found = _worst(net, bare, z)
            if found.over < best.over:
                best = found
        x = best.x
        known = best.over <= bound if least else best.over <= 0 or bound > 0
        if known or clock() - begun > seconds:
            break
        over = net.over(z)
        total += over / max(float(np.abs(over).max(initial=0.0)), 1.0)
        weight = np.exp(
            _RATE * (total - total.max(initial=-np.inf)) * min(1.0, 4.0 / np.sqrt(k + 1))
        )
        weight[weight < 1e-9] = 0.0
        weight /= weight.sum()
    return replace(best, bound=bound)


def _apart(net: Network) -> float:
    """By how much limits are exceeded at least, each variable taking its least at every time."""
    uses = net.uses
    if not len(uses) or net.wide:
        return -np.inf
    least = np.minimum.reduceat(uses.amount, uses.start[:-1])
    steps = np.zeros(len(uses.room) + 1, dtype=np.int64)
    np.add.at(steps, uses.lower, least)
    np.subtract.at(steps, uses.upper, least)
    return float((np.cumsum(steps[:-1]) - uses.room).max())


def _worst(net: Network, bare: Network, x: Ints) -> Reach:
    if not np.isfinite(bare.value(x)):
        return Reach(x, 0, np.inf, -np.inf)
    over = net.over(x)
    if not len(over):
        return Reach(x, 0, 0.0, -np.inf)
    at = int(over.argmax())
    return Reach(x, at, float(over[at]), -np.inf)


def _weighted(net: Network, weight: Floats) -> Floats:
    """What rows occupy, times weighted: [rows]."""
    uses = net.uses
    until = np.concatenate(([0.0], np.cumsum(weight)))
    paid = np.repeat(until[uses.upper] - until[uses.lower], np.diff(uses.start))
    return np.bincount(net.use_rows, paid * uses.amount, len(net.cost)).astype(np.float64)


def _bare(net: Network) -> Network:
    """The network without costs: only tables that forbid something, the rest of them free.

    Its costs are more than any weighted usage, so that what is forbidden costs still more.
    """
    sizes = net.sizes[net.first] * net.sizes[net.second]
    start = offsets(sizes)
    forbids = np.zeros(len(sizes), dtype=bool)
    if len(sizes):
        forbids = np.logical_or.reduceat(~np.isfinite(net.cells), start[:-1])
    inside = ranges(start[:-1][forbids], sizes[forbids])
    most = 0.0
    if len(net.uses):
        most = float(np.maximum.reduceat(net.uses.amount, net.uses.start[:-1]).sum(dtype=float))
    return Network(
        net.sizes,
        np.full(len(net.cost), most),
        net.first[forbids],
        net.second[forbids],
        np.where(np.isfinite(net.cells[inside]), 0.0, np.inf),
        net.uses,
    )
