"""Time on one device: what a program or one of its operations costs before any mesh is chosen.

A kernel of which devices can share no dim runs on each of them. Beside what they share it counts as
often as the target has devices, so that of two programs the one that devices can share is chosen.

Kernels that keep none of their scores run in blocks. XLA for GPUs stores what a product of matrices
makes and reads it in other kernels, so that there each block is several kernels: products as small
as it is, and what goes through memory between them. On an H100 (`benchmarks/bench_device.py`, LoRA
in float32) a logarithm of 8192 words took 1.96 ms, its gradient 4.95, attention of 8 heads of 512
rows 1.18: here 2.01, 5.48 and 1.35, where the products as a whole would take 0.95, 1.67 and 0.14.
XLA for TPUs computes exponentials inside the products, and holds blocks on the chip (modules of
libtpu 0.0.52); on CPUs caches hold them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod

from tapestry_egg.graph.blockgraph import BlockGraph, itemsize
from tapestry_egg.machine.costs import copying_seconds, kernel_seconds, like_roofline
from tapestry_egg.machine.tables.gemm import Convolved, Gemm
from tapestry_egg.machine.target import Target
from tapestry_egg.metakernels.signatures.signature import OperationSignature, evaluate
from tapestry_egg.tracing.constants import without_prepared

from .flatten import FlatProgram, flatten
from .repeated import repeat_cheap
from .schedules import Schedule, schedule
from .traffic import Traffic, arithmetic_seconds, scattered_bytes, traffic_of
from .units import Unit, is_view


def least_seconds(signature: OperationSignature, target: Target, passes: float = 0.0) -> float:
    """The least seconds that one operation can add to a program, and those of so many `passes` over
    what it must store.

    Kernels that compilers fuse with nothing take their full time, `times` over; views nothing; all
    others may run inside their neighbours, and then add arithmetic but neither traffic nor a
    launch.
    """
    if signature.fusion == "view":
        return 0.0
    if signature.fusion != "kernel":
        flops, dtype = signature.whole_flops, _arithmetic(signature, None)
        return float(kernel_seconds(flops, 0.0, dtype, target, False)) - target.launch_seconds
    moved = float(signature.output_bytes + sum(signature.read_bytes))
    moved += scattered_bytes(signature, signature.extents, target)
    seconds = priced([signature], [signature.extents], moved, target).seconds
    seconds *= times(signature, target)
    return seconds + passes * signature.output_bytes / target.hbm_bytes_per_second


def times(signature: OperationSignature, target: Target) -> int:
    """How often an operation counts: on every device if these can share no dim, else once."""
    if signature.fusion != "kernel":
        return 1
    shared = any(d.role != "whole" and gcd(d.size, target.devices) > 1 for d in signature.index)
    return 1 if shared else target.devices


def program_seconds(
    graph: BlockGraph,
    target: Target,
    weights: Mapping[str, float] | None = None,
    passes: float = 0.0,
) -> float:
    """Seconds of a whole program on one device, by the same model of fusion as plans are costed,
    and those of so many `passes` over all that it stores.

    What it computes from constants alone is computed before it runs, and costs nothing. With
    `weights`, kernels count by the `scope` of the operation that ends them; without, the graph
    remembers the answer, as several other forms are held beside the same one.
    """
    if weights is not None:
        return _program_seconds(graph, target, weights, passes)
    known: dict[tuple[Target, float], float] = graph.__dict__.setdefault("_program_seconds", {})
    key = target, passes
    if key not in known:
        known[key] = _program_seconds(graph, target, None, passes)
    return known[key]


def scheduled_alone(graph: BlockGraph) -> Schedule:
    """The schedule of a program none of whose outputs is fed back, without what is computed before
    it runs; the graph remembers it, as both its seconds and its peak on one device are of this."""
    known: Schedule | None = graph.__dict__.get("_scheduled_alone")
    if known is None:
        program = flatten(repeat_cheap(without_prepared(graph)), {})
        known = graph.__dict__["_scheduled_alone"] = schedule(program)
    return known


def _program_seconds(
    graph: BlockGraph, target: Target, weights: Mapping[str, float] | None, passes: float
) -> float:
    plan = scheduled_alone(graph)
    program, traffic = plan.program, traffic_of(plan, target)
    if weights is None:
        return sum(_priced(program, unit, target, traffic, passes) for unit in plan.units)
    total = 0.0
    for unit in plan.units:
        weight = weights.get(_scope(program, unit.root), 0.0)
        total += weight * _priced(program, unit, target, traffic, passes) if weight else 0.0
    return total


def _priced(
    program: FlatProgram, unit: Unit, target: Target, traffic: Traffic, passes: float
) -> float:
    """Seconds of a unit, and of so many passes over what it stores."""
    seconds = unit_seconds(program, unit, target, traffic)
    seconds *= times(program.instances[unit.root].signature, target)
    if not passes or program.instances[unit.root].port:
        return seconds
    made = zip(traffic.of(unit).writes, unit.outputs, strict=True)
    stored = sum([program.sizes[v] for share, v in made if share])
    return seconds + passes * stored / target.hbm_bytes_per_second


def block_work(
    signature: OperationSignature, extents: tuple[int, ...], target: Target
) -> tuple[float, float]:
    """Seconds of all blocks, and the bytes of scores that they move through memory, on a device
    whose part of the index space has these extents; nothing where the kernel is one on the target.
    """
    scratch, blocks = signature.scratch, signature.blocks
    if scratch is None or blocks is None or not target.stores_products:
        return 0.0, 0.0
    dim, size = scratch.block(extents)
    if not all(extents):
        return 0.0, 0.0
    count = extents[dim] / size
    dtype = signature.input_types[0].dtype
    wide = dtype if itemsize(dtype) > itemsize("float32") else "float32"
    inside = [size if d == dim else n for d, n in enumerate(extents)]
    seconds = stored = largest = 0.0
    for product in blocks.products:
        batch, m, n, k = [float(prod([inside[d] for d in side])) for side in product]
        made = batch * m * n * itemsize(wide)
        moved = batch * (m + n) * k * itemsize(dtype) + made
        gemm = Gemm(batch, m, n, k, dtype, dtype, wide)
        flops = 2.0 * batch * m * n * k
        seconds += float(kernel_seconds(flops, moved, dtype, target, True, gemm))
        largest = max(largest, moved)
        stored += made
    between = evaluate(blocks.moved, extents) / count + evaluate(blocks.again, extents)
    # The shared cache holds a block where all does that is read and written for its products.
    cache = target.caches
    held = cache is not None and largest <= cache.bytes
    rate = cache.bytes_per_second if cache and held else target.hbm_bytes_per_second
    seconds += between / rate + blocks.kernels * target.launch_seconds
    return count * seconds, 0.0 if held else count * (stored + between)


def region_shares(graph: BlockGraph, target: Target) -> dict[tuple[int, int], float]:
    """The share of a program's seconds on one device that each region of its operations takes, what
    is nested in it included; regions by the numbers of operation and region."""
    program = flatten(graph, {})
    shares: dict[tuple[int, int], float] = {}
    total = 0.0
    plan = schedule(program)
    traffic = traffic_of(plan, target)
    for unit in plan.units:
        seconds = unit_seconds(program, unit, target, traffic)
        total += seconds
        body = unit.body
        while program.bodies[body].parent > 0:
            body = program.bodies[body].parent
        if body > 0:
            key = (program.bodies[body].operation, program.bodies[body].region)
            shares[key] = shares.get(key, 0.0) + seconds
    return {key: seconds / total for key, seconds in shares.items()} if total else {}


def _scope(program: FlatProgram, i: int) -> str:
    """The scope of the operation of the program itself that an instance belongs to."""
    body, operation = program.instances[i].body, program.instances[i].operation
    while body > 0:
        operation = program.bodies[body].operation
        body = program.bodies[body].parent
    return program.bodies[0].graph.operations[operation].scope if operation >= 0 else ""


def unit_seconds(program: FlatProgram, unit: Unit, target: Target, traffic: Traffic) -> float:
    """Seconds of one unit on one device, as often as one step runs it."""
    members = [program.instances[i] for i in unit.members]
    root = members[-1]
    through = traffic.of(unit)
    if is_view(program, unit):
        return 0.0
    signatures = [m.signature for m in members]
    extents = [m.extents for m in signatures]
    if through.is_free(whole=True):
        exposed = traffic.exposed(unit, target)
        inside = arithmetic_seconds(signatures, extents, target) if exposed else 0.0
        return root.weight * exposed * inside
    moved = traffic.moved(unit, target)
    if root.port:
        return root.weight * copying_seconds(moved, through.launches, target)
    moved += taken_through_views(root.signature, unit, root.signature.extents, target)
    return root.weight * priced(signatures, extents, moved, target).seconds


@dataclass(frozen=True)
class Priced:
    """A kernel on one device: seconds, bytes that it moves, flops, and these as `work` of the
    roofline in some dtype, on matrix units or not; `steps` that wait for one another."""

    seconds: float
    moved: float
    flops: float
    work: float
    dtype: str
    matrix: bool
    steps: float


def priced(
    members: Sequence[OperationSignature],
    extents: Sequence[tuple[int, ...]],
    moved: float,
    target: Target,
) -> Priced:
    """What a kernel takes whose operations have such index extents on a device, if all that they
    read and write moves so many bytes."""
    flops = float(sum(evaluate(m.flops, own) for m, own in zip(members, extents, strict=True)))
    found = [(m, own) for m, own in zip(members, extents, strict=True) if m.contracts]
    gemm = gemm_of(*found[0]) if len(found) == 1 else None
    root, local = members[-1], extents[-1]
    dtype, matrix, steps = _arithmetic(root, gemm), bool(found), evaluate(root.steps, local)
    spilled = root.spilled_in(local)
    work = like_roofline(root.kernel, root.measured, flops, dtype, target, matrix, spilled)
    seconds = float(kernel_seconds(work, moved, dtype, target, matrix, gemm, steps))
    blocks, stored = block_work(root, local, target)
    return Priced(max(seconds, blocks), moved + stored, flops, work, dtype, matrix, steps)


def taken_through_views(
    signature: OperationSignature, unit: Unit, extents: tuple[int, ...], target: Target
) -> float:
    """Bytes that a kernel moves of operands which views show it, where it says what these are."""
    if signature.fusion != "kernel":
        return 0.0
    outside = {(i, p) for i, p, _ in unit.reads}
    inside = [p for p in range(len(signature.inputs)) if (unit.root, p) not in outside]
    parts = [(p, signature.reads[p]) for p in inside] if signature.reads else []
    taken = sum(
        evaluate(part, extents) * signature.input_types[p].itemsize
        for p, part in parts
        if part is not None
    )
    if signature.scattered is not None and signature.scattered.operand in inside:
        taken += scattered_bytes(signature, extents, target)
    return float(taken)


def gemm_of(signature: OperationSignature, extents: Sequence[int]) -> Gemm[float] | None:
    """The product of matrices that a contraction is at the given index extents, if it is one."""
    dims = signature.gemm
    if dims is None:
        return None
    batch, m, n, k = map(float, dims.shape(extents))
    lhs, rhs = signature.input_types[dims.lhs].dtype, signature.input_types[dims.rhs].dtype
    windows = signature.convolved(extents)
    convolved = Convolved(*map(float, windows)) if windows else None
    out = signature.output_types[0].dtype
    return Gemm(batch, m, n, k, lhs, rhs, out, convolved, signature.precision)


def _arithmetic(root: OperationSignature, gemm: Gemm[float] | None) -> str:
    """The dtype in which a kernel computes: of a product's operands, else of what it makes."""
    if gemm is not None:
        return gemm.dtype
    return root.output_types[0].dtype if root.output_types else "float32"
