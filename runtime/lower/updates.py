"""Updates: operations that compute a large new state of the old one, and the products whose kernels
go on with them.

XLA for TPUs may turn an old state as soon as it can be read, and hold that until its update: it is
not to be read before. Where a product's own kernel makes the update nothing may come between the
two, and the state waits for what is there before that kernel.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.plans.plan import BodyPlan

from .order import SMALL, Reads


def updates(
    body: BodyPlan,
    signatures: Sequence[OperationSignature],
    states: Collection[int],
    mesh: MeshShape,
) -> dict[int, tuple[int, ...]]:
    """Operations that go element by element over a large state, an input at one of the places
    `states`, and do not round it for a product: which of their operands such states are."""
    graph = body.graph

    blocks = {k: body.inputs[k].block(graph.values[graph.inputs[k]], mesh) for k in states}
    state = {graph.inputs[k] for k, block in blocks.items() if block.nbytes >= SMALL}
    return {
        k: tuple(p for p, v in enumerate(op.inputs) if v in state)
        for k, (op, own) in enumerate(zip(graph.operations, signatures, strict=True))
        if own.fusion == "loop" and own.means != "rounding"
        if not state.isdisjoint(op.inputs)
    }


def within_products(
    body: BodyPlan,
    signatures: Sequence[OperationSignature],
    own: Mapping[int, Sequence[int]],
    reads: Reads,
    in_memory: Collection[int],
) -> dict[int, tuple[int, ...]]:
    """The updates `own` that the kernels of products make, by the first operation of these, where
    they read the state as it lies, given what is `in_memory` between kernels."""
    operations, found = body.graph.operations, dict[int, tuple[int, ...]]()
    maker = body.graph.producers()
    for k, places in own.items():
        first = _begin(body, signatures, k, maker, in_memory)
        there = all(reads[k][p].origin == "produced" for p in places)
        plain = all(operations[j].remat is None for j in (first, k))
        if first < k and there and plain:
            found[first] = (*found.get(first, ()), k)
    return found


def _begin(
    body: BodyPlan,
    signatures: Sequence[OperationSignature],
    k: int,
    maker: Mapping[int, int],
    in_memory: Collection[int],
) -> int:
    """Where the kernel of a product begins that goes on with operation k, as between the two
    nothing is `in_memory`: with what it computes of its operands. Itself, where none does."""
    found, stack, seen = k, [(k, False)], {k}
    while stack:
        at, below = stack.pop()
        for v in body.graph.operations[at].inputs:
            j = maker.get(v)
            if j is None or v in in_memory or j in seen:
                continue
            product = signatures[j].fusion == "kernel"
            if product and below:
                continue
            seen.add(j)
            stack.append((j, below or product))
            if product or below:
                found = min(found, j)
    return found
