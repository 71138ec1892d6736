"""Search: plans along the trade-off of seconds, peak bytes and joules, and bounds on all of them.

Limits on memory and energy are exchanged for prices on bytes at each time and on joules. At given
prices message passing bounds the problem and elimination finds what is very nearly the best
labelling; where that exceeds a limit the price rises, elsewhere it falls (ascent on the Lagrangian
dual; the prices of bytes are multiplied, not added to). Between plans that are found so, prices
are those at which they balance (`balance.py`). What is done within one limit stands in
`approaching.py`, at fixed prices in `settling.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Floats, Ints
from tapestry_egg.extract.search.messages.dual import Cut, Prices

from .approaching import TOTALS, Approaching
from .archive import Archive, Candidate, shown
from .balance import hull, slope
from .price_steps import mixed, weights_after
from .settling import KEEP, KEEP_MORE, REHEARSALS, SLIVER, Limits, Place, share

# Where these numbers come from: see `settling.py`.

# The walk from low to high prices may take this share of the work, in no fewer prices than these.
_WALK, _FEWEST = 0.5, 5

# So often prices are sought between the same two plans.
_CHORDS = 5

# So many sweeps at prices of bytes alone.
_LAST_SWEEPS = 3

# So many sweeps at prices of joules alone.
_SWEEPS = 20

# What is not less than this share of a gap is as good as the whole of it.
_LITTLE = 0.999

# So many sweeps before a search goes on from another's prices.
_BEGIN = 5

# Fractions of multiples of it are spread evenly, however many there are.
_GOLDEN = 0.5 * (5.0**0.5 - 1.0)

# What it takes to evaluate a bound for a plan, in entries that are read.
_PER_BOUND = 300


class Search(Approaching):
    """Anytime search of one problem; call `run`, then read `archive`."""

    def run(self, limits: Limits | None = None) -> Archive:
        """The front from the fastest plan down to the smallest peak, then the least joules.

        First the price of memory rises step by step; then prices at which plans balance find others
        between them, or prove that there are none; then the search works wherever the gap is
        largest, until it is small everywhere or the effort is spent. `limits` are of special
        interest.
        """
        fastest = self.fastest()
        if not self.effort.front and (limits is None or limits.hold(fastest)):
            return self.archive
        least = self._walk(fastest)
        if self.effort.part == self.effort.parts - 1:
            self._least_peak(least)
        if limits is not None and least.peak > limits.peak:
            if self._over():
                least = self._squeezed(fastest, least, limits)
            self._descended(least, limits.peak)
        elif limits is not None and not limits.hold(fastest):
            self.approach(limits, 2 * self.effort.steps)
        if self.effort.part == 0:
            self._frugal(fastest)
        if self.effort.ends:
            self._least_joules()
            return self.archive
        if self.mixtures is None:
            self._balance()
        self._narrow()
        if self.small:
            self._close()
        return self.archive

    def go_on(self, archive: Archive) -> Archive:
        """Take up what other searches of the problem have found and proved: work wherever the gap
        is largest, rivals counted, from the prices that proved most there."""
        self.take_up(archive)
        self._settle(Prices(0.0, np.zeros(self.problem.times)), _BEGIN, self._some_rows())
        self._remember(self._here())
        self._narrow()
        if self.small:
            self._close()
        return self.archive

    def take_up(self, archive: Archive) -> None:
        """Know what other searches of the problem have found and proved, and at which prices."""
        self.archive = replace(
            archive, candidates=[*archive.candidates], cuts=[*archive.cuts], places=[], spent=0.0
        )
        self.visited = [Place(cut, prices, None) for cut, prices in archive.places]
        for candidate in archive.candidates:
            self.consider(candidate.rows)

    def leave(self) -> None:
        """Note in the archive what was spent, and the places from which another may go on: those
        that prove most for one of the plans that a front shows."""
        best: dict[int, None] = {}
        for c in self.archive.corners() if self.visited else ():
            for limits in (Limits(c.peak), Limits(c.peak, c.joules)):
                values = [x.cut.at(limits.peak, limits.joules) for x in self.visited]
                best[int(np.argmax(values))] = None
        self.archive.places = [(self.visited[k].cut, self.visited[k].prices) for k in best]
        self.archive.spent = self.work.units

    def _some_rows(self) -> list[Ints]:
        """The fastest labelling known."""
        return [min(self.archive.candidates, key=lambda c: c.costs).rows]

    # The ends of the front

    def fastest(self) -> Candidate:
        """The fastest plan. Raises ExtractError when no legal one is found."""
        free = Prices(0.0, np.zeros(self.problem.times))
        if self.shares is None:
            found = self._settle(free, 40)
            self._remember(self._here())
        else:
            found = self._approached(free)
        if not self.archive.candidates:
            self.consider(self._improved([self.dual.decode()], KEEP_MORE))
        if not self.archive.candidates and self.small:
            self._exactly(Limits(np.inf))
        if not self.archive.candidates:
            raise ExtractError(
                "no legal combination of strategies was found",
                hint="Layouts that one operation gives cannot be changed to what others need; "
                "was a rule removed?",
            )
        if not np.isfinite(found.seconds):
            return self.archive.candidates[0]
        return self._descended(found, found.peak)

    def _walk(self, fastest: Candidate) -> Candidate:
        """Raise the price of memory from hardly anything to far above time; the smallest peak."""
        if not fastest.peak or not fastest.seconds:
            return fastest
        least = found = fastest
        prices = self._first(fastest)
        totals = self._totals() * fastest.seconds / fastest.peak
        last = self.effort.part == self.effort.parts - 1
        self.range = totals[0] if self.effort.part else 0.0, np.inf if last else totals[-1]
        for total in totals:
            prices = Prices(0.0, prices.bytes * (total / prices.bytes.sum()))
            used: Floats | None = None
            places = []
            # At the highest price the search is for the smallest peak.
            longer = self._longer if last and total == totals[-1] else 1
            for _ in range(longer * self._steps):
                if self._over():
                    return least
                found = self._settle(prices, 1, [found.rows])
                places.append(self._here())
                least = min(least, found, key=lambda c: c.peak)
                used = mixed(used, self._used(found))
                prices = Prices(0.0, total * weights_after(prices.bytes, used[:-1], 1.0))
                if self._beaten(found):  # here the rivals are better; the bound was wanted
                    break
            self._remember(max(places, key=lambda x: x.cut.value))
        return self._descended(least, least.peak)

    def _squeezed(self, fastest: Candidate, least: Candidate, limits: Limits) -> Candidate:
        """The smallest peak at the highest price of memory, which little work did not come to, and
        without which nothing may be within the limits."""
        total = TOTALS[-1] * fastest.seconds / max(fastest.peak, 1.0)
        used = self._used(least)[:-1]
        before = np.ones_like(used)
        for _ in range(self._longer * self._steps):
            if limits.hold(least):
                break
            prices = Prices(0.0, total * weights_after(before, used, 1.0))
            found = self._settle(prices, 1, [least.rows])
            least = min(least, found, key=lambda c: c.peak)
            before, used = prices.bytes, mixed(used, self._used(found)[:-1])
        self._remember(self._here())
        return least

    def _least_peak(self, least: Candidate) -> None:
        """Prove, where seconds cost nothing, that no peak is much smaller than the smallest found.

        What is met on the way costs any time, and is not kept.
        """
        total = float(self.dual.prices.bytes.sum())
        if not total:
            return
        before, rng = self.dual.messages(), np.random.default_rng(self.effort.seed)
        self.dual.resume(before / total)
        prices = Prices(0.0, self.dual.prices.bytes / total, 0.0)
        used: Floats | None = None
        for k in range(1 + self.effort.steps):
            if k and self._over():  # little work, and without it nothing is said of all plans
                break
            self.dual.price(prices)
            self.dual.rehearse(REHEARSALS)
            self._none_below(max(self.dual.sweep().least_peak for _ in range(_LAST_SWEEPS)))
            profile = self._evaluated(self.elimination.improve([least.rows], KEEP, rng))[2]
            used = mixed(used, profile)
            prices = replace(prices, bytes=weights_after(prices.bytes, used, 1.0))
        self.dual.resume(before)

    def _totals(self) -> Floats:
        """This part's total prices of memory, fewer of them where a step is much work."""
        begin = self.work.units
        self._settle(replace(self.dual.prices), 1)
        step = self.work.units - begin
        # Where the clock alone ends the search, so much work as it should have time for.
        every_unit = min(self.effort.work, self.effort.seconds) - begin
        room = _WALK * every_unit * self.effort.parts
        most = int(room / (step * (self._steps + 1)))
        count = min(self.effort.prices, max(most, _FEWEST))
        if self.dual.folding.worth:  # plans that balance will find the prices between
            count = min(count, _FEWEST)
        part, parts = self.effort.part, self.effort.parts
        every = np.geomspace(*TOTALS, max(count, parts))
        # Searches of the same one after the other walk between each other's prices.
        apart = every[1] / every[0] if len(every) > 1 else 1.0
        every = every * apart ** (self.effort.round * _GOLDEN % 1.0)
        first, last = (len(every) * k // parts for k in (part, part + 1))
        return every[first : last + 1]  # the next part's first is the end of this one's range

    def _frugal(self, fastest: Candidate) -> None:
        """Plans of few joules, at no memory price."""
        for factor in (0.5, 4.0):
            price = factor * fastest.seconds / max(fastest.joules, 1e-12)
            self._settle(Prices(price, np.zeros(self.problem.times)), 4, [fastest.rows])

    def _least_joules(self) -> None:
        """Prove, where seconds and bytes cost nothing, that no plan takes many fewer joules than
        the most frugal one that is known."""
        self.dual.resume(0.0 * self.dual.messages())
        self.dual.price(Prices(1.0, np.zeros(self.problem.times), 0.0))
        least = max(self.dual.sweep().value for _ in range(_SWEEPS))
        self.archive.cuts.append(Cut(np.inf, 0.0, 0.0, np.inf, least * (1.0 - 0.1 * SLIVER)))

    # Between them

    def _narrow(self) -> None:
        """Go on wherever the gap is largest, until it is small or the effort is spent."""
        tries: dict[Limits, int] = {}
        while not self._over():
            found = self._widest(tries)
            if found is None:
                break
            gap, limits = found
            tried = tries.get(limits, 0) > 0
            if tried and self._affordable(limits):
                self._exactly(limits)
                tries[limits] = 3
                continue
            self.approach(limits, 2 * self.effort.steps)
            left = self._gap(limits)
            if not left < _LITTLE * gap and not self.small:
                tries[limits] = 3  # once more would be the same again
            elif not left < 0.8 * gap:
                tries[limits] = tries.get(limits, 0) + 1

    def _widest(self, tries: dict[Limits, int]) -> tuple[float, Limits] | None:
        """The largest gap of a plan that a front would show, and the limits to close it at."""
        out = None
        found = np.array([c.costs for c in self.archive.candidates]).reshape(-1, 3)
        every = np.concatenate([found, self.rivals])
        self.work.add(0, _PER_BOUND * len(every) * len(self.archive.cuts))
        for seconds, peak, joules in every[shown(every)].tolist():
            by_peak = self._gap(Limits(peak))
            own = share(seconds, self.archive.bound(peak, joules))
            for gap, limits in ((by_peak, Limits(peak)), (own, Limits(peak, joules))):
                if limits.joules < np.inf and own <= by_peak:
                    continue
                if gap > self.effort.gap and tries.get(limits, 0) < 3:
                    out = max(out, (gap, limits), key=lambda x: x[0]) if out else (gap, limits)
        return out

    def _balance(self) -> None:
        """Between neighbours of the convex hull: find plans below it, or prove that there are none,
        by prices at which they balance."""
        tries: dict[tuple[float, float], int] = {}
        vain: set[tuple[float, float]] = set()
        enough = 0.75 * self.effort.gap
        while not self._over():
            out = None
            for a, b in pairwise(hull(self.archive.candidates)):
                limit, key = 0.5 * (a.peak + b.peak), (a.peak, b.peak)
                known = min(0.5 * (a.seconds + b.seconds), self._rival(Limits(limit)))
                gap = share(known, self.archive.bound(limit, np.inf))
                mine = self.range[0] <= slope(a, b) <= self.range[1]
                if mine and gap > enough and tries.get(key, 0) < _CHORDS:
                    out = max(out or (gap, key), (gap, key))
            if out is None:
                return
            key = out[1]
            if not self._between(0.5 * (key[0] + key[1]), key in vain):
                vain.add(key)
            tries[key] = tries.get(key, 0) + 1

    # Small problems are settled by mixed-integer programming

    def _close(self) -> None:
        """Prove, or refute, that nothing faster lies between known plans, or below the smallest.

        Rivals count among them: what is below their smallest peak too is of this problem alone.
        """
        settled: set[float] = set()
        rivals = self.rivals[:, 1].tolist()
        while not self._over():
            peaks = sorted([*rivals, *(c.peak for c in self.archive.candidates)])
            steps = pairwise([-1.0, *peaks])
            above = [y * (1 - SLIVER) for x, y in steps if x < y * (1 - SLIVER)]
            open_ = [x for x in above if x not in settled]
            if not open_:
                break
            limit = max(open_, key=lambda x: self._gap(Limits(x)))
            settled.add(limit)
            within = Limits(limit)
            if self._gap(within) > self.effort.gap and self._affordable(within):
                self._exactly(within)
