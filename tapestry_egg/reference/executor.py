"""The reference executor: any block graph in NumPy, operation by operation and shard by shard.

It is the most naive scheduler there is, and what every plan must agree with. A *cover* cuts an
operation's index space into boxes. Each box is one shard: it reads the boxes of the operands that
the projections give, runs the kernel's reference on them, and writes the boxes of the outputs.
Shards that differ in a reduce dim write partial values, combined under the dim's monoid.

    execute(graph, inputs)                              whole
    execute(graph, inputs, {(3,): box.split(0, 2)})     operation 3 in shards of two rows
    execute(graph, inputs, {(5, 0, 2): boxes})          operation 2 of region 0 of operation 5
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError, TapestryError
from tapestry_egg.graph.blockgraph import REGIONS_SAID, BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import ZRange, cover_fault, has_gaps

from .call import Array, numpy_dtype, zero
from .kernels import reference

#: Where an operation stands: its number in the graph, then region and number, level by level.
Path = tuple[int, ...]
Covers = Mapping[Path, Sequence[ZRange]]


class CoverError(TapestryError):
    """Boxes are not a disjoint cover of an index space, or cut what must stay whole."""


def execute(
    graph: BlockGraph, inputs: Sequence[Array], covers: Covers | None = None
) -> tuple[Array, ...]:
    """The outputs of a graph; operations that `covers` names run shard by shard, others whole.

    `inputs` have the shapes and dtypes of the graph's inputs; random keys are arrays of their words
    (`numpy_dtype`). Covers of operations in a loop's body apply to every step.

    Raises CoverError for a cover that is not disjoint and exact, cuts a dim that must stay whole,
    or belongs to no operation; GraphError for inputs that do not fit; TemplateError for a kernel
    that has no reference.
    """
    wanted = {} if covers is None else dict(covers)
    for path in wanted:
        if operation_at(graph, path) is None:
            raise CoverError(
                f"there is no operation at {path}",
                where=graph.name,
                hint="A path is an operation's number, or (operation, region, operation, ...).",
            )
    return _run(graph, inputs, wanted, ())


def operation_at(graph: BlockGraph, path: Path) -> Operation | None:
    """The operation at a path, if it is one that runs a kernel."""
    inside = graph
    for k in range(0, len(path) - 2, 2):
        if not 0 <= path[k] < len(inside.operations):
            return None
        regions = inside.operations[path[k]].regions
        if not 0 <= path[k + 1] < len(regions):
            return None
        inside = regions[path[k + 1]]
    if len(path) % 2 == 0 or not 0 <= path[-1] < len(inside.operations):
        return None
    found = inside.operations[path[-1]]
    return None if found.regions else found


def run_operation(
    kernel: str,
    params: Mapping[str, Any],
    signature: OperationSignature,
    operands: Sequence[Array],
    cover: Sequence[ZRange] | None = None,
    where: str = "",
) -> tuple[Array, ...]:
    """The outputs of one operation, from its whole operands, run on every box of `cover` in turn.

    The starting value of a reduction (`signature.initial`) counts in the first shard that reads it
    and is the monoid's zero for the others. A shard whose boxes would hold elements of other shards
    (every second element, say) runs slice by slice. Raises CoverError for a cover that is not
    disjoint and exact, and where two shards write one element that no monoid combines. Empty boxes
    are no shards; outputs of an index space without points are the starting value of the reduction,
    or the monoid's zero.
    """
    whole = ZRange.from_shape(signature.extents)
    boxes = [whole] if cover is None else list(cover)
    check_cover(signature, boxes, where or kernel)
    boxes = [box for box in boxes if not box.is_empty]
    monoids = {d.monoid for d in signature.index if d.role == "reduce"}
    monoid = next(iter(monoids)) if len(monoids) == 1 else None
    outputs = [np.zeros(t.shape, numpy_dtype(t.dtype)) for t in signature.output_types]
    written = [np.zeros(t.shape, bool) for t in signature.output_types]
    if whole.is_empty and monoid is not None:
        for q, out in enumerate(outputs):
            out[...] = (
                operands[signature.initial[q]] if signature.initial else zero(monoid, out.dtype)
            )
            written[q][...] = True
    counted = {p: np.zeros(signature.input_types[p].shape, bool) for p in signature.initial}
    for box in (b for given in boxes for b in without_gaps(signature, given)):
        local = []
        for p, x in enumerate(operands):
            at = signature.operand_box(p, box).slices
            part = np.asarray(x)[at]
            if p in counted and monoid is not None:
                nothing = np.asarray(zero(monoid, part.dtype), part.dtype)
                part = np.where(counted[p][at], nothing, part)
                counted[p][at] = True
            local.append(part)
        made = reference(kernel, params, signature, local, box)
        for q, value in enumerate(made):
            at = signature.outputs[q].image(box).slices
            again = written[q][at]
            if again.any():
                if monoid is None:
                    raise CoverError(
                        f"shard {box} writes elements of output {q} that another wrote",
                        where=where or kernel,
                        hint="The output's projection maps two index points to one element.",
                    )
                value = np.where(again, combine(monoid, outputs[q][at], value), value)
            outputs[q][at] = value
            written[q][at] = True
    for q, done in enumerate(written):
        if not done.all():
            raise CoverError(f"no shard writes some elements of output {q}", where=where or kernel)
    return tuple(outputs)


def combine(monoid: str, a: Array, b: Array) -> Array:
    """Two partial values as one; integers wrap in their own width."""
    with np.errstate(all="ignore"):
        return np.asarray(_COMBINE[monoid](a, b)).astype(a.dtype)


_COMBINE: dict[str, Any] = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.logical_and,
    "or": np.logical_or,
    "logaddexp": np.logaddexp,
}


def check_cover(signature: OperationSignature, cover: Sequence[ZRange], where: str = "") -> None:
    """Raise CoverError unless the boxes are disjoint, together are the index space, and leave the
    dims whole that are not of the roles `map` and `reduce`: shards exchange nothing here."""
    whole = ZRange.from_shape(signature.extents)
    for box in cover:
        if box.rank != whole.rank:
            raise CoverError(f"{box} has rank {box.rank}, the index space {whole}", where=where)
        if not whole.contains(box):
            raise CoverError(f"{box} leaves the index space {whole}", where=where)
        for d, dim in enumerate(signature.index):
            if dim.role in ("whole", "scan", "join") and box.shape[d] not in (0, dim.size):
                raise CoverError(
                    f"{box} cuts index dim {dim.name}, whose role is {dim.role}",
                    where=where,
                    hint=f"Let every box have 0:{dim.size} there.",
                )
    fault = cover_fault(cover, whole)
    if fault is not None:
        raise CoverError(f"the boxes are no disjoint cover: {fault}", where=where)


def without_gaps(signature: OperationSignature, box: ZRange) -> Iterator[ZRange]:
    """Parts of an index box whose images have no gaps but those that the whole images have, and
    those that the kernel skips."""
    for p, projection in enumerate((*signature.inputs, *signature.outputs)):
        skipped = signature.skips[p] if p < len(signature.skips) else ()
        for k, (row, size) in enumerate(zip(projection.matrix, projection.shape, strict=True)):
            whole = k in skipped or has_gaps(row, size, signature.extents)
            if not whole and has_gaps(row, size, box.shape):
                moving = [d for d, n in enumerate(box.shape) if n > 1]
                widest = max(moving, key=lambda d: abs(row[d]))
                for part in box.split(widest, 1):
                    yield from without_gaps(signature, part)
                return
    yield box


# Graphs


def _run(graph: BlockGraph, inputs: Sequence[Array], covers: Covers, at: Path) -> tuple[Array, ...]:
    if len(inputs) != len(graph.inputs):
        raise GraphError(f"{len(inputs)} inputs for {len(graph.inputs)}", where=graph.name)
    values: dict[int, Array] = {v: np.asarray(x) for v, x in graph.constants.items()}
    for k, (v, x) in enumerate(zip(graph.inputs, inputs, strict=True)):
        wanted = graph.values[v]
        if np.shape(x) != wanted.shape or np.asarray(x).dtype != numpy_dtype(wanted.dtype):
            raise GraphError(
                f"input {k} is {np.asarray(x).dtype}{np.shape(x)}, not {wanted}", where=graph.name
            )
        values[v] = np.asarray(x)
    for i, op in enumerate(graph.operations):
        operands = [values[v] for v in op.inputs]
        if op.regions:
            made = _region(op, operands, covers, (*at, i))
        elif op.effectful and not op.outputs:
            continue  # a print, say: nothing of it can be compared
        else:
            types = [graph.values[v] for v in op.inputs], [graph.values[v] for v in op.outputs]
            signature = registry.signature(op.kernel, op.params, *types)
            where = f"operation {(*at, i)} ({op.kernel}, {op.source})"
            cover = covers.get((*at, i))
            made = run_operation(op.kernel, op.params, signature, operands, cover, where)
        values.update(zip(op.outputs, made, strict=True))
    return tuple(values[v] for v in graph.outputs)


def _region(op: Operation, operands: Sequence[Array], covers: Covers, at: Path) -> Sequence[Array]:
    def body(r: int, *given: Array) -> tuple[Array, ...]:
        return _run(op.regions[r], given, covers, (*at, r))

    p = op.params
    if op.is_scan:
        consts, rest = operands[: p["num_consts"]], operands[p["num_consts"] :]
        carry, streams = list(rest[: p["num_carry"]]), rest[p["num_carry"] :]
        steps = range(p["length"])
        slices: list[tuple[Array, ...]] = []
        for t in reversed(steps) if p["reverse"] else steps:
            out = body(0, *consts, *carry, *(x[t] for x in streams))
            carry = list(out[: len(carry)])
            slices.append(out[len(carry) :])
        if p["reverse"]:
            slices.reverse()
        graph = op.regions[0]
        types = [graph.values[v] for v in graph.outputs[len(carry) :]]
        empty = [np.zeros((0, *t.shape), numpy_dtype(t.dtype)) for t in types]
        stacks = [np.stack(parts) for parts in zip(*slices, strict=True)] if slices else empty
        return [*carry, *stacks]
    if op.is_while:
        n, m = p["cond_nconsts"], p["body_nconsts"]
        asked, used, carry = operands[:n], operands[n : n + m], list(operands[n + m :])
        while body(0, *asked, *carry)[0]:
            carry = list(body(1, *used, *carry))
        return carry
    if op.is_branch:
        return body(min(max(int(operands[0]), 0), len(op.regions) - 1), *operands[1:])
    raise GraphError(
        f"unknown region operation {op.kernel!r}",
        where=str(op.source),
        hint=f"Regions are {REGIONS_SAID}.",
    )
