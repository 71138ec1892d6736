"""Approaching: prices at which most is proven within one pair of limits, and plans within them.

From the best prices known for limits on bytes and joules the search goes part of the way to those
at which known labellings balance, or along what is used beyond the limits; where known labellings
balance at a limit between two plans, it raises the bound there. Which limits come one after the
other stands in `search.py`, what is done at fixed prices in `settling.py`.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.search.messages.dual import Prices
from tapestry_egg.products import dot

from .archive import Candidate
from .price_steps import mixed, stepped, toward, weights_after
from .settling import Limits, Place, Settling, share

# Where these numbers come from: see `settling.py`.

#: The price of all memory, in the time of the fastest plan per byte of its peak: from hardly
#: anything to so much that only the peak counts.
TOTALS = (0.05, 64.0)

# So often a bound is raised, by some sweeps each time, where known plans balance.
_RAISES = 6

# So many mixtures are made for each step.
_MIXTURES = 4

# Plans are balanced only where so few times decide: linear programs jump among more of them, and
# small steps do better.
_TIMES = 3

# How often prices are raised where a plan exceeds its limit.
_REPAIRS = 6

# How steps change in length when they raise a bound, and when they do not.
_LONGER, _SHORTER = 1.3, 0.6

# So many sweeps at prices towards those at which known labellings balance.
_LONG = 8

# So far from the best prices towards those at which known labellings balance is the first step, and
# the longest; where what they balance at is within this share of the gap above the bound, no prices
# prove much more.
_FAR, _FARTHEST, _MET = 0.3, 0.6, 0.1

# What is within no mixture of known labellings is as if it took so many times the slowest's time.
_BEYOND = 10.0


class Approaching(Settling):
    """A search at prices that change with what they prove for a pair of limits."""

    def _first(self, fastest: Candidate) -> Prices:
        """Prices to begin with: where the fastest plan needs most memory."""
        profile = self._used(fastest)[:-1]
        total = TOTALS[0] * fastest.seconds / max(fastest.peak, 1.0)
        return Prices(0.0, total * weights_after(np.ones_like(profile), profile, 1.0))

    def approach(self, limits: Limits, steps: int) -> None:
        """Adjust the prices for one pair of limits, from the best for them so far."""
        best = self._nearest(limits)
        if best.messages is not None:
            self.dual.resume(best.messages)
        if self.mixtures is not None and self.mixtures.shortest(limits.peak, limits.joules):
            self._remember(self._mixed(limits, best, _MIXTURES * steps))
            return
        # Programs settle small problems, and prices are where they begin.
        balanced = self.mixtures is None and not self.small
        best, found = (self._toward if balanced else self._along)(limits, best, steps)
        self._remember(best)
        self._repair(best.prices, found, limits.peak)

    def _toward(self, limits: Limits, best: Place, steps: int) -> tuple[Place, Candidate]:
        """Settle part of the way from the prices that prove most within limits to those at which
        known labellings balance, one time after the other; where most is proven in the end, and
        what was found last."""
        prices, reached, far = best.prices, -np.inf, _FAR
        found = min(self.archive.candidates, key=lambda c: _distance(c, limits))
        for _ in range(steps):
            if self._over():
                break
            found = self._settle(prices, _LONG, [found.rows])
            bound = self.archive.cuts[-1].at(limits.peak, limits.joules)
            if bound > reached:
                if reached > -np.inf:
                    self.gained = time.perf_counter()
                best, reached, far = self._here(), bound, min(_FARTHEST, _LONGER * far)
            else:
                far *= _SHORTER
            gap = self._gap(limits)
            balance = self.pool.balance(limits.peak, self.work, limits.joules, _BEYOND)
            if gap <= self.effort.gap or balance is None:
                break
            if share(balance.seconds, reached) <= _MET * gap:
                break  # no prices prove much more
            prices = toward(best.prices, balance.bytes, balance.joule, far)
        return best, found

    def _along(self, limits: Limits, best: Place, steps: int) -> tuple[Place, Candidate]:
        """Step along what is used beyond the limits; where most is proven in the end, and what was
        found last."""
        prices, scale, reached = best.prices, 1.0, -np.inf
        if self.shares is not None and prices.events is not None:
            self.shares.proving = prices.events
        found = min(self.archive.candidates, key=lambda c: _distance(c, limits))
        used: Floats | None = None
        for k in range(steps):
            if self._over():
                break
            found = self._settle(prices, 1 if k else 3, [found.rows])
            used = mixed(used, self._used(found))
            bound = self.archive.cuts[-1].at(limits.peak, limits.joules)
            if bound >= reached:
                if bound > reached and k:
                    self.gained = time.perf_counter()
                best, reached, scale = self._here(), bound, _LONGER * scale
            else:
                scale *= _SHORTER
            if self._gap(limits) <= self.effort.gap:
                break
            prices = stepped(best.prices, used, limits.peak, limits.joules, scale)
            if self.shares is not None and best.prices.events is not None:
                self.shares.proving = best.prices.events
                self.shares.follow(self._lengths(found), 0.5 * min(scale, 1.0))
        return best, found

    def _repair(self, prices: Prices, found: Candidate, limit: float) -> None:
        """Look for a plan within a memory limit: bytes cost more wherever it is exceeded."""
        for _ in range(_REPAIRS):
            if found.peak <= limit or self._over():
                break
            weights = weights_after(prices.bytes, self._used(found)[:-1], 1.0)
            prices = replace(prices, bytes=1.5 * prices.bytes.sum() * weights)
            found = self._settle(prices, 1, [found.rows])
        self._descended(found, limit)

    def _nearest(self, limits: Limits) -> Place:
        """Where the bound for limits is best so far."""
        place = max(self.visited, key=lambda x: x.cut.at(limits.peak, limits.joules))
        prices = place.prices
        if not prices.bytes.any():
            prices = replace(self._first(self.archive.candidates[0]), joule=prices.joule)
        if limits.joules < np.inf and not prices.joule:
            known = self._known(limits)
            if not np.isfinite(known):  # nothing is within these limits yet
                known = min(c.seconds for c in self.archive.candidates)
            prices = replace(prices, joule=0.1 * known / limits.joules)
        return replace(place, prices=prices)

    def _between(self, limit: float, half: bool) -> bool:
        """Raise the bound where known labellings balance at a limit, until it meets them or a
        better one turns up, and whether one did; `half`: half way there from the best prices.
        """
        balance = self.pool.balance(limit, self.work)
        if balance is None or np.count_nonzero(balance.bytes) > _TIMES:
            return False
        place = self._nearest(Limits(limit))
        if place.messages is not None:
            self.dual.resume(place.messages)
        prices = Prices(0.0, 0.5 * (balance.bytes + place.prices.bytes) if half else balance.bytes)
        paid, enough = float(prices.bytes.sum()) * limit, 0.4 * self.effort.gap * balance.seconds
        known = [self.archive.best(limit), self._least_above(limit)]
        rows = [c.rows for c in known if c is not None]
        value, better = -np.inf, False
        for k in range(_RAISES):
            found = self._settle(prices, 3 if k else 1, rows)
            cut = self.archive.cuts[-1]
            risen, value = cut.value - value, cut.value
            priced = found.seconds + dot(prices.bytes, self._used(found)[:-1])
            better = priced < balance.seconds + paid - enough
            met = value >= min(priced, balance.seconds + paid) - enough
            if better or met or risen < 0.2 * enough or self._over():
                break
        self._remember(self._here())
        return better

    def _least_above(self, limit: float) -> Candidate | None:
        """The plan with the smallest peak above a limit."""
        above = [c for c in self.archive.candidates if c.peak > limit]
        return min(above, key=lambda c: c.peak, default=None)


def _ratio(a: float, b: float) -> float:
    """How far apart two quantities are, as a logarithm; nothing if both are unlimited."""
    if a == b:
        return 0.0
    return float(abs(np.log(min(max(a, 1e-12), 1e30)) - np.log(min(max(b, 1e-12), 1e30))))


def _distance(candidate: Candidate, limits: Limits) -> float:
    joules = _ratio(candidate.joules, limits.joules) if np.isfinite(limits.joules) else 0.0
    return _ratio(candidate.peak, limits.peak) + joules
