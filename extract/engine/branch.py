"""Branch and bound: the fastest labelling within limits on memory and joules, and the proof.

A limit is exchanged for prices, which rise where labellings exceed it (Polyak's subgradient steps,
with the mean direction of the volume algorithm: Barahona and Anbil, 2000). What prices leave open,
branching closes: one row of a variable is taken, or it is excluded, until every open part of the
problem is bounded from below by what is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.problem.chains import longest
from tapestry_egg.extract.problem.compiled import compiled
from tapestry_egg.extract.problem.problem import Floats, Ints

from .network import Flags, Network, State
from .sweeps import beliefs, decode, evaluate, price, sweep

# Steps of prices at the root and at every other node; passes of messages at each.
_ROOT, _STEPS, _SWEEPS = 60, 8, 2

#: Steps of prices that the root takes, and any other node, about.
AT_ROOT, PER_NODE = 30, 6

# The first step as a share of Polyak's, and by what it shrinks when a bound does not rise.
_FIRST, _SHORTER = 0.6, 0.6

# How much of a direction is new, and how far shares of chains go towards the longest one.
_NEW, _TURN = 0.4, 0.4


@compiled
def ascend(
    net: Network,
    state: State,
    alive: Flags,
    limits: Floats,
    prices: Floats,
    chains: Floats,
    merging: float,
    upper: float,
    enough: float,
    steps: int,
    sweeps: int,
    forbidden: float,
    rows: Ints,
    taken: Ints,
) -> tuple[float, float]:
    """Raise the bound on seconds within `limits` (peak bytes, joules) among rows that are `alive`.

    `prices` [moments + 1], of all bytes of the limit at each moment and of all its joules, and the
    shares of `chains` [reads] are moved to those that prove most. With `merging` of -1 latencies
    count along chains alone, with 0 all of them do. A labelling within the limits and faster than
    `upper` is written to `rows`; `taken` counts how often a row was in a labelling. Ends where the
    bound reaches `enough`, or after `steps` of as many `sweeps`. Returns the bound and the new
    `upper`.
    """
    moments = net.moments
    peak, joules = limits[0], limits[1]
    best, length = -np.inf, _FIRST
    trial, direction = np.empty(moments + 1), np.zeros(moments + 1)
    for t in range(moments + 1):
        trial[t] = prices[t]
    along, path = np.empty(len(chains)), np.zeros(len(chains))
    for r in range(len(chains)):
        along[r] = chains[r]
    until = np.zeros(net.times + 1)
    for r in range(len(taken)):
        taken[r] = 0
    first = True
    for _ in range(steps):
        paid = 0.0
        for t in range(moments):
            until[t + 1] = until[t] + trial[t] / peak
            paid += trial[t]
        joule = 0.0
        if joules < np.inf:
            joule = trial[moments] / joules
            paid += trial[moments]
        if net.times > moments:
            until[moments + 1] = until[moments] + merging
            for r in range(len(along)):
                until[moments + 2 + r] = until[moments + 1 + r] + along[r]
        price(net, state, 1.0, joule, until, forbidden)
        for r in range(len(alive)):
            if not alive[r]:
                state.cost[r] = forbidden
        bounds = sweep(net, state, sweeps, 0.0, np.inf)
        value = bounds[0]
        for k in range(1, len(bounds)):
            value = max(value, bounds[k])
        value -= paid
        if value > best:
            best = value
            for t in range(moments + 1):
                prices[t] = trial[t]
            for r in range(len(along)):
                chains[r] = along[r]
        else:
            length *= _SHORTER
        if best >= enough:
            break
        found = decode(net, state)
        seconds, energy, profile = evaluate(net, found)
        legal = seconds < forbidden
        for v in range(len(found)):
            legal = legal and alive[net.row[v] + found[v]]
        if legal:
            if net.times > moments and merging != 0.0:
                most, path = longest(net.maker, net.reader, net.units, profile[moments + 1 :])
                seconds += most - profile[moments]
            for v in range(len(found)):
                taken[net.row[v] + found[v]] += 1
            high = 0.0
            for t in range(moments):
                high = max(high, profile[t])
            if high <= peak and energy <= joules and seconds < upper:
                upper = seconds
                enough = min(enough, upper)
                for v in range(len(found)):
                    rows[v] = found[v]
            new = 1.0 if first else _NEW
            first = False
            for t in range(moments):
                direction[t] = new * (profile[t] / peak - 1.0) + (1.0 - new) * direction[t]
            if joules < np.inf:
                over = energy / joules - 1.0
                direction[moments] = new * over + (1.0 - new) * direction[moments]
        norm = 0.0
        for t in range(moments + 1):
            if direction[t] > 0.0 or prices[t] > 0.0:
                norm += direction[t] * direction[t]
        if norm == 0.0 and len(along) == 0:
            break
        step = 0.0
        if norm > 0.0:
            step = length * (min(upper, 2.0 * max(best, 0.0) + 1e-9) - best) / norm
        for t in range(moments + 1):
            trial[t] = max(0.0, prices[t] + step * direction[t])
        for r in range(len(along)):
            along[r] = chains[r] + _TURN * length * (path[r] - chains[r])
    return best, upper


@dataclass
class _Open:
    """A part of the problem that is not closed: the rows that it has, prices and shares of chains
    to begin with, and what is proven of it."""

    alive: Flags
    prices: Floats
    chains: Floats
    low: float


def branch(
    net: Network,
    state: State,
    limits: Floats,
    prices: Floats,
    chains: Floats,
    merging: float,
    upper: float,
    gap: float,
    nodes: float,
    forbidden: float,
    over: Callable[[], bool] = lambda: False,
) -> tuple[float, float, Ints | None, int]:
    """Close the problem within `limits` (peak bytes, joules) to the share `gap`, in so many nodes,
    or until it is `over`.

    Returns a bound on seconds within the limits, what is known (`upper`, or better), the rows of
    what is better, and the nodes visited. `prices`, `chains` and `merging` are as in `ascend`, and
    where the search begins.
    """
    rows = np.full(len(net.row) - 1, -1, dtype=np.int64)
    taken = np.zeros(int(net.row[-1]), dtype=np.int64)
    left = [_Open(np.ones(len(taken), dtype=np.bool_), prices, chains, 0.0)]
    visited = 0
    while left and visited < nodes and not over():
        part = left.pop()
        enough = upper * (1.0 - gap)
        if part.low >= enough:
            continue
        steps = _STEPS if visited else _ROOT
        visited += 1
        bound, upper = ascend(
            net,
            state,
            part.alive,
            limits,
            part.prices,
            part.chains,
            merging,
            upper,
            enough,
            steps,
            _SWEEPS,
            forbidden,
            rows,
            taken,
        )
        bound = max(bound, part.low)
        if bound >= upper * (1.0 - gap):
            continue
        row, v = _split(net, part.alive, taken, beliefs(net, state))
        if v < 0:  # one labelling is left, and it is not within the limits
            continue
        one = np.zeros_like(part.alive)
        one[: net.row[v]], one[net.row[v + 1] :] = (
            part.alive[: net.row[v]],
            part.alive[net.row[v + 1] :],
        )
        one[row], part.alive[row] = True, False
        part.low = bound
        left += [part, _Open(one, part.prices.copy(), part.chains.copy(), bound)]
    low = min((part.low for part in left), default=np.inf)
    return min(low, upper * (1.0 - gap)), upper, rows if rows[0] >= 0 else None, visited


@compiled
def _split(net: Network, alive: Flags, taken: Ints, belief: Floats) -> tuple[int, int]:
    """A row to take or exclude, and its variable: one on which the labellings that were met agree
    least; -1 where every variable has one row left."""
    row, variable, most = -1, -1, -1.0
    for v in range(len(net.row) - 1):
        left = met = often = every = 0
        usual, best = -1, -1
        low, second = np.inf, np.inf
        for r in range(net.row[v], net.row[v + 1]):
            if not alive[r]:
                continue
            left += 1
            if taken[r] > 0:
                met += 1
                every += taken[r]
                if taken[r] > often:
                    often, usual = taken[r], r
            if belief[r] < low:
                low, second, best = belief[r], low, r
            elif belief[r] < second:
                second = belief[r]
        if left > 1:
            if met > 1:
                score, which = 2.0 - often / every, usual
            else:
                score, which = 1.0 / (1.0 + 1e6 * (second - low)), best
            if score > most:
                row, variable, most = which, v, score
    return row, variable
