"""Branch and bound along an exact elimination, for networks of small width.

Elimination of the network at some prices of memory leaves tables from which the least priced cost
of any completion of a partial labelling is read off. Depth-first search in the reverse order visits
exactly the partial labellings whose bound is below the best, and checks memory as it goes, in
integers: what remains is proven best, or that nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.gym.cfn.network.buckets import Buckets
from tapestry_egg.extract.gym.cfn.network.network import Floats, Ints, Network, dot

#: No table of the elimination has more entries.
CELLS = 1 << 21

# Networks of more variables are left to other methods: the search goes as deep.
_DEEP = 400

# What float64 sums along a path may be wrong by, as a share.
_ROUNDING = 2.0**-44


@dataclass(frozen=True)
class Branched:
    """The best rows within the limits, if any are better; whether the search was exhaustive."""

    x: Ints | None
    complete: bool
    visited: int


def solve(
    net: Network,
    price: Floats,
    below: float,
    stop: Callable[[], bool],
    step: float = 0.0,
    most: int = 200_000,
) -> Branched | None:
    """Search for rows within the limits that cost less than `below`; None for too wide a network.

    No two costs differ by less than `step` (0 where nothing is known). Gives up after `most`
    partial labellings, or when `stop` says so.
    """
    if len(net) > _DEEP:
        return None
    buckets = Buckets(net, np.random.default_rng(0), CELLS)
    if not buckets.exact:
        return None
    return _Search(net, buckets, price, below, stop, step, most).run()


class _Search:
    def __init__(
        self,
        net: Network,
        buckets: Buckets,
        price: Floats,
        below: float,
        stop: Callable[[], bool],
        step: float,
        most: int,
    ) -> None:
        self.net = net
        self.stop = stop
        self.step = step
        self.most = most
        self.below = below
        self.best: Ints | None = None
        self.visited = 0
        self.x = np.zeros(len(net), dtype=np.int64)
        cost = net.priced(price)
        self.order = buckets.buckets[::-1]
        self.totals = buckets.totals(self.x, cost)[::-1]
        # The least of a bucket's total is what all that was eliminated before it comes to; what
        # a partial labelling costs beyond that is added on the way down.
        self.free = net.constant - dot(price, net.uses.room.astype(np.float64))
        self.start = self.free + sum(
            float(t.min()) for t, b in zip(self.totals, self.order, strict=True) if b.next < 0
        )
        terms = float(np.abs(cost).max(initial=0.0)) * len(net) + abs(self.free)
        self.margin = _ROUNDING * (terms + abs(self.start))
        uses = net.uses
        kind = object if net.wide else np.int64
        self.slack = uses.room.astype(kind)
        self.least = [
            uses.amount[uses.start[u] : uses.start[u + 1]].min() for u in range(len(uses))
        ]
        for u, least in enumerate(self.least):
            self.slack[uses.lower[u] : uses.upper[u]] -= int(least)

    def run(self) -> Branched:
        fitting = not len(self.slack) or bool((self.slack >= 0).all())
        complete = self._down(0, self.start) if fitting else True
        return Branched(self.best, complete, self.visited)

    def _down(self, depth: int, bound: float) -> bool:
        """Search below a partial labelling; whether all of it was searched."""
        if depth == len(self.order):
            value = self.net.value(self.x)
            if value < self.below:
                self.below, self.best = value, self.x.copy()
            return True
        bucket, total = self.order[depth], self.totals[depth]
        variable = bucket.scope[0]
        scores = total[(slice(None), *(self.x[v] for v in bucket.scope[1:]))]
        least = float(scores.min())
        for row in np.argsort(scores, kind="stable").tolist():
            score = float(scores[row])
            reached = bound + (score - least)
            if not np.isfinite(score) or reached > self.below - self.step + self.margin:
                break
            self.visited += 1
            if self.visited > self.most or (self.visited % 256 == 0 and self.stop()):
                return False
            self.x[variable] = row
            taken = self._take(variable, row)
            done = self._down(depth + 1, reached) if taken else True
            self._give(variable, row)
            if not done:
                return False
        return True

    def _take(self, variable: int, row: int) -> bool:
        fits = True
        for low, high, more in self._uses(variable, row):
            self.slack[low:high] -= more
            fits = fits and bool((self.slack[low:high] >= 0).all())
        return fits

    def _give(self, variable: int, row: int) -> None:
        for low, high, more in self._uses(variable, row):
            self.slack[low:high] += more

    def _uses(self, variable: int, row: int) -> list[tuple[int, int, int]]:
        net, uses = self.net, self.net.uses
        first, last = net.of_variable[variable], net.of_variable[variable + 1]
        out = []
        for u in range(int(first), int(last)):
            more = int(uses.amount[uses.start[u] + row]) - int(self.least[u])
            if more:
                out.append((int(uses.lower[u]), int(uses.upper[u]), more))
        return out
