"""What a kernel of a plan does and takes, counted again from its operations' projections."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    collective_seconds,
    collective_wire_bytes,
    copying_seconds,
)
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.split_products import SplitK, multiplied, split_scratch
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.target import Target
from tapestry_egg.machine.tiles import Tiles, stored_bytes
from tapestry_egg.metakernels.signatures.signature import (
    evaluate,
)
from tapestry_egg.plans.plan import BodyPlan
from tapestry_egg.schedule.flatten import FlatProgram
from tapestry_egg.schedule.one_device import gemm_of, priced, taken_through_views
from tapestry_egg.schedule.traffic import UnitTraffic, scattered_bytes
from tapestry_egg.schedule.units import Unit
from tapestry_egg.shard.stored_blocks import kernel_blocks


class Work(NamedTuple):
    """One run of a kernel: seconds, joules of the mesh; flops, memory traffic and bytes sent of one
    device; which part of the roofline is highest: `compute`, `memory` or `launch`."""

    seconds: float = 0.0
    joules: float = 0.0
    flops: float = 0.0
    hbm_bytes: float = 0.0
    wire_bytes: float = 0.0
    bound: str = ""

    def then(self, other: Work) -> Work:
        """Both, one after the other."""
        return Work(
            self.seconds + other.seconds,
            self.joules + other.joules,
            self.flops + other.flops,
            self.hbm_bytes + other.hbm_bytes,
            self.wire_bytes + other.wire_bytes,
            max(self, other).bound,
        )


def kernel_work(
    unit: Unit,
    through: UnitTraffic,
    exposed: float,
    program: FlatProgram,
    bodies: Sequence[BodyPlan],
    given: Mapping[int, Layout],
    needed: Mapping[tuple[int, int], Layout],
    mesh: MeshShape,
    target: Target,
) -> Work:
    """What one run of a unit does and takes on one device.

    It goes `through` memory as its compiler fuses it; a unit that runs in others' kernels takes
    what is `exposed` of its arithmetic (`Traffic.exposed`). `given` are the layouts in which
    values are made, `needed[i, p]` those in which instance i reads its operand p.
    """
    instances = [program.instances[i] for i in unit.members]
    port = instances[-1].port
    if not through.launches or (not port and all(x.signature.fusion == "view" for x in instances)):
        return Work()
    extents = {} if port else _extents(unit, program, bodies, mesh)
    traffic = 0.0
    for (i, p, v), share in zip(unit.reads, through.reads, strict=True):
        signature = program.instances[i].signature
        some = signature.reads[p] if signature.reads else None
        if some is None:
            block = elements(program.types[v], needed[i, p], mesh) * program.types[v].itemsize
            traffic += share * block
        else:
            traffic += share * evaluate(some, extents[i]) * program.types[v].itemsize
        if not port and signature.scattered is not None and signature.scattered.operand == p:
            traffic += scattered_bytes(signature, extents[i], target)
    for v, share in zip(unit.outputs, through.writes, strict=True):
        traffic += share * (elements(program.types[v], given[v], mesh) * program.types[v].itemsize)
    if port:
        seconds = copying_seconds(traffic, through.launches, target)
        energy = joules(0.0, traffic, 0.0, seconds, mesh.devices, target)
        return Work(seconds, energy, hbm_bytes=traffic, bound="memory")
    root = instances[-1].signature
    traffic += taken_through_views(root, unit, extents[unit.root], target)
    signatures = [x.signature for x in instances]
    found = priced(signatures, [extents[i] for i in unit.members], traffic, target)
    about = mesh.devices, target, found.dtype, found.matrix
    if through.is_free(not any(given[v].partial for v in unit.outputs)):
        seconds = exposed * found.work / target.rate(found.dtype, found.matrix) if exposed else 0.0
        inside = joules(found.flops, 0.0, 0.0, seconds, *about)
        return Work(seconds, float(inside), found.flops, bound="compute" if exposed else "")
    seconds, flops, traffic = found.seconds, found.flops, found.moved
    energy = joules(flops, traffic, 0.0, seconds, *about)
    roofline = {
        "compute": found.work / target.rate(found.dtype, found.matrix),
        "memory": traffic / target.hbm_bytes_per_second,
        "launch": max(target.launch_seconds, found.steps * target.step_seconds),
    }
    bound, wire = max(roofline, key=lambda k: roofline[k]), 0.0
    for sent in instances[-1].signature.sent_types:
        axes, amount = tuple(range(len(mesh.sizes))), float(sent.nbytes)
        seconds += collective_seconds("all_reduce", amount, axes, mesh, target)
        energy += collective_joules("all_reduce", amount, axes, mesh, target)
        wire += collective_wire_bytes("all_reduce", amount, mesh.devices)
    return Work(seconds, float(energy), flops, traffic, wire, bound)


def kernel_scratch(
    unit: Unit,
    program: FlatProgram,
    bodies: Sequence[BodyPlan],
    mesh: MeshShape,
    target: Target,
) -> tuple[float, float]:
    """Bytes of one device that a unit's kernel takes beside its operands and results: blocks of
    scores; and those that it makes in the place of a product of matrices whose sum the compiler
    splits, which another kernel adds up after it."""
    if program.instances[unit.root].port:
        return 0.0, 0.0
    extents = _extents(unit, program, bodies, mesh)
    stored = sum(
        kernel_blocks(program.instances[i].signature, extents[i], target) for i in unit.members
    )
    return stored, _split(unit, program, extents, target)


def _split(
    unit: Unit,
    program: FlatProgram,
    extents: Mapping[int, tuple[int, ...]],
    target: Target,
) -> float:
    gemm = _gemm(unit, program, extents)
    products = [x for i in unit.members if (x := program.instances[i].signature).is_product]
    if target.split_k is None or gemm is None or not products:
        return 0.0
    if products[0].by_vector:
        columns = products[0].adds_columns
        return _parts(gemm, target.split_k, multiplied) if columns else 0.0
    return _parts(gemm, target.split_k, split_scratch)


def _gemm(
    unit: Unit, program: FlatProgram, extents: Mapping[int, tuple[int, ...]]
) -> Gemm[float] | None:
    """The product of matrices that a unit's kernel is on one device, if it is one."""
    found = [i for i in unit.members if program.instances[i].signature.contracts]
    if len(found) != 1:
        return None
    return gemm_of(program.instances[found[0]].signature, extents[found[0]])


@lru_cache(maxsize=1 << 12)
def _parts(
    gemm: Gemm[float], costs: SplitK, scratch: Callable[[Gemm[Floats], SplitK], Floats]
) -> float:
    """The parts of one product of matrices; the plans of a front have many alike."""
    batch, m, n, k = [np.array(x) for x in (gemm.batch, gemm.m, gemm.n, gemm.k)]
    return float(scratch(Gemm(batch, m, n, k, gemm.lhs, gemm.rhs, gemm.out), costs))


def _extents(
    unit: Unit, program: FlatProgram, bodies: Sequence[BodyPlan], mesh: MeshShape
) -> dict[int, tuple[int, ...]]:
    """Per member, the sizes of its index dims on one device."""
    found: dict[int, tuple[int, ...]] = {}
    for i in unit.members:
        x = program.instances[i]
        cuts = bodies[x.body].strategies[x.operation].cuts
        found[i] = tuple(
            n // mesh.parts(axes) for n, axes in zip(x.signature.extents, cuts, strict=True)
        )
    return found


def elements(tensor: TensorType, layout: Layout, mesh: MeshShape) -> int:
    """Elements of one device's block."""
    return prod(n // mesh.parts(axes) for n, axes in zip(tensor.shape, layout.dims, strict=True))


def held_bytes(
    tensor: TensorType,
    layout: Layout,
    mesh: MeshShape,
    tiles: Tiles | None,
    windows: Collection[int] = (),
) -> int:
    """What one device's block takes in memory, in the tiles of the machine."""
    shape = layout.local_shape(tensor.shape, mesh)
    return stored_bytes(shape, max(tensor.itemsize, 1), tiles, windows)


def block_bytes(tensor: TensorType, layout: Layout, mesh: MeshShape) -> int:
    """Memory of one device's block; what has no bytes of its own still takes one per element."""
    return elements(tensor, layout, mesh) * max(tensor.itemsize, 1)
