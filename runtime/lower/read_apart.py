"""What sums along columns read from memory, where XLA would make it in their kernels."""

from __future__ import annotations

from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.schedules import Schedule


def read_apart(plan: Schedule, fusing: FusionCosts | None) -> frozenset[tuple[int, int]]:
    """Operands of operations that kernels store, and whose readers are not to make them: sums along
    columns, which would read too much at once (`schedule/inlining.py`), and what such sums
    alone compute of an operand."""
    if fusing is None:
        return frozenset()
    found = fusion(plan, costs=fusing)
    operands = set[tuple[int, int]]()
    for u, v in found.apart:
        reading = [u]
        while reading:
            for i, p, w in plan.units[reading.pop()].reads:
                if w == v:
                    operands.add((plan.program.instances[i].operation, p))
                elif found.within[plan.producer[w]]:
                    reading.append(plan.producer[w])
    return frozenset(operands)
