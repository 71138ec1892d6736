"""Cost against memory: the front of a network's answers, by sweeping the limit.

Limits go from the least that is reachable to where memory is no matter. The problem is reduced once
for all of them; then `sweep.py` searches. Every point is recomputed by the checker.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.cfn.network import program
from tapestry_egg.extract.gym.cfn.network.known import Known
from tapestry_egg.extract.gym.cfn.network.network import WIDE, Ints, Network
from tapestry_egg.extract.gym.cfn.network.reach import reach
from tapestry_egg.extract.gym.cfn.network.reductions import Begun, Reduced, begin
from tapestry_egg.extract.gym.choices.check import evaluate
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Number
from tapestry_egg.extract.gym.choices.front import ChoiceFront, ChoicePoint
from tapestry_egg.parallel.deadline import TimeUp, ends_at, held
from tapestry_egg.parallel.executors import INTERRUPTED

from .aside import WORTH, Aside
from .opening import opening, plain_bound
from .solver import difference, whole
from .sweep import SweepSearch, within

#: The objective that is added: the most memory in use at any time.
PEAK = "peak"

# The share of the time that goes at most into the least limit that is reachable, in so many rounds,
# and into reducing.
_REACHING, _ROUNDS, _REDUCING = 0.05, 20, 0.2

# The share of the time that goes into an answer at the given limit before reducing.
_OPENING = 0.01

# The share of the time that is kept for the checks of points; their number fits into it, but for a
# few.
_CHECKING, _FEWEST, _MOST = 0.06, 8, 64


def memory_front(
    problem: ChoiceProblem,
    seconds: float,
    seed: int = 0,
    processes: int | None = None,
    told: Callable[[str], None] | None = None,
) -> ChoiceFront:
    """The front of cost and peak memory, exact or with a bound on what may be missing.

    The problem's own limit is searched at first; the front goes below and beyond it. An
    interruption (Ctrl-C) keeps the points so far. Raises ExtractError for a problem without one
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
    work = _Front(problem, seconds, seed, processes or os.cpu_count() or 1, told)
    notes: tuple[str, ...] = ()
    try:
        with ends_at(begun + (1.0 - _CHECKING) * seconds):
            work.run()
    except TimeUp:
        pass
    except KeyboardInterrupt:
        notes = (INTERRUPTED,)
    with held():
        front = work.front()
    return replace(front, seconds=time.perf_counter() - begun, notes=notes)


class _Front:
    """The work on one front, and what has come of it."""

    def __init__(
        self,
        problem: ChoiceProblem,
        seconds: float,
        seed: int,
        processes: int,
        told: Callable[[str], None] | None,
    ) -> None:
        self.problem, self.seconds, self.seed = problem, seconds, seed
        self.processes, self.told = processes, told
        self.begun = time.perf_counter()
        self.choices: list[Choice] = []  # that are no rows of the network that is searched
        self.known: Known | None = None
        self.reduced: Reduced | None = None
        self.reason = "no answer was found in time"
        self.step = difference(problem)

    def left(self) -> float:
        return (1.0 - _CHECKING) * self.seconds - (time.perf_counter() - self.begun)

    def run(self) -> None:
        """Search; the choices and `known` hold what was found until then."""
        problem = self.problem
        top = peak(problem, None)
        with held():  # whatever the time, there is a point
            found = self._lightest()
            if found is None:
                return
            least, low = found
            self.choices.append(least)
            self.known = Known(low, top)
            start = begin(problem, limits=_limits(top), spread=top - low)
            assert isinstance(start, Begun)
            self.known.step(top, plain_bound(start.network))
        given = min(max(int(problem.usage.limits[0]), low), top)
        for x, _ in opening(within(start.network, top - given), _OPENING * self.seconds, self.seed):
            self.choices[1:] = [Choice(problem.node_start[:-1] + start.lift(x))]
        since = time.perf_counter()
        over = since + _REDUCING * self.seconds
        self.reduced = start.reduced(lambda: time.perf_counter() > over)
        net = self.reduced.network
        low = self.known.low = max(low, self.reduced.taken)
        if self.reduced.infeasible is None and not len(net):
            self.known.add(low, net.constant, np.zeros(0, dtype=np.int64))
            self.known.step(top, net.constant)
        elif self.reduced.infeasible is None:
            took = time.perf_counter() - since
            self._sweep(net, self.known, given, took)

    def _sweep(self, net: Network, known: Known, given: int, narrowing: float) -> None:
        """Search at all limits; what is small has a second process at each, what is large one for
        all of them."""
        left = self.left()
        search = SweepSearch(net, known, left, self.seed, self.step, narrowing)
        if self.told is not None:
            search.visited = self._tell
        if self.processes == 1 or program.fits(net) or left < WORTH:
            search.processes = self.processes
            search.sweep(given)
            return
        beside: Aside | None = None
        try:
            with held():
                span = known.low, known.top, given
                beside = other = Aside(net, left, self.seed + 1, self.step, span)
            search.news = lambda search: other.learn(known)
            search.sweep(given)
        finally:
            if beside is not None:
                with held():
                    beside.end()

    def _tell(self, limit: int, known: Known) -> None:
        found = known.opens(self.step)
        best = known.best(limit)
        assert self.told is not None
        self.told(
            f"front {len(known.answers)}, at {limit}: best {best.value if best else 0:.10g}, "
            f"bound {known.bound(limit):.10g}; epsilon {found[0].epsilon if found else 0.0:.2%}"
        )

    def _lightest(self) -> tuple[Choice, int] | None:
        """A choice of little memory, and what all need at least; the same if that is soon seen."""
        start = begin(self.problem, ("consistency", "merge", "fixed"), limits=_limits(0))
        if isinstance(start, Reduced):
            assert start.infeasible is not None
            self.reason = start.infeasible.reason
            return None
        rng = np.random.default_rng(self.seed)
        found = reach(start.network, _REACHING * self.seconds, rng, rounds=_ROUNDS, least=True)
        if not math.isfinite(found.over):
            return None
        low = max(math.ceil(found.bound), 0) if math.isfinite(found.bound) else 0
        return Choice(self.problem.node_start[:-1] + start.lift(found.x)), low

    def front(self) -> ChoiceFront:
        """What was found, every point checked, and what may be missing."""
        begun = time.perf_counter()
        points: list[ChoicePoint] = []
        checked = [self._checked(choice) for choice in self.choices]
        most = _MOST
        if checked:
            each = (time.perf_counter() - begun) / len(checked)
            most = int(min(max(_CHECKING * self.seconds / max(each, 1e-9), _FEWEST), _MOST))
        if self.known is not None and self.reduced is not None:
            for answer in self.known.thinned(most):
                rows = self.reduced.lift(answer.rows.astype(np.int64))
                checked.append(self._checked(Choice(self.problem.node_start[:-1] + rows)))
        kept = pareto.non_dominated([values for values, _ in checked])  # type: ignore[misc]
        points = [self._point(*checked[i]) for i in kept]
        return ChoiceFront(
            self.problem,
            (self.problem.objectives[0], PEAK),
            tuple(sorted(points, key=lambda p: p.values)),
            self._epsilon(points),
            "network",
            reason="" if points else self.reason,
        )

    def _checked(self, choice: Choice) -> tuple[tuple[Number, int], Choice]:
        most = peak(self.problem, choice)
        found = evaluate(replace_limit(self.problem, most), choice)
        if not found.feasible:
            raise ExtractError(
                f"an answer that is none: {found.violations[0]}",
                where=f"front of {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        return (found.values[0], most), choice

    def _point(self, values: tuple[Number, int], choice: Choice) -> ChoicePoint:
        assert self.known is not None
        bound = self.known.bound(values[1])
        if bound > values[0] - max(self.step, 1e-12):
            return ChoicePoint(values, choice, values[0])
        return ChoicePoint(values, choice, whole(self.problem, bound))

    def _epsilon(self, points: Sequence[ChoicePoint]) -> float:
        """By what share an answer may be better than all points, in cost or in memory."""
        if self.known is None or not points:
            return math.inf if not points else 0.0
        shown = Known(self.known.low, self.known.top)
        shown.lines, shown.steps = self.known.lines, self.known.steps
        for p in points:
            shown.add(int(p.values[1]), float(p.values[0]), np.zeros(0, dtype=np.int64))
        found = shown.opens(self.step)
        return found[0].epsilon if found else 0.0


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
    if sum(amount.tolist()) > WIDE:
        amount = amount.astype(object)
    steps = np.zeros(problem.times() + 1, dtype=amount.dtype)
    np.add.at(steps, lower, amount)
    np.subtract.at(steps, upper, amount)
    return int(np.cumsum(steps).max(initial=0))


def replace_limit(problem: ChoiceProblem, limit: int) -> ChoiceProblem:
    """The same problem with another limit for all times."""
    return replace(problem, usage=replace(problem.usage, limits=_limits(limit)))


def _limits(limit: int) -> Ints:
    return np.array([limit], dtype=np.int64)
