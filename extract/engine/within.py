"""The search within one limit: the least seconds of labellings whose peak is within it, for as long
as there is time.

The limit is exchanged for prices of bytes at each moment (Lagrangian relaxation). At given prices
messages bound the network, and trees settle it but for little; prices then rise where the limit is
exceeded and fall elsewhere. A labelling that exceeds it somewhat is repaired by raising prices
there, and improved by trees that stay within it. Once prices have settled, the search goes on
around the best labelling: bytes become cheaper for some trees, and dear again. A large network is
searched so in its cores, the rows that the bound hardly excludes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints

from . import branch, core, elimination, sweeps
from .network import Flags, Network, State, state_of
from .trees import descend_trees

# Passes of messages before there are prices, while they raise the bound by a share of itself.
_SWEEPS, _RISE = 60, 1e-4

# Steps of prices, as a share of what the best is above the priced cost and some more of the cost
# (Polyak's rule): the first, the least and the largest; they grow by up to a factor where one goes
# on in the direction of the last, and shrink where it turns back.
_STEP, _STEPS, _GROWTH, _LEAST_STEP = 0.25, (0.02, 0.7), 1.1, 0.002

# How much of a direction is new; prices below a share of the largest are none.
_NEW, _NONE = 0.3, 1e-6

# The share of the time that goes into prices.
_PRICING = 0.4

# So many steps of prices repair a labelling, each larger than the last by a factor.
_REPAIRS, _STEEPER = 40, 1.15

# The largest trees of a pass within the limit: where little is free, small ones fit more often.
_TREES = (6, 15, 40, 100, 1 << 30)

# So many passes within the limit follow a repair.
_PASSES = 8

# Around the best: factors of prices to begin with; how much worse a labelling may be to go on from
# it; so many steps without success lead back to the best. A way to begin that helped is drawn more
# often by the reward, which fades.
_FACTORS = ((0.0, 0.1), (0.1, 0.4), (0.4, 0.8), (0.8, 1.3))
_WORSE, _PATIENCE = 0.002, 60
_REWARD, _FADING, _LEAST = 1.0, 0.95, 0.15

# Weights of moments grow at a rate where only the peak counts, in at most so many rounds.
_RATE, _ROUNDS = 2.0, 400

# Pairs of the first core have so many entries together; networks with no more are searched as they
# are. A core that is solved but for a share of the whole network's gap is followed by one larger by
# a factor, one that was in vain by a smaller one. Exclusion is multiplied by noise, so that cores
# differ.
_ENTRIES, _LARGER, _SMALLER, _NOISE = 60_000, 2.0, 1.5, (0.5, 1.5)
_CLOSE, _NEARLY = 0.02, 0.1

# The share of all time that one core gets; it ends after a share of that without a gain.
_SHARE, _VAIN = 0.08, 0.25

# Passes of messages at the prices of the last core; there are more before the first one.
_SETTLING, _AT_FIRST = 40, 150

# Networks of up to so many variables are eliminated over so many rows of each, in tables of so many
# entries.
_SMALL, _KEEP, _CELLS = 1000, 6, 1 << 14

# Networks of up to so many variables are closed by branch and bound, if that is soon done.
_CLOSED = 400

# Before that, prices are raised while so many steps gain a share of the gap.
_STALLED, _GAINED = 40, 0.02

# The share to which costs are closed that are no integers.
_CLOSED_TO = 1e-9

# A limit of nothing is one of so many bytes.
_TINY = 1e-3

# What sums may have added to a bound, as a share of what is added.
_ROUNDING = 2.0**-44


@dataclass
class Within:
    """A search of one network within one limit on the peak.

    `report` hears of every better labelling and bound. Costs of labellings differ by `step` at
    least; 0 says that nothing is known of that.
    """

    net: Network
    limit: float
    spent: Callable[[], float]  # of the time for this search, as a share
    seed: int = 0
    step: float = 0.0
    report: Callable[[Within], None] = lambda search: None
    state: State | None = None
    prices: Floats | None = None  # [moments]
    rows: Ints | None = None  # the best within the limit
    seconds: float = np.inf
    bound: float = -np.inf
    least_peak: float = 0.0  # no labelling has a smaller one
    nearest: Ints | None = None  # the rows of the least peak, where none was within the limit
    close: float = 0.0  # the gap that is good enough, as a share
    patience: float = np.inf  # ends after so much of the time without a gain
    proven: bool = False
    hear: Callable[[], None] | None = None  # takes up what others have found
    inner: bool = False  # whether this is the search of a core
    _own: State = field(init=False)
    _start: Ints | None = None
    _order: elimination.Order | None = None
    _turn: int = 1

    def __post_init__(self) -> None:
        net = self.net
        self._own = state_of(net) if self.state is None else self.state
        self._rng = np.random.default_rng(self.seed)
        self._random = np.array([1 + self._rng.integers(2**31 - 2)], dtype=np.int64)
        self._none = np.zeros(0)
        self._unit = max(self.limit, _TINY) if np.isfinite(self.limit) else 1.0
        self._limited = net.moments > 0 and np.isfinite(self.limit)
        most = _largest(net)
        self._most = most
        self._forbidden = 4.0 * most + 1.0
        self._priced = False
        self.price = np.zeros(net.moments) if self.prices is None else self.prices.copy()
        self.best_price = self.price
        self._gained = 0.0

    def open(self) -> None:
        """Bound the network without a limit, and find rows within it, if they are soon found."""
        self._start = self._settled()
        if self.rows is None and self._limited:
            self._reach(0.1, self.limit)
            if self.rows is not None:
                self._repaired(self.rows, self.price)

    def run(self) -> None:
        """Search until the time is over or the best is proven."""
        if self._start is None:
            self.open()
        assert self._start is not None
        rows = self._start
        if self._limited and not self.done():
            rows = self._raise_prices(rows)
        if self._closes and not self.done():
            self._close(0.5)
        if not self.done():
            self.improve(rows)

    def done(self) -> bool:
        """Whether time is over, or nothing better is to be found."""
        if self.hear is not None:
            self.hear()
        if self.step and self.bound > self.seconds - self.step:
            self.proven = True
        if not self.step and self.bound >= self.seconds * (1.0 - 1e-12):
            self.proven = True
        near = self.seconds - self.bound <= self.close * abs(self.seconds)
        return self.proven or bool(near) or self.spent() >= 1.0

    @property
    def _closes(self) -> bool:
        """Whether branch and bound is tried."""
        return not self.inner and len(self.net.row) - 1 <= _CLOSED

    @property
    def _large(self) -> bool:
        """Whether it is searched in cores, as large cores are in turn."""
        return len(self._own.tables) > _ENTRIES

    def offer(self, rows: Ints) -> bool:
        """Keep a labelling if it is the best within the limit; whether it is."""
        return self._consider(rows) is not None and self.rows is rows

    def raise_bound(self, bound: float) -> None:
        """Take a bound that was proven elsewhere, if it is better."""
        if bound > self.bound:
            self.bound = bound
            self.report(self)

    # At prices

    def _set(self, price: Floats, second: float = 1.0) -> None:
        until = np.zeros(self.net.times + 1)
        until[1 : self.net.moments + 1] = np.cumsum(price)
        until[self.net.moments + 1 :] = until[self.net.moments]
        paid = float(until[-1]) * self._unit
        if second and paid + self._most > self._forbidden / 2.0:
            self._forbidden, self._priced = 4.0 * (paid + self._most), False
        if self._priced and second:
            sweeps.reprice(self.net, self._own, second, 0.0, until, self._forbidden)
            return
        forbidden = self._forbidden if second else 4.0 * self._heaviest() + 1.0
        sweeps.price(self.net, self._own, second, 0.0, until, forbidden)
        self._priced = second == 1.0

    def _heaviest(self) -> float:
        """More than any labelling's weighted bytes, where weights add up to one."""
        return float(np.abs(self.net.amounts).max(initial=0.0)) * (len(self.net.begin) + 1)

    def _swept(self, price: Floats, passes: int = 1, risen: float = 0.0) -> float:
        """The bound at the prices that are set."""
        found = sweeps.sweep(self.net, self._own, passes, risen, np.inf)
        value, paid = float(found.max()), 0.0
        if self._limited:
            paid = float(np.einsum("t->", price)) * self.limit
        bound = value - paid - _ROUNDING * (abs(value) + paid)
        if bound > self.bound:
            self.bound, self.best_price = bound, price.copy()
            self.report(self)
        return bound

    def _eliminated(self, rows: Ints) -> Ints:
        """The best of the rows that messages exclude least and of those given, nearly; of a large
        network these themselves."""
        if len(rows) > _SMALL:
            return rows
        if self._order is None:
            self._order = elimination.order_of(self.net)
        belief = sweeps.beliefs(self.net, self._own)
        some, count = elimination.domains(self.net, belief, _KEEP, rows[None, :])
        self._turn += 1
        elimination.fit(self._order, count, _CELLS, self._turn)
        return elimination.eliminate(self.net, self._own, self._order, some, count)

    def _moved(self, rows: Ints, passes: int) -> Ints:
        rows = rows.copy()
        for _ in range(passes):
            descend_trees(self.net, self._own, rows, self._none, 0.0, len(rows), self._random)
        return rows

    def _evaluated(self, rows: Ints) -> tuple[float, Floats]:
        seconds, _, profile = sweeps.evaluate(self.net, rows)
        return seconds, profile[: self.net.moments]

    def _consider(self, rows: Ints) -> tuple[float, Floats]:
        """Evaluate a labelling, and keep it if it is the best within the limit."""
        seconds, profile = self._evaluated(rows)
        if seconds < self.seconds and profile.max(initial=0.0) <= self.limit:
            self.rows, self.seconds, self._gained = rows.copy(), seconds, self.spent()
            self.report(self)
        return seconds, profile

    def _decoded(self, passes: int) -> Ints:
        return self._moved(self._eliminated(sweeps.decode(self.net, self._own)), passes)

    def _settled(self) -> Ints:
        """Without prices, or at those that are given: bound and labelling."""
        self._set(self.price)
        for k in range(_SWEEPS):
            last = self.bound
            risen = self._swept(self.price) - last
            if (k > 5 and risen <= _RISE * abs(last)) or self.done():
                break
        rows = self._decoded(8)
        self._consider(rows)
        return rows

    def _raise_prices(self, rows: Ints) -> Ints:
        """Subgradient ascent on the prices, on the excess of a labelling that follows them."""
        length, before = _STEP, None
        begun = self.spent()
        most = max(_PRICING - begun, 0.1)
        seconds, profile = self._consider(rows)
        over = profile / self._unit - self.limit / self._unit
        mean = over
        self._repaired(rows, self.price)
        k, stalled = 0, -np.inf
        while not self.done():
            share = (self.spent() - begun) / most
            if share > 1.0:
                break
            if self._closes and k % _STALLED == 0:
                if self.bound - stalled <= _GAINED * (self.seconds - self.bound):
                    break
                stalled = self.bound
            k += 1
            scale = max(abs(seconds) if np.isfinite(seconds) else abs(self.bound), 1.0)
            mean = (1.0 - _NEW) * mean + _NEW * over
            along = np.where((self.price <= 0.0) & (mean < 0.0), 0.0, mean)
            norm = float(np.einsum("t,t->", along, along))
            if norm <= 0.0:
                if (over <= 0.0).all() and not self.price.any():
                    break
                norm = 1.0
            if before is not None:
                size = float(np.sqrt(np.einsum("t,t->", before, before) * norm))
                turn = float(np.einsum("t,t->", before, along)) / size if size > 0 else 0.0
                length *= _GROWTH ** float(np.clip(2.0 * turn - 0.6, -1.0, 1.0))
                length = float(np.clip(length, *_STEPS))
            before = along
            room = _LEAST_STEP * scale
            if self.rows is not None:
                paid = float(np.einsum("t,t->", self.price, over)) * self._unit
                room += max(self.seconds - seconds - paid, 0.0)
            else:
                room += 0.1 * scale
            step = length * room * (1.0 - 0.9 * share)
            price = np.maximum(self.price + step / norm * along / self._unit, 0.0)
            price[price < _NONE * price.max(initial=0.0)] = 0.0
            self.price = price
            self._set(price)
            self._swept(price)
            rows = self._moved(self._eliminated(rows), 1)
            if k % 5 == 0:
                other = self._decoded(2)
                if self._lagrangian(other) < self._lagrangian(rows):
                    rows = other
            seconds, profile = self._consider(rows)
            over = profile / self._unit - self.limit / self._unit
            if k % 15 == 0:
                self._repaired(rows, price)
        return rows

    def _lagrangian(self, rows: Ints) -> float:
        seconds, profile = self._consider(rows)
        return seconds + float(np.einsum("t,t->", self.price, profile))

    # Within the limit

    def _repaired(self, rows: Ints, price: Floats) -> tuple[Ints, float, Floats] | None:
        """Raise prices where the limit is exceeded until it is not, and go on within it.

        Returns the rows, their seconds and the prices that led there; None where some moment is
        still above the limit.
        """
        seconds, profile = self._evaluated(rows)
        scale = self.seconds if np.isfinite(self.seconds) else abs(seconds)
        if not np.isfinite(scale):
            scale = abs(self.bound)
        scale = max(abs(scale), 1.0)
        for k in range(_REPAIRS):
            over = np.maximum(profile - self.limit, 0.0) / self._unit
            if not over.any():
                break
            if self.spent() >= 1.0:
                return None
            rise = 0.01 * _STEEPER**k * scale / float(np.einsum("t,t->", over, over))
            price = price * 1.01 + rise * over / self._unit
            self._set(price)
            rows = self._moved(rows, 1)
            seconds, profile = self._evaluated(rows)
        else:
            return None
        if not np.isfinite(seconds):
            return None
        self._consider(rows)
        rows, profile = rows.copy(), np.ascontiguousarray(profile)
        for _ in range(_PASSES):
            self._set(price * self._rng.uniform(0.0, 1.3))
            largest = int(self._rng.choice(_TREES))
            descend_trees(self.net, self._own, rows, profile, self.limit, largest, self._random)
        return rows, self._consider(rows)[0], price

    def lean(self, share: float) -> None:
        """Look for the rows of the least peak, and bound it, in a share of the time."""
        self._start = sweeps.decode(self.net, self._own)
        self._consider(self._start)
        self._reach(share, -np.inf)

    def _reach(self, share: float, limit: float) -> None:
        """Look for rows by what they use alone, until their peak is within a limit or as small as
        any; and bound the least peak."""
        lowest, total = np.inf, np.zeros(self.net.moments)
        rows = sweeps.decode(self.net, self._own)
        weight = np.full(self.net.moments, 1.0 / max(self.net.moments, 1))
        begun, messages = self.spent(), self._own.messages.copy()
        for k in range(_ROUNDS):
            self._set(weight, 0.0)
            found = sweeps.sweep(self.net, self._own, 3, 0.0, np.inf).max()
            self.least_peak = max(self.least_peak, float(found) * (1.0 - _ROUNDING))
            for start in (sweeps.decode(self.net, self._own), rows):
                other = self._moved(self._eliminated(start), 3)
                seconds, profile = self._consider(other)
                high = float(profile.max(initial=0.0))
                if np.isfinite(seconds) and high < lowest:
                    lowest, self.nearest = high, other
            rows = other if self.nearest is None else self.nearest
            if lowest <= max(limit, self.least_peak * (1.0 + 1e-9)) or not self.net.moments:
                break
            if -np.inf < limit < self.least_peak or self.spent() - begun > share:
                break
            over = profile - self.limit
            total += over / max(float(np.abs(over).max()), 1.0)
            weight = np.exp(_RATE * (total - total.max()) * min(1.0, 4.0 / np.sqrt(k + 1)))
            weight[weight < 1e-9] = 0.0
            weight /= weight.sum()
        self._own.messages[:] = messages
        self.proven = self.proven or self.least_peak > self.limit

    def _close(self, share: float) -> None:
        """Branch and bound, in a share of the time."""
        begun, net = self.spent(), self.net
        upper = self.seconds if self.rows is not None else 2.0 * self._most + 1.0
        prices = np.zeros(net.moments + 1)
        if self._limited:
            prices[:-1] = self.best_price * self.limit
        gap = min(0.5 * self.step / upper, 0.5) if self.step and upper else _CLOSED_TO
        bound, best, rows, _ = branch.branch(
            net,
            state_of(net),
            np.array([max(self.limit, _TINY), np.inf]),
            prices,
            np.zeros(len(net.maker)),
            -1.0,
            upper,
            gap,
            np.inf,
            self._forbidden,
            lambda: self.done() or self.spent() - begun > share,
        )
        if rows is not None:
            self._consider(rows)
        if bound >= best * (1.0 - gap) * (1.0 - 1e-12):
            self.proven = True
        if self.rows is not None or not self.proven:
            self.raise_bound(bound - _ROUNDING * abs(bound))

    # Around the best

    def improve(self, rows: Ints) -> None:
        """Around the best, in ever other cores of a large network, until time is over."""
        entries, price, steps = _ENTRIES, self.best_price, 0
        while self._large and entries <= len(self._own.tables) and not self.done():
            self._set(price)
            self._swept(price, _SETTLING if steps else _AT_FIRST, _RISE)
            excess = _excess(self.net, sweeps.beliefs(self.net, self._own))
            if steps:  # other rows at the edge of the core each time
                excess *= self._rng.uniform(*_NOISE, len(excess))
            best = rows if self.rows is None else self.rows
            kept = np.zeros(len(excess), dtype=bool)
            kept[self.net.row[:-1] + best] = True
            kept |= excess <= _threshold(self.net, excess, kept, entries)
            net, state, row_of, _ = core.restrict(self.net, self._own, kept)
            inner = self._inner(net, state, row_of, price)
            before = self.seconds
            inner.run()
            steps += 1
            price = inner.best_price
            if inner.proven or inner.seconds - inner.bound <= _NEARLY * (self.seconds - self.bound):
                entries = int(_LARGER * entries)
            elif not self.seconds < before:
                entries = max(int(entries / _SMALLER), _ENTRIES // 2)
        if not self.done():
            self._around(rows if self.rows is None else self.rows)

    def _inner(self, net: Network, state: State, row_of: Ints, price: Floats) -> Within:
        begun = self.spent()
        share = max(min(1.0 - begun, _SHARE), 1e-3)

        def heard(search: Within) -> None:
            if search.rows is not None and search.seconds < self.seconds:
                self._consider(row_of[net.row[:-1] + search.rows])

        inner = Within(
            net,
            self.limit,
            lambda: (self.spent() - begun) / share,
            int(self._rng.integers(2**31)),
            self.step,
            heard,
            state,
            price,
            patience=_VAIN,
            inner=True,
        )
        if np.isfinite(self.seconds):
            inner.close = _CLOSE * (self.seconds - self.bound) / max(abs(self.seconds), 1.0)
        return inner

    def _around(self, rows: Ints) -> None:
        """Bytes become cheaper for some trees, then as dear as they must be.

        Which prices to begin with, and by what factor, is drawn by how often it has helped of late.
        """
        current, value = rows, self.seconds
        prices = [self.best_price, self.price, self.price]
        arms = list(product(range(len(prices)), range(len(_FACTORS))))
        weight = np.ones(len(arms))
        since, begun = 0, self.spent()
        while not self.done() and self.spent() - max(begun, self._gained) <= self.patience:
            arm = int(self._rng.choice(len(arms), p=weight / weight.sum()))
            base, factor = arms[arm]
            price = prices[base] * self._rng.uniform(*_FACTORS[factor])
            self._set(price)
            found = self._repaired(self._moved(current, int(self._rng.integers(1, 4))), price)
            since += 1
            better = False
            if found is not None:
                better = found[1] < value
                if found[1] <= value + _WORSE * self._rng.random() ** 2 * abs(value):
                    current, value, prices[2] = found
            weight[arm] = max(_FADING * weight[arm] + (_REWARD if better else 0.0), _LEAST)
            if better:
                since = 0
            if since > _PATIENCE and self.rows is not None:
                current, value, since = self.rows, self.seconds, 0


def _largest(net: Network) -> float:
    """More than any legal labelling takes."""
    total = 0.0
    if len(net.seconds):
        finite = np.where(np.isfinite(net.seconds), np.abs(net.seconds), 0.0)
        total += float(np.maximum.reduceat(finite, net.row[:-1]).sum())
    if len(net.pair_seconds):
        tables, at = np.unique(net.entry, return_inverse=True)
        finite = np.where(np.isfinite(net.pair_seconds), np.abs(net.pair_seconds), 0.0)
        total += float(np.maximum.reduceat(finite, tables)[at.ravel()].sum())
    return total


def _excess(net: Network, belief: Floats) -> Floats:
    """By how much each row is above the best of its variable [rows]."""
    least = np.minimum.reduceat(belief, net.row[:-1])
    return belief - np.repeat(least, np.diff(net.row))


def _threshold(net: Network, excess: Floats, kept: Flags, entries: int) -> float:
    """The largest excess up to which the pairs of a core have about so many entries."""
    levels = np.sort(excess)
    low, high = 0, len(levels) - 1
    while low < high:
        middle = (low + high + 1) // 2
        some = (kept | (excess <= levels[middle])).astype(np.int64)
        sizes = np.add.reduceat(some, net.row[:-1])[net.ends]
        if int((sizes[:, 0] * sizes[:, 1])[(sizes > 1).all(axis=1)].sum()) <= entries:
            low = middle
        else:
            high = middle - 1
    return float(levels[low])
