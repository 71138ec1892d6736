"""Settling: a problem at fixed prices, bounded and solved, and what a search knows by that.

Message passing bounds the problem, elimination finds what is very nearly the best labelling, single
moves improve it. Every labelling met on the way is kept if nothing dominates it; every bound met on
the way is a cut that holds for all limits. A small problem is settled by mixed-integer programming,
within one pair of limits at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints, Problem
from tapestry_egg.extract.search.messages.dual import Cut, Dual, Messages, Prices
from tapestry_egg.machine.objectives import JOULES, PEAK_BYTES
from tapestry_egg.products import dot
from tapestry_egg.work import Work

from . import exact
from .archive import Archive, Candidate
from .balance import Mixtures, Pool, between
from .descent import Descent
from .elimination import Elimination
from .price_steps import EventShares

# Of the numbers below, and of those in `search.py`, no measurement is kept. They say in which order
# and how long the search works. What it did not come to is in the gaps: every bound holds, however
# it was reached.

# Memory limits closer together than this share of them are not told apart, as a solver with its
# tolerances could not. What is proven of peaks is lowered, so that no bound depends on it.
SLIVER = 1e-5

# Rows per variable that elimination looks at, and at first, where a legal labelling is wanted.
KEEP, KEEP_MORE = 4, 16

# So many places keep their messages, megabytes each; from earlier ones they are passed anew.
_REMEMBERED = 64

# Passes among the layers that stand for equal ones, whenever prices change.
REHEARSALS = 8

# Where collectives run beside kernels: so many mixtures are made for the fastest plan, which may
# take this share of the work, with so many sweeps at the prices of each; a mixture that is within
# the first share of `gap` of its bound is met, a bound that rises by less than the second share so
# many times in turn has stopped rising.
_APPROACHES, _APPROACHING, _MIXED_SWEEPS = 40, 0.2, 3
_MET, _RISEN, _VAIN = 0.25, 0.02, 8

# So many parts of a mixture are put into a plan, between so many places.
_PARTS, _CUTS = 6, 16

# Calls that it takes to find that a labelling is not legal.
_PER_CROSSING = 30

# So many paths of either kind are in a mixed-integer program from the start.
_PATHS = 10

# So near to its bound, as a share of the gap that is good enough, the solver comes.
_NEARLY = 0.25

# Seconds after which a program is given up, far above what its size lets expect: a solver heeds no
# interruption.
LONGEST = 60.0


@dataclass(frozen=True)
class Limits:
    """What a plan may need: peak bytes, joules."""

    peak: float
    joules: float = np.inf

    def hold(self, candidate: Candidate) -> bool:
        """Whether a candidate needs no more."""
        return candidate.peak <= self.peak and candidate.joules <= self.joules

    @classmethod
    def of(cls, bounds: Mapping[str, float]) -> Limits | None:
        """Those of a user's limits, in base units, on what speed is exchanged for; None if none."""
        if bounds.keys().isdisjoint((PEAK_BYTES.name, JOULES.name)):
            return None
        return cls(bounds.get(PEAK_BYTES.name, np.inf), bounds.get(JOULES.name, np.inf))


@dataclass(frozen=True)
class Effort:
    """How hard to search: prices of all memory to try first, steps at each, `work` in all (units of
    `Work`, each about a second of one processor).

    `moves` is how often a labelling is improved once more at given prices where one elimination
    does not hold all of it; `gap` is what is good enough. A search may be one of `parts`, number
    `part`, that divide the prices among them, from low to high. Without `front` it is over with the
    fastest plan, if that is within the limits; with `ends` it is over with the ends of the front,
    what bounds say of it from there, and the least joules. Without `proofs` it is for plans alone:
    integer programs, which prove more than they find, have no part in it. `round` says how many
    searches of the problem there were before, whose prices it lies between. So far the same input
    gives the same result; not so where the search ends by the clock: after `seconds`, or after
    `patience` seconds without a better plan or bound.
    """

    prices: int = 16
    steps: int = 4
    moves: int = 0
    seconds: float = 30.0
    gap: float = 0.004
    seed: int = 0
    part: int = 0
    parts: int = 1
    patience: float = np.inf
    front: bool = True
    work: float = np.inf
    ends: bool = False
    proofs: bool = True
    round: int = 0


@dataclass(frozen=True)
class Place:
    """Prices, what they prove, and the messages to go on from there, if they are still kept."""

    cut: Cut
    prices: Prices
    messages: Messages | None


Report = Callable[[Archive, float], None]


class Settling:
    """One problem, settled at one price after the other; `archive` holds what came of it.

    `rivals` [plans, objectives] are costs of plans that other problems have: where those are as
    good as anything here can be, there is nothing to search for.
    """

    def __init__(
        self,
        problem: Problem,
        effort: Effort,
        report: Report | None = None,
        rivals: Floats | None = None,
    ) -> None:
        self.problem = problem
        self.rivals = np.zeros((0, 3)) if rivals is None else rivals
        self.effort = effort
        self.report = report
        self.deadline = time.perf_counter() + effort.seconds
        self.gained = time.perf_counter()
        self.late = False  # the clock has ended the search
        self.archive = Archive()
        self.work = Work()
        self.dual = Dual(problem, self.work)
        self.elimination = Elimination(self.dual)
        self.descent = Descent(problem, self.work)
        timeline = problem.timeline
        self.shares = None if timeline is None else EventShares(timeline)
        self.mixtures = None if timeline is None else Mixtures(timeline, self.work)
        self.small = exact.small(problem)
        self._nodes = exact.NODES * (1 + effort.round)
        self.rng = np.random.default_rng(effort.seed)
        self.visited: list[Place] = []
        self.pool = Pool()
        self.range = (0.0, np.inf)  # of all memory's price, in seconds per byte: this part's
        # Where equal layers are folded, few steps come near to what many reach.
        folded = self.dual.folding.worth
        self._steps = max(1, effort.steps // 2) if folded else effort.steps
        self._longer = 2 if folded else 4

    def _none_below(self, peak: float) -> None:
        """Note that every peak has so many bytes at least, but for rounding."""
        self.archive.cuts.append(Cut(np.inf, 0.0, 0.0, peak * (1 - 0.1 * SLIVER)))

    # At fixed prices

    def _here(self) -> Place:
        return Place(self.archive.cuts[-1], self.dual.prices, self.dual.messages())

    def _remember(self, place: Place) -> None:
        self.visited.append(place)
        if len(self.visited) > _REMEMBERED:
            old = self.visited[-1 - _REMEMBERED]
            self.visited[-1 - _REMEMBERED] = replace(old, messages=None)

    def _settle(self, prices: Prices, sweeps: int, known: Sequence[Ints] = ()) -> Candidate:
        """Bound and solve the problem at fixed prices of bytes and joules; the best labelling found
        for them. Shares of events, where there are such, follow what is found."""
        if self.shares is None:
            return self._settle_at(prices, sweeps, known)
        if prices.events is not None:
            self.shares.proving = prices.events
        found = [self._settle_at(replace(prices, events=self.shares.finding), sweeps, known)]
        self.shares.averaged(self._lengths(found[0]))
        rows = [found[0].rows, *known]
        found.append(self._settle_at(replace(prices, events=self.shares.proving), sweeps, rows))
        self.shares.averaged(self._lengths(found[1]))
        self.shares.follow(self._lengths(found[1]))

        def paid(c: Candidate) -> float:
            return c.seconds + prices.joule * c.joules + dot(prices.bytes, self._used(c)[:-1])

        return min(found, key=paid)

    def _approached(self, prices: Prices) -> Candidate:
        """The best labelling found at prices of mixtures within no limits; `prices` have no shares
        of events yet."""
        assert self.shares is not None
        found = self._settle_at(replace(prices, events=self.shares.proving), 40)
        most = self.work.units + _APPROACHING * min(self.effort.work, self.effort.seconds)
        place = self._mixed(Limits(np.inf), self._here(), _APPROACHES, most)
        assert place.prices.events is not None
        self.shares.proving = self.shares.finding = place.prices.events
        self._remember(place)
        return min(self.archive.candidates, key=lambda c: c.costs, default=found)

    def _mixed(self, limits: Limits, best: Place, steps: int, most: float = np.inf) -> Place:
        """Settle half way from the prices that prove most within limits to those of the shortest
        mixture of what is known, one time after the other, until the `most` work is done; where
        most is proven in the end."""
        assert self.mixtures is not None and self.problem.timeline is not None
        if best.prices.events is None:
            even = replace(best.prices, events=self.problem.timeline.evenly())
            best = replace(best, prices=even)
        reached = best.cut.at(limits.peak, limits.joules)
        mixture, vain = None, 0
        for _ in range(steps):
            if self._over() or self._gap(limits) <= self.effort.gap or vain == _VAIN:
                break
            if self.work.units > most:
                break
            mixture = self.mixtures.shortest(limits.peak, limits.joules)
            if mixture is None or share(mixture.seconds, reached) <= _MET * self.effort.gap:
                break
            self._settle_at(between(best.prices, mixture.prices), _MIXED_SWEEPS, mixture.parts[:2])
            bound = self.archive.cuts[-1].at(limits.peak, limits.joules)
            vain = 0 if share(bound, reached) > _RISEN * self.effort.gap else vain + 1
            if bound > reached:
                best, reached = self._here(), bound
                self.gained = time.perf_counter()
        if mixture is not None and self._gap(limits) > self.effort.gap:
            self._crossed(mixture.parts[:_PARTS], limits)
        return best

    def _crossed(self, parts: Sequence[Ints], limits: Limits) -> None:
        """Put stretches of the parts of a mixture into the fastest plan within limits: parts are
        good in some places each, and their sum at fixed prices does not tell which."""
        best = self.archive.best(limits.peak, limits.joules)
        if best is None:
            return
        for other in parts:
            places = np.flatnonzero(other != best.rows)
            cuts = np.unique(np.linspace(0, len(places), _CUTS + 1).astype(np.int64))
            for i, j in combinations(cuts.tolist(), 2):
                if self._over():
                    return
                rows = best.rows.copy()
                rows[places[i:j]] = other[places[i:j]]
                self.work.add(_PER_CROSSING, 8 * len(self.problem.pairs))
                if not np.isfinite(self.problem.serial(rows)):
                    continue
                found = self.consider(rows)
                if limits.hold(found) and found.seconds < best.seconds:
                    best = found

    def _lengths(self, candidate: Candidate) -> Floats:
        """Seconds of every event."""
        self.work.add(*self.problem.evaluation)
        return self.problem.lengths(candidate.rows)

    def _settle_at(self, prices: Prices, sweeps: int, known: Sequence[Ints] = ()) -> Candidate:
        """Bound and solve the problem at fixed prices; the best labelling found for them."""
        if prices is not self.dual.prices:
            self.dual.price(prices)
            self.dual.rehearse(REHEARSALS)
        last = -np.inf
        for _ in range(sweeps):
            cut = self.dual.sweep()
            risen = cut.value - last
            last = cut.value
            if risen <= self.effort.gap * 0.05 * abs(last):
                break
        self.archive.cuts.append(cut)
        return self.consider(self._improved(known or [self.dual.decode()], KEEP))

    def _improved(self, known: Sequence[Ints], keep: int) -> Ints:
        """What elimination makes of known labellings at the present prices."""
        rows = self.elimination.improve(known, keep, self.rng)
        for _ in range(self.effort.moves):
            if self.elimination.held:
                break
            rows = self.elimination.improve([rows, *known], keep, self.rng)
        return rows

    def _descended(self, found: Candidate, limit: float) -> Candidate:
        """What single moves make of a plan within a memory limit."""
        moved = self.consider(self.descent.into(found.rows, limit))
        # Moves are judged by the sum of seconds, which is not what a longest path takes.
        worse = self.shares is not None and moved.seconds > found.seconds
        return found if worse and found.peak <= limit else moved

    def consider(self, rows: Ints) -> Candidate:
        """Evaluate a labelling and offer it to the archive."""
        seconds, joules, profile = self._evaluated(rows)
        candidate = Candidate(rows, seconds, float(profile.max(initial=0.0)), joules)
        if np.isfinite(seconds):
            self.pool.add(seconds, profile, joules)
            if self.mixtures is not None:
                self.mixtures.add(rows, self._lengths(candidate), profile, joules)
        if self.archive.add(candidate):
            self.gained = time.perf_counter()
            if self.report is not None:
                self.report(self.archive, max(0.0, self.deadline - self.gained))
        return candidate

    def _used(self, candidate: Candidate) -> Floats:
        """Bytes at each time, then joules."""
        return np.append(self._evaluated(candidate.rows)[2], candidate.joules)

    def _evaluated(self, rows: Ints) -> tuple[float, float, Floats]:
        self.work.add(*self.problem.evaluation)
        return self.problem.evaluate(rows)

    def _gap(self, limits: Limits) -> float:
        """How far the best plan known, rivals included, may be from the best of this problem."""
        return share(self._known(limits), self.archive.bound(limits.peak, limits.joules))

    def _known(self, limits: Limits) -> float:
        """Seconds of the fastest plan within limits here or among the rivals."""
        return min(self._upper(limits), self._rival(limits))

    def _rival(self, limits: Limits) -> float:
        """Seconds of the fastest rival within limits; infinite if none is."""
        within = (self.rivals[:, 1] <= limits.peak) & (self.rivals[:, 2] <= limits.joules)
        return float(self.rivals[within, 0].min(initial=np.inf))

    def _beaten(self, found: Candidate) -> bool:
        """Whether some rival is better in everything."""
        return bool((self.rivals < np.array(found.costs)).all(axis=1).any())

    def _upper(self, limits: Limits) -> float:
        """Seconds of the fastest plan known within limits; infinite if none is."""
        best = self.archive.best(limits.peak, limits.joules)
        return best.seconds if best else np.inf

    def _over(self) -> bool:
        """Whether the effort is spent."""
        if self.work.units >= self.effort.work:
            return True
        now = time.perf_counter()
        if now > self.deadline or now > self.gained + self.effort.patience:
            self.late = self.archive.by_clock = True
        return self.late

    # Small problems are settled by mixed-integer programming

    def _affordable(self, limits: Limits) -> bool:
        """Whether there is work left for a solver, which cannot be ended by what it does."""
        if not (self.small and self.effort.proofs):
            return False
        known = self._known(limits) < np.inf and self.problem.timeline is None
        left = min(self.effort.work, self.effort.seconds) - self.work.units
        return (exact.units_below if known else exact.units)(self.problem) <= left

    def _exactly(self, limits: Limits) -> None:
        """Settle one pair of limits by mixed-integer programming, or note that the solver gave one
        up on memory alone."""
        self._solve(limits)
        if limits.joules == np.inf and self._gap(limits) > self.effort.gap:
            self.archive.unsettled += (limits.peak,)

    def _solve(self, limits: Limits) -> None:
        limit = limits.peak
        left = min(self.deadline - time.perf_counter(), LONGEST)
        peaks = sorted({int(profile.argmax()) for profile in self.pool.profiles})
        smallest = min((c.peak for c in self.archive.candidates), default=np.inf)
        if limit < smallest < np.inf:
            least, by_clock = exact.least_peak(
                self.problem, smallest, left, peaks, self.work, self._nodes
            )
            self._told(by_clock)
            self._none_below(least)
            # What the solver's tolerances cannot tell apart is as good.
            if least >= limit * (1 - 0.1 * SLIVER) or not self._affordable(limits):
                return
            left = min(self.deadline - time.perf_counter(), LONGEST)
        gap = max(_NEARLY * self.effort.gap, 1e-4)
        paths = [] if self.problem.timeline is None else self._paths(limit)
        joules, fastest = limits.joules, self._known(limits)
        found = exact.solve(
            self.problem, limit, left, gap, peaks, self.work, self._nodes, paths, joules, fastest
        )
        self._told(found.by_clock)
        if found.rows is not None:
            self.consider(found.rows)
        # A solver that overlooks a plan that is known has lost its way in its tolerances. Where it
        # finds that nothing is within the limit, the bound is infinite, and a bound all the same.
        known = self._upper(limits)
        if found.bound <= known * (1 + 1e-6):
            self.archive.cuts.append(Cut(found.bound, 0.0, 0.0, limit, limits.joules))

    def _paths(self, limit: float) -> list[Floats]:
        """Shares of events that prove most within a limit, paths that matter for mixtures there,
        and those of what is fastest."""
        timeline, mixtures = self.problem.timeline, self.mixtures
        assert timeline is not None and mixtures is not None
        mixtures.shortest(limit, np.inf)
        places = sorted(self.visited, key=lambda x: -x.cut.at(limit, np.inf))[:_PATHS]
        found = [x.prices.events for x in places if x.prices.events is not None]
        found += mixtures.paths[-_PATHS:]
        for c in self.archive.corners()[:_PATHS]:
            found.append(timeline.shares(self.problem.lengths(c.rows)))
        return found

    def _told(self, by_clock: bool) -> None:
        """Note whether the clock ended the solver: the next program would take as long."""
        self.archive.by_clock |= by_clock
        self.small &= not by_clock


def share(seconds: float, bound: float) -> float:
    """By which share of a bound some plan may be slower than the best there is."""
    if seconds <= bound:
        return 0.0
    return seconds / bound - 1.0 if bound > 0 else np.inf
