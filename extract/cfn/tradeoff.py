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
from .solver import solve

#: Shares of the problem's limit that are tried.
SHARES = (0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5)


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
    """One point per limit (by default shares of the problem's, and none), largest limit first.

    The time is divided evenly. Raises ExtractError for a problem without one limit for all times,
    or whose choices need others.
    """
    if not problem.usage or len(problem.usage.limits) != 1:
        raise ExtractError(
            "a front of cost against memory needs one limit",
            where=f"choice problem {problem.name}",
            hint="Give the limit of which shares are to be tried.",
        )
    whole = int(problem.usage.limits[0])
    if limits is None:
        enough = peak(problem, None)
        limits = sorted({*(int(whole * s) for s in SHARES), enough} - {0})
        limits = [x for x in limits if x <= enough] or [enough]
    points: list[Point] = []
    begun = time.perf_counter()
    for k, limit in enumerate(sorted(set(limits), reverse=True)):
        spent = time.perf_counter() - begun
        share = max(seconds - spent, 0.0) / (len(set(limits)) - k)
        found = solve(
            problem, share, seed, limits=np.array([limit], dtype=np.int64), processes=processes
        )
        reason = ""
        if found.choice is None:
            reason = found.infeasible.reason if found.infeasible else "none was found in time"
        bound = max([found.bound, *(p.bound for p in points)])
        point = Point(
            limit,
            found.choice,
            found.value,
            0 if found.choice is None else peak(problem, found.choice),
            min(bound, found.value),
            found.proven or bound >= found.value,
            reason,
        )
        if told is not None:
            told(point)
        points.append(point)
    return _mended(points)


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
        points.append(ChoicePoint((found.values[0], p.peak), p.choice, p.bound))
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
