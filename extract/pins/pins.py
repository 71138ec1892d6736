"""Pins: layouts of inputs and outputs that the user fixes.

    {"[0]['kernel']": (None, "x"), "[2]": ("x",)}

A path names one input or, as a prefix, all those below it; the longest one that fits an input
counts. A layout has per tensor dim the mesh axes that cut it: a name, several names major to minor,
or None; dims left off at the end are not cut, so `()` replicates. `jax.sharding.PartitionSpec`s are
such layouts too. Pins of inputs and outputs may also come as JAX's `in_shardings` and
`out_shardings` (`shardings.py`), and outputs that the program itself constrains are pinned so.
Values inside a program and its results are pinned by number, line or path (`value_pins.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.flatten import close_paths, is_below
from tapestry_egg.tracing.constraints import Constraint, NamedDims, Wanted, shown

Spec = Iterable[str | Sequence[str] | None]
Pins = Mapping[str, Spec]


@dataclass(frozen=True, slots=True)
class Pin:
    """One pinned input or output: its number and name, and the axis names that cut each of its
    dims (None: the dim is free)."""

    position: int
    name: str
    where: str  # the user's word for it, for messages
    shape: tuple[int, ...]
    dims: NamedDims
    output: bool = False
    spoken: tuple[str, ...] | None = None  # the axes that it is about; None: all

    @property
    def axes(self) -> frozenset[str]:
        return frozenset(a for d in self.dims for a in d or ())

    def wanted(self, mesh: MeshShape, contract: MeshContract | None = None) -> Wanted | None:
        """The layouts that it allows on a plan's mesh; None where the mesh cannot tell the axes."""
        return Wanted.on(self.dims, self.spoken, mesh, contract)

    def __str__(self) -> str:
        return shown(self.dims)


def read_pins(graph: BlockGraph, pins: Pins | None) -> tuple[Pin, ...]:
    """The pinned inputs of a graph, in order.

    Raises ExtractError for a path that no input has, and for a layout that is malformed or has more
    dims than an input below its path.
    """
    names = graph.input_paths
    specs = {path: _spec(f"pins[{path!r}]", spec) for path, spec in (pins or {}).items()}
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
        tensor = graph.values[graph.inputs[i]]
        found.append(pin_of(i, name, tensor, specs[path], f"pins[{path!r}]"))
    return tuple(found)


def pin_of(position: int, name: str, tensor: TensorType, spec: Spec, where: str) -> Pin:
    """The pin of one tensor to a layout as the user wrote it.

    Raises ExtractError for a layout that is malformed or has more dims than the tensor.
    """
    dims = _spec(where, spec)
    if len(dims) > tensor.rank:
        raise ExtractError(
            f"{name} is {tensor}, the layout has {len(dims)} dims",
            where=where,
            hint=f"Give at most {tensor.rank}, or pin {name!r} by itself.",
        )
    return Pin(position, name, where, tensor.shape, dims + ((),) * (tensor.rank - len(dims)))


def constrained_outputs(graph: BlockGraph) -> tuple[Pin, ...]:
    """Pins of the outputs that the program constrains right before it returns them."""

    made = {op.outputs[0]: op for op in graph.operations if registry.meaning(op.kernel) == "layout"}
    found = []
    for j, v in enumerate(graph.outputs):
        if v in made:
            asked = Constraint.of(made[v].params)
            name = graph.output_paths[j]
            where = f"the constraint of output {name or 0}"
            shape = graph.values[v].shape
            found.append(Pin(j, name, where, shape, asked.dims, True, asked.axes))
    return tuple(found)


def fitting(
    pins: Sequence[Pin], shapes: Sequence[MeshShape], contract: MeshContract | None = None
) -> tuple[MeshShape, ...]:
    """The mesh shapes that have the axes of all pins, and whose sizes divide what they cut.

    Raises TargetError when no mesh has the axes, ExtractError when those that do would cut some
    input or output unevenly.
    """
    if not pins:
        return tuple(shapes)
    having = [s for s in shapes if all(p.wanted(s, contract) is not None for p in pins)]
    if not having:
        axes = frozenset[str]().union(*(p.axes for p in pins))
        known = {n for s in shapes for n in (contract.names if contract else s.names)}
        absent = sorted(axes - known)
        words = (
            f"no mesh has the axis {absent[0]!r}"
            if absent
            else f"no mesh has all the axes {', '.join(sorted(axes))}"
        )
        culprit = next((p for p in pins if not absent or absent[0] in p.axes), pins[0])
        choice = str(contract) if contract else ", ".join(map(str, shapes))
        raise TargetError(words, where=culprit.where, hint=f"Mesh shapes to choose from: {choice}.")
    even = [s for s in having if all(_divides(p, s, contract) for p in pins)]
    if not even:
        mesh = having[0]
        uneven = next(p for p in pins if not _divides(p, mesh, contract))
        raise ExtractError(
            f"{uneven.name or 'the output'} of shape {list(uneven.shape)} cannot be cut evenly "
            f"as {uneven} on {' or '.join(map(str, having))}: {_remainder(uneven, mesh, contract)}",
            where=uneven.where,
            hint="Pin it to axes whose sizes divide its dims, or leave it unpinned.",
        )
    return tuple(even)


def _divides(pin: Pin, mesh: MeshShape, contract: MeshContract | None) -> bool:
    wanted = pin.wanted(mesh, contract)
    return wanted is not None and wanted.least.divides(pin.shape, mesh)


def _remainder(pin: Pin, mesh: MeshShape, contract: MeshContract | None) -> str:
    """Why a mesh does not divide what a pin asks for."""
    wanted = pin.wanted(mesh, contract)
    assert wanted is not None, "the mesh has its axes"
    parts = [mesh.parts(axes) for axes in wanted.least.dims]
    size, count = next((n, m) for n, m in zip(pin.shape, parts, strict=True) if n % m)
    return f"{size} is not divisible by {count}"


def unpaired(
    pairs: Mapping[int, int], inputs: Sequence[Pin], outputs: Sequence[Pin]
) -> dict[int, int]:
    """The feedback pairs without those whose output and input are pinned to different layouts:
    such an output leaves where the user says, not where it entered."""
    entering = {p.position: p for p in inputs}
    apart = {
        p.position
        for p in outputs
        if p.position in pairs
        and (own := entering.get(pairs[p.position])) is not None
        and (own.dims, own.spoken) != (p.dims, p.spoken)
    }
    return {j: i for j, i in pairs.items() if j not in apart}


def _spec(where: str, spec: Spec) -> tuple[tuple[str, ...], ...]:
    """The axes per dim of a layout as the user wrote it."""

    def error(what: str) -> ExtractError:
        return ExtractError(
            what,
            where=where,
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
