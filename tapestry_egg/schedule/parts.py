"""A kernel run as two, with the value between them in memory.

What a kernel computes on the way is nowhere. Where a sum in the middle of it is left partial by
its operands, it can be written, combined over devices once, and read by the rest.
"""

from __future__ import annotations

from tapestry_egg.graph.ids import FlatId

from .flatten import FlatProgram
from .units import Unit


def two_kernels(program: FlatProgram, unit: Unit, value: FlatId) -> tuple[Unit, Unit] | None:
    """The kernel that makes a value inside a unit, with all that leads to it, and the rest; None
    where something else leads from the one to the other, or out of the first."""
    instances = program.instances
    maker = {v: i for i in unit.members for v in instances[i].outputs}
    if value not in maker or maker[value] == unit.root or value in unit.outputs:
        return None
    first, stack = set(), [maker[value]]
    while stack:
        i = stack.pop()
        if i not in first:
            first.add(i)
            stack += [maker[v] for v in instances[i].inputs if v in maker]
    made = {v for i in first for v in instances[i].outputs} - {value}
    rest = [i for i in unit.members if i not in first]
    if not made.isdisjoint(unit.outputs) or any(
        not made.isdisjoint(instances[i].inputs) for i in rest
    ):
        return None
    crossing = tuple(
        (i, p, v) for i in rest for p, v in enumerate(instances[i].inputs) if v == value
    )
    return (
        Unit(
            tuple(i for i in unit.members if i in first),
            tuple(r for r in unit.reads if r[0] in first),
            (value,),
            unit.body,
        ),
        Unit(
            tuple(rest),
            (*(r for r in unit.reads if r[0] not in first), *crossing),
            unit.outputs,
            unit.body,
        ),
    )
