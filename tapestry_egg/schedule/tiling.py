"""Along which dims of a program's values windows move, where a machine has tiles."""

from __future__ import annotations

from collections.abc import Mapping

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.tiles import Tiles

from .flatten import FlatProgram


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
