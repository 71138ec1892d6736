"""The unit in which a solver of floating-point programs sees exact costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import reduce as fold

from .form import AndOr

#: A scaled cost, with the constant; inf where there is none.
Scaled = int | float

# The largest cost of an objective that is not integral, in the unit of its program.
_LARGE = 100


@dataclass(frozen=True)
class Unit:
    """How scaled costs become a program's: divided by `step`; `integral` where all are multiples.

    Costs that are decimals of up to six digits count as integral: what binary fractions differ
    from them by is far below what tells two answers apart.
    """

    step: int | Fraction
    integral: bool

    def bound(self, value: float) -> Scaled:
        """A scaled lower bound from a program's, allowing for the tolerances of its solver."""
        if math.isinf(value):
            return value
        if not self.integral:
            return math.floor(Fraction(value - 1e-9 * max(1.0, abs(value))) * self.step)
        slack = max(1e-6, 1e-9 * abs(value))
        least = Fraction(math.ceil(value - slack)) * self.step
        if isinstance(self.step, int):
            return int(least)
        return math.floor(least - abs(least) * Fraction(1, 10**12))

    @property
    def gap(self) -> float:
        """The difference of program values below which two are the same."""
        return 1.0 - 1e-4 if self.integral else 1e-7


def unit_of(form: AndOr) -> Unit:
    """The unit for a form's costs."""
    costs = [v for v in form.cost.values() if v]
    if not costs:
        return Unit(1, True)
    scale = form.scale
    common = fold(math.gcd, costs, 0)
    largest = max(abs(v) for v in costs)
    if largest // common < 10**7:
        return Unit(common, True)
    for digits in range(1, 7):
        steps = [v * 10**digits / scale for v in costs]
        if max(map(abs, steps)) < 10**9 and all(
            abs(s - round(s)) <= 1e-9 * max(1.0, abs(s)) for s in steps
        ):
            return Unit(Fraction(scale, 10**digits), True)
    return Unit(Fraction(largest) / _LARGE, False)
