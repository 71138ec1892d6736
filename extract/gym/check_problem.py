"""An answer to a snapshot's problem, recomputed from the problem's arrays alone.

Shares no code with the search: every table is read entry by entry, and sums are exact before they
are rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import inf, isinf

from tapestry_egg.extract.problem.problem import Problem


@dataclass(frozen=True)
class RowCosts:
    """What one row per variable costs, and what is wrong with it (empty: nothing)."""

    seconds: float
    peak_bytes: float
    joules: float
    violations: tuple[str, ...]


def row_costs(problem: Problem, rows: Sequence[int]) -> RowCosts:
    """Recompute seconds, peak bytes and joules of one row per variable."""
    if len(rows) != len(problem.variables):
        what = f"{len(rows)} rows for {len(problem.variables)} variables"
        return RowCosts(inf, inf, inf, (what,))
    seconds, joules = Fraction(0), Fraction(0)
    steps = [Fraction(0)] * (problem.times + 1)
    wrong: list[str] = []

    def occupy(start: int, end: int, amount: float) -> None:
        steps[start] += Fraction(amount)
        steps[end] -= Fraction(amount)

    for variable, r in zip(problem.variables, rows, strict=True):
        if not 0 <= r < len(variable.seconds):
            return RowCosts(inf, inf, inf, (f"{variable.name} has no row {r}",))
        if isinf(variable.seconds[r]) or isinf(variable.joules[r]):
            wrong.append(f"row {r} of {variable.name} is forbidden")
            continue
        seconds += Fraction(float(variable.seconds[r]))
        joules += Fraction(float(variable.joules[r]))
        for use in variable.uses:
            occupy(use.start, use.end, float(use.amount[r]))
    for pair in problem.pairs:
        a, b = int(pair.label_a[rows[pair.a]]), int(pair.label_b[rows[pair.b]])
        if isinf(pair.seconds[a, b]) or isinf(pair.joules[a, b]):
            names = (problem.variables[pair.a].name, problem.variables[pair.b].name)
            wrong.append(f"rows {rows[pair.a]} of {names[0]} and {rows[pair.b]} of {names[1]}")
            continue
        seconds += Fraction(float(pair.seconds[a, b]))
        joules += Fraction(float(pair.joules[a, b]))
        for use in pair.uses:
            occupy(use.start, use.end, float(use.amount[a, b]))
    held, peak = Fraction(0), Fraction(0)
    for t in range(problem.times):
        held += steps[t]
        peak = max(peak, held)
    return RowCosts(float(seconds), float(peak), float(joules), tuple(wrong))
