"""Anytime search of one network: prices of memory, bounds at them, and plans within the limits.

Limits on memory are exchanged for prices of a unit at each time (Lagrangian relaxation). At given
prices message passing bounds the network and moves over random forests settle it but for little;
prices then rise where the limit is exceeded and fall elsewhere. A labelling that exceeds a limit
somewhat is repaired by raising prices there, and improved by moves that keep all limits. Once the
prices have settled, the search goes on around the best plan: memory becomes cheaper for some moves
and dear again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from tapestry_egg.extract.gym.cfn.network.buckets import Buckets
from tapestry_egg.extract.gym.cfn.network.forest import Forest
from tapestry_egg.extract.gym.cfn.network.messages import Messages
from tapestry_egg.extract.gym.cfn.network.network import Floats, Ints, Network, dot
from tapestry_egg.extract.gym.cfn.network.reach import Reach, reach

from . import branch
from .trades import trade

# Sweeps of message passing before prices are raised, while they raise the bound by a share.
_SWEEPS, _RISE = 60, 1e-4

# Forests are drawn anew one by one; so many are kept: of any size, and of small trees.
_FORESTS, _GROVES = 10, 16
_TREES = (6, 15, 40, 100)

# Subgraphs of small width: so many are kept; their tables have at most so many cells, and in a
# network of up to so many variables they take the place of forests.
_SUBGRAPHS, _CELLS, _SMALL = (24, 6), (1 << 11, 1 << 14, 1 << 17), 1000

# Forests together hold about so many cells.
_HELD = 1 << 23

# Moves far take so many times the time of those near; their times are smoothed.
_FAR, _SMOOTH = 2.0, 0.9

# While prices are raised they take no more than this share of the time.
_AFAR = 0.15

# A variable with so many neighbours is central; draws begin with a share of these.
_CENTRAL, _SHARES = 15, (0.02, 0.1, 0.3)

# Steps of prices, as a share of what the best is above the priced cost and some more of the cost
# (Polyak's rule): the first, the least and the largest; they grow by up to a factor where one goes
# on in the direction of the last, and shrink where it turns back.
_STEP, _STEPS, _GROWTH, _LEAST_STEP = 0.25, (0.02, 0.7), 1.1, 0.002

# The shares of the time that go into prices, and at most into finding any answer.
_PRICING, _REACHING = 0.4, 0.1

# So many steps of prices repair a plan, each larger than the last by a factor.
_REPAIRS, _STEEPER = 40, 1.15
_ROUNDING = 2.0**-50

# Around the best: factors of prices to begin with; how much worse a plan may be to go on from it;
# so many steps without success lead back to the best. A way to begin that helped is drawn more
# often by the reward, which fades.
_FACTORS = ((0.0, 0.1), (0.1, 0.4), (0.4, 0.8), (0.8, 1.3))
_WORSE, _PATIENCE = 0.002, 60
_REWARD, _FADING, _LEAST = 1.0, 0.95, 0.15

Report = Callable[[float, float], None]


@dataclass(frozen=True)
class Found:
    """The best rows within the limits, their cost, a bound on all such, and whether no better are.

    Proven without rows: nothing fits.
    """

    x: Ints | None  # [variables] a row of each
    value: float
    bound: float
    price: Floats  # [limits]
    proven: bool
    steps: int


class Search:
    """Search of one network; `run` may be called once."""

    def __init__(
        self,
        net: Network,
        seconds: float,
        seed: int = 0,
        report: Report | None = None,
        clock: Callable[[], float] = time.perf_counter,
        step: float = 0.0,
        news: Callable[[Search], None] | None = None,
    ) -> None:
        """`step` is what costs differ by at least, 0 where nothing is known; `news` is called now
        and then, and may offer rows and bounds that were found elsewhere."""
        self.net = net
        self.clock = clock
        self.begun = clock()
        self.seconds = seconds
        self.report = report
        self.step = step
        self.news = news
        self.proven = False
        self.rng = np.random.default_rng(seed)
        self.best: Ints | None = None
        self.value = np.inf
        self.bound = -np.inf
        self.times = len(net.uses.room)
        self.room = net.uses.room.astype(np.float64)
        self.unit = float(max(self.room.max(initial=0.0), 1.0))
        self.price = np.zeros(self.times)
        self.best_price = self.price
        self.steps = 0
        self.pricing = _PRICING
        #: Search ends where the bound is as near as this share, or so long after the last gain.
        self.close, self.patience = 0.0, np.inf
        self.gained = self.begun
        #: What memory is reachable, where no answer was found at once.
        self.reach: Reach | None = None
        self.messages = Messages(net)
        self.degree = net.half.degree()
        # Forests hold copies of tables: fewer of them where those are large.
        self.share = min(1.0, _HELD / max(len(net.cells), 1))
        largest = net.sizes[net.first] * net.sizes[net.second]
        self.cells = max(4 * int(largest.max(initial=1)), 1)
        self.subgraphs: list[Buckets] = []
        self.spent = [0.0, 0.0]  # seconds per move, near and far
        self.afar, self.settled = 0.0, False  # seconds of moves far; whether prices have settled
        self.forests = [self._forest(len(net))]
        self.groves = [self._forest(int(self.rng.choice(_TREES)))]
        # What float64 sums may have added to a bound.
        half = net.half
        terms = float(np.abs(net.cost).sum()) + float(np.abs(half.cells).max(initial=0.0))
        self.rounding = _ROUNDING * terms

    def left(self) -> float:
        return self.seconds - (self.clock() - self.begun)

    def done(self) -> bool:
        """Whether time is over or nothing better can be found."""
        if self.news is not None:
            self.news(self)
        self.proven = self.proven or self.bound > self.value - max(self.step, 1e-12)
        near = np.isfinite(self.value) and self.value - self.bound <= self.close * abs(self.value)
        return self.proven or bool(near) or self.left() <= 0

    def run(self) -> Found:
        """Search until the time is over or the best is proven."""
        cost = self.net.priced(self.price)
        x = self._settled(cost)
        if self.best is None and len(self.net):
            self._reach()
        if not self.done():
            x = self._raise_prices(x)
        self.settled = True
        if not self.done():
            self._branch()
        if not self.done():
            self._improve(x)
        return Found(self.best, self.value, self.bound, self.best_price, self.proven, self.steps)

    def _reach(self) -> None:
        """Look for rows within the limits by what they occupy alone."""
        until = _REACHING * self.seconds
        found = self.reach = reach(self.net, until, self.rng, self.clock)
        if found.over <= 0:
            self._consider(found.x)
            self._traded(found.x, self.price, 12)
        elif found.bound > 0:
            self.proven = True

    def offer(self, x: Ints) -> None:
        """Take rows that were found elsewhere, if they are better."""
        self._consider(x)

    def raise_bound(self, bound: float) -> None:
        """Take a bound that was proven elsewhere, if it is better."""
        self.bound = max(self.bound, bound)

    def _branch(self) -> None:
        """Close a small network by branch and bound, if that is soon done."""
        until = min(self.left(), 0.2 * self.seconds)
        begun = self.clock()
        found = branch.solve(
            self.net,
            self.best_price,
            self.value,
            lambda: self.clock() - begun > until,
            self.step,
        )
        if found is None:
            return
        if found.x is not None:
            self._consider(found.x)
        if found.complete:
            self.proven = True
            self.bound = max(self.bound, self.value)

    # Moves

    def _forest(self, largest: int) -> Forest:
        weight = self.rng.random(len(self.net))
        central = np.flatnonzero(self.degree > _CENTRAL)
        first = self.rng.random(len(central)) < self.rng.choice(_SHARES)
        weight[central] += np.where(first, -1.0, 1.0)
        return Forest(self.net, np.argsort(weight).tolist(), largest)

    def _draw(self, kept: list[Forest], most: int, largest: int) -> Forest:
        most = max(2, int(most * self.share))
        if len(kept) < most or self.rng.random() < 0.02:
            fresh = self._forest(largest)
            if len(kept) < most:
                kept.append(fresh)
            else:
                kept[int(self.rng.integers(most))] = fresh
            return fresh
        return kept[int(self.rng.integers(len(kept)))]

    def _moved(self, x: Ints, cost: Floats, moves: int) -> Ints:
        """Best over forests, one after another, at priced costs."""
        if len(self.net) <= _SMALL:
            return self._moved_far(x, cost, moves)
        for _ in range(moves):
            if self.rng.random() < self._rate() and self._affords():
                x = self._moved_far(x, cost, 1)
                continue
            begun = self.clock()
            x = self._draw(self.forests, _FORESTS, len(self.net)).minimise(x, cost)
            self.spent[0] = _SMOOTH * self.spent[0] + (1 - _SMOOTH) * (self.clock() - begun)
        return x

    def _rate(self) -> float:
        """How often to move far: seldom where that takes much longer than a forest does."""
        near, far = self.spent
        return float(np.clip(_FAR * near / far, 0.02, 0.25)) if near > 0 and far > 0 else 0.1

    def _moved_far(self, x: Ints, cost: Floats, moves: int) -> Ints:
        """The same, over subgraphs of small width, which hold more and take longer."""
        for _ in range(moves):
            begun = self.clock()
            x = self._subgraph().minimise(x, cost)
            took = self.clock() - begun
            self.afar += took
            self.spent[1] = (
                _SMOOTH * self.spent[1] + (1 - _SMOOTH) * took if self.spent[1] else took
            )
        return x

    def _afforded(self, x: Ints, cost: Floats, moves: int) -> Ints:
        """Moves far; while prices are raised only while they take a small share of the time."""
        for _ in range(moves):
            if not self._affords():
                break
            x = self._moved_far(x, cost, 1)
        return x

    def _affords(self) -> bool:
        most = _AFAR * (self.clock() - self.begun)
        return self.settled or len(self.net) <= _SMALL or self.afar <= most

    def _subgraph(self) -> Buckets:
        most = _SUBGRAPHS[0] if len(self.net) <= _SMALL else _SUBGRAPHS[1]
        if len(self.subgraphs) < most or self.rng.random() < 0.02:
            cells = int(self.rng.choice(_CELLS[:-1] if len(self.net) <= _SMALL else _CELLS[1:]))
            fresh = Buckets(self.net, self.rng, max(cells, self.cells))
            if len(self.subgraphs) < most:
                self.subgraphs.append(fresh)
            else:
                self.subgraphs[int(self.rng.integers(most))] = fresh
            return fresh
        return self.subgraphs[int(self.rng.integers(most))]

    def _decoded(self, cost: Floats, moves: int) -> Ints:
        x = self._afforded(self.messages.decode(cost), cost, 1)
        return self._moved(x, cost, moves)

    def _lagrangian(self, x: Ints) -> float:
        return self.net.value(x) + dot(self.price, self.net.over(x))

    # Prices

    def _settled(self, cost: Floats) -> Ints:
        """Without prices: bound and labelling."""
        last = -np.inf
        for k in range(_SWEEPS):
            risen = self._sweep(cost)
            if (k > 5 and risen - last <= _RISE * abs(risen)) or self.left() < 0.95 * self.seconds:
                break
            last = risen
        x = self._moved(self._afforded(self._decoded(cost, 12), cost, 4), cost, 12)
        self._consider(x)
        return x

    def _sweep(self, cost: Floats) -> float:
        bound = self.messages.sweep(cost) + self.net.constant
        paid = dot(self.price, self.room)
        bound -= paid + self.rounding + _ROUNDING * paid
        if bound > self.bound:
            self.bound, self.best_price = bound, self.price.copy()
        return bound

    def _raise_prices(self, x: Ints) -> Ints:
        """Subgradient ascent on the prices, on the excess of a labelling that follows them."""
        net = self.net
        small = len(net) <= _SMALL
        length_of_step = _STEP
        before: Floats | None = None
        over = net.over(x) / self.unit
        mean = over
        self._repaired(x, self.price)
        begun = self.clock()
        most = max(self.pricing * self.seconds - (begun - self.begun), 0.1 * self.seconds)
        k = 0
        while not self.done():
            share = (self.clock() - begun) / most
            if share > 1:
                break
            k += 1
            scale = max(abs(self.net.value(x)), 1.0)
            if not np.isfinite(scale):
                scale = max(abs(self.bound), 1.0)
            mean = 0.7 * mean + 0.3 * over
            along = np.where((self.price <= 0) & (mean < 0), 0.0, mean)
            length = dot(along, along)
            if length <= 0.0:
                if (over <= 0).all() and not self.price.any():
                    break
                length = 1.0
            if before is not None:
                norm = float(np.sqrt(dot(before, before) * length))
                turn = dot(before, along) / norm if norm > 0 else 0.0
                length_of_step *= _GROWTH ** float(np.clip(2.0 * turn - 0.6, -1.0, 1.0))
                length_of_step = float(np.clip(length_of_step, *_STEPS))
            before = along
            room = _LEAST_STEP * scale
            if np.isfinite(self.value):
                room += max(self.value - self._lagrangian(x), 0.0)
            else:
                room += 0.1 * scale
            step = length_of_step * room * (1.0 - 0.9 * share)
            price = np.maximum(self.price + step / length * along / self.unit, 0.0)
            price[price < 1e-6 * price.max(initial=0.0)] = 0.0
            self.price = price
            cost = net.priced(price)
            if k % 5 == 0:
                x = self._afforded(x, cost, 1)
            x = self._moved(x, cost, 2)
            if small or k % 2:
                self._sweep(cost)
            if k % (2 if small else 5) == 0:
                other = self._decoded(cost, 10)
                if self._lagrangian(other) < self._lagrangian(x):
                    x = other
            over = net.over(x) / self.unit
            self._consider(x)
            if k % 15 == 0:
                self._repaired(x, price)
        return x

    def _consider(self, x: Ints) -> bool:
        """Keep a labelling if it is the best within the limits."""
        value = self.net.value(x)
        if value >= self.value or not self.net.fits(x):
            return False
        self.best, self.value, self.gained = x.copy(), value, self.clock()
        if self.report is not None:
            self.report(value, self.bound)
        return True

    # Plans within the limits

    def _repaired(self, x: Ints, price: Floats) -> tuple[Ints, Floats] | None:
        """Raise prices where limits are exceeded until none is, and trade from there.

        Returns the rows and the prices that led there; None where some limit is still exceeded.
        """
        net = self.net
        value = net.value(x)
        scale = self.value if np.isfinite(self.value) else abs(value)
        if not np.isfinite(scale):
            scale = max(abs(self.bound), 1.0)
        scale = max(abs(scale), 1.0)
        for k in range(_REPAIRS):
            over = np.maximum(net.over(x), 0.0) / self.unit
            if not over.any():
                break
            if self.left() <= 0:
                return None
            rise = 0.01 * _STEEPER**k * scale / dot(over, over)
            price = price * 1.01 + rise * over / self.unit
            x = self._moved(x, net.priced(price), 1)
        else:
            return None
        self._consider(x)
        return self._traded(x, price, 12), price

    def _traded(self, x: Ints, price: Floats, moves: int) -> Ints:
        """Moves that keep all limits, at prices scaled at random."""
        net = self.net
        if net.wide:
            return x
        slack = net.slack(x)
        for _ in range(moves):
            if self.left() <= 0:
                break
            if self.rng.random() < 0.7:
                forest = self._draw(self.groves, _GROVES, int(self.rng.choice(_TREES)))
            else:
                forest = self._draw(self.forests, _FORESTS, len(net))
            scaled = price * self.rng.uniform(0.0, 1.3)
            x, _ = trade(net, forest, x, net.priced(scaled), scaled, slack)
        self._consider(x)
        return x

    def _improve(self, x: Ints) -> None:
        """Around the best: memory becomes cheaper for some moves, then as dear as it must be.

        Which prices to begin with, by what factor, and whether to move far, is drawn by how often
        it has helped of late.
        """
        net = self.net
        current = self.best if self.best is not None else x
        value = self.value
        prices = [self.best_price, self.price, self.price]
        arms = list(product(range(len(prices)), range(len(_FACTORS)), (False, True)))
        weight = np.ones(len(arms))
        since = 0
        begun = self.clock()
        while not self.done() and self.clock() - max(begun, self.gained) <= self.patience:
            self.steps += 1
            arm = int(self.rng.choice(len(arms), p=weight / weight.sum()))
            base, factor, far = arms[arm]
            price = prices[base] * self.rng.uniform(*_FACTORS[factor])
            cost = net.priced(price)
            y = self._moved_far(current, cost, 1) if far else current
            y = self._moved(y, cost, int(self.rng.integers(1, 4)))
            found = self._repaired(y, price)
            since += 1
            better = False
            if found is not None:
                reached = net.value(found[0])
                better = reached < value
                if reached <= value * (1 + _WORSE * self.rng.random() ** 2):
                    current, value = found[0], reached
                    prices[2] = found[1]
            weight[arm] = max(_FADING * weight[arm] + (_REWARD if better else 0.0), _LEAST)
            if better:
                since = 0
            if since > _PATIENCE and self.best is not None:
                current, value, since = self.best, self.value, 0
