"""Fronts of choice problems: their points, what may be missing, and where to search next.

A sweep solves one limit on memory after another. A bound that was proven within a limit holds
within all smaller ones. Every point is recomputed by the checker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.parallel.deadline import TimeUp, ends_at, held
from tapestry_egg.parallel.executors import INTERRUPTED

from .check import evaluate
from .choices import Choice, ChoiceProblem, Number

# What may be missing counts less by a factor for every try in vain, and this much at most.
_VAIN, _MOST = 0.5, 10.0

# Relative error of a bound, and of costs that are the same.
_ROUNDING, _SAME = 1e-12, 1e-9

# The stretch between two points is searched for its widest gap in so many parts.
_PARTS = 24


@dataclass(frozen=True)
class Point:
    """One answer of a front. No answer within its other values has a first one below `bound`."""

    values: tuple[Number, ...]
    answer: Any  # a `Choice`, or one row per variable
    bound: Number

    @property
    def gap(self) -> float:
        """(first value - bound) / |bound|: 0 when the point is known to be on the front."""
        return pareto.excess(self.values[0], self.bound)


@dataclass(frozen=True)
class Front:
    """Answers of which none dominates another, by rising first objective.

    `epsilon`: every answer is dominated by one here when its values may grow by that share; 0 for
    the exact front.
    """

    name: str
    objectives: tuple[str, ...]
    points: tuple[Point, ...]
    epsilon: float
    method: str
    seconds: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[Point]:
        return iter(self.points)

    @property
    def exact(self) -> bool:
        """Whether every non-dominated value is here."""
        return self.epsilon == 0.0

    def knee(self) -> Point:
        """The point nearest to having the least of each objective. Raises ExtractError if empty."""
        if not self.points:
            raise ExtractError(self.reason or "no answer", where=f"front of {self.name}")
        return self.points[pareto.knee([p.values for p in self.points])]

    def hypervolume(self, reference: tuple[float, ...] | None = None) -> float:
        """What the points dominate, below a reference (1.1 times the greatest value by default)."""
        values = [tuple(map(float, p.values)) for p in self.points]
        if not values:
            return 0.0
        if reference is None:
            most = [max(column) for column in zip(*values, strict=True)]
            reference = tuple(v + 0.1 * abs(v) for v in most)
        return pareto.hypervolume(values, reference)

    def document(self, chosen: Callable[[Any], dict[str, Any]]) -> dict[str, Any]:
        """The front as JSON data: values, bounds and what is `chosen` of every answer."""
        return {
            "name": self.name,
            "objectives": list(self.objectives),
            "epsilon": plain(self.epsilon),
            "exact": self.exact,
            "method": self.method,
            "seconds": round(self.seconds, 3),
            "points": [
                {"values": list(map(plain, p.values)), "bound": plain(p.bound), **chosen(p.answer)}
                for p in self.points
            ],
        }


def plain(value: Number) -> int | float | None:
    """A value for JSON: integers whole, fractions as the nearest float, infinities as null."""
    if isinstance(value, int) or not math.isfinite(value):
        return value if isinstance(value, int) else None
    return int(value) if isinstance(value, Fraction) and value.denominator == 1 else float(value)


@dataclass(frozen=True)
class Gap:
    """A stretch of peaks, from the point `low` on and below the point `high`, in which an answer
    may be missing: by what share, and the limit to search within."""

    epsilon: float
    limit: int
    low: tuple[int, Number]
    high: tuple[int, Number]


@dataclass
class Sweep:
    """The work on one front of cost and peak memory, and what has come of it.

    No answer has a peak above `top`. `told` hears how it stands after every search.
    """

    problem: ChoiceProblem
    top: int
    deadline: float
    told: Callable[[str], None] | None = None
    found: dict[tuple[int, Number], Choice] = field(default_factory=dict)  # by peak and cost
    cuts: list[tuple[float, float]] = field(default_factory=list)  # least cost, up to which peak
    tries: dict[int, int] = field(default_factory=dict)
    reason: str = "no answer was found in time"
    begun: float = field(default_factory=time.perf_counter)

    def front(self, run: Callable[[], None]) -> Front:
        """What `run` finds until the deadline or an interruption (Ctrl-C), and what may be missing.

        Raises ExtractError for an answer that is none.
        """
        notes: tuple[str, ...] = ()
        try:
            with ends_at(self.deadline):
                run()
        except TimeUp:
            pass
        except KeyboardInterrupt:
            notes = (INTERRUPTED,)
        with held():
            kept = self.points()
            points = [Point((v, k), self.found[k, v], self._bound(k, v)) for k, v in kept]
            gaps = self.gaps()
        return Front(
            self.problem.name,
            ("cost", "peak"),
            tuple(sorted(points, key=lambda p: p.values)),
            gaps[0].epsilon if gaps else 0.0 if points else math.inf,
            "network",
            time.perf_counter() - self.begun,
            "" if points else self.reason,
            notes,
        )

    def until(self, share: float) -> float:
        """When a share of all time will be over, from now on."""
        now = time.perf_counter()
        return min(self.deadline, now + share * (self.deadline - self.begun))

    def keep(self, choice: Choice) -> tuple[int, Number]:
        """Note an answer; returns its peak and its cost."""
        found = evaluate(self.problem, choice, limited=False)
        if not found.feasible:
            raise ExtractError(
                f"an answer of the front is none: {found.violations[0]}",
                where=f"front of {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        values = found.peak, found.cost
        self.found.setdefault(values, choice)
        return values

    def close(self, visit: Callable[[Gap, float], None], share: float) -> None:
        """Search where most may be missing, until nothing is or time is over: `visit` takes the gap
        and a share of the time, a first `share` or more of it where tries were in vain."""
        while time.perf_counter() < self.deadline and (gaps := self.gaps()):
            tries = self.tries
            gap = max(gaps, key=lambda g: min(g.epsilon, _MOST) * _VAIN ** tries.get(g.limit, 0))
            visit(gap, share * (1 + tries.get(gap.limit, 0)))

    def prove(self, least: float, most: float) -> None:
        """Note that every answer with a peak of `most` or less costs `least` or more; an infinite
        cost says that there is none."""
        self.cuts.append((least, most))

    def tell(self, what: str = "") -> None:
        """Say how it stands."""
        points = self.points() if self.told is not None else []
        if self.told is None or not points:
            return
        gaps = self.gaps()
        self.told(
            f"front {len(points)}, best {float(points[-1][1]):.10g}, "
            f"bound {float(self._bound(*points[-1])):.10g}, "
            f"gap {gaps[0].epsilon if gaps else 0.0:.2%}{what}"
        )

    def points(self) -> list[tuple[int, Number]]:
        """(peak, cost) of what no other dominates, by rising peak."""
        found = list(self.found)
        return [found[i] for i in pareto.non_dominated(found)]

    def gaps(self) -> list[Gap]:
        """Where what is missing may be nearer to the origin, the widest first.

        An answer whose peak is at least one point's and below the next one's is dominated by one of
        them once its values grow by the share that is told.
        """
        found = []
        ends: Sequence[tuple[int, Number]] = [
            (0, math.inf),
            *self.points(),
            (self.top + 1, math.inf),
        ]
        for low, high in pairwise(ends):
            cuts = np.unique(np.linspace(low[0], high[0], _PARTS + 1).astype(np.int64)).tolist()
            widest = Gap(0.0, 0, low, high)
            for begin, end in pairwise(cuts):
                bound = self._bound(end - 1, low[1])
                if bound == low[1] < math.inf or bound == math.inf:
                    continue
                share, later = _above(low[1], bound), _above(high[1], bound)
                if begin > 0:
                    share = min(share, max(later, high[0] / begin - 1.0))
                if share >= widest.epsilon:
                    widest = replace(widest, epsilon=share, limit=end - 1)
            if widest.epsilon > 0.0:
                # What is proven at the end of the stretch holds for all of it; where something is
                # found there, two shorter ones are left.
                last = high[0] - 1
                found.append(widest if last in self.tries else replace(widest, limit=last))
        return sorted(found, key=lambda g: -g.epsilon)

    def _bound(self, peak: int, value: Number) -> Number:
        """What every answer of such a peak at most costs at least; `value` where that may not
        differ from it."""
        bound = max((least for least, most in self.cuts if peak <= most), default=-math.inf)
        if math.isfinite(bound):
            bound -= _ROUNDING * abs(bound)
        step = 1.0 if self.problem.integral else 0.0
        if math.inf > value and bound > value - max(step, _SAME * abs(float(value))):
            return value
        return self.problem.least(bound)


def _above(value: Number, bound: Number) -> float:
    """By what share a value is above a bound; infinite for what growth does not make positive."""
    return math.inf if bound <= 0 < value else pareto.excess(value, bound)
