"""What is known of a front of two objectives: answers, and bounds on what was not found.

The first objective is a cost f(k), the least of all answers whose second objective, a count, is at
most k. Answers bound f from above, programs from below: a bound on a * cost + b * count of all
answers is a line below f, a bound on the cost under a limit holds for smaller limits too. Costs and
counts are scaled and hold the constant.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import itemgetter

from tapestry_egg.extract.gym.dag.egraph.cost_unit import Scaled, unit_of
from tapestry_egg.extract.gym.dag.egraph.form import AndOr
from tapestry_egg.pareto import excess

# Floats that differ by less than this share are the same: the tolerance of the programs solved.
_SAME = 1e-7

#: (cost, count) of an answer.
Point = tuple[int, int]

_count = itemgetter(1)


@dataclass(frozen=True)
class Region:
    """Limits `first` to `last` on the count under which a better answer may be.

    Every answer there costs less than `left`, the known answer of the fewest nodes that keeps to
    these limits, and has a smaller count than `right`, the next one; None where there is none.
    `epsilon` is the share by which the values of the known answers would have to grow to dominate
    all that may be there, `widest` the limit under which that is so.
    """

    epsilon: float
    widest: int
    first: int
    last: int
    left: Point | None
    right: Point | None

    @property
    def weights(self) -> tuple[int, int]:
        """(a, b) for which a * cost + b * count is the same at both ends; one objective alone
        where an end is missing."""
        if self.left is None:
            return 0, 1
        if self.right is None:
            return 1, 0
        a, b = self.right[1] - self.left[1], self.left[0] - self.right[0]
        common = math.gcd(a, b)
        return a // common, b // common


@dataclass
class FrontBounds:
    """Bounds for limits of 0 to `most` on the count. Costs are `offset` and multiples of `step`;
    `exact` where they are integers in the problem's unit, which are compared to the last digit."""

    most: int
    exact: bool = True
    step: int = 1
    offset: int = 0
    #: The answers of which none dominates another, by rising count and so by falling cost.
    points: list[Point] = field(default_factory=list)
    lower: list[Scaled] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lower = [-math.inf] * (self.most + 1)

    def measure(self, form: AndOr) -> None:
        """Take the unit of a form's costs."""
        unit = unit_of(form)
        self.exact, self.offset = form.scales[0] == 1, form.constant[0]
        self.step = unit.step if self.exact and isinstance(unit.step, int) else 1

    def offer(self, point: Point) -> bool:
        """Take a point that no known one is as good as; says whether it was."""
        cost, count = point
        at = bisect_right(self.points, count, key=_count)
        if at and self.points[at - 1][0] <= cost:
            return False
        begin = at - 1 if at and self.points[at - 1][1] == count else at
        end = at
        while end < len(self.points) and self.points[end][0] >= cost:
            end += 1
        self.points[begin:end] = [point]
        return True

    def close(self, points: Iterable[Point]) -> None:
        """Every answer is dominated by one of some points, or equal to it."""
        least: Scaled = math.inf
        by_count: dict[int, int] = {}
        for cost, count in sorted(points, reverse=True):
            by_count[count] = cost
        for k in range(self.most + 1):
            least = min(least, by_count.get(k, math.inf))
            self.lower[k] = least

    def line(self, a: int, b: int, value: Scaled) -> None:
        """Every answer has a * cost + b * count of at least `value`; a and b are not negative."""
        if value == -math.inf:
            return
        if a == 0:
            fewest = self.most + 1 if value == math.inf else math.ceil(value / b)
            for k in range(min(fewest, self.most + 1)):
                self.lower[k] = math.inf
            return
        for k, held in enumerate(self.lower):
            bound = value if value == math.inf else self._up(-((b * k - int(value)) // a))
            if bound > held:
                self.lower[k] = bound

    def limited(self, limit: int, bound: Scaled) -> None:
        """Every answer with a count of at most `limit` costs at least `bound`."""
        if bound > -math.inf and bound < math.inf:
            bound = self._up(math.ceil(bound))
        for k in range(min(limit, self.most) + 1):
            if bound <= self.lower[k]:
                continue
            self.lower[k] = bound

    def _up(self, bound: int) -> int:
        """The least cost that an answer may have, from a bound."""
        return self.offset + -((self.offset - bound) // self.step) * self.step

    def open(self, lower: Scaled, upper: Scaled) -> bool:
        """Whether a cost may be below a known one."""
        if self.exact or math.inf in (upper, lower):
            return lower < upper
        return lower < upper - _SAME * abs(upper)

    def dominated(self, point: Point) -> bool:
        """Whether a known answer is as good as a point in both."""
        at = bisect_right(self.points, point[1], key=_count)
        return at > 0 and self.points[at - 1][0] <= point[0]

    def regions(self) -> list[Region]:
        """Where a better answer may be, by rising count."""
        found = []
        points = self.points
        for i in range(-1, len(points)):
            left = points[i] if i >= 0 else None
            right = points[i + 1] if i + 1 < len(points) else None
            begin, end = (left[1] if left else 0), (right[1] if right else self.most + 1)
            upper: Scaled = left[0] if left else math.inf
            epsilon, widest, first = 0.0, -1, -1
            for k in range(begin, end):
                if not self.open(self.lower[k], upper):
                    continue
                share = self._share(k)
                first = k if first < 0 else first
                if widest < 0 or share > epsilon:
                    epsilon, widest = share, k
            if first >= 0:
                found.append(Region(epsilon, widest, first, end - 1, left, right))
        return found

    def _share(self, k: int) -> float:
        """The share by which a known answer has to grow to dominate answers of k nodes.

        Along the known answers what the cost lacks falls, and what the count lacks rises: the best
        is where they cross.
        """
        least = self.lower[k]
        if not self.exact and least > -math.inf:
            least += _SAME * abs(least)

        def more(point: Point) -> float:
            return max(0.0, (point[1] - k) / max(k, 1))

        def dearer(point: Point) -> float:
            # What may be zero, or below, does not become positive by any growth.
            return math.inf if least <= 0 < point[0] else excess(point[0], least)

        at = bisect_left(self.points, 0.0, key=lambda p: more(p) - dearer(p))
        return min(
            (max(dearer(p), more(p)) for p in self.points[max(0, at - 1) : at + 1]),
            default=math.inf,
        )

    def epsilon(self) -> float:
        """The share by which known values would have to grow to dominate every answer."""
        if not self.points:
            return math.inf
        return max((r.epsilon for r in self.regions()), default=0.0)
