"""Archive: the labellings that a search keeps, and the bounds that it has proved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints, Problem
from tapestry_egg.machine.objectives import JOULES, PEAK_BYTES
from tapestry_egg.pareto import excess
from tapestry_egg.quantities import TIME

# Relative error of a bound, a sum of some thousand terms, twice over.
_ROUNDING = 1e-12

#: Memory limits closer together than this share of them are not told apart. What is proven of peaks
#: is lowered by a tenth of it, so that no bound depends on rounding.
SLIVER = 1e-5

# A plan is left out for another that is at most this much worse in anything and better on the whole
# (by the product of all ratios): a front shows its corners, not every step between them. The best
# plan in the first objective always stays. No measurement of the number is kept; the front's
# epsilon covers what is left out so.
_NEAR = 0.01


@dataclass(frozen=True)
class Prices:
    """What a byte at each moment and a joule cost, in seconds, and what a second does: nothing
    where only bytes or joules count. Where seconds are a longest path, `events` are the shares of a
    second of the sum of all, and of each event."""

    bytes: Floats  # [moments]
    joule: float = 0.0
    second: float = 1.0
    events: Floats | None = None  # [1 + events]


@dataclass(frozen=True)
class Cut:
    """One valid inequality: seconds ≥ value − bytes_price·peak − joule_price·joules.

    It holds for plans whose peak is at most `peak` and whose joules are at most `joules`; an
    infinite value says that there are none.
    """

    value: float
    bytes_price: float
    joule_price: float
    peak: float = float("inf")
    joules: float = float("inf")

    @property
    def numbers(self) -> tuple[float, float, float, float, float]:
        """What it is made of, in the order above."""
        return self.value, self.bytes_price, self.joule_price, self.peak, self.joules


def bounds_at(cuts: Floats, peak: float, joules: float) -> Floats:
    """The bounds on seconds of any plan within limits, of cuts by their numbers [cuts, 5]."""
    value, byte, joule, most_bytes, most_joules = cuts.T
    taken = np.multiply(byte, peak, out=np.zeros(len(cuts)), where=byte != 0.0)
    taken += np.multiply(joule, joules, out=np.zeros(len(cuts)), where=joule != 0.0)
    with np.errstate(invalid="ignore"):  # infinite values
        # At very high prices two large numbers are subtracted: what rounding may have added goes.
        found = value - taken - _ROUNDING * (np.abs(value) + taken)
    found[value == np.inf] = np.inf
    found[(peak > most_bytes) | (joules > most_joules)] = 0.0
    return found


@dataclass(frozen=True)
class Limits:
    """What a plan may need: peak bytes, joules."""

    peak: float = float("inf")
    joules: float = float("inf")

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
class Candidate:
    """A labelling and its true costs. Where collectives may be merged, `seconds` are those however
    that is done, and `unmerged` those of every collective on its own."""

    rows: Ints  # [variables], the row of each
    seconds: float
    peak: float
    joules: float
    unmerged: float = np.inf

    @classmethod
    def of(cls, problem: Problem, rows: Ints) -> Candidate:
        """A labelling of a problem, as the problem evaluates it."""
        seconds, joules, profile = problem.evaluate(rows)
        peak = float(profile.max(initial=0.0))
        if problem.latencies is None or not np.isfinite(seconds):
            return cls(rows, seconds, peak, joules)
        merged = problem.latencies.seconds(problem.lengths(rows))
        return cls(rows, merged, peak, joules, seconds)

    @property
    def costs(self) -> tuple[float, float, float]:
        """What it has of each objective that a search counts (`machine.objectives.SEARCHED`)."""
        return (self.seconds, self.peak, self.joules)


@dataclass
class Archive:
    """The candidates that no other dominates, and every cut proved so far; whether the search ended
    `by_clock`, so that another one may find something else. Another search can go on from its
    `places`: prices, and the cuts that they proved. `spent` is what the search did, in units of
    `Work`."""

    candidates: list[Candidate] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    by_clock: bool = False
    places: list[tuple[Cut, Prices]] = field(default_factory=list)
    spent: float = 0.0
    # [cuts, 5], the numbers of as many as there were when a bound was asked for
    _every: Floats = field(
        default_factory=lambda: np.zeros((0, 5)), init=False, repr=False, compare=False
    )

    def add(self, new: Candidate) -> bool:
        """Keep a candidate unless another is as good in everything; drop what is no better than
        it."""
        if not np.isfinite(new.seconds):
            return False
        if any(_covers(old, new) for old in self.candidates):
            return False
        self.candidates = [c for c in self.candidates if not _covers(new, c)]
        self.candidates.append(new)
        return True

    def join(self, other: Archive) -> None:
        """Take in what another search of the same problem has found and proved."""
        for candidate in other.candidates:
            self.add(candidate)
        mine = set(self.cuts)
        self.cuts += [cut for cut in other.cuts if cut not in mine]
        self.by_clock |= other.by_clock
        seen = {cut for cut, _ in self.places}
        self.places += [place for place in other.places if place[0] not in seen]
        self.spent += other.spent

    def bound(self, peak: float, joules: float) -> float:
        """The best proved bound on seconds of any plan within these limits."""
        if not self.cuts:
            return 0.0
        every = self._every
        if len(every) != len(self.cuts):  # they are added at the end
            new = [c.numbers for c in self.cuts[len(every) :]]
            every = self._every = np.concatenate([every, np.array(new)])
        return float(bounds_at(every, peak, joules).max())

    def least_peak(self) -> float:
        """The most bytes that the peak of every plan is proved to have; 0 where nothing is."""
        none = (c.peak for c in self.cuts if c.value == np.inf and c.joules == np.inf)
        return max(none, default=0.0)

    def best(self, peak: float, joules: float = np.inf) -> Candidate | None:
        """The fastest candidate within limits."""
        fitting = [c for c in self.candidates if c.peak <= peak and c.joules <= joules]
        return min(fitting, key=lambda c: c.costs) if fitting else None

    def corners(self) -> list[Candidate]:
        """The candidates that a front would show, from fast to slow."""
        costs = np.array([c.costs for c in self.candidates]).reshape(-1, 3)
        return [self.candidates[i] for i in shown(costs)]


def shown(costs: Floats) -> list[int]:
    """Which of some points [points, objectives] a front shows, from the least in the first
    objective on: those that nothing dominates and that are not close to a better one."""
    order = np.lexsort(costs.T[::-1])
    kept: list[int] = []
    for i in order.tolist():
        if not kept or not (costs[kept] <= costs[i]).all(axis=1).any():
            kept.append(i)
    logs = np.log(np.maximum(costs[kept], 1e-30))

    def hardly_better(i: int) -> Any:
        return (logs[i] - logs).max(axis=1) <= _NEAR  # than point i

    alive = np.ones(len(kept), dtype=bool)
    if kept:
        alive &= ~hardly_better(0)
        alive[0] = True  # the best in the first objective
    for i in np.argsort(logs.sum(axis=1), kind="stable").tolist():
        if alive[i]:
            alive &= ~(hardly_better(i) & (logs[i].sum() < logs.sum(axis=1)))
            alive[0] = True
    return [i for i, here in zip(kept, alive, strict=True) if here]


def _covers(a: Candidate, b: Candidate) -> bool:
    """Whether a candidate is as good as another in everything, but for rounding."""
    own, other = (*a.costs, a.unmerged), (*b.costs, b.unmerged)
    return all(x <= y * (1 + 1e-12) for x, y in zip(own, other, strict=True))


def so_far(archives: Sequence[Archive]) -> str:
    """`front 7  best 1.2 ms  bound 1.19 ms  gap 0.84%`: the plans that a front shows, the seconds
    of the fastest, the least that any plan may take, and how far a plan of the front may be above
    the fastest of its peak and joules."""
    candidates = [c for archive in archives for c in archive.candidates]
    if not candidates:
        return ""
    points = [candidates[i] for i in shown(np.array([c.costs for c in candidates]))]
    best = min(c.seconds for c in candidates)
    bound = min(archive.bound(np.inf, np.inf) for archive in archives)
    gap = max(
        excess(c.seconds, max(0.0, min(a.bound(c.peak, c.joules) for a in archives)))
        for c in points
    )
    return "  ".join(
        [
            f"front {len(points)}",
            f"best {TIME.format(best)}",
            f"bound {TIME.format(min(best, bound)) if bound > 0 else '-'}",
            f"gap {f'{gap:.2%}' if gap < 1e3 else '-'}",
        ]
    )
