"""Archive: the labellings that a search keeps, and the bounds that it has proved."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints
from tapestry_egg.extract.search.messages.dual import Cut, Prices, bounds_at

# A plan is left out for another that is at most this much worse in anything and better on the whole
# (by the product of all ratios): a front shows its corners, not every step between them. The best
# plan in the first objective always stays. No measurement of the number is kept; the front's
# epsilon covers what is left out so.
_NEAR = 0.01


@dataclass(frozen=True)
class Candidate:
    """A labelling and its true costs."""

    rows: Ints  # [variables], the row of each
    seconds: float
    peak: float
    joules: float

    @property
    def costs(self) -> tuple[float, float, float]:
        """What it has of each objective that a search counts (`machine.objectives.SEARCHED`)."""
        return (self.seconds, self.peak, self.joules)


@dataclass
class Archive:
    """The candidates that no other dominates, and every cut proved so far; whether the search ended
    `by_clock`, so that another one may find something else. `unsettled` are limits on the peak for
    which a solver of integer programs was ended before it had proven what is wanted. Another search
    can go on from its `places`: prices, and the cuts that they proved. `spent` is what the search
    did, in units of `Work`."""

    candidates: list[Candidate] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)
    by_clock: bool = False
    unsettled: tuple[float, ...] = ()
    places: list[tuple[Cut, Prices]] = field(default_factory=list)
    spent: float = 0.0
    # [cuts, 5], the numbers of as many as there were when a bound was asked for
    _every: Floats = field(
        default_factory=lambda: np.zeros((0, 5)), init=False, repr=False, compare=False
    )

    def add(self, new: Candidate) -> bool:
        """Keep a candidate unless another is as good in everything; drop what it dominates."""
        if not np.isfinite(new.seconds):
            return False
        if any(_covers(old.costs, new.costs) for old in self.candidates):
            return False
        self.candidates = [c for c in self.candidates if not _covers(new.costs, c.costs)]
        self.candidates.append(new)
        return True

    def join(self, other: Archive) -> None:
        """Take in what another search of the same problem has found and proved."""
        for candidate in other.candidates:
            self.add(candidate)
        mine = set(self.cuts)
        self.cuts += [cut for cut in other.cuts if cut not in mine]
        self.by_clock |= other.by_clock
        self.unsettled = tuple(dict.fromkeys(self.unsettled + other.unsettled))
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
    alive = np.ones(len(kept), dtype=bool)
    for i in np.argsort(logs.sum(axis=1), kind="stable"):
        if alive[i]:
            worse = (logs[i] - logs).max(axis=1) <= _NEAR
            better = logs[i].sum() < logs.sum(axis=1)
            alive &= ~(worse & better)
            alive[0] = True  # the best in the first objective
    return [i for i, here in zip(kept, alive, strict=True) if here]


def _covers(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(x <= y * (1 + 1e-12) for x, y in zip(a, b, strict=True))
