"""How values lie in memory: whose dims are in the order in which they are written, by who makes and
who reads them; and along which dims windows move, where a machine has tiles.

Kernels write their results as their dims are written. A transpose moves nothing, and operations on
elements leave the order as it is. Some kernels and the caller take no other order than that in
which dims are written: what lies otherwise is turned for them, a copy.
"""

from __future__ import annotations

from collections.abc import Mapping

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.tiles import Tiles

from .flatten import FlatProgram
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


def window_dims(program: FlatProgram, tiles: Tiles | None) -> Mapping[FlatId, frozenset[int]]:
    """The values over which windows move, along some of their dims, and those of the same shape
    that are computed from them, or they from those, element by element; what enters or leaves the
    program lies as it does outside."""
    if tiles is None:
        return {}
    outside = {
        v
        for i in program.instances
        if i.port in ("input", "state", "output")
        for v in (*i.inputs, *i.outputs)
    }
    beside: dict[FlatId, set[FlatId]] = {}
    found: dict[FlatId, frozenset[int]] = {}
    for i in program.instances:
        signature = i.signature
        if i.port or signature.fusion == "view":
            continue
        values = (*i.inputs, *i.outputs)
        if signature.fusion == "loop":
            shape = program.types[i.outputs[0]].shape
            alike = {v for v in values if program.types[v].shape == shape} - outside
            for v in alike:
                beside.setdefault(v, set()).update(alike)
            continue
        for v, dims in zip(values, signature.window_dims, strict=True):
            if dims and v not in outside:
                found[v] = found.get(v, frozenset()) | dims
    fresh = list(found)
    while fresh:
        v = fresh.pop()
        for w in beside.get(v, ()):
            dims = found.get(w, frozenset()) | found[v]
            if found.get(w) != dims:
                found[w] = dims
                fresh.append(w)
    return found
