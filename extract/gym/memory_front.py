"""Fronts of cost against peak memory: one limit after another, where most may be missing.

A bound that was proven within a limit holds within all smaller ones, and at prices of memory it
rises from there as the limit falls (`extract/engine/archive.py`). Every point is recomputed by
the checker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Archive, Cut
from tapestry_egg.extract.gym.choices.check import evaluate
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Number
from tapestry_egg.extract.gym.choices.front import ChoiceFront, ChoicePoint
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.parallel.deadline import TimeUp, ends_at, held
from tapestry_egg.parallel.executors import INTERRUPTED

from .network import Unanswerable
from .solver import Solving, difference, whole

#: The objective that is added: the most memory in use at any time.
PEAK = "peak"

# The share of the time that is kept for the checks of points, and how many there are at most.
_CHECKING, _MOST = 0.06, 64

# Limits that are tried first, after the given one: powers of the way from the least peak to the
# peak of the least cost. The share of the time for each, and for each later one.
_WAY = (0.5, 0.25, 0.75, 0.12)
_FIRST, _LATER = 0.08, 0.04

# What may be missing counts less by a factor for every try in vain.
_VAIN = 0.5

# What is between two points is looked at in so many parts.
_PARTS = 24


def memory_front(
    problem: ChoiceProblem,
    seconds: float,
    seed: int = 0,
    told: Callable[[str], None] | None = None,
) -> ChoiceFront:
    """The front of cost and peak memory, exact or with a bound on what may be missing.

    An interruption (Ctrl-C) keeps the points so far. Raises ExtractError for a problem without one
    limit for all times, or whose choices need others. `told` hears how it stands, in words, after
    the search at each limit.
    """
    if not problem.usage or len(problem.usage.limits) != 1:
        raise ExtractError(
            "a front of cost against memory needs one limit",
            where=f"choice problem {problem.name}",
            hint="Give the limit of which shares are to be tried.",
        )
    begun = time.perf_counter()
    work = _Front(problem, begun + (1.0 - _CHECKING) * seconds, seed, told)
    notes: tuple[str, ...] = ()
    try:
        with ends_at(work.deadline):
            work.run()
    except TimeUp:
        pass
    except Unanswerable as e:
        work.reason = str(e)
    except KeyboardInterrupt:
        notes = (INTERRUPTED,)
    with held():
        front = work.front()
    return replace(front, seconds=time.perf_counter() - begun, notes=notes)


@dataclass(frozen=True)
class _Open:
    """A limit within which the front may be nearer to the origin than the points, by a share."""

    limit: int
    epsilon: float


@dataclass
class _Front:
    """The work on one front, and what has come of it."""

    problem: ChoiceProblem
    deadline: float
    seed: int
    told: Callable[[str], None] | None
    found: dict[tuple[int, float], Ints] = field(default_factory=dict)  # nodes by peak and cost
    bounds: Archive = field(default_factory=Archive)
    tries: dict[int, int] = field(default_factory=dict)
    reason: str = "no answer was found in time"

    def __post_init__(self) -> None:
        self.begun = time.perf_counter()
        self.top = peak(self.problem, None)

    def run(self) -> None:
        """Search at the given limit, at both ends, between them, and where most may be missing."""
        given = min(int(self.problem.usage.limits[0]), self.top)
        with held():  # whatever the time, there is a point
            solving = Solving(self.problem, self.top, self._share(_FIRST), self.seed)
            solving.search.open()
            self._take(solving)
        if not self.found:
            return
        self.visit(self.top, _FIRST)
        self._leanest()
        self.visit(given, 2.0 * _FIRST)
        low, high = (min(self.found)[0], max(self.found)[0])
        for way in _WAY:
            self.visit(int(max(low, 1) * (high / max(low, 1)) ** way), _FIRST)
        while time.perf_counter() < self.deadline:
            opens = self.opens(self.points())
            if not opens:
                return
            tried = {o: o.epsilon * _VAIN ** self.tries.get(o.limit, 0) for o in opens}
            widest = max(opens, key=lambda o: tried[o])
            tries = self.tries.get(widest.limit, 0)
            self.visit(widest.limit, _LATER * (1 + tries))

    def _share(self, share: float) -> float:
        """When a share of all time will be over, from now on."""
        now = time.perf_counter()
        return min(self.deadline, now + share * (self.deadline - self.begun))

    def visit(self, limit: int, share: float) -> None:
        """Search within a limit for a share of the time."""
        if limit < 0 or time.perf_counter() >= self.deadline:
            return
        self.tries[limit] = self.tries.get(limit, 0) + 1
        try:
            solving = Solving(self.problem, limit, self._share(share), self.seed)
        except Unanswerable as e:
            self.reason = str(e)
            self.bounds.cuts.append(Cut(math.inf, 0.0, 0.0, limit))
            return
        try:
            solving.run()
        finally:
            with held():
                self._take(solving)
        if self.told is not None:
            opens = self.opens(self.points())
            self.told(
                f"front {len(self.found)}, at {limit}: best {solving.value:.10g}, "
                f"bound {solving.bound:.10g}; epsilon {opens[0].epsilon if opens else 0.0:.2%}"
            )

    def _leanest(self) -> None:
        """A choice of little memory, and what all need at least."""
        with held():
            solving = Solving(self.problem, self.top, self._share(_FIRST), self.seed, least=0)
            solving.search.lean(1.0)
            if solving.search.nearest is not None:
                self._keep(solving.form.nodes(solving.search.nearest))
            least = math.ceil(solving.search.least_peak)
            if solving.form.exact and least > 0:
                self.bounds.cuts.append(Cut(math.inf, 0.0, 0.0, least - 1))

    def _take(self, solving: Solving) -> None:
        """What a search within one limit has found and proven."""
        if solving.search.rows is not None:
            self._keep(solving.form.nodes(solving.search.rows))
        if not solving.form.exact:
            return
        limit = solving.limit
        bound = math.inf if solving.infeasible else solving.bound
        if bound > -math.inf:
            self.bounds.cuts.append(Cut(bound, 0.0, 0.0, limit))

    def _keep(self, nodes: Ints) -> None:
        choice = Choice(nodes)
        most = peak(self.problem, choice)
        value = evaluate(replace_limit(self.problem, most), choice).values[0]
        self.found[most, float(value)] = nodes

    def points(self) -> list[tuple[int, float]]:
        """(peak, cost) of what no other dominates, by rising peak."""
        found = list(self.found)
        return sorted(found[i] for i in pareto.non_dominated(found))

    def opens(self, points: Sequence[tuple[int, float]]) -> list[_Open]:
        """Where what is missing may be nearer to the origin, the widest first.

        An answer whose peak is at least one point's and below the next one's is dominated by one of
        them once its cost, and its peak, grow by the share that is told.
        """
        step, found = difference(self.problem), []
        nearby = [(0, math.inf), *points]
        for k, (low, value) in enumerate(nearby):
            high = nearby[k + 1][0] if k + 1 < len(nearby) else self.top + 1
            cost = nearby[k + 1][1] if k + 1 < len(nearby) else math.inf
            cuts = np.unique(np.linspace(low, high, _PARTS + 1).astype(np.int64)).tolist()
            widest = _Open(0, 0.0)
            for begin, end in pairwise(cuts):
                bound = self.bounds.bound(end - 1, np.inf) if self.bounds.cuts else -math.inf
                if bound == math.inf or bound > value - max(step, 1e-9 * abs(value)):
                    continue
                share, later = (_above(x, bound) for x in (value, cost))
                if begin > 0:
                    share = min(share, max(later, high / begin - 1.0))
                if share >= widest.epsilon:
                    widest = _Open(end - 1, share)
            if widest.epsilon > 0.0 and high - 1 not in self.tries:
                # What is proven there holds for all of the stretch; where something is found, two
                # shorter ones are left.
                widest = replace(widest, limit=high - 1)
            if widest.epsilon > 0.0:
                found.append(widest)
        return sorted(found, key=lambda o: -o.epsilon)

    def front(self) -> ChoiceFront:
        """What was found, every point checked, and what may be missing."""
        kept = self.points()
        points = [self._point(*p) for p in kept[:: -(-len(kept) // _MOST) or 1]]
        opens = self.opens([(int(p.values[1]), float(p.values[0])) for p in points])
        epsilon = math.inf if not points else opens[0].epsilon if opens else 0.0
        return ChoiceFront(
            self.problem,
            (self.problem.objectives[0], PEAK),
            tuple(sorted(points, key=lambda p: p.values)),
            epsilon,
            "network",
            reason="" if points else self.reason,
        )

    def _point(self, most: int, value: float) -> ChoicePoint:
        choice = Choice(self.found[most, value])
        found = evaluate(replace_limit(self.problem, most), choice)
        if not found.feasible:
            raise ExtractError(
                f"an answer that is none: {found.violations[0]}",
                where=f"front of {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        exact: Number = found.values[0]
        bound: Number = -math.inf
        if self.bounds.cuts:
            bound = whole(self.problem, self.bounds.bound(most, np.inf))
        if bound > exact - max(difference(self.problem), 1e-12):
            bound = exact
        return ChoicePoint((exact, most), choice, bound)


def _above(value: float, bound: float) -> float:
    """By what share a value is above a bound; infinite where the bound is not above zero."""
    return value / bound - 1.0 if bound > 0.0 else math.inf


def peak(problem: ChoiceProblem, choice: Choice | None) -> int:
    """The most that a choice uses at any time; without one, the most that any choice can."""
    usage = problem.usage
    amount = np.where(usage.upper > usage.lower, usage.amount, 0)
    if choice is not None:
        at = choice.node
        lower, upper, amount = usage.lower[at], usage.upper[at], amount[at]
    else:
        start = problem.node_start[:-1]
        if not len(start):
            return 0
        amount = np.maximum.reduceat(amount, start)
        lower = np.minimum.reduceat(usage.lower, start)
        upper = np.maximum.reduceat(usage.upper, start)
    if sum(amount.tolist()) >= 1 << 62:
        amount = amount.astype(object)
    steps = np.zeros(problem.times() + 1, dtype=amount.dtype)
    np.add.at(steps, lower, amount)
    np.subtract.at(steps, upper, amount)
    return int(np.cumsum(steps).max(initial=0))


def replace_limit(problem: ChoiceProblem, limit: int) -> ChoiceProblem:
    """The same problem with another limit for all times."""
    limits = np.array([limit], dtype=np.int64)
    return replace(problem, usage=replace(problem.usage, limits=limits))
