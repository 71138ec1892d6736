"""Mixtures: prices at which known labellings balance.

Of all mixtures of labellings that are known, a linear program finds the one with the least seconds
whose bytes stay within a limit at every moment, and its joules within another. Its dual values are
prices of bytes and joules: either the bound at these prices proves that no mixture is much better,
or a labelling turns up that is cheaper at them than all that are known (column generation: Dantzig
and Wolfe, 1960). What no prices can prove is the seconds of the best mixture.

Where seconds are a longest path, because collectives run beside kernels or may be merged, a
labelling has its seconds on every path. Then the program finds the mixture whose mean lengths have
the shortest longest path. Its dual values are also a unit flow (a mixture of paths), which gives
every event its share of a second. Paths join the program as mixtures turn up that take longer, and
leave it when they have not mattered for a while.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tapestry_egg.extract.problem.latencies import Latencies
from tapestry_egg.extract.problem.problem import Floats, Ints, Problem
from tapestry_egg.extract.problem.timeline import Timeline
from tapestry_egg.work import Work

from .archive import Cut, Limits, Prices

# So many labellings are remembered: beyond, those go first that were longest in no mixture.
_REMEMBERED = 120

# A path that was in no flow of so many programs is forgotten.
_FORGOTTEN = 8

# A mixture may be over a limit by this share of it, and has no labelling of less than this share.
_OVER, _LEAST = 1e-7, 1e-6

# So often a program is solved anew with what its mixture was too long on, or over a limit at.
_ROUNDS = 12

# Where nothing known is within the limits, what takes nothing else but so many times the seconds of
# the slowest stands in.
_BEYOND = 10.0

# Calls of a linear program, and of each of its iterations, in units of `Work`.
_PER_PROGRAM, _PER_ITERATION = 3e-3, 5e-5


@dataclass(frozen=True)
class Mixture:
    """The seconds of the shortest mixture within limits, the prices at which what is in it
    balances, and its parts, the greatest first."""

    seconds: float
    prices: Prices
    parts: tuple[Ints, ...]  # each [variables], rows


@dataclass(slots=True)
class _Known:
    """A labelling of a network: what its events take, its bytes at each moment, its joules, and in
    the how manieth program it mattered last."""

    network: int
    rows: Ints
    lengths: Floats
    profile: Floats
    joules: float
    used: int


def likeness(form: int, problem: Problem) -> tuple[int, int, int]:
    """What networks have in common that share their mixtures: the form, and how many moments and
    events there are. Results of more sizes, as on more devices, make more moments."""
    return form, problem.times, 0 if problem.paths is None else len(problem.paths)


class Mixtures:
    """The labellings that searches have met, and the paths that matter for mixtures of them.

    Networks of one form on several meshes that have the same moments share their mixtures: prices
    that were found on one of them are where others begin. `places` are the cuts that each network
    has proved, by its number, and their prices. `leanest` are two distributions of the price of
    memory over moments: the one that led a network to a plan of a small peak, and the one that
    proves the most about peaks.
    """

    def __init__(self, longest: Timeline | Latencies | None) -> None:
        self.longest = longest
        self.known: dict[tuple[int, bytes], _Known] = {}
        self.paths = [np.ones(1) if longest is None else longest.evenly()]
        self._mattered = [0]  # per path, in which program last
        self._programs = 0
        self.places: list[tuple[int, Cut, Prices]] = []
        self.leanest: tuple[Floats, Floats] | None = None

    def add(
        self, network: int, rows: Ints, lengths: Floats, profile: Floats, joules: float
    ) -> None:
        """Remember a labelling; `lengths` are the sum of its seconds, then those of its events."""
        key = network, rows.tobytes()
        if key in self.known:
            return
        self.known[key] = _Known(network, rows, lengths, profile, joules, self._programs)
        if len(self.known) > _REMEMBERED:
            del self.known[min(self.known, key=lambda k: self.known[k].used)]

    def shortest(self, network: int, limits: Limits, work: Work) -> Mixture | None:
        """The shortest mixture within limits, with the parts of it that are of one network; None
        where nothing is known, or a limit is nothing."""
        peak, joules = limits.peak, limits.joules
        known = list(self.known.values())
        if not known or peak <= 0.0 or joules <= 0.0:
            return None
        lengths = np.array([x.lengths for x in known])
        profiles = np.array([x.profile for x in known])
        energy = np.array([x.joules for x in known])
        every = np.einsum("e,ke->k", self.paths[0], lengths)
        unit = max(float(every.min()), 1e-300)
        times = sorted({int(t) for t in profiles.argmax(axis=1)}) if peak < np.inf else []
        found: Any = None
        within, seconds = times, np.inf
        for _ in range(_ROUNDS):
            paths = np.array(self.paths)
            each = np.einsum("pe,ke->pk", paths, lengths) / unit
            found = _solved(each, profiles[:, times] / peak, energy / joules)
            work.add_units(_PER_PROGRAM + _PER_ITERATION * int(found.nit))
            if found.x is None:
                return None
            shares, within = found.x[:-2], times
            mixed = np.einsum("k,ke->e", shares, lengths)
            seconds = float(found.x[-1]) * unit
            longer = False
            if self.longest is not None:
                seconds = self.longest.seconds(mixed)
                longer = seconds > float(found.x[-1]) * unit * (1 + _OVER)
                longer = longer and self._join(self.longest.shares(mixed))
            over = np.zeros(0, dtype=np.int64)
            if times:
                held = np.einsum("k,kt->t", shares, profiles)
                held[times] = 0.0
                over = np.flatnonzero(held > peak * (1 + _OVER))
            if over.size:
                times = [*times, int(held.argmax())]
            elif not longer:
                break
        self._programs += 1
        dual = np.maximum(-found.ineqlin.marginals, 0.0)
        flow, memory = dual[: len(paths)], dual[len(paths) : len(paths) + len(within)]
        flow = flow / max(flow.sum(), 1e-300)
        prices = np.zeros(profiles.shape[1])
        prices[within] = memory * unit / peak
        joule = float(dual[-1]) * unit / joules if joules < np.inf else 0.0
        order = [k for k in np.argsort(-shares, kind="stable").tolist() if shares[k] > _LEAST]
        for k in order:
            known[k].used = self._programs + 1  # more than what is added until the next
        self._forget(flow)
        events = None if self.longest is None else np.einsum("p,pe->e", flow, paths)
        own = tuple(known[k].rows for k in order if known[k].network == network)
        return Mixture(seconds, Prices(prices, joule, 1.0, events), own)

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
    """The linear program over shares of labellings, of what stands in where none is within the
    limits, and of one more column, the longest of `paths` [paths, labellings]; `profiles`
    [labellings, times] and `energy` [labellings] are shares of their limits."""
    from scipy.optimize import linprog

    count = paths.shape[1]
    within = np.column_stack((profiles, energy)).T
    beyond = _BEYOND * paths.max(axis=1)[:, None]
    return linprog(
        np.append(np.zeros(count + 1), 1.0),
        A_ub=np.block(
            [[paths, beyond, -np.ones((len(paths), 1))], [within, np.zeros((len(within), 2))]]
        ),
        b_ub=np.append(np.zeros(len(paths)), np.ones(len(within))),
        A_eq=np.append(np.ones(count + 1), 0.0)[None, :],
        b_eq=[1.0],
        method="highs-ds",
    )
