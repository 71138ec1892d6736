"""Operands that a compiler is not to know: it would make other kernels by it, or send less."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.plans.fetch import Fetch
from tapestry_egg.plans.plan import Change
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.schedules import Schedule


def read_apart(plan: Schedule, fusing: FusionCosts | None) -> frozenset[tuple[int, int]]:
    """Operands of operations that kernels store, and whose readers are not to make them: sums along
    columns, which would read too much at once, what is reduced of sums that readers compute again
    (`schedule/inlining.py`), and what such sums alone compute of an operand."""
    if fusing is None:
        return frozenset()
    found = fusion(plan, costs=fusing)
    operands = set[tuple[int, int]]()
    for u, v in found.apart | found.behind:
        reading = [u]
        while reading:
            for i, p, w in plan.units[reading.pop()].reads:
                if w == v:
                    operands.add((plan.program.instances[i].operation, p))
                elif found.within[plan.producer[w]]:
                    reading.append(plan.producer[w])
    return frozenset(operands)


def reduced_apart(
    reads: Sequence[Sequence[Fetch]], makers: Mapping[int, int], stored: frozenset[int]
) -> frozenset[tuple[int, int]]:
    """Operands of operations by which kernels read several sums over the same devices, each sent on
    its own: as they are, or as operations of one operand give them that are not stored.

    XLA for GPUs would add first and send once (its passes `all-reduce-reassociate` and
    `reduce-scatter-reassociate`), and hold what is not yet summed until then, where a plan that
    sends each as soon as it is there holds blocks.
    """

    def of(k: int, p: int) -> tuple[int, int]:
        """The operand that operand p of operation k is computed of."""
        f = reads[k][p]
        while not f.steps and f.value in computed and len(reads[makers[f.value]]) == 1:
            k, p = makers[f.value], 0
            f = reads[k][p]
        return k, p

    computed = makers.keys() - stored
    found: set[tuple[int, int]] = set()
    for k, operands in enumerate(reads):
        alike: dict[tuple[Change, ...], set[tuple[int, int]]] = {}
        for i, p in {of(k, p) for p in range(len(operands))}:
            steps = reads[i][p].steps
            if any(step.kind in ("all_reduce", "reduce_scatter") for step in steps):
                alike.setdefault(steps, set()).add((i, p))
        for several in alike.values():
            if len({reads[i][p].value for i, p in several}) > 1:
                found |= several
    return frozenset(found)
