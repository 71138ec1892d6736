"""Cores of a network: only the rows that a bound hardly excludes.

Message passing says what each row adds to the bound at least, where it is chosen. Most rows add
much, so that a good answer takes few of them: with the rows of least excess alone, exact reductions
leave a network that is smaller by orders of magnitude, whose prices and best answer are soon found.
A core takes the rows of least excess at the prices of the last one, and those of the best answer
known, so that it holds no worse; it grows from one to the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tapestry_egg.extract.gym.cfn.network.network import Flags, Floats, Ints, Network
from tapestry_egg.extract.gym.cfn.network.reach import lightest
from tapestry_egg.extract.gym.cfn.network.reductions import Reduced, narrow

from .search import Found, Search

# Tables of the first core have so many cells together; those of larger networks are not searched
# as they are. A core that is solved but for a share of the whole network's gap is followed by one
# larger by a factor, one that was in vain by a smaller one. Excess is multiplied by noise, so that
# cores differ.
_CELLS, _GROWTH, _SHRINKING, _NOISE = 60_000, 2.0, 1.5, (0.5, 1.5)
_CLOSE, _NEARLY = 0.02, 0.1

# The share of the time that goes into prices of the whole network.
_PRICING = 0.2

# The share of all time that one core gets, and at least so many seconds; it ends after a share of
# that without a gain.
_SHARE, _SHORTEST, _PATIENCE = 0.08, 2.0, 0.25

# So many sweeps at the prices of the last core, as long as ten of them raise the bound by a share:
# what rows add is only told well by messages that have settled. There are more before the first
# core. Prices are left for the best ones if they prove less by a share of the gap.
_SETTLING, _AT_FIRST, _RISE, _WORSE = 40, 150, 2e-4, 0.3


@dataclass(frozen=True)
class Core:
    """A reduced network of some rows of another."""

    whole: Network
    reduced: Reduced

    @property
    def network(self) -> Network:
        return self.reduced.network

    def inside(self, price: Floats) -> Floats:
        """Prices of the whole network's times, at the core's: each goes to the nearest before."""
        times = self.reduced.times
        out = np.zeros(len(times))
        seen = np.flatnonzero(price)
        if len(times):
            at = np.maximum(np.searchsorted(times, seen, side="right") - 1, 0)
            np.add.at(out, at, price[seen])
        return out

    def outside(self, price: Floats) -> Floats:
        """Prices of the core's times, at those of the whole network."""
        out = np.zeros(len(self.whole.uses.room))
        out[self.reduced.times] = price
        return out


def core(net: Network, excess: Floats, kept: Flags, cells: int) -> Core | None:
    """The core of some rows, and of those of least excess that fill tables of so many cells.

    None where it has no answer within the limits.
    """
    reduced = narrow(net, kept | (excess <= threshold(net, excess, kept, cells)))
    return None if reduced.infeasible is not None else Core(net, reduced)


def threshold(net: Network, excess: Floats, kept: Flags, cells: int) -> float:
    """The largest excess up to which the tables of a core have about so many cells."""
    levels = np.sort(excess)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        sizes = np.add.reduceat((kept | (excess <= levels[middle])).astype(np.int64), net.rows[:-1])
        if int((sizes[net.first] * sizes[net.second]).sum()) <= cells:
            low = middle
        else:
            high = middle - 1
    return float(levels[low]) if len(levels) else 0.0


def rows_of(net: Network, x: Ints) -> Flags:
    """The rows of an answer."""
    out = np.zeros(len(net.cost), dtype=bool)
    out[net.rows[:-1] + x] = True
    return out


class CoreSearch(Search):
    """Search of one network that goes on around its best answer in cores; `run` may be called once.

    Networks of small tables are searched as they are.
    """

    def run(self) -> Found:
        """Search until the time is over or the best is proven."""
        if len(self.net.cells) > _CELLS:
            self.pricing = min(self.pricing, _PRICING)
        return super().run()

    def _improve(self, x: Ints) -> None:
        if len(self.net.cells) <= _CELLS:
            super()._improve(x)
            return
        cells = _CELLS
        price = self.best_price
        while not self.done():
            excess = self._excess(price)
            if self.steps:  # other rows at the edge of the core each time
                excess *= self.rng.uniform(*_NOISE, len(excess))
            kept = rows_of(self.net, x if self.best is None else self.best)
            found = core(self.net, excess, kept | self._lightest(), cells)
            if found is None or self.done():
                break
            before = self.value
            inner = self._inner(found, price)
            last = inner.run()
            self.steps += 1 + last.steps
            if last.x is not None:
                self._consider(found.reduced.lift(last.x))
            price = found.outside(last.price)
            if last.proven or last.value - last.bound <= _NEARLY * (self.value - self.bound):
                cells = int(_GROWTH * cells)
            elif not self.value < before:
                cells = max(int(cells / _SHRINKING), _CELLS // 2)
            if cells > len(self.net.cells):
                break
        if not self.done():
            super()._improve(x if self.best is None else self.best)

    def _inner(self, found: Core, price: Floats) -> Search:
        def report(value: float, bound: float) -> None:
            if inner.best is not None:
                self._consider(found.reduced.lift(inner.best))

        share = min(self.left(), max(_SHARE * self.seconds, _SHORTEST))
        seed = int(self.rng.integers(2**31))
        inner = Search(found.network, share, seed, report, self.clock, self.step)
        inner.price = inner.best_price = found.inside(price)
        if np.isfinite(self.value):
            inner.close = _CLOSE * (self.value - self.bound) / max(abs(self.value), 1.0)
        inner.patience = _PATIENCE * share
        return inner

    def _excess(self, price: Floats) -> Floats:
        """What rows add to the bound at some prices; at the best ones where those prove little."""
        for at in (price, self.best_price):
            bound = self._settle(at)
            if self.bound - bound <= _WORSE * abs(self.value - self.bound):
                break
        return self.messages.excess()

    def _settle(self, price: Floats) -> float:
        """Sweep at some prices; the bound that is reached."""
        self.price = price.copy()
        cost = self.net.priced(price)
        bound = before = -np.inf
        for k in range(_SETTLING if self.steps else _AT_FIRST):
            bound = max(bound, self._sweep(cost))
            if k % 10 == 9:
                if bound - before <= _RISE * abs(bound) or self.left() <= 0:
                    break
                before = bound
        return bound

    def _lightest(self) -> Flags:
        """Where no answer is known: the rows that occupy least, so that a core has one."""
        if self.best is not None:
            return np.zeros(len(self.net.cost), dtype=bool)
        return rows_of(self.net, lightest(self.net))
