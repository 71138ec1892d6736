"""Sets of values of which none dominates another: what is on the front, and how good it is.

A value is one number per objective, all to be minimised. a dominates b when a is at most b in every
objective and less in one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


def dominates(a: Sequence[float | Fraction], b: Sequence[float | Fraction]) -> bool:
    """Whether a is at most b everywhere, and less somewhere."""
    return all(x <= y for x, y in zip(a, b, strict=True)) and tuple(a) != tuple(b)


def non_dominated(values: Sequence[Sequence[float | Fraction]]) -> list[int]:
    """Indices of the values that no other dominates, by rising value; of equal ones the first."""
    kept: list[int] = []
    for i in sorted(range(len(values)), key=lambda i: (tuple(values[i]), i)):
        # Of two objectives the second falls: the last has the least.
        rivals = kept[-1:] if len(values[i]) == 2 else kept
        if not any(all(x <= y for x, y in zip(values[k], values[i], strict=True)) for k in rivals):
            kept.append(i)
    return kept


def knee(values: Sequence[Sequence[float | Fraction]]) -> int:
    """The index of the value nearest to the ideal, each objective scaled to its range.

    The distance is the largest scaled excess over the least of an objective; ties go to the first.
    Raises ValueError for no values.
    """
    if not values:
        raise ValueError("no values, no knee")
    least = [min(column) for column in zip(*values, strict=True)]
    most = [max(column) for column in zip(*values, strict=True)]

    def excess(value: Sequence[float | Fraction]) -> float:
        return max(
            (
                float((x - lo) / (hi - lo))
                for x, lo, hi in zip(value, least, most, strict=True)
                if hi > lo
            ),
            default=0.0,
        )

    return min(range(len(values)), key=lambda i: (excess(values[i]), i))


def hypervolume(values: Sequence[Sequence[float | Fraction]], reference: Sequence[float]) -> float:
    """The volume of what the values dominate below a reference point.

    By slicing along the last objective (Fonseca, Paquete and López-Ibáñez, 2006, in its simplest
    form): fine for some hundreds of values. Values not below the reference in each objective count
    nothing.
    """
    inside = [tuple(v) for v in values if all(x < r for x, r in zip(v, reference, strict=True))]
    if not inside:
        return 0.0
    if len(reference) == 1:
        return float(reference[0] - min(v[0] for v in inside))
    order = sorted(set(inside), key=lambda v: v[-1])
    total = 0.0
    if len(reference) == 2:
        nearest: float | Fraction = reference[0]
        for k, v in enumerate(order):
            top = order[k + 1][1] if k + 1 < len(order) else reference[1]
            nearest = min(nearest, v[0])
            total += float(reference[0] - nearest) * float(top - v[1])
        return total
    for k, v in enumerate(order):
        top = order[k + 1][-1] if k + 1 < len(order) else reference[-1]
        if top > v[-1]:
            below = [u[:-1] for u in order[: k + 1]]
            total += hypervolume(below, reference[:-1]) * float(top - v[-1])
    return total


def excess(value: float | Fraction, bound: float | Fraction) -> float:
    """The share by which a value may be above the best, given a bound: 0 where they are equal."""
    if value <= bound:
        return 0.0
    if math.inf in (value, -bound):
        return math.inf
    return float(value - bound) / max(abs(float(bound)), 1e-300)
