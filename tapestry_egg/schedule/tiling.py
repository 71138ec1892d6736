"""Which values of a program lie in tiles along their last two dims, where a machine has tiles."""

from __future__ import annotations

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.tiles import Tiles

from .flatten import FlatProgram


def last_in_tiles(program: FlatProgram, tiles: Tiles | None) -> frozenset[FlatId]:
    """The values that the kernels `tiles.last` read or make, and those of the same shape that are
    computed from them, or they from those, element by element; what enters or leaves the program
    lies as it does outside."""
    if tiles is None or not tiles.last:
        return frozenset()
    outside = {
        v
        for i in program.instances
        if i.port in ("input", "state", "output")
        for v in (*i.inputs, *i.outputs)
    }
    beside: dict[FlatId, set[FlatId]] = {}
    found: list[FlatId] = []
    for i in program.instances:
        values = [v for v in (*i.inputs, *i.outputs) if v not in outside]
        if i.signature.kernel in tiles.last:
            found += values
        elif not i.port and i.signature.fusion == "loop":
            shape = program.types[i.outputs[0]].shape
            alike = {v for v in values if program.types[v].shape == shape}
            for v in alike:
                beside.setdefault(v, set()).update(alike)
    reached = set(found)
    while found:
        fresh = beside.get(found.pop(), set()) - reached
        reached |= fresh
        found += fresh
    return frozenset(reached)
