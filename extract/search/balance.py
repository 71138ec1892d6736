"""Chords: prices at which known labellings balance.

Of all mixtures of labellings that are known, a linear program finds the one with the least seconds
whose bytes stay within a limit at every time, and its joules within another. Its dual values are
prices of bytes and joules: either the bound at these prices proves that no mixture is much better,
or a labelling turns up that is cheaper at them than all that are known (column generation: Dantzig
and Wolfe, 1960). Where one time decides, the price is the slope of the chord between two labellings
(Aneja and Nair, 1979). What no prices can prove is the seconds of the best mixture.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.work import Work

from .archive import Candidate

# So many labellings are remembered, the last ones.
_REMEMBERED = 200

# A mixture may be over the limit by this share of it.
_OVER = 1e-7

# Calls of a linear program, and of each of its iterations.
_PER_PROGRAM, _PER_ITERATION = 5000, 50


@dataclass(frozen=True)
class Balance:
    """The least seconds of a mixture, and what a byte costs at each time, and a joule."""

    seconds: float
    bytes: Floats  # [times], seconds per byte
    joule: float = 0.0  # seconds per joule


@dataclass
class Pool:
    """Seconds, joules and bytes at each time of the labellings that a search has met."""

    seconds: list[float] = field(default_factory=list)
    profiles: list[Floats] = field(default_factory=list)  # each [times], bytes
    joules: list[float] = field(default_factory=list)

    def add(self, seconds: float, profile: Floats, joules: float = 0.0) -> None:
        """Remember a labelling."""
        self.seconds.append(seconds)
        self.profiles.append(profile)
        self.joules.append(joules)
        if len(self.seconds) > _REMEMBERED:
            del self.seconds[0], self.profiles[0], self.joules[0]

    def balance(
        self, limit: float, work: Work | None = None, joules: float = np.inf, beyond: float = 0.0
    ) -> Balance | None:
        """The best mixture with the peak within `limit` bytes and within so many joules, if there
        is one; what it takes to find it is added to `work`. Where known labellings need more, one
        that takes nothing but `beyond` times the seconds of the slowest stands in."""
        from scipy.optimize import linprog

        if limit <= 0.0 or not self.seconds:
            return None
        profiles, costs, spent = np.array(self.profiles), np.array(self.seconds), [*self.joules]
        if beyond:
            profiles = np.concatenate([profiles, np.zeros((1, profiles.shape[1]))])
            costs, spent = np.append(costs, beyond * costs.max()), [*spent, 0.0]
        unit = max(min(self.seconds), 1e-300)
        profiles, costs = profiles / limit, costs / unit
        energy = np.array([spent]) / joules if joules < np.inf else np.zeros((0, len(costs)))
        times = sorted({int(t) for t in profiles.argmax(axis=1)})
        while True:
            found = linprog(
                costs,
                A_ub=np.concatenate([profiles[:, times].T, energy]),
                b_ub=np.ones(len(times) + len(energy)),
                A_eq=np.ones((1, len(costs))),
                b_eq=[1.0],
                method="highs",
            )
            if work is not None:
                work.add(_PER_PROGRAM + _PER_ITERATION * int(found.nit), 20 * profiles.size)
            if found.x is None:
                return None
            mixture = np.einsum("k,kt->t", found.x, profiles)
            worst = int(mixture.argmax())
            if mixture[worst] <= 1.0 + _OVER or worst in times:
                break
            times.append(worst)
        prices = np.zeros(profiles.shape[1])
        paid = np.maximum(-found.ineqlin.marginals, 0.0) * unit
        prices[times] = paid[: len(times)] / limit
        return Balance(float(found.fun) * unit, prices, float(paid[len(times) :].sum()) / joules)


def hull(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that are fastest at some price of their peak, from fast to small."""
    kept: list[Candidate] = []
    for c in sorted(candidates, key=lambda c: (c.seconds, c.peak)):
        if kept and c.peak >= kept[-1].peak:
            continue
        while len(kept) > 1 and slope(kept[-2], kept[-1]) >= slope(kept[-2], c):
            kept.pop()
        kept.append(c)
    return kept


def slope(fast: Candidate, small: Candidate) -> float:
    """Seconds that the smaller plan takes more, per byte that its peak is less."""
    return (small.seconds - fast.seconds) / (fast.peak - small.peak)
