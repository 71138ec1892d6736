"""Pins: layouts of inputs that the user fixes, by path in the arguments.

    {"[0]['kernel']": (None, "x"), "[2]": ("x",)}

A path names one input or, as a prefix, all those below it; the longest one that fits an input
counts. A layout has per tensor dim the mesh axes that cut it: a name, several names major to minor,
or None; dims left off at the end are not cut, so `()` replicates. `jax.sharding.PartitionSpec`s are
such layouts too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..blockgraph import BlockGraph
from ..errors import ExtractError, TargetError
from ..flatten import close_paths, is_below
from ..layout import Layout, MeshShape
from .snapshot import Snapshot, UnitRows

Spec = Iterable[str | Sequence[str] | None]
Pins = Mapping[str, Spec]


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned input: its number and name, and the axis names that cut each of its dims."""

    position: int
    name: str
    path: str  # the user's, a prefix of the name
    shape: tuple[int, ...]
    dims: tuple[tuple[str, ...], ...]

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(a for d in self.dims for a in d)

    def layout(self, mesh: MeshShape) -> Layout:
        """The layout on a mesh that has the axes."""
        number = {name: a for a, name in enumerate(mesh.names)}
        return Layout(tuple(tuple(number[a] for a in d) for d in self.dims))

    def __str__(self) -> str:
        words = ", ".join("·".join(d) or "." for d in self.dims)
        return f"[{words}]"


def read_pins(graph: BlockGraph, pins: Pins | None) -> tuple[Pin, ...]:
    """The pinned inputs of a graph, in order.

    Raises ExtractError for a path that no input has, and for a layout that is malformed or has more
    dims than an input below its path.
    """
    names = graph.input_names or tuple(f"[{i}]" for i in range(len(graph.inputs)))
    specs = {path: _spec(path, spec) for path, spec in (pins or {}).items()}
    for path in specs:
        if not any(is_below(path, name) for name in names):
            raise ExtractError(
                f"no input lies at {path!r}",
                where=f"pins[{path!r}]",
                hint=f"Inputs are named by their paths: {close_paths(path, names)}.",
            )
    found = []
    for i, name in enumerate(names):
        above = [path for path in specs if is_below(path, name)]
        if not above:
            continue
        path = max(above, key=len)
        tensor, spec = graph.values[graph.inputs[i]], specs[path]
        if len(spec) > tensor.rank:
            raise ExtractError(
                f"{name} is {tensor}, the layout has {len(spec)} dims",
                where=f"pins[{path!r}]",
                hint=f"Give at most {tensor.rank}, or pin {name!r} by itself.",
            )
        dims = spec + ((),) * (tensor.rank - len(spec))
        found.append(Pin(i, name, path, tensor.shape, dims))
    return tuple(found)


def fitting(pins: Sequence[Pin], shapes: Sequence[MeshShape]) -> tuple[MeshShape, ...]:
    """The mesh shapes that have the axes of all pins, and whose sizes divide what they cut.

    Raises TargetError when no mesh has the axes, ExtractError when those that do would cut some
    input unevenly.
    """
    axes = frozenset[str]().union(*(p.axes for p in pins))
    having = [s for s in shapes if axes <= set(s.names)]
    if not having:
        absent = sorted(a for a in axes if not any(a in s.names for s in shapes))
        words = (
            f"no mesh has the axis {absent[0]!r}"
            if absent
            else f"no mesh has all the axes {', '.join(sorted(axes))}"
        )
        culprit = next((p for p in pins if not absent or absent[0] in p.axes), pins[0])
        raise TargetError(
            words,
            where=f"pins[{culprit.path!r}]",
            hint=f"Mesh shapes to choose from: {', '.join(map(str, shapes))}.",
        )
    even = [s for s in having if all(p.layout(s).divides(p.shape, s) for p in pins)]
    if not even:
        mesh = having[0]
        uneven = next(p for p in pins if not p.layout(mesh).divides(p.shape, mesh))
        raise ExtractError(
            f"{uneven.name} of shape {list(uneven.shape)} cannot be cut evenly as {uneven} on "
            f"{' or '.join(map(str, having))}",
            where=f"pins[{uneven.path!r}]",
            hint="Pin it to axes whose sizes divide its dims, or leave it unpinned.",
        )
    return tuple(even)


def pin(snap: Snapshot, pins: Sequence[Pin]) -> Snapshot:
    """The snapshot with only those rows of the inputs that give the pinned layouts.

    An input that an output feeds back into pins the output too: one identity makes both.
    Raises ExtractError where the rules derive no such row.
    """
    if not pins:
        return snap
    schedule, rows = snap.schedule, list(snap.rows)
    body = schedule.program.bodies[0]
    for p in pins:
        v = body.values[body.graph.inputs[p.position]]
        u = schedule.producer[v]
        q, layout = schedule.units[u].outputs.index(v), p.layout(snap.mesh)
        rows[u] = _only(rows[u], [r for r, gives in enumerate(rows[u].gives) if gives[q] == layout])
        if not len(rows[u]):
            raise ExtractError(
                f"the rules derive no way for {p.name} to enter as {p} on {snap.mesh}",
                where=f"pins[{p.path!r}]",
                hint="Pin another layout, or bring back the rule that was removed.",
            )
    return replace(snap, rows=tuple(rows))


def _only(rows: UnitRows, kept: list[int]) -> UnitRows:
    which = np.array(kept, dtype=np.int64)
    return UnitRows(
        rows.choice[which],
        tuple(rows.needs[r] for r in kept),
        tuple(rows.gives[r] for r in kept),
        rows.seconds[which],
        rows.joules[which],
        rows.flops[which],
    )


def _spec(path: str, spec: Spec) -> tuple[tuple[str, ...], ...]:
    """The axes per dim of a layout as the user wrote it."""

    def error(what: str) -> ExtractError:
        return ExtractError(
            what,
            where=f"pins[{path!r}]",
            hint="A layout has per dim an axis name, a tuple of them or None: ('x', None).",
        )

    if isinstance(spec, str) or not isinstance(spec, Iterable):
        raise error(f"{spec!r} is not a layout")
    dims: list[tuple[str, ...]] = []
    for entry in spec:
        names = (entry,) if isinstance(entry, str) else () if entry is None else entry
        if not isinstance(names, tuple | list) or not all(isinstance(a, str) for a in names):
            raise error(f"{entry!r} names no mesh axes")
        dims.append(tuple(names))
    axes = [a for d in dims for a in d]
    for a in axes:
        if axes.count(a) > 1:
            raise error(f"axis {a!r} occurs twice in one layout")
    return tuple(dims)
