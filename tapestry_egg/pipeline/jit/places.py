"""Places: the mesh that a request of `te.jit` is about, and the layouts that it pins.

The mesh is the one given, else that of the shardings given, else the one on which arguments were
put, else that of constraints inside, else the one that is set (`jax.set_mesh`), as under `jax.jit`.
All are contracts; a list of devices, or nothing, is none.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tapestry_egg.extract.pins.shardings import Leaves, said
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.mesh_contract import Dims, MeshContract
from tapestry_egg.schedule.flatten import is_below
from tapestry_egg.tracing.constraints import active_mesh, contract_of, spec_dims

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program

    from .planning import Request


def named_mesh(request: Request) -> Any:
    """The JAX mesh whose axes a request speaks of; None where it leaves the mesh to the plan."""
    import jax

    if isinstance(request.mesh, jax.sharding.Mesh):
        return request.mesh
    own = None if request.mesh is None else set(_flat(request.mesh))
    said = (*request.in_shardings, *request.out_shardings, *_committed(request), *request.inside)
    for sharding in said:
        mesh = getattr(sharding, "mesh", None)
        if isinstance(mesh, jax.sharding.Mesh) and (own is None or set(mesh.devices.flat) == own):
            return mesh
    found = active_mesh()
    if found is not None and (own is None or set(found.devices.flat) == own):
        return found
    return None


def pinned_leaves(program: Program, request: Request) -> tuple[Leaves, Leaves]:
    """The layouts that the shardings of a request pin, of inputs and of outputs.

    Where an argument lies counts where nothing else is said of it. Warns of places that the axes of
    the request's mesh cannot express.
    """
    mesh = named_mesh(request)
    graph = program.graph
    inputs = _dims(request.in_shardings, program, mesh, len(graph.inputs), output=False)
    outputs = _dims(request.out_shardings, program, mesh, len(graph.outputs), output=True)
    lost = []
    for i, sharding in enumerate(_committed(request)):
        name = graph.input_names[i] if graph.input_names else f"[{i}]"
        if sharding is None or inputs[i] is not None or mesh is None:
            continue
        if any(is_below(path, name) for path in request.pins):
            continue
        inputs[i] = _on(mesh, sharding, graph.values[graph.inputs[i]].rank)
        if inputs[i] is None:
            lost.append(name)
    if lost:
        more = f" and {len(lost) - 3} more" if len(lost) > 3 else ""
        warnings.warn(
            f"{', '.join(lost[:3])}{more} lie on another mesh in a way that {contract_of(mesh)} "
            f"cannot express: they are moved at every call",
            stacklevel=2,
        )
    return Leaves(tuple(inputs)), Leaves(tuple(outputs))


def mesh_shape(mesh: Any) -> MeshShape | None:
    """The axes of a JAX mesh, as plain data."""
    if mesh is None:
        return None
    contract = contract_of(mesh)
    return MeshShape(contract.names, contract.sizes)


def _committed(request: Request) -> tuple[Any, ...]:
    """Where arguments lie on several devices; nothing where they are free."""
    if request.arguments == "free":
        return ()
    return tuple(
        s if s is not None and getattr(s.mesh, "size", 1) > 1 else None for s in request.committed
    )


def _dims(
    shardings: Sequence[Any], program: Program, mesh: Any, count: int, output: bool
) -> list[Any]:
    from tapestry_egg.extract.pins.shardings import sharding_pins

    found: list[Dims | None] = [None] * count
    leaves = [(i, said(s)) for i, s in enumerate(shardings)]
    for pin in sharding_pins(program, leaves, output):
        sharding = shardings[pin.position]
        own = getattr(sharding, "mesh", None)
        if own is not None and mesh is not None and contract_of(own) != contract_of(mesh):
            expressed = _on(mesh, sharding, len(pin.shape))
            if expressed is None:
                from tapestry_egg.errors import ExtractError

                raise ExtractError(
                    f"{sharding} is about another mesh than {contract_of(mesh)}",
                    where=pin.where,
                    hint="Give shardings of one mesh.",
                )
            found[pin.position] = expressed
        else:
            found[pin.position] = tuple(d or () for d in pin.dims)
    return found


def _on(mesh: Any, sharding: Any, rank: int) -> Dims | None:
    """A place in the axes of a mesh; None where they cannot express it, or where the devices of the
    two meshes are others or in another order."""
    contract, own = contract_of(mesh), contract_of(sharding.mesh)
    dims = tuple(d or () for d in spec_dims(sharding.spec, rank))
    if own == contract and _same_devices(mesh, sharding.mesh):
        return dims
    shape = MeshShape(own.names, own.sizes)
    if not _same_devices(mesh, sharding.mesh) or contract.blocks(shape) is None:
        return None
    axes = [MeshContract(shape.names, shape.sizes).resolve(d, shape) for d in dims]
    if any(a is None for a in axes):
        return None
    return contract.express(Layout(tuple(a or () for a in axes)), shape)


def _same_devices(one: Any, other: Any) -> bool:
    """Whether two meshes have their devices in one order; an abstract mesh has any."""
    from jax.sharding import Mesh

    if not (isinstance(one, Mesh) and isinstance(other, Mesh)):
        return True
    return list(one.devices.flat) == list(other.devices.flat)


def _flat(mesh: Any) -> list[Any]:
    given = getattr(mesh, "devices", mesh)
    return list(given.flat) if hasattr(given, "flat") else list(given)
