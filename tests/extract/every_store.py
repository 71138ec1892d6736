"""Every program that keeps some values of a program from being computed inside their readers.

An oracle for what is searched of them: of all values that a compiler would not store, or would
compute inside each of their readers, any are behind a barrier, which all that reads them reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.schedules import Schedule

from .every_form import TooMany


def every_store(plan: Schedule, most: int) -> Iterator[BlockGraph]:
    """The programs other than the given one. Raises TooMany where there are more than `most`."""
    values = unstored(plan)
    if 2 ** len(values) - 1 > most:
        raise TooMany
    graph = plan.program.bodies[0].graph
    for count in range(1, len(values) + 1):
        for some in combinations(values, count):
            yield stored(graph, some)


def unstored(plan: Schedule) -> tuple[int, ...]:
    """Values of a program without regions that operations on elements make and kernels do not."""
    graph, within = plan.program.bodies[0].graph, fusion(plan).within
    place = {v: k for k, v in enumerate(plan.program.bodies[0].values)}
    found = []
    for u, unit in enumerate(plan.units):
        for i in unit.members:
            x = plan.program.instances[i]
            if x.port or x.signature.fusion != "loop" or len(x.outputs) != 1:
                continue
            (v,) = x.outputs
            if (v not in unit.outputs or within[u]) and graph.values[place[v]].size > 1:
                found.append(place[v])
    return tuple(sorted(found))


def stored(graph: BlockGraph, values: tuple[int, ...]) -> BlockGraph:
    """A program some values of which are behind barriers."""
    types, operations = list(graph.values), list[Operation]()
    stands: dict[int, int] = {}
    for op in graph.operations:
        inputs = tuple([stands.get(v, v) for v in op.inputs])
        operations.append(op if inputs == op.inputs else replace(op, inputs=inputs))
        for v in (v for v in op.outputs if v in values):
            types.append(types[v])
            stands[v] = len(types) - 1
            operations.append(Operation("optimization_barrier", (v,), (stands[v],)))
    return replace(graph, values=tuple(types), operations=tuple(operations))
