"""From block graphs to Loom graphs: operations, their signatures, and covers as shards.

Loom's index space counts outputs: a dim that is reduced, scanned or must stay whole is not in it,
and the projections have its full extent in their shape. Such dims are folded away here; `read.py`
puts them back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.executor import Covers
from tapestry_egg.tracing.graph_documents import SourceTable, constant_form, graph_record
from tapestry_egg.tracing.plain import handles_in
from tapestry_egg.tracing.trace import Program
from tapestry_egg.zspace import Projection, ZRange, cover_fault

from .nodes import (
    APPLICATION,
    IPF_INDEX,
    IPF_SIGNATURE,
    NOTE,
    OPERATION,
    TENSOR,
    ApplicationBody,
    LoomGraph,
    Node,
    NoteBody,
    OperationBody,
    RangeRecord,
    SelectionRecord,
    SignatureRecord,
    TensorBody,
    body_of,
    node_of,
    projection_record,
    range_record,
)
from .read import (
    ORIGIN,
    PROGRAM,
    REGIONS,
    VALUE,
    OriginTag,
    ProgramTag,
    RegionRecord,
    ValueTag,
)


def to_loom(given: Program | BlockGraph, covers: Covers | None = None) -> LoomGraph:
    """A program as a Loom graph, each operation in the shards that `covers` gives, or whole.

    Ids follow from the graph's name, so that equal graphs make equal files. Operations that read
    beyond their operands or have empty ones carry no signature. Raises GraphError for a cover that
    is none, that cuts a dim which is not in Loom's index, or that belongs to no operation.
    """
    program = given if isinstance(given, Program) else Program.of(given)
    graph, flat = program.graph, Program.of(program.graph)
    nested = (program.in_tree, program.out_tree) != (flat.in_tree, flat.out_tree)
    wanted = dict(covers or {})
    for path in wanted:
        if len(path) != 1 or not 0 <= path[0] < len(graph.operations):
            raise GraphError(
                f"there is no operation at {path} to shard",
                where=graph.name,
                hint="Loom has no regions: only operations of the outer graph have shards.",
            )
    space = uuid5(NAMESPACE_URL, f"tapestry-egg/{graph.name}")
    ids = [str(uuid5(space, f"value {v}")) for v in range(len(graph.values))]
    names = dict(zip(graph.inputs, graph.input_names, strict=False))
    nodes = [
        node_of(
            str(uuid5(space, "program")),
            NOTE,
            NoteBody(message=f"The program {graph.name}, written by tapestry-egg."),
            tags={
                PROGRAM: ProgramTag(
                    name=graph.name,
                    inputs=[ids[v] for v in graph.inputs],
                    outputs=[ids[v] for v in graph.outputs],
                    input_names=list(graph.input_names),
                    output_names=list(graph.output_names),
                    donated=list(graph.donated),
                    in_tree=program.in_tree if nested else None,
                    out_tree=program.out_tree if nested else None,
                )
            },
        )
    ]
    for v, tensor in enumerate(graph.values):
        constant = constant_form(graph.constants[v], tensor) if v in graph.constants else None
        value = ValueTag(weak=tensor.weak, constant=constant)
        body = TensorBody(dtype=tensor.dtype, range=range_record(ZRange.from_shape(tensor.shape)))
        tags = {VALUE: value} if value != ValueTag() else {}
        nodes.append(node_of(ids[v], TENSOR, body, label=names.get(v) or f"%{v}", tags=tags))
    for i, op in enumerate(graph.operations):
        made = _operation_nodes(graph, i, op, ids, str(uuid5(space, f"operation {i}")))
        nodes.append(made[0])
        nodes.extend(_shards(made[0], made[1], wanted.get((i,))))
    return LoomGraph(id=str(space), nodes=tuple(nodes))


def _operation_nodes(
    graph: BlockGraph, number: int, op: Operation, ids: Sequence[str], id: str
) -> tuple[Node, OperationSignature | None]:
    where = f"{graph.name}, operation {number} ({op.kernel}, {op.source})"
    held = [name for name, value in op.params.items() if handles_in(value)]
    if held:
        raise GraphError(f"holds an object of this process ({', '.join(held)})", where=where)
    ins = [graph.values[v] for v in op.inputs]
    outs = [graph.values[v] for v in op.outputs]
    signature = registry.signature(op.kernel, op.params, ins, outs, len(op.regions))
    stripped = _stripped(signature)
    index = ZRange.from_shape([d.size for d in signature.index if d.role == "map"])
    folded = [_folded(p, signature) for p in (*signature.inputs, *signature.outputs)]
    boxes = (
        [ZRange.from_shape(t.shape) for t in (*ins, *outs)]
        if stripped
        else [p.image(index) for p in folded]
    )
    selected = [
        SelectionRecord(tensorId=ids[v], range=range_record(box))
        for v, box in zip((*op.inputs, *op.outputs), boxes, strict=True)
    ]
    arrange = _arrangement(op, ins, outs)
    params = dict(op.params)
    if op.regions:
        params[REGIONS] = [_region_record(region) for region in op.regions]
    body = OperationBody(
        kernel=op.kernel,
        params=params,
        inputs=_arranged(arrange[0], selected[: len(ins)]),
        outputs=_arranged(arrange[1], selected[len(ins) :]),
    )
    source = op.source
    origin = OriginTag(
        source=None
        if source == Source()
        else (source.file, source.line, source.column, source.function, source.text),
        scope=op.scope,
        remat=op.remat,
        effectful=op.effectful,
        places=None
        if op.places is None
        else [(p.file, p.line, p.column, p.function, p.text) for p in op.places],
    )
    tags: dict[str, Any] = {} if origin == OriginTag() else {ORIGIN: origin}
    if not stripped:
        records = [projection_record(p) for p in folded]
        tags[IPF_INDEX] = range_record(index)
        tags[IPF_SIGNATURE] = SignatureRecord(
            inputs=_arranged(arrange[0], records[: len(ins)]),
            outputs=_arranged(arrange[1], records[len(ins) :]),
        )
    node = node_of(id, OPERATION, body, label=op.kernel, tags=tags)
    return node, None if stripped else signature


def _region_record(region: BlockGraph) -> dict[str, Any]:
    sources = SourceTable()
    record = graph_record(region, sources)
    made = RegionRecord(graph=record, sources=sources.rows)
    return msgspec.to_builtins(made)  # type: ignore[no-any-return]


def _shards(
    node: Node, signature: OperationSignature | None, cover: Sequence[ZRange] | None
) -> tuple[Node, ...]:
    if signature is not None:
        index = ZRange.from_shape(signature.extents)
        return applications(node, [_fold_box(b, signature) for b in cover or [index]])
    if cover is not None and len(cover) > 1:
        raise GraphError("has no signature and cannot be sharded", where=f"operation {node.label}")
    body = body_of(node)
    whole = ApplicationBody(operationId=node.id, inputs=body.inputs, outputs=body.outputs)
    return (node_of(str(uuid5(UUID(node.id), "whole")), APPLICATION, whole),)


def _stripped(signature: OperationSignature) -> bool:
    """Whether the projections cannot say what is read: beyond a tensor, or of an empty one."""
    everything = (*signature.inputs, *signature.outputs)
    return (
        any(o is not None for o in signature.outside)
        or ZRange.from_shape(signature.extents).is_empty
        or any(0 in p.shape for p in everything)
    )


def _folded(p: Projection, signature: OperationSignature) -> Projection:
    """The projection of the `map` dims alone, the others at their full extent."""
    keep = [d for d, dim in enumerate(signature.index) if dim.role == "map"]
    fold = [d for d in range(len(signature.index)) if d not in keep]
    reach = [[row[d] * (signature.index[d].size - 1) for d in fold] for row in p.matrix]
    return Projection(
        tuple(tuple(row[d] for d in keep) for row in p.matrix),
        tuple(b + sum(min(r, 0) for r in k) for b, k in zip(p.offset, reach, strict=True)),
        tuple(s + sum(abs(r) for r in k) for s, k in zip(p.shape, reach, strict=True)),
        index_rank=len(keep),
    )


def _fold_box(box: ZRange, signature: OperationSignature) -> ZRange:
    if box.rank != len(signature.index):
        raise GraphError(f"{box} is no box of an index space of {len(signature.index)} dims")
    for d, dim in enumerate(signature.index):
        if dim.role != "map" and (box.start[d], box.end[d]) != (0, dim.size):
            raise GraphError(
                f"{box} cuts index dim {dim.name}, whose role is {dim.role}",
                where=f"operation {signature.kernel}",
                hint="Loom's index counts outputs; only dims that reach them can be cut.",
            )
    keep = [d for d, dim in enumerate(signature.index) if dim.role == "map"]
    return ZRange(tuple(box.start[d] for d in keep), tuple(box.end[d] for d in keep))


def _arrangement(
    op: Operation, ins: Sequence[TensorType], outs: Sequence[TensorType]
) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Names of operands and results, with the number of tensors under each: the template's."""
    entry = None if op.regions else registry.entry(op.kernel, op.params, ins, outs)
    if entry is None:
        return [("operands", len(ins))], [("results", len(outs))]
    spare_in, spare_out = len(ins) - len(entry.inputs) + 1, len(outs) - len(entry.outputs) + 1
    return (
        [(o.name, spare_in if o.many else 1) for o in entry.inputs],
        [(o.name, 1 if o.count is None else spare_out) for o in entry.outputs],
    )


def _arranged(names: Sequence[tuple[str, int]], values: Sequence[Any]) -> dict[str, list[Any]]:
    out, at = {}, 0
    for name, count in names:
        if count:
            out[name] = list(values[at : at + count])
        at += count
    return out


# Shards by construction: the applications that a signature gives for a cover of its index.


def sharded(graph: LoomGraph, operation: str, cover: Sequence[ZRange]) -> LoomGraph:
    """The graph with the applications of one operation replaced by those of a cover of its index.

    Raises GraphError for an operation without a signature, which cannot be sharded anew, and for
    boxes that are not a disjoint and exact cover.
    """
    node = graph.by_id().get(operation)
    if node is None or node.kind != OPERATION:
        raise GraphError(f"there is no operation {operation}", where=f"graph {graph.id}")
    kept = [n for n in graph.nodes if n.kind != APPLICATION or body_of(n).operationId != operation]
    return LoomGraph(id=graph.id, nodes=(*kept, *applications(node, cover)))


def applications(node: Node, cover: Sequence[ZRange]) -> tuple[Node, ...]:
    """The applications of an operation, one per box; every selection is the image of its box.

    Their ids follow from the operation's id and the box.
    """
    where = f"operation {node.label or node.id}"
    if node.tag(IPF_SIGNATURE) is None or node.tag(IPF_INDEX) is None:
        raise GraphError(
            "has no signature and cannot be sharded",
            where=where,
            hint="Its tags must be IPFSignature and IPFIndex.",
        )
    signature = msgspec.convert(node.tag(IPF_SIGNATURE), SignatureRecord)
    index = msgspec.convert(node.tag(IPF_INDEX), RangeRecord).range()
    fault = cover_fault(list(cover), index)
    if fault:
        raise GraphError(f"not a cover of its index: {fault}", where=where)
    body = body_of(node)
    return tuple(
        node_of(
            str(uuid5(UUID(node.id), str(box))),
            APPLICATION,
            ApplicationBody(
                operationId=node.id,
                inputs=_selected(body.inputs, signature.inputs, box),
                outputs=_selected(body.outputs, signature.outputs, box),
            ),
            tags={IPF_INDEX: range_record(box)},
        )
        for box in cover
    )


def _selected(selections: Any, projections: Any, box: ZRange) -> dict[str, list[SelectionRecord]]:
    return {
        name: [
            SelectionRecord(
                tensorId=selection.tensorId,
                range=range_record(record.projection(box.rank).image(box)),
            )
            for selection, record in zip(listed, projections[name], strict=True)
        ]
        for name, listed in selections.items()
    }
