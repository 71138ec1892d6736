"""Search: plans along the trade-off of seconds, peak bytes and joules, and bounds on all of them.

For a falling sequence of memory limits the prices of bytes are adjusted (subgradient steps on the
Lagrangian) while message passing bounds the priced problem. Every labelling met on the way is kept
if nothing dominates it; every bound met on the way is a cut that holds for all limits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from ..errors import ExtractError
from . import exact
from .dual import Cut, Dual, Prices
from .problem import Floats, Ints, Problem

# Memory limits closer together than this share of them are not told apart.
SLIVER = 1e-5


@dataclass(frozen=True)
class Candidate:
    """A labelling and its true costs."""

    rows: Ints
    seconds: float
    peak: float
    joules: float

    @property
    def costs(self) -> tuple[float, float, float]:
        return (self.seconds, self.peak, self.joules)


@dataclass
class Archive:
    """The candidates that no other dominates, and every cut proved so far."""

    candidates: list[Candidate] = field(default_factory=list)
    cuts: list[Cut] = field(default_factory=list)

    def add(self, new: Candidate) -> bool:
        """Keep a candidate unless another is as good in everything; drop what it dominates."""
        if not np.isfinite(new.seconds):
            return False
        if any(_covers(old.costs, new.costs) for old in self.candidates):
            return False
        self.candidates = [c for c in self.candidates if not _covers(new.costs, c.costs)]
        self.candidates.append(new)
        return True

    def bound(self, peak: float, joules: float) -> float:
        """The best proved bound on seconds of any plan within these limits."""
        return max((c.at(peak, joules) for c in self.cuts), default=0.0)

    def best(self, peak: float) -> Candidate | None:
        """The fastest candidate within a memory limit."""
        fitting = [c for c in self.candidates if c.peak <= peak]
        return min(fitting, key=lambda c: c.costs) if fitting else None


def _coarse_to_fine(n: int) -> list[int]:
    """0..n-1 with the ends first, then middles of the widest spaces."""
    order = [0] if n else []
    width = n
    while len(order) < n:
        order += [k for k in range(width // 2, n, max(width, 1)) if k not in order]
        order += [k for k in range(n) if width <= 1 and k not in order]
        width //= 2
    return order


def _covers(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return all(x <= y * (1 + 1e-12) for x, y in zip(a, b, strict=True))


@dataclass(frozen=True)
class Effort:
    """How long to search: memory limits to visit, price steps at each, seconds in all."""

    limits: int = 10
    steps: int = 4
    moves: int = 40
    seconds: float = 30.0
    gap: float = 0.004
    seed: int = 0


# So many of the cheapest rows of a variable are tried in a move that looks at the memory profile.
_OPTIONS = 40

Report = Callable[[Archive, float], None]


class Search:
    """Anytime search of one problem; call `run`, then read `archive`."""

    def __init__(self, problem: Problem, effort: Effort, report: Report | None = None) -> None:
        self.problem = problem
        self.effort = effort
        self.report = report
        self.archive = Archive()
        self.dual = Dual(problem)
        self.deadline = time.perf_counter() + effort.seconds
        self.moves = _Moves(problem)
        self.small = exact.small(problem)
        self.rng = np.random.default_rng(effort.seed)
        self.visited: dict[float, Floats] = {}  # memory limit -> prices of its best bound

    def run(self, peak: float | None = None) -> Archive:
        """The front from the fastest plan down to the smallest peak, then the least joules.

        Memory limits are visited coarse to fine, then wherever the gap is largest, until it is
        small everywhere or the time is spent. `peak` is a limit of special interest.
        """
        fastest = self._settle(Prices(0.0, np.zeros(self.problem.times)), 40)
        if not self.archive.candidates:
            fastest = self._any()
        least = self._smallest(fastest)
        lowest = max(least.peak, 1e-6 * fastest.peak)
        grid = np.zeros(0)
        if lowest < fastest.peak:
            grid = np.geomspace(lowest, fastest.peak, self.effort.limits + 1)[:-1]
        limits = [float(grid[k]) for k in _coarse_to_fine(len(grid))]
        if peak is not None and least.peak < peak < fastest.peak:
            limits.insert(0, peak)
        for limit in limits:
            if self._over():
                break
            self.approach(limit, self.effort.steps)
        self._frugal(fastest)
        self._refine()
        tries: dict[float, int] = {}
        while not self._over():
            open_ = [(self._gap(c.peak), c.peak) for c in self.archive.candidates]
            open_ = [(g, x) for g, x in open_ if g > self.effort.gap and tries.get(x, 0) < 3]
            if not open_:
                break
            gap, limit = max(open_)
            if self.small and tries.get(limit, 0):
                self._exactly(limit)
                tries[limit] = 3
                continue
            self.approach(limit, self.effort.steps * (1 + tries.get(limit, 0)))
            if self._gap(limit) > 0.8 * gap:
                tries[limit] = tries.get(limit, 0) + 1
        if self.small:
            self._close()
        return self.archive

    def _close(self) -> None:
        """Prove, or refute, that nothing faster lies between one candidate and the next larger."""
        settled: set[float] = set()
        while not self._over():
            peaks = sorted(c.peak for c in self.archive.candidates)
            above = [y * (1 - SLIVER) for x, y in pairwise(peaks) if x < y * (1 - SLIVER)]
            open_ = [x for x in above if x not in settled]
            if not open_:
                break
            limit = max(open_, key=self._gap)
            settled.add(limit)
            if self._gap(limit) > self.effort.gap:
                self._exactly(limit)

    def _any(self) -> Candidate:
        """Some legal labelling, where message passing met none.

        Raises ExtractError when there is none, or none is found.
        """
        if self.small:
            self._exactly(np.inf)
        if not self.archive.candidates:
            raise ExtractError(
                "no legal combination of strategies was found",
                hint="Layouts that one operation gives cannot be changed to what others need; "
                "was a rule removed?",
            )
        return self.archive.candidates[0]

    def _exactly(self, limit: float) -> None:
        """Settle one memory limit by mixed-integer programming."""
        left = self.deadline - time.perf_counter()
        found = exact.solve(self.problem, limit, min(left, 10.0))
        if found.rows is not None:
            self.consider(found.rows)
        best = self.archive.best(limit)
        # A solver that overlooks a plan that is known has lost its way in its tolerances.
        known = best.seconds if best else np.inf
        if np.isfinite(found.bound) and found.bound <= known * (1 + 1e-6):
            self.archive.cuts.append(Cut(found.bound, 0.0, 0.0, limit))

    def _over(self) -> bool:
        return time.perf_counter() > self.deadline

    def _gap(self, peak: float) -> float:
        """How far the best plan known within a memory limit may be from the best there is."""
        best, bound = self.archive.best(peak), self.archive.bound(peak, np.inf)
        if best is not None and best.seconds <= bound:
            return 0.0
        return best.seconds / bound - 1.0 if best and bound > 0 else np.inf

    def consider(self, rows: Ints) -> Candidate:
        """Evaluate a labelling and offer it to the archive."""
        seconds, joules, profile = self.problem.evaluate(rows)
        candidate = Candidate(rows, seconds, float(profile.max(initial=0.0)), joules)
        if self.archive.add(candidate) and self.report is not None:
            self.report(self.archive, max(0.0, self.deadline - time.perf_counter()))
        return candidate

    def _settle(self, prices: Prices, sweeps: int, start: Ints | None = None) -> Candidate:
        """Bound and solve the problem at fixed prices; the best labelling found for them."""
        self.dual.price(prices)
        last = -np.inf
        for _ in range(sweeps):
            cut = self.dual.sweep()
            risen = cut.value - last
            last = cut.value
            if risen <= self.effort.gap * 0.05 * abs(last):
                break
        self.archive.cuts.append(cut)
        starts = [self.dual.polish(self.dual.decode(), 2)]
        if start is not None:
            starts.append(start)
        rows = min(starts, key=self._priced)
        best, stale = self._priced(rows), 0
        for _ in range(self.effort.moves):
            if best <= cut.value * (1 + 0.2 * self.effort.gap) or stale >= 6:
                break
            rows = self.dual.forest(rows, self.rng)
            now = self._priced(rows)
            stale = 0 if now < best * (1 - 1e-6) else stale + 1
            best = now
            self.consider(rows)
        return self.consider(rows)

    def _priced(self, rows: Ints) -> float:
        """Cost of a labelling at the current prices."""
        seconds, joules, profile = self.problem.evaluate(rows)
        prices = self.dual.prices
        return seconds + prices.joule * joules + float(prices.bytes @ profile)

    def _smallest(self, fastest: Candidate) -> Candidate:
        """A plan of very small peak: bytes priced far above time, where they are most."""
        if not fastest.peak:
            return fastest
        rate = 30.0 * fastest.seconds / max(fastest.peak, 1.0)
        *_, profile = self.problem.evaluate(fastest.rows)
        weight = np.zeros_like(profile)
        best = found = fastest
        for k in range(6):
            peaks = profile >= profile.max() * (1 - 1e-9)
            weight = weight * (k / (k + 1.0)) + peaks / peaks.sum() / (k + 1.0)
            found = self._settle(Prices(0.0, rate * weight), 5, found.rows)
            *_, profile = self.problem.evaluate(found.rows)
            if found.peak < best.peak:
                best = found
        improved = self.consider(self.moves.descend(best.rows, best.peak, peak_first=True))
        return min(best, improved, key=lambda c: c.peak)

    def approach(self, limit: float, steps: int) -> None:
        """Adjust the prices for one memory limit, from those of the nearest limit visited."""
        if self.visited:
            near = min(self.visited, key=lambda x: abs(np.log(max(x, 1.0) / max(limit, 1.0))))
            lam = self.visited[near].copy()
        else:
            lam = np.zeros(self.problem.times)
        scale = 1.0
        best_bound, best_lam = -np.inf, lam
        warm = min(self.archive.candidates, key=lambda c: abs(c.peak - limit)).rows
        for _ in range(steps):
            found = self._settle(Prices(0.0, lam), 8, warm)
            warm = found.rows
            bound = self.archive.cuts[-1].at(limit, np.inf)
            *_, profile = self.problem.evaluate(found.rows)
            self._into(found.rows, limit)
            if bound > best_bound:
                best_bound, best_lam = bound, lam
            else:
                scale *= 0.6
            if self._gap(limit) <= self.effort.gap or self._over():
                break
            fitting = self.archive.best(limit)
            upper = fitting.seconds if fitting else self._upper()
            over = profile - limit
            active = (over > -0.02 * limit) | (lam > 0)
            direction = np.where(active, over, 0.0)
            norm = float(direction @ direction)
            if norm == 0.0:
                break
            step = scale * max(upper - bound, 1e-3 * upper) / norm
            lam = np.maximum(0.0, lam + step * direction)
        self.visited[limit] = best_lam

    def _into(self, rows: Ints, limit: float) -> None:
        """Offer what single moves make of a labelling within the limit."""
        self.consider(self.moves.descend(rows, limit))

    def _upper(self) -> float:
        """A ceiling for seconds when no plan within the limit is known yet."""
        return 1.5 * max(c.seconds for c in self.archive.candidates)

    def _frugal(self, fastest: Candidate) -> None:
        """Plans of few joules, at no memory price."""
        for factor in (0.5, 4.0):
            price = factor * fastest.seconds / max(fastest.joules, 1e-12)
            self._settle(Prices(price, np.zeros(self.problem.times)), 4)

    def _refine(self) -> None:
        """Descend from every candidate on its true costs, within its own peak."""
        for candidate in sorted(self.archive.candidates, key=lambda c: -c.peak):
            if self._over():
                break
            self.consider(self.moves.descend(candidate.rows, candidate.peak))


class _Moves:
    """Single-variable moves judged by true seconds and true peak."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        free = replace(problem)
        self.dual = Dual(free)
        self.pairs: list[list[tuple[int, bool]]] = [[] for _ in problem.variables]
        for k, p in enumerate(problem.pairs):
            self.pairs[p.a].append((k, True))
            self.pairs[p.b].append((k, False))

    def descend(
        self, rows: Ints, limit: float, *, peak_first: bool = False, sweeps: int = 2
    ) -> Ints:
        """Improve seconds while the peak stays within the limit; above it, lower the peak."""
        rows = rows.copy()
        *_, profile = self.problem.evaluate(rows)
        for _ in range(sweeps):
            changed = False
            for i in range(len(rows)):
                if len(self.problem.variables[i]) == 1:
                    continue
                cost = self.dual.conditional(i, rows)
                peak = float(profile.max())
                tight = peak_first or peak > limit
                if not tight and cost[rows[i]] <= cost.min() * (1 + 1e-12):
                    continue
                promising = np.flatnonzero(cost < self.dual.forbidden / 2)
                if not tight:
                    promising = promising[cost[promising] < cost[rows[i]] - 1e-15]
                if not promising.size:
                    continue
                if promising.size > _OPTIONS:
                    order = np.argpartition(cost[promising], _OPTIONS)
                    promising = promising[order[:_OPTIONS]]
                changes = self._profiles(i, rows, promising)
                peaks = (profile[None, :] + changes).max(axis=1)
                if tight:
                    order = np.lexsort((cost[promising], np.round(peaks / max(peak, 1e-300), 9)))
                    take = order[0]
                    better = peaks[take] < peak * (1 - 1e-9) or (
                        peaks[take] <= peak * (1 + 1e-9)
                        and cost[promising[take]] < cost[rows[i]] - 1e-15
                    )
                else:
                    fits = np.flatnonzero(peaks <= limit * (1 + 1e-12))
                    if not fits.size:
                        continue
                    take = fits[cost[promising[fits]].argmin()]
                    better = True
                if better and promising[take] != rows[i]:
                    profile = profile + changes[take]
                    rows[i] = promising[take]
                    changed = True
            if not changed:
                break
        return rows

    def _profiles(self, i: int, rows: Ints, options: Ints) -> Floats:
        """Change of the memory profile for each option of variable i: [options, times]."""
        steps = np.zeros((len(options), self.problem.times + 1))
        now = rows[i]
        for use in self.problem.variables[i].uses:
            delta = use.amount[options] - use.amount[now]
            steps[:, use.start] += delta
            steps[:, use.end] -= delta
        for k, is_a in self.pairs[i]:
            p = self.problem.pairs[k]
            for use in p.uses:
                if is_a:
                    other = p.label_b[rows[p.b]]
                    delta = use.amount[p.label_a[options], other]
                    delta = delta - use.amount[p.label_a[now], other]
                else:
                    other = p.label_a[rows[p.a]]
                    delta = use.amount[other, p.label_b[options]]
                    delta = delta - use.amount[other, p.label_b[now]]
                steps[:, use.start] += delta
                steps[:, use.end] -= delta
        return np.cumsum(steps, axis=1)[:, :-1]
