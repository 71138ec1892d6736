"""Which values lie in memory as their dims are written, by who makes and who reads them.

Kernels write their results as their dims are written. A transpose moves nothing, and operations on
elements leave the order as it is. Some kernels and the caller take no other order than that in
which dims are written: what lies otherwise is turned for them, a copy.
"""

from __future__ import annotations

from tapestry_egg.graph.ids import FlatId

from .schedules import Schedule


def made_straight(schedule: Schedule) -> frozenset[FlatId]:
    """What kernels make that want their operands straight, and leave their result so."""
    instances = schedule.program.instances
    roots = [instances[unit.root] for unit in schedule.units]
    return frozenset(v for x in roots if x.signature.straight for v in x.outputs)


def read_straight(schedule: Schedule) -> frozenset[tuple[int, int]]:
    """Units and what they read that must not be turned, dims in the order in which they are
    written: operands of kernels that say so (`straight`), and results. Contractions, slices of
    stacks and operations on elements take any order."""
    instances = schedule.program.instances
    found = set()
    for u, unit in enumerate(schedule.units):
        straight = instances[unit.root].port == "output"
        for i, p, v in unit.reads:
            if straight or p in instances[i].signature.straight:
                found.add((u, int(v)))
    return frozenset(found)
