"""Search of one network at many limits, each warm from the others.

The answers of all limits are kept (also those that a search at one limit meets beyond it), and so
are the prices that prove most at each; messages and forests do not depend on limits and go on from
one to the next. First come some limits from the least to where memory is no matter, then those at
which most may be missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from tapestry_egg.extract.gym.cfn.network.known import Known
from tapestry_egg.extract.gym.cfn.network.network import Floats, Ints, Network
from tapestry_egg.extract.gym.cfn.network.reach import lightest
from tapestry_egg.extract.gym.cfn.network.reductions import narrow
from tapestry_egg.parallel.deadline import held

from .aside import WORTH as _WORTH
from .aside import Aside
from .cores import Core, CoreSearch
from .search import Search

# Limits that are tried first, after the given one: powers of the way from the least limit to what
# the best without limits needs.
_WAY = (1.0, 0.5, 0.25, 0.12, 0.06, 0.0, 0.75)

# A network is reduced at each limit where that takes no more than this share of a try.
_NARROWING = 0.25

# An answer above the bound by more than this factor would make steps of prices too long.
_FAR = 4.0

# Cores are searched if there is left so many times what a reduction takes.
_CORES = 3.0

# The share of the time that goes into a first try of each, and into each later one, of which each
# in vain makes the next one longer by as much.
_FIRST, _LATER = 0.6, 0.03

# The given limit gets as much as so many others at first.
_GIVEN = 2.5

# Without prices there are so many sweeps at most, while the bound rises by a share, in a share of
# the time.
_SETTLING, _RISE, _FREE = 60, 1e-4, 0.05

# A try takes as long as so many sweeps of message passing at least, and so many seconds.
_SWEEPS, _SHORTEST = 40.0, 0.25

# The share of a try that goes into prices, at first and later.
_PRICING = (0.4, 0.2)

# The share of a try that goes into prices before the network is reduced at its limit.
_BEFORE = 0.1

# The same of a search of the network as it is reduced at one limit.
_INNER = 0.2

# What is missing counts less by a factor for every try in vain.
_VAIN = 0.5


def within(net: Network, less: int) -> Network:
    """The same network with so much less room at all times; what was laid out is shared."""
    out = replace(net, uses=replace(net.uses, room=net.uses.room - less))
    for name in ("half", "use_rows", "of_variable", "wide"):
        getattr(net, name)
        out.__dict__[name] = net.__dict__[name]
    return out


class SweepSearch(CoreSearch):
    """Search at limits from `known.low` to `known.top`, at which the network is given."""

    def __init__(
        self,
        net: Network,
        known: Known,
        seconds: float,
        seed: int = 0,
        step: float = 0.0,
        narrowing: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`narrowing`: the seconds that a reduction at one limit takes."""
        super().__init__(net, seconds, seed, None, clock, step)
        self.whole = net
        self.known = known
        self.narrowing, self.processes = narrowing, 1
        #: Is called with a limit after the search there.
        self.visited: Callable[[int, Known], None] = lambda limit, known: None
        self.limit = known.top
        self.until = self.begun + seconds
        self.prices: dict[int, Floats] = {}
        self.tries: dict[int, int] = {}

    def sweep(self, given: int, at_once: bool = False) -> None:
        """Search until the time is over or the front is exact; one limit is given preference: more
        time and, if that is asked, the first turn. Others come from the largest to the least."""
        self.bound = self.known.bound(self.limit)
        begun = self.clock()
        sweep = self._unpriced()
        first = self._first(given, max(_SWEEPS * sweep, _SHORTEST))
        first.sort(key=lambda limit: (at_once and limit != given, -limit))
        for limit in first:
            if self.over():
                return
            share = _FIRST * (self.until - begun) / (len(_WAY) + _GIVEN)
            self.visit(limit, max(share * (_GIVEN if limit == given else 1.0), _SWEEPS * sweep))
        while not self.over():
            widest = self._widest()
            if widest is None:
                return
            after = self.known.best(widest)
            tries = self.tries.get(after.need if after else self.known.low, 0)
            share = _LATER * (1 + tries) * (self.until - begun)
            self.visit(widest, max(share, _SWEEPS * sweep, _SHORTEST))

    def _unpriced(self) -> float:
        """Bound and rows without a price; the seconds that a sweep of messages takes."""
        begun, cost = self.clock(), self.whole.cost
        self._consider(lightest(self.whole))
        count, last = 0, -np.inf
        while count < 6 or (count < _SETTLING and self.clock() - begun < _FREE * self.seconds):
            risen = self._sweep(cost)
            count += 1
            if risen - last <= _RISE * abs(risen):
                break
            last = risen
        took = (self.clock() - begun) / count
        self._consider(self._moved(self._decoded(cost, 4), cost, 4))
        self.prices[self.limit] = self.price
        return took

    def over(self) -> bool:
        return self.clock() >= self.until

    def _first(self, given: int, shortest: float) -> list[int]:
        """Limits to begin with, as many as there is time for."""
        low = self.known.low
        free = self.known.answers[-1].need if self.known.answers else self.known.top
        limits = [given, *(int(max(low, 1) * (free / max(low, 1)) ** s) for s in _WAY)]
        many = int(_FIRST * max(self.until - self.clock(), 0.0) / shortest)
        inside = [x for x in dict.fromkeys(limits) if low <= x <= self.known.top]
        return inside[: max(many, 2)]

    def _widest(self) -> int | None:
        """Where most may be missing; less is where it was looked for in vain."""
        found = [
            (o.epsilon * _VAIN ** self.tries.get(o.after, 0), o.limit)
            for o in self.known.opens(self.step)
        ]
        return max(found)[1] if found else None

    def visit(self, limit: int, seconds: float) -> None:
        """Search at one limit for some seconds, from what is known."""
        before = self.known.best(limit)
        self.limit = limit
        self.net = within(self.whole, self.known.top - limit)
        self.room = self.net.uses.room.astype(np.float64)
        self.begun = self.gained = self.clock()
        self.seconds = min(seconds, self.until - self.begun)
        self.bound, self.proven = self.known.bound(limit), False
        self.best, self.value = None, np.inf
        if before is not None and before.value <= _FAR * abs(self.bound):
            self.best, self.value = before.rows.astype(np.int64), before.value
        if self.done():
            return
        self.price = self.prices[min(self.prices, key=lambda x: (abs(x - limit), x))].copy()
        self.best_price = self.price
        narrows = _NARROWING * self.seconds > self.narrowing
        x = self._priced(_BEFORE if narrows else _PRICING[limit in self.prices])
        if self.done():
            pass
        elif narrows:
            self._narrowed()
        elif self.left() > _CORES * self.narrowing:
            self._improve(x)
        else:
            Search._improve(self, x)
        self.prices[limit] = self.best_price
        if self.best is None and self.proven:
            self.known.step(limit, np.inf)
        elif self.proven:
            self.known.step(limit, self.value)
        self.visited(limit, self.known)
        after = self.known.best(limit)
        need = after.need if after else self.known.low
        gained = after is not None and (before is None or after.value < before.value)
        self.tries[need] = 0 if gained else self.tries.get(need, 0) + 1

    def _priced(self, share: float) -> Ints:
        """Raise prices from those that are set, messages going on; the rows that follow them."""
        self.pricing = share
        cost = self.net.priced(self.price)
        self._sweep(cost)
        x = self._moved(self._decoded(cost, 4), cost, 4)
        self._consider(x)
        return x if self.done() else self._raise_prices(x)

    def _narrowed(self) -> None:
        """Search the network as it is reduced at this limit alone, from the prices that are set."""
        reduced = narrow(self.net, np.ones(len(self.net.cost), dtype=bool))
        if reduced.infeasible is not None:
            self.proven = True
            return
        core = Core(self.net, reduced)

        def report(value: float, bound: float) -> None:
            if inner.best is not None:
                self._consider(core.reduced.lift(inner.best))

        seed, left = int(self.rng.integers(2**31)), max(self.left(), 0.0)
        beside = None
        try:
            if self.processes > 1 and self.news is None and left > _WORTH and len(core.network) > 1:
                with held():
                    beside = Aside(core.network, left, seed + 1, self.step)
            news = self._outer_news if beside is None else beside.news
            inner = CoreSearch(core.network, left, seed, report, self.clock, self.step, news)
            inner.price = inner.best_price = core.inside(self.price)
            inner.bound, inner.pricing = self.bound, _INNER
            found = inner.run()
        finally:
            if beside is not None:
                with held():
                    beside.end()
        if found.x is not None:
            self._consider(core.reduced.lift(found.x))
        self.best_price = core.outside(found.price)
        self.bound, self.proven = max(self.bound, found.bound), found.proven
        self.known.step(self.limit, self.bound)

    def _outer_news(self, inner: Search) -> None:
        if self.news is not None:
            self.news(self)

    def _consider(self, x: Ints) -> bool:
        """Keep an answer for the limit that it needs, and for this one if it is the best."""
        value = self.net.value(x)
        if not np.isfinite(value):
            return False
        if self.net.wide:
            need = self.limit if self.net.fits(x) else None
        else:
            need = self.limit - int(self.net.slack(x).min(initial=self.limit))
        if need is None or need > self.known.top:
            return False
        self.known.add(need, value, x)
        if need > self.limit or value >= self.value:
            return False
        self.best, self.value, self.gained = x.copy(), value, self.clock()
        return True

    def _sweep(self, cost: Floats) -> float:
        bound = super()._sweep(cost)
        self.known.line(self.limit, bound, float(self.price.sum()))
        return bound
