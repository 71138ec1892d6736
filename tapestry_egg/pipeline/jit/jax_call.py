"""What `jax.jit` makes of a call: on which devices it would run it, and which layouts it is told.

Where all that is said names the devices of one mesh, these are the ones. Otherwise JAX itself is
asked, by lowering the function as it is written. So a call that `jax.jit` refuses is refused in the
same words, and what arguments, shardings and constraints say of devices is heard.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tapestry_egg.errors import UnplannedError
from tapestry_egg.tracing.constraints import (
    check_layout_kept,
    check_memory_kept,
    common_mesh,
    constraints,
    contract_of,
    entered_mesh,
    with_devices,
)

if TYPE_CHECKING:
    from tapestry_egg.tracing.trace import Program


@dataclass(frozen=True, slots=True)
class JaxCall:
    """A call as `jax.jit` would run it.

    `devices` are in JAX's order; `bound` says whether the user chose them. `shardings` are all that
    arguments, results and the program itself name. `ordered` says whether the order of an array's
    dims in memory is asked for.
    """

    devices: tuple[Any, ...]
    bound: bool
    shardings: tuple[Any, ...]
    ordered: bool


def plain_call(program: Program, shardings: Sequence[Any]) -> JaxCall | None:
    """A call of which it is plain where `jax.jit` runs it: `shardings` and the program name one
    mesh's devices, or nothing does. None where JAX is to be asked.

    `shardings` are those given and those of arguments that are committed.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    meshes = dict.fromkeys(program.places)
    for sharding in shardings:
        if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
            return None
        meshes[sharding.mesh] = None
    for mesh in (jax.sharding.get_mesh(), entered_mesh()):
        meshes.update(with_devices(mesh))
    if not all(isinstance(mesh, Mesh) for mesh in meshes):
        return None
    places = {tuple(mesh.devices.flat) for mesh in meshes}
    if len(places) > 1 or jax.config.values.get("jax_default_device") is not None:
        return None
    if not places:
        return JaxCall((), False, (), False)
    (devices,) = places
    named = (*shardings, *(NamedSharding(mesh, PartitionSpec()) for mesh in program.places))
    return JaxCall(devices, True, named, False) if len(devices) > 1 else None


@contextmanager
def as_set() -> Iterator[None]:
    """Where `with mesh:` counts as `jax.set_mesh(mesh)`."""
    import jax

    mesh = entered_mesh() if jax.sharding.get_mesh().empty else None
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        yield


def read_call(written: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> JaxCall | None:
    """How `jax.jit` would run `written`; None where this version of JAX does not say, or where a
    plan can give types or a mesh that JAX asks for.

    Raises what `jax.jit` raises for such a call, and UnplannedError where its only mesh has no
    devices.
    """
    import jax

    try:
        with as_set(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the plan has its own donations and constants
            lowering: Any = written.trace(*args, **kwargs).lower()._lowering
    except Exception as e:
        if type(e).__name__ == "ShardingTypeError" or "requires a non-empty mesh" in str(e):
            return None
        if "only AbstractMesh exists" in str(e):
            raise UnplannedError(
                "its arguments are on an abstract mesh, which has no devices",
                hint="To plan it, pass mesh=, or shardings of a mesh with devices.",
            ) from None
        raise
    try:
        told = lowering.compile_args
        devices = tuple(lowering._device_list)
        shardings = (*told["in_shardings"], *told["out_shardings"], *told["intermediate_shardings"])
        layouts = (*told["in_layouts"], *told["out_layouts"])
        bound = bool(told["committed"]) or jax.config.values.get("jax_default_device") is not None
    except (AttributeError, KeyError, TypeError):
        return None
    ordered = any(hasattr(x, "major_to_minor") for x in layouts)
    return JaxCall(devices, bound, shardings, ordered)


def check_mesh_set() -> None:
    """Raise UnplannedError where the mesh that is set has no devices."""
    import jax

    if jax.sharding.get_mesh().empty and not jax.sharding.get_abstract_mesh().empty:
        raise UnplannedError(
            "the mesh that is set is abstract, and has no devices",
            hint="Set one with devices (jax.set_mesh), or pass mesh=.",
        )


def check_planned(call: JaxCall) -> None:
    """Raise UnplannedError for a call that says what no plan keeps."""
    import jax

    if call.bound and len(call.devices) == 1 < jax.device_count():
        raise UnplannedError(
            f"it is bound to one device, {call.devices[0]}, by its arguments or shardings",
            hint="To plan it, pass mesh=, or arguments that are not committed to a device.",
        )
    if call.ordered:
        raise UnplannedError(
            "a Layout of array dims in memory is asked for, which no plan keeps",
            hint="Give shardings without a Layout.",
        )
    for sharding in call.shardings:
        # What JAX has not been told is replicated, by a sharding without names.
        named = len(call.devices) > 1 and not getattr(sharding, "is_fully_replicated", False)
        (check_layout_kept if named else check_memory_kept)(sharding, "")


def check_types(program: Program, platform: str) -> None:
    """Raise UnplannedError for arguments that JAX's compiled functions do not take: on CPUs, whose
    arrays hold a byte for each of their elements, those of fewer bits."""
    narrow = [t for t in program.input_types if _NARROW.fullmatch(t.dtype)]
    if platform == "cpu" and narrow:
        raise UnplannedError(
            f"an argument is {narrow[0]}, which JAX does not pass to compiled functions on CPUs",
            hint="Pass wider numbers, and narrow them inside.",
        )


#: Dtypes of less than a byte.
_NARROW = re.compile(r"u?int[24]|float4.*")


def check_constraints(program: Program, mesh: Any) -> None:
    """Raise UnplannedError where a constraint inside is about another mesh than the plan's, which
    is `mesh`, or if that is None the one that all constraints name."""
    found = list(constraints(program.graph))
    contract = common_mesh([c.mesh for *_, c in found]) if mesh is None else contract_of(mesh)
    for graph, op, constraint in found:
        shape = graph.values[op.inputs[0]].shape
        plain = None if contract is None else contract.meshes(1)[0]
        if plain is None or constraint.wanted(shape, plain, contract) is None:
            other = "others" if contract is None else str(contract)
            raise UnplannedError(
                f"a constraint {constraint} is about the mesh {constraint.mesh}, beside {other}",
                where=str(op.source) if op.source.file else "",
                hint="Give shardings of one mesh.",
            )
