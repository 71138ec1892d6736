"""Cost against memory: the front of a network's answers, by sweeping the limit.

Every point is the best answer found within one limit, with a bound on all such. An answer within a
limit is one within every larger one, and a bound at a limit is one at every smaller one, so that
points help each other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from ...errors import ExtractError
from .. import pareto
from ..check_choices import evaluate
from ..choice_front import ChoiceFront, ChoicePoint
from ..choices import Choice, ChoiceProblem
from .reach import reach
from .reductions import reduce
from .solver import solve

#: Shares of the problem's limit that are tried.
SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)

# The share of the time that goes at most into the least limit that is reachable.
_REACHING = 0.05


@dataclass(frozen=True)
class Point:
    """The best answer found within a limit, what it uses at most, and a bound on the cost.

    Without a choice, `reason` says why none was found.
    """

    limit: int
    choice: Choice | None
    value: float
    peak: int
    bound: float
    proven: bool
    reason: str = ""

    @property
    def gap(self) -> float:
        """(value - bound) / |value|: 0 when proven, inf when nothing is known."""
        if self.proven or self.value <= self.bound:
            return 0.0
        if not (math.isfinite(self.value) and math.isfinite(self.bound)):
            return math.inf
        return (self.value - self.bound) / max(abs(self.value), 1e-300)


def sweep(
    problem: ChoiceProblem,
    seconds: float,
    seed: int = 0,
    limits: Sequence[int] | None = None,
    told: Callable[[Point], None] | None = None,
    processes: int | None = None,
) -> tuple[Point, ...]:
    """One point per limit, largest limit first.

    By default limits are shares of the problem's, what never binds, the least that is reachable,
    and, where that is proven to be so, just below. The time is divided evenly; an interruption
    (Ctrl-C) keeps the points so far. Raises ExtractError for a problem without one limit for all
    times, or whose choices need others.
    """
    if not problem.usage or len(problem.usage.limits) != 1:
        raise ExtractError(
            "a front of cost against memory needs one limit",
            where=f"choice problem {problem.name}",
            hint="Give the limit of which shares are to be tried.",
        )
    points: list[Point] = []
    begun = time.perf_counter()
    below: list[Point] = []
    if limits is None:
        limits, below = _default(problem, _REACHING * seconds, seed)
    for k, limit in enumerate(sorted(set(limits), reverse=True)):
        last = points[-1] if points else None
        if last is not None and last.proven and last.choice is not None and last.peak <= limit:
            point = replace(last, limit=limit)  # the best within more is within this
        elif last is not None and last.proven and last.choice is None:
            why = f"nothing fits within the larger limit of {last.limit}"
            point = replace(last, limit=limit, reason=why)
        else:
            spent = time.perf_counter() - begun
            share = max(seconds - spent, 0.0) / (len(set(limits)) - k)
            try:
                point = _solved(problem, limit, share, seed, points, processes)
            except KeyboardInterrupt:
                break
        if told is not None:
            told(point)
        points.append(point)
    return _mended([*points, *(p for p in below if points and p.limit < points[-1].limit)])


def _default(problem: ChoiceProblem, seconds: float, seed: int) -> tuple[list[int], list[Point]]:
    """Limits to try, and the point just below the least one where nothing fits."""
    whole, enough = int(problem.usage.limits[0]), peak(problem, None)
    limits = {x for x in (*(int(whole * s) for s in SHARES), enough) if 0 < x <= enough}
    none = np.zeros(1, dtype=np.int64)
    legal = reduce(problem, ("consistency", "fixed", "merge"), limits=none)
    if legal.infeasible is not None or not len(legal.network):
        return sorted(limits or {enough}), []
    found = reach(legal.network, seconds, np.random.default_rng(seed))
    if not math.isfinite(found.over):
        return sorted(limits or {enough}), []
    choice = Choice(problem.node_start[:-1] + legal.lift(found.x))
    least = peak(problem, choice)
    proven = max(math.ceil(found.bound), 0) if math.isfinite(found.bound) else 0
    below = []
    if proven > 0:
        reason = f"no choice uses less than {proven} at all times"
        below = [Point(proven - 1, None, math.inf, 0, math.inf, True, reason)]
    return sorted({least} | {x for x in limits if x > least}), below


def _solved(
    problem: ChoiceProblem,
    limit: int,
    seconds: float,
    seed: int,
    larger: Sequence[Point],
    processes: int | None,
) -> Point:
    """The best answer found within a limit."""
    limits = np.array([limit], dtype=np.int64)
    found = solve(problem, seconds, seed, limits=limits, processes=processes)
    reason = ""
    if found.choice is None:
        reason = found.infeasible.reason if found.infeasible else "none was found in time"
    bound = max([found.bound, *(p.bound for p in larger)])
    return Point(
        limit,
        found.choice,
        found.value,
        0 if found.choice is None else peak(problem, found.choice),
        min(bound, found.value),
        found.proven or bound >= found.value,
        reason,
    )


def _mended(points: list[Point]) -> tuple[Point, ...]:
    """Answers of smaller limits where they are better than those of larger ones."""
    out: list[Point] = []
    best: Point | None = None
    for p in reversed(points):
        if best is not None and best.value < p.value:
            bound = min(p.bound, best.value)
            p = replace(
                p,
                choice=best.choice,
                value=best.value,
                peak=best.peak,
                bound=bound,
                proven=bound >= best.value,
                reason="",
            )
        if p.choice is not None:
            best = p
        out.append(p)
    return tuple(reversed(out))


def peak(problem: ChoiceProblem, choice: Choice | None) -> int:
    """The most that a choice uses at any time; without one, the most that any choice can."""
    usage = problem.usage
    start = problem.node_start
    steps = [0] * (problem.times() + 1)
    if choice is not None:
        for n in choice.node.tolist():
            steps[usage.lower[n]] += int(usage.amount[n])
            steps[usage.upper[n]] -= int(usage.amount[n])
    else:
        there = np.where(usage.upper > usage.lower, usage.amount, 0)
        for a, b in zip(start[:-1].tolist(), start[1:].tolist(), strict=True):
            most = int(there[a:b].max(initial=0))
            steps[int(usage.lower[a:b].min())] += most
            steps[int(usage.upper[a:b].max())] -= most
    used = most_used = 0
    for change in steps:
        used += change
        most_used = max(most_used, used)
    return most_used


#: The objective that is added: the most memory in use at any time.
PEAK = "peak"


def memory_front(
    problem: ChoiceProblem, seconds: float, seed: int = 0, processes: int | None = None
) -> ChoiceFront:
    """The front of cost and peak memory over a sweep of limits; see `sweep`."""
    begun = time.perf_counter()
    swept = sweep(problem, seconds, seed, processes=processes)
    points = []
    for p in swept:
        if p.choice is None:
            continue
        found = evaluate(replace_limit(problem, p.limit), p.choice)
        if not found.feasible:
            raise ExtractError(
                f"an answer that is none: {found.violations[0]}",
                where=f"front of {problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        points.append(ChoicePoint((found.values[0], p.peak), p.choice, _bound_at(swept, p)))
    kept = pareto.non_dominated([p.values for p in points])  # type: ignore[misc]
    return ChoiceFront(
        problem,
        (problem.objectives[0], PEAK),
        tuple(sorted((points[i] for i in kept), key=lambda p: p.values)),
        _distance(swept),
        "network",
        time.perf_counter() - begun,
        "" if points else swept[0].reason,
    )


def _bound_at(points: Sequence[Point], p: Point) -> float:
    """The best bound on what answers cost that use no more than a point's does."""
    return min(p.value, max(q.bound for q in points if q.limit >= p.peak))


def replace_limit(problem: ChoiceProblem, limit: int) -> ChoiceProblem:
    """The same problem with another limit for all times."""
    usage = replace(problem.usage, limits=np.array([limit], dtype=np.int64))
    return replace(problem, usage=usage)


def _distance(points: Sequence[Point]) -> float:
    """By what share an answer may be better than all points in cost, or in memory.

    One that needs more than a limit, and no more than the next, costs at least the bound there:
    the best within the first limit costs at most so much more, or the best within the second needs
    at most so much more. Below the least limit nothing is known, unless nothing fits it.
    """
    rising = sorted(points, key=lambda p: p.limit)
    if rising[0].choice is not None or not rising[0].proven:
        return math.inf
    most = 0.0
    for below, p in pairwise(rising):
        if p.choice is None:
            continue
        more = math.inf
        if p.bound > 0:
            more = max(p.value / p.bound - 1.0, p.peak / (below.limit + 1) - 1.0, 0.0)
            more = min(more, max(below.value / p.bound - 1.0, 0.0))
        most = max(most, more)
    return most
