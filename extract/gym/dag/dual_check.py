"""Lower bounds of linear programs from their multipliers, in exact arithmetic.

Any multipliers of the rows prove a bound (weak duality): the rows' sides weighted by them, plus for
each column the least that its remaining cost can add within its bounds. Nothing is believed but the
program itself: multipliers that are off by rounding, or wrong, only make the bound worse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

from .linear_program import Floats, Row


def dual_bound(
    cost: Floats, lower: Floats, upper: Floats, rows: Sequence[Row], multipliers: Floats
) -> Fraction | None:
    """The bound on cost · x that multipliers of the rows prove; None where they prove none.

    A positive multiplier leans on its row's lower side, a negative one on the upper; multipliers
    whose side is infinite count as zero.
    """
    remaining = [Fraction(c) for c in cost.tolist()]
    total = Fraction(0)
    for (columns, coefficients, low, high), y in zip(rows, multipliers.tolist(), strict=True):
        side = low if y > 0 else high
        if not y or math.isinf(side):
            continue
        weight = Fraction(y)
        total += weight * Fraction(float(side))
        for j, a in zip(columns, coefficients, strict=True):
            remaining[j] -= weight * Fraction(float(a))
    for value, least, most in zip(remaining, lower.tolist(), upper.tolist(), strict=True):
        if value:
            end = least if value > 0 else most
            if math.isinf(end):
                return None
            total += value * Fraction(end)
    return total
