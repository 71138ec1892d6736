"""The user's words: the mesh, shardings and constraints that a search must heed, read together."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.front.notes import Note, note
from tapestry_egg.extract.pins.boundary import Fixed
from tapestry_egg.extract.pins.pins import (
    Pin,
    Pins,
    constrained_outputs,
    fitting,
    read_pins,
    unpaired,
)
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.machine.target import Target
from tapestry_egg.tracing.constraints import common_mesh, constraints, contract_of, left_out

# Axes of the largest mesh shapes that are counted where they are not searched: all that a target
# names.
_MOST_COUNTED = 6

if TYPE_CHECKING:
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.tracing.trace import Program


@dataclass(frozen=True)
class Words:
    """What is fixed, the mesh shapes to search, and what of it could not be heeded."""

    fixed: Fixed
    shapes: tuple[MeshShape, ...]
    notes: tuple[Note, ...]
    said: bool = False  # whether some layout is fixed, at the boundary or inside
    sharded: bool = False  # whether JAX's shardings, or constraints of the program, are given
    unsearched: tuple[MeshShape, ...] = ()  # distinct shapes of more axes than are searched

    def pairs(self, feedback: Mapping[int, int]) -> dict[int, int]:
        """The feedback pairs that the pins leave."""
        inputs = [p for p in self.fixed.pins if not p.output]
        outputs = [p for p in self.fixed.pins if p.output]
        return unpaired(feedback, inputs, outputs)


def read_words(
    program: Program | BlockGraph,
    machine: Target,
    mesh: Any,
    pins: Pins | None,
    in_shardings: Any,
    out_shardings: Any,
    mesh_shapes: Sequence[MeshShape] | None,
    max_axes: int,
    devices: Sequence[int] = (),
    inside: Sequence[Pin] = (),
    results: Sequence[Pin] = (),
) -> Words:
    """Read the keywords of `optimize` that speak of layouts, and the program's constraints, among
    which those are that stand for pins of values `inside` it. `results` are pins of single results.

    `devices` are the numbers of them that plans may have (default: all), the largest first. Warns
    once of constraints that no mesh can heed. Raises TargetError for a mesh of another number of
    devices than the target's, and for axes that no mesh has; ExtractError for pins and shardings
    that do not fit the program, or each other, and for a mesh of more devices than plans may have.
    """
    from tapestry_egg.extract.pins.shardings import (
        input_shardings,
        meshes_of,
        output_shardings,
        sharding_pins,
    )
    from tapestry_egg.graph.blockgraph import BlockGraph
    from tapestry_egg.tracing.trace import Program

    graph = program if isinstance(program, BlockGraph) else program.graph
    whole = Program.of(graph) if isinstance(program, BlockGraph) else program
    ins, outs = input_shardings(whole, in_shardings), output_shardings(whole, out_shardings)
    sharded = [*sharding_pins(whole, ins), *sharding_pins(whole, outs, output=True)]
    given = [*read_pins(graph, pins), *sharded, *results]
    contract = None
    if not mesh_shapes or mesh is not None:
        contract = _contract(mesh, meshes_of([*ins, *outs]), graph, machine)
    counts = tuple(devices) or (machine.devices,)
    if contract is None:
        shapes = tuple(mesh_shapes or _of_devices(machine, counts, max_axes))
        every = shapes if mesh_shapes else _of_devices(machine, counts, _MOST_COUNTED)
        for shape in mesh_shapes or ():
            machine.is_even(shape)  # raises where the machine has no part of so many devices
        # Pins name axes; without them, meshes that differ in names alone are one.
        if not (mesh_shapes or given or next(constraints(graph), None)):
            shapes, every = machine.distinct(shapes), machine.distinct(every)
    else:
        if contract.devices > counts[0]:
            raise ExtractError(
                f"the mesh {contract} has {contract.devices} devices, plans may have {counts[0]}",
                where="limits",
                hint="Leave the mesh to the plan, or name one of fewer devices on such a target.",
            )
        every = _of_contract(contract, machine, mesh_shapes, _MOST_COUNTED)
        shapes = _of_contract(contract, machine, mesh_shapes, max_axes)
    own = {(p.output, p.position) for p in given}
    for p in constrained_outputs(graph):
        if (p.output, p.position) not in own and _readable(p, shapes, contract):
            given.append(p)
    shapes = fitting([*given, *inside], shapes, contract)
    if contract is not None:
        shapes = _few(shapes, contract, graph)
    most = max(len(s.sizes) for s in shapes)
    left = [s for s in every if len(s.sizes) > most and _fits([*given, *inside], s, contract)]
    notes = tuple(note("constraint", text=words) for words in left_out(graph, shapes, contract))
    for each in notes:
        warnings.warn(str(each), stacklevel=4)
    asked = sum(1 for _ in constraints(graph))
    return Words(
        fixed=Fixed(_once(given), contract),
        shapes=shapes,
        notes=notes,
        said=bool(given or asked),
        sharded=bool(sharded or asked > len(inside)),
        unsearched=tuple(left),
    )


def _of_devices(machine: Target, counts: Sequence[int], max_axes: int) -> tuple[MeshShape, ...]:
    """The mesh shapes of every number of devices, in turn."""
    return tuple(shape for n in counts for shape in machine.mesh_shapes(max_axes, n))


def _contract(
    mesh: Any, named: Sequence[MeshContract], graph: BlockGraph, machine: Target
) -> MeshContract | None:
    """The mesh that the user names: by keyword, by shardings, or in the program."""
    if mesh is not None:
        contract = contract_of(mesh)
    elif named:
        found = common_mesh(named)
        if found is None:
            raise ExtractError(
                f"shardings name several meshes: {', '.join(sorted({str(m) for m in named}))}",
                where="in_shardings, out_shardings",
                hint="Give shardings of one mesh.",
            )
        contract = found
    else:
        asked = [c.mesh for _, _, c in constraints(graph)]
        inside = common_mesh([m for m in asked if m.devices == machine.devices])
        if inside is None:
            return None
        contract = inside
    if contract.devices != machine.devices:
        raise TargetError(
            f"the mesh {contract} has {contract.devices} devices, {machine.spec} has "
            f"{machine.devices}",
            where="mesh",
            hint="Give a mesh over all devices of the target.",
        )
    return contract


def _of_contract(
    contract: MeshContract,
    machine: Target,
    mesh_shapes: Sequence[MeshShape] | None,
    max_axes: int,
) -> tuple[MeshShape, ...]:
    """The mesh shapes that a contract leaves, the user's own first."""
    if mesh_shapes:
        alien = [s for s in mesh_shapes if contract.blocks(s) is None]
        if alien:
            raise TargetError(
                f"the mesh shape {alien[0]} is not made of the axes of {contract}",
                where="mesh_shapes",
                hint="Leave mesh_shapes out: those that divide the mesh's axes are searched.",
            )
        return tuple(mesh_shapes)
    first, *others = contract.meshes(max_axes)
    return (first, *(s for s in others if machine.is_even(s)))


def _few(
    shapes: tuple[MeshShape, ...], contract: MeshContract, graph: BlockGraph
) -> tuple[MeshShape, ...]:
    """Without the meshes of most axes, where others heed all constraints as well."""
    from tapestry_egg.machine.mesh_contract import MOST_AXES

    few = tuple(s for s in shapes if len(s.sizes) <= MOST_AXES)
    able = tuple(s for s in few if not left_out(graph, (s,), contract))
    return able or shapes if len(few) < len(shapes) else shapes


def _readable(pin: Pin, shapes: Sequence[MeshShape], contract: MeshContract | None) -> bool:
    return any(_fits((pin,), s, contract) for s in shapes)


def _fits(pins: Sequence[Pin], shape: MeshShape, contract: MeshContract | None) -> bool:
    try:
        return bool(fitting(pins, (shape,), contract))
    except (ExtractError, TargetError):
        return False


def _once(pins: Sequence[Pin]) -> tuple[Pin, ...]:
    """The pins, one for each input and output. Raises ExtractError where two contradict."""
    found: dict[tuple[bool, int], Pin] = {}
    for p in pins:
        other = found.setdefault((p.output, p.position), p)
        if other.dims != p.dims:
            raise ExtractError(
                f"{p.name} is pinned to {other} and to {p}",
                where=f"{other.where}, {p.where}",
                hint="Give one of them.",
            )
    return tuple(found.values())
