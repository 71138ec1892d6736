"""Constraints: layouts that a program asks for inside, by `with_sharding_constraint` or `reshard`.

In the graph such a request is an operation of its own, an identity of kernel `sharding_constraint`
with the parameters

    mesh   [[name, size], ..]   the axes of the mesh that the request is about
    dims   [[name, ..] | null]  per tensor dim the axes that cut it; null leaves the dim free
    axes   [name, ..] | null    the axes that it speaks of; null: all of the mesh

A plan makes it only in layouts that the request allows, so the value exists in that layout. A
request that no mesh of the search can read (other axes, blocks that are not equal) is left out,
and told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from tapestry_egg.errors import TargetError, UnplannedError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.metakernels import registry

KERNEL = "sharding_constraint"
#: Per dim the names of the axes that cut it; None: it is free.
NamedDims = tuple[tuple[str, ...] | None, ...]


@dataclass(frozen=True, slots=True)
class Wanted:
    """The layouts that are wanted of a value: exactly `dims` (None: free), looking at the axes
    `spoken` only (None: at all), and nothing partial."""

    dims: tuple[tuple[int, ...] | None, ...]
    spoken: frozenset[int] | None = None

    @staticmethod
    def on(
        dims: NamedDims,
        axes: Sequence[str] | None,
        mesh: MeshShape,
        contract: MeshContract | None,
    ) -> Wanted | None:
        """What named axes per dim want on a plan's mesh, looking at `axes` only (None: at all);
        None where the mesh cannot tell the axes."""
        own = contract or MeshContract(mesh.names, mesh.sizes)
        found = [None if d is None else own.resolve(d, mesh) for d in dims]
        about = None if axes is None else [own.resolve((a,), mesh) for a in axes]
        if found.count(None) > dims.count(None) or (about is not None and None in about):
            return None
        spoken = None if about is None else frozenset(a for own in about for a in own or ())
        return Wanted(tuple(found), spoken)

    def holds(self, layout: Layout) -> bool:
        if layout.partial:
            return False
        for have, want in zip(layout.dims, self.dims, strict=True):
            seen = have
            if self.spoken is not None:
                seen = tuple(a for a in have if a in self.spoken)
            if want is not None and seen != want:
                return False
        return True

    @property
    def least(self) -> Layout:
        """The layout that cuts no more than is wanted."""
        return Layout(tuple(d or () for d in self.dims))


@dataclass(frozen=True, slots=True)
class Constraint:
    """A request in the words of the mesh that it is about."""

    dims: NamedDims
    mesh: MeshContract
    axes: tuple[str, ...] | None = None

    @staticmethod
    def of(params: Mapping[str, Any]) -> Constraint:
        """The request of an operation's parameters."""
        mesh = MeshContract(
            tuple(str(n) for n, _ in params["mesh"]), tuple(int(s) for _, s in params["mesh"])
        )
        dims = tuple(None if d is None else tuple(d) for d in params["dims"])
        axes = params.get("axes")
        return Constraint(dims, mesh, None if axes is None else tuple(axes))

    def params(self) -> dict[str, Any]:
        """The parameters of the operation."""
        return {
            "mesh": [[n, s] for n, s in zip(self.mesh.names, self.mesh.sizes, strict=True)],
            "dims": [None if d is None else list(d) for d in self.dims],
            "axes": None if self.axes is None else list(self.axes),
        }

    def wanted(
        self, shape: tuple[int, ...], mesh: MeshShape, contract: MeshContract | None
    ) -> Wanted | None:
        """What it wants on a plan's mesh; None where that mesh cannot read it, or where the blocks
        would not be equal."""
        return _wanted(self, shape, mesh, contract)

    def __str__(self) -> str:
        return shown(self.dims)


def shown(dims: NamedDims) -> str:
    """Named axes per dim as text: `[x·y, ., *]`."""
    words = ("*" if d is None else "·".join(d) or "." for d in dims)
    return f"[{', '.join(words)}]"


@lru_cache(maxsize=4096)
def _wanted(
    constraint: Constraint,
    shape: tuple[int, ...],
    mesh: MeshShape,
    contract: MeshContract | None,
) -> Wanted | None:
    own = contract or MeshContract(mesh.names, mesh.sizes)
    if own.size != {**own.size, **constraint.mesh.size}:
        return None  # other axes, or the same names of other sizes
    wanted = Wanted.on(constraint.dims, constraint.axes, mesh, contract)
    return wanted if wanted is not None and wanted.least.divides(shape, mesh) else None


def constraint_of(sharding: Any, rank: int, explicit: bool = False) -> Constraint | None:
    """The request that a JAX sharding makes of a value; None for one that asks for nothing.

    `explicit` for one that speaks of the Explicit axes of its mesh only, as types do; otherwise it
    speaks of all others.
    """
    mesh = getattr(sharding, "mesh", None)
    spec = getattr(sharding, "spec", None)
    if mesh is None or spec is None or mesh.empty:
        return None
    contract = contract_of(mesh)
    kinds = [str(t).rpartition(".")[2] for t in mesh.axis_types or ("Auto",) * len(contract.names)]
    axes = tuple(
        n for n, k in zip(contract.names, kinds, strict=True) if (k == "Explicit") == explicit
    )
    dims = spec_dims(spec, rank)
    if contract.devices == 1 or not axes or all(d is None for d in dims):
        return None
    return Constraint(dims, contract, None if axes == contract.names else axes)


def check_layout_kept(sharding: Any, where: str) -> None:
    """Raise UnplannedError for a sharding, or a `PartitionSpec`, that says more than which axes of
    a mesh cut which dims: a memory, partial sums, devices without axes."""
    check_memory_kept(sharding, where)
    what = ""
    spec = sharding if is_spec(sharding) else getattr(sharding, "spec", None)
    if getattr(spec, "unreduced", None) or getattr(spec, "reduced", None):
        what = "it is about sums that are not complete"
    elif spec is None and type(sharding).__name__ not in _OPEN:
        what = "it names no mesh axes"
    if what:
        raise UnplannedError(
            f"no plan keeps {sharding!s:.120}: {what}",
            where=where,
            hint="Give a NamedSharding of whole values; or call the function under jax.jit.",
        )


def check_memory_kept(sharding: Any, where: str) -> None:
    """Raise UnplannedError for a sharding, or a `jax.memory.Space`, that is not a device's own."""
    space = type(sharding).__name__ == "MemorySpace"
    kind = sharding.name.lower() if space else getattr(sharding, "memory_kind", None)
    if kind not in _DEFAULT_MEMORY:
        raise UnplannedError(
            f"no plan keeps {kind} memory, as {sharding!s:.120} asks for",
            where=where,
            hint="Give shardings of device memory; or call the function under jax.jit.",
        )


def is_spec(sharding: Any) -> bool:
    """Whether this is a `PartitionSpec`, which names axes of whichever mesh."""
    from jax.sharding import PartitionSpec

    return isinstance(sharding, PartitionSpec)


#: The memory that arrays are in by default, by the names that JAX has for it.
_DEFAULT_MEMORY = (None, "device", "any", "unpinned_host")
#: What leaves the layout open.
_OPEN = ("NoneType", "UnspecifiedValue", "AUTO", "MemorySpace", "TransferToMemoryKind")


def contract_of(mesh: Any) -> MeshContract:
    """The axes of a JAX mesh, concrete or abstract, or of a `MeshShape`. Raises TargetError for
    anything else."""
    if isinstance(mesh, MeshShape):
        return MeshContract(mesh.names, mesh.sizes)
    if not hasattr(mesh, "axis_names"):
        sizes = tuple(mesh) if isinstance(mesh, tuple | list) else ()
        if not (0 < len(sizes) <= 3 and all(isinstance(n, int) for n in sizes)):
            sizes = (2, 4)
        named = f"te.MeshShape({tuple('xyz'[: len(sizes)])}, {sizes})"
        raise TargetError(
            f"a mesh needs names for its axes; given {mesh!r:.60}",
            where="mesh",
            hint=f"Give {named}, or a jax.sharding.Mesh.",
        )
    shape = dict(mesh.shape)
    return MeshContract(tuple(map(str, shape)), tuple(int(n) for n in shape.values()))


def spec_dims(spec: Any, rank: int) -> NamedDims:
    """The axes per dim of a PartitionSpec; None for dims that it leaves unconstrained. Raises
    UnplannedError for one about partial sums."""
    from jax.sharding import PartitionSpec

    check_layout_kept(spec, "")

    dims: list[tuple[str, ...] | None] = []
    for entry in spec:
        if entry is PartitionSpec.UNCONSTRAINED:
            dims.append(None)
        elif entry is None:
            dims.append(())
        else:
            dims.append(
                tuple(map(str, entry)) if isinstance(entry, tuple | list) else (str(entry),)
            )
    return (*dims, *((),) * (rank - len(dims)))


def constraints(graph: BlockGraph) -> Iterator[tuple[BlockGraph, Operation, Constraint]]:
    """The requests of a program, those inside its regions included."""
    for op in graph.operations:
        if registry.meaning(op.kernel) == "layout":
            yield graph, op, Constraint.of(op.params)
        for region in op.regions:
            yield from constraints(region)


def without_pins(graph: BlockGraph) -> BlockGraph:
    """The program without the requests that name no mesh, which pins of values inside put behind
    all other values (`extract/pins/value_pins.py`)."""
    stands: dict[int, int] = {}
    operations = []
    for op in graph.operations:
        inputs = tuple([stands.get(v, v) for v in op.inputs])
        if registry.meaning(op.kernel) == "layout" and not op.params["mesh"]:
            stands[op.outputs[0]] = inputs[0]
        else:
            regions = tuple(map(without_pins, op.regions))
            operations.append(replace(op, inputs=inputs, regions=regions))
    first = len(graph.values) - len(stands)
    if any(v < first for v in stands):
        return graph
    return replace(
        graph,
        values=graph.values[:first],
        operations=tuple(operations),
        outputs=tuple([stands.get(v, v) for v in graph.outputs]),
    )


def common_mesh(found: Sequence[MeshContract]) -> MeshContract | None:
    """The one mesh that all are; None where they differ or there is none."""
    return found[0] if found and all(c == found[0] for c in found) else None


def left_out(
    graph: BlockGraph, shapes: Sequence[MeshShape], contract: MeshContract | None
) -> list[str]:
    """What is to be told of requests that some mesh of the search does not read, one line each."""
    words: dict[str, None] = {}
    for at, op, constraint in constraints(graph):
        shape = at.values[op.inputs[0]].shape
        deaf = [s for s in shapes if constraint.wanted(shape, s, contract) is None]
        if deaf:
            where = f" at {op.source}" if op.source.file else ""
            on = "" if len(deaf) == len(shapes) else f" on {' and '.join(map(str, deaf))}"
            words[
                f"the constraint {constraint} of {at.values[op.inputs[0]]}{where} is left out{on}: "
                + _unread(constraint, shape, deaf)
            ] = None
    return list(words)


def _unread(constraint: Constraint, shape: Sequence[int], deaf: Sequence[MeshShape]) -> str:
    """Why none of those meshes can do what is asked of an array."""
    size = constraint.mesh.size
    for n, names in zip(shape, constraint.dims, strict=True):
        parts = prod(size.get(name, 1) for name in names or ())
        if n % parts:
            return f"{n} is not divisible by the {parts} devices of {', '.join(names or ())}"
    meshes = ", ".join(map(str, deaf))
    return f"it names axes of the mesh {constraint.mesh}, and the meshes of plans are {meshes}"


def active_mesh() -> Any:
    """The mesh with devices that is set (`jax.set_mesh`, or `with mesh:`); None where none is, or
    one of a single device, and inside of what is transformed, where JAX knows its axes only."""
    import jax

    mesh: Any
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:
        mesh = jax.sharding.get_abstract_mesh()
    mesh = entered_mesh() if mesh.empty else mesh
    return mesh if isinstance(mesh, jax.sharding.Mesh) and mesh.size > 1 else None


def entered_mesh() -> Any:
    """The mesh of `with mesh:`, which `jax.jit` hears of only as `jax.set_mesh`; None where none
    is."""
    import jax

    inner = getattr(getattr(jax, "_src", None), "mesh", None)
    resources = getattr(inner, "thread_resources", None)
    mesh = getattr(getattr(resources, "env", None), "physical_mesh", None)
    return None if mesh is None or mesh.empty else mesh


def one_device(sharding: Any) -> Any:
    """The device that a sharding, or what stands for one, is about; None for any other, and one in
    another memory."""
    if hasattr(sharding, "device_kind"):
        return sharding
    alone = type(sharding).__name__ == "SingleDeviceSharding"
    if not alone or sharding.memory_kind not in _DEFAULT_MEMORY:
        return None
    return next(iter(sharding.device_set))


def with_devices(mesh: Any) -> dict[Any, None]:
    """A mesh by itself if it has devices; nothing for one that is only described, or none."""
    from jax.sharding import Mesh

    return {mesh: None} if isinstance(mesh, Mesh) and not mesh.empty else {}
