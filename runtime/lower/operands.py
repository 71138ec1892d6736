"""Operands that lie otherwise than who reads them would have it: of products, and of loops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import prod

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.plan import BodyPlan
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.schedules import schedule

from .order import Reads

#: Bytes that lie together of which a memory is read without waste.
_RUN = 128


def turned_beside_computed(
    body: BodyPlan, signatures: Sequence[OperationSignature], mesh: MeshShape
) -> frozenset[tuple[int, int]]:
    """Operations, products, and their operands that lie otherwise than the operand beside them,
    which several products compute for themselves.

    XLA for TPUs makes a product a convolution, which goes over batches and what is summed in the
    order in which they lie in one operand. The other is turned for it inside the kernel, or is
    computed there, but not both: XLA would store what the plan has computed in each product.
    """
    graph = body.graph
    makers = {v: k for k, op in enumerate(graph.operations) for v in op.outputs}
    products = {k: x for k, x in enumerate(signatures) if x.is_product and not x.by_vector}
    reads = Counter(v for k in products for v in graph.operations[k].inputs)
    shared = {v for v in _computed(graph) if reads[v] > 1}
    found = set()
    for k, signature in products.items() if shared else ():
        gemm, inputs = signature.gemm, graph.operations[k].inputs
        if gemm is None:
            continue
        cuts = body.strategies[k].cuts
        local = [n // mesh.parts(c) for n, c in zip(signature.extents, cuts, strict=True)]
        common = {d for d in (*gemm.batch, *gemm.k) if local[d] > 1}
        for p, q in ((gemm.lhs, gemm.rhs), (gemm.rhs, gemm.lhs)):
            turns = makers.get(inputs[q])
            order = signatures[turns].permutation if turns is not None else None
            if inputs[p] not in shared or order is None:
                continue
            lying = sorted(range(len(order)), key=order.__getitem__)
            straight = range(len(graph.values[inputs[p]].shape))
            if _run(signature, p, straight, common) != _run(signature, q, lying, common):
                found.add((k, q))
    return frozenset(found)


def turned_slices(
    body: BodyPlan,
    reads: Reads,
    signatures: Sequence[OperationSignature],
    on_the_fly: Mapping[int, int],
    mesh: MeshShape,
) -> dict[int, dict[int, int]]:
    """Per loop, operands whose slices are taken of what they are a transposition of, in runs that
    are worth reading: operand -> the operation that transposes. `on_the_fly` are values that are
    not stored, with what makes them."""
    found: dict[int, dict[int, int]] = {}
    for k, op in enumerate(body.graph.operations):
        if not op.is_scan:
            continue
        first = sum(counts(op))
        for p, f in enumerate(reads[k]):
            by = on_the_fly.get(f.value) if f.origin == "produced" else None
            order = signatures[by].permutation if by is not None else None
            if p < first or by is None or order is None:
                continue
            f = reads[by][0]
            type_ = body.graph.values[f.value]
            run = prod(f.need.local_shape(type_.shape, mesh)[order[0] + 1 :]) * type_.itemsize
            if run >= _RUN:
                found.setdefault(k, {})[p] = by
    return found


def _computed(graph: BlockGraph) -> set[int]:
    """What XLA for TPUs computes element by element inside all that read it."""
    plan = schedule(flatten(graph, {}))
    program = plan.program
    place = {v: k for k, v in enumerate(program.bodies[0].values)}
    return {
        place[v]
        for unit, inside in zip(plan.units, fusion(plan, epilogues=True).within, strict=True)
        if inside and program.instances[unit.root].signature.fusion == "loop"
        for v in unit.outputs
        if v in place
    }


def _run(signature: OperationSignature, p: int, order: Sequence[int], among: set[int]) -> list[int]:
    """Some index dims in the order in which they lie in operand p, whose dims lie in `order`."""
    rows = signature.inputs[p].matrix
    return [d for i in order for d, a in enumerate(rows[i]) if a and d in among]
