"""Chords: prices at which known labellings balance.

Of all mixtures of labellings that are known, a linear program finds the one with the least seconds
whose bytes stay within a limit at every time, and its joules within another. Its dual values are
prices of bytes and joules: either the bound at these prices proves that no mixture is much better,
or a labelling turns up that is cheaper at them than all that are known (column generation: Dantzig
and Wolfe, 1960). Where one time decides, the price is the slope of the chord between two labellings
(Aneja and Nair, 1979). What no prices can prove is the seconds of the best mixture.

Where collectives run beside kernels, seconds are a longest path, and no labelling has a price of
its own: each has one on every path. Then the program finds the mixture whose mean lengths have the
shortest longest path. Its dual values are also a unit flow through the timeline (a mixture of
paths), which gives every event its share of a second. Paths join the program as mixtures turn up
that take longer, and leave it when they have not mattered for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry_egg.extract.problem.problem import Floats, Ints
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.extract.search.messages.dual import Prices
from tapestry_egg.work import Work

from .archive import Candidate

# So many labellings are remembered, the last ones.
_REMEMBERED = 200

# A mixture may be over the limit by this share of it.
_OVER = 1e-7

# Calls of a linear program, and of each of its iterations.
_PER_PROGRAM, _PER_ITERATION = 5000, 50


# Of the numbers of mixtures no measurement is kept: they order the work.

# So many labellings are remembered: beyond, those go first that were longest in no mixture.
_MIXED = 120

# A path that was in no flow of so many programs is forgotten.
_FORGOTTEN = 8

# So often a program is solved anew with what its mixture was too long on, or over a limit at.
_ROUNDS = 3

# A mixture has no labelling of less than this share.
_LEAST = 1e-6


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


@dataclass(frozen=True)
class Mixture:
    """The seconds of the shortest mixture within limits, the prices at which what is in it
    balances, and its parts, the greatest first."""

    seconds: float
    prices: Prices
    parts: tuple[Ints, ...]  # each [variables], rows


@dataclass(slots=True)
class _Known:
    """A labelling: what its events take, its bytes at each time, its joules, and in the how manieth
    program it mattered last."""

    rows: Ints
    lengths: Floats
    profile: Floats
    joules: float
    used: int


class Mixtures:
    """The labellings that a search has met, and the paths that matter for mixtures of them."""

    def __init__(self, timeline: Timeline, work: Work) -> None:
        self.timeline, self.work = timeline, work
        self.known: dict[bytes, _Known] = {}
        self.paths = [timeline.evenly()]
        self._mattered = [0]  # per path, in which program last
        self._programs = 0

    def add(self, rows: Ints, lengths: Floats, profile: Floats, joules: float) -> None:
        """Remember a labelling."""
        key = rows.tobytes()
        if key in self.known:
            return
        self.known[key] = _Known(rows, lengths, profile, joules, self._programs)
        if len(self.known) > _MIXED:
            del self.known[min(self.known, key=lambda k: self.known[k].used)]

    def shortest(self, peak: float, joules: float) -> Mixture | None:
        """The shortest mixture within limits on bytes and joules, if one is within them."""
        known = list(self.known.values())
        if not known or peak <= 0.0 or joules <= 0.0:
            return None
        lengths = np.array([x.lengths for x in known])
        profiles = np.array([x.profile for x in known])
        energy = np.array([x.joules for x in known])
        unit = max(float(np.einsum("e,ke->k", self.paths[0], lengths).min()), 1e-300)
        times = sorted({int(t) for t in profiles.argmax(axis=1)}) if peak < np.inf else []
        for _ in range(_ROUNDS):
            paths = np.array(self.paths)
            each = np.einsum("pe,ke->pk", paths, lengths) / unit
            found = _solved(each, profiles[:, times] / peak, energy / joules)
            self.work.add(_PER_PROGRAM + _PER_ITERATION * int(found.nit), 20 * lengths.size)
            if found.x is None:
                return None
            shares, within = found.x[:-1], times
            mixed = np.einsum("k,ke->e", shares, lengths)
            seconds, over = self.timeline.seconds(mixed), np.zeros(0, dtype=np.int64)
            longer = seconds > float(found.x[-1]) * unit * (1 + _OVER)
            longer = longer and self._join(self.timeline.shares(mixed))
            if times:
                bytes_ = np.einsum("k,kt->t", shares, profiles)
                bytes_[times] = 0.0
                over = np.flatnonzero(bytes_ > peak * (1 + _OVER))
            if over.size:
                times = [*times, int(bytes_.argmax())]
            elif not longer:
                break
        self._programs += 1
        dual = np.maximum(-found.ineqlin.marginals, 0.0)
        flow, memory = dual[: len(paths)], dual[len(paths) : len(paths) + len(within)]
        flow = flow / flow.sum()
        prices = np.zeros(profiles.shape[1])
        prices[within] = memory * unit / peak
        joule = float(dual[-1]) * unit / joules if joules < np.inf else 0.0
        order = [k for k in np.argsort(-shares, kind="stable").tolist() if shares[k] > _LEAST]
        for k in order:
            known[k].used = self._programs + 1  # more than what is added until the next
        self._forget(flow)
        return Mixture(
            np.inf if over.size else seconds,
            Prices(joule, prices, events=np.einsum("p,pe->e", flow, paths)),
            tuple(known[k].rows for k in order),
        )

    def _join(self, path: Floats) -> bool:
        """Take up a path, unless it is known."""
        if any(np.array_equal(path, x) for x in self.paths):
            return False
        self.paths.append(path)
        self._mattered.append(self._programs)
        return True

    def _forget(self, flow: Floats) -> None:
        """Note which paths mattered, and leave out those that have not for long."""
        for k in np.flatnonzero(flow > 0.0).tolist():
            self._mattered[k] = self._programs  # those that joined just now come behind
        kept = [
            k
            for k, last in enumerate(self._mattered)
            if not k or self._programs - last <= _FORGOTTEN
        ]
        self.paths = [self.paths[k] for k in kept]
        self._mattered = [self._mattered[k] for k in kept]


def _solved(paths: Floats, profiles: Floats, energy: Floats) -> Any:
    """The linear program over shares of labellings, and one more column, the longest of `paths`
    [paths, labellings]; `profiles` [labellings, times] and `energy` [labellings] are shares of
    their limits."""
    from scipy.optimize import linprog

    count = paths.shape[1]
    within = np.column_stack((profiles, energy)).T
    return linprog(
        np.append(np.zeros(count), 1.0),
        A_ub=np.block([[paths, -np.ones((len(paths), 1))], [within, np.zeros((len(within), 1))]]),
        b_ub=np.append(np.zeros(len(paths)), np.ones(len(within))),
        A_eq=np.append(np.ones(count), 0.0)[None, :],
        b_eq=[1.0],
        method="highs-ds",
    )


def between(a: Prices, b: Prices) -> Prices:
    """Prices half way from a to b."""
    assert a.events is not None and b.events is not None
    return replace(
        a,
        joule=0.5 * (a.joule + b.joule),
        bytes=0.5 * (a.bytes + b.bytes),
        events=0.5 * (a.events + b.events),
    )
