"""Between our block graphs and Loom graphs: operations, their signatures, and covers as shards.

Loom's index space counts outputs: a dim that is reduced, scanned or must stay whole is not in it,
and the projections have its full extent in their shape. `to_loom` folds such dims away, `from_loom`
puts them back. What Loom has no place for (weak types, constants, source lines, regions, the order
of inputs) goes into tags and parameters of our own, so that nothing is lost on the way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import NAMESPACE_URL, UUID, uuid5

import msgspec
import networkx as nx

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, Source, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.tracing.graph_documents import (
    Blob,
    GraphRecord,
    SourceRecord,
    SourceTable,
    constant_form,
    constant_of,
    convert,
    graph_from_record,
    graph_record,
)
from tapestry_egg.tracing.plain import check_plain, handles_in
from tapestry_egg.zspace import Projection, ZRange

from .dialects import APPLICATIONS, EXPRESSIONS
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
from .sharding import applications

#: Operation number -> boxes of its index space, as the reference executor takes them.
Covers = Mapping[tuple[int, ...], Sequence[ZRange]]

PROGRAM, VALUE, ORIGIN = "tapestry-egg:Program", "tapestry-egg:Value", "tapestry-egg:Origin"
_REGIONS = "$regions"


class ProgramTag(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """On a note: the graph's name, inputs and outputs in order, by tensor id."""

    name: str
    inputs: list[str]
    outputs: list[str]
    input_names: list[str] = []
    output_names: list[str] = []
    donated: list[bool] = []


class ValueTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On a tensor: JAX's weak typing, and its value where it is a constant."""

    weak: bool = False
    constant: bool | int | float | Blob | None = None


class OriginTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On an operation: where it comes from, and what JAX says of it."""

    source: tuple[str, int, int, str, str] | None = None
    scope: str = ""
    remat: int | None = None
    effectful: bool = False


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nested graph in the parameters of an operation, with its source lines."""

    graph: GraphRecord
    sources: list[SourceRecord] = []


_OURS: Mapping[str, Any] = {PROGRAM: ProgramTag, VALUE: ValueTag, ORIGIN: OriginTag}

#: Application expressions with what a traced program has beyond them, and the same without shards.
PROGRAMS = APPLICATIONS.extended("programs", tag_types=_OURS)
UNSHARDED = EXPRESSIONS.extended("unsharded programs", {NOTE: NoteBody}, _OURS)


def to_loom(graph: BlockGraph, covers: Covers | None = None) -> LoomGraph:
    """A block graph as a Loom graph, each operation in the shards that `covers` gives, or whole.

    Ids follow from the graph's name, so that equal graphs make equal files. Operations that read
    beyond their operands or have empty ones carry no signature. Raises GraphError for a cover that
    is none, that cuts a dim which is not in Loom's index, or that belongs to no operation.
    """
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
    if any(handles_in(value) for value in op.params.values()):
        raise GraphError("holds an object of this process", where=where)
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
        params[_REGIONS] = [_region_record(region) for region in op.regions]
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


def _unfold_box(box: ZRange, signature: OperationSignature) -> ZRange:
    starts, ends = iter(box.start), iter(box.end)
    start = tuple(next(starts) if d.role == "map" else 0 for d in signature.index)
    end = tuple(next(ends) if d.role == "map" else d.size for d in signature.index)
    return ZRange(start, end)


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


# ---- from Loom ---------------------------------------------------------------------------------


def from_loom(
    loom: LoomGraph, where: str = ""
) -> tuple[BlockGraph, dict[tuple[int, ...], tuple[ZRange, ...]]]:
    """The block graph of a Loom graph, and the covers of the operations with several shards.

    Tensors move to the origin; a selection that is a part of its tensor becomes a `slice`. Without
    our tags, tensors that nothing makes are the inputs, and those that nothing reads the outputs.
    Raises LoomError for a graph that breaks a constraint, GraphError for shards of a kernel without
    a template.
    """
    where = where or f"Loom graph {loom.id}"
    (PROGRAMS if any(loom.of_kind(APPLICATION)) else UNSHARDED).check(loom, where)
    return _Reader(loom, where).graph()


class _Reader:
    """One pass over a checked Loom graph."""

    def __init__(self, loom: LoomGraph, where: str) -> None:
        self.loom, self.where = loom, where
        self.values: list[TensorType] = []
        self.ranges: dict[str, ZRange] = {}
        self.value_of: dict[str, int] = {}
        self.constants: dict[int, Any] = {}
        self.operations: list[Operation] = []
        self.covers: dict[tuple[int, ...], tuple[ZRange, ...]] = {}
        tags = [t for n in loom.of_kind(NOTE) if (t := n.tag(PROGRAM)) is not None]
        self.tag = msgspec.convert(tags[0], ProgramTag) if tags else None

    def graph(self) -> tuple[BlockGraph, dict[tuple[int, ...], tuple[ZRange, ...]]]:
        for node in self.loom.of_kind(TENSOR):
            self._tensor(node)
        shards: dict[str, list[ZRange]] = {}
        for node in self.loom.of_kind(APPLICATION):
            tag = node.tag(IPF_INDEX)
            if tag is not None:
                box = msgspec.convert(tag, RangeRecord).range()
                shards.setdefault(body_of(node).operationId, []).append(box)
        for node in self._in_order():
            self._operation(node, shards.get(node.id, []))
        made = {v for op in self.operations for v in op.outputs}
        read = {v for op in self.operations for v in op.inputs}
        tag, count = self.tag, range(len(self.values))
        graph = BlockGraph(
            name=tag.name if tag else self.loom.id,
            values=tuple(self.values),
            operations=tuple(self.operations),
            inputs=self._named(tag.inputs)
            if tag
            else tuple(v for v in count if v not in made and v not in self.constants),
            outputs=self._named(tag.outputs)
            if tag
            else tuple(v for v in count if v in made and v not in read),
            constants=self.constants,
            input_names=tuple(tag.input_names) if tag else (),
            output_names=tuple(tag.output_names) if tag else (),
            donated=tuple(tag.donated) if tag else (),
        )
        verify_graph(graph, where=self.where)
        return graph, self.covers

    def _named(self, ids: Sequence[str]) -> tuple[int, ...]:
        for id in ids:
            if id not in self.value_of:
                raise GraphError(
                    f"the program names a tensor {id!r} that is none", where=self.where
                )
        return tuple(self.value_of[id] for id in ids)

    def _tensor(self, node: Node) -> None:
        body, tag = body_of(node), msgspec.convert(node.tag(VALUE) or {}, ValueTag)
        self.ranges[node.id] = body.range.range()
        type_ = TensorType(self.ranges[node.id].shape, body.dtype, tag.weak)
        v = self.value_of[node.id] = len(self.values)
        self.values.append(type_)
        if tag.constant is not None:
            self.constants[v] = constant_of(tag.constant, type_, f"{self.where}, {node.label}")

    def _in_order(self) -> list[Node]:
        """Operations such that every tensor is made before it is read, else as in the file."""
        nodes = list(self.loom.of_kind(OPERATION))
        bodies = [body_of(n) for n in nodes]
        makers = {
            s.tensorId: k for k, b in enumerate(bodies) for ss in b.outputs.values() for s in ss
        }
        edges: nx.DiGraph = nx.DiGraph()
        edges.add_nodes_from(range(len(nodes)))
        edges.add_edges_from(
            (makers[s.tensorId], k)
            for k, b in enumerate(bodies)
            for ss in b.inputs.values()
            for s in ss
            if s.tensorId in makers
        )
        return [nodes[k] for k in nx.lexicographical_topological_sort(edges)]

    def _operation(self, node: Node, boxes: Sequence[ZRange]) -> None:
        body = body_of(node)
        params = dict(body.params)
        where = f"{self.where}, operation {node.label or node.id}"
        documents = params.pop(_REGIONS, [])
        check_plain(params, f"{where}: params")
        records = convert(documents, list[RegionRecord], f"{where}: params.{_REGIONS}")
        regions = tuple(
            graph_from_record(r.graph, r.sources, f"{where}, region {k}")
            for k, r in enumerate(records)
        )
        tag = msgspec.convert(node.tag(ORIGIN) or {}, OriginTag)
        op = Operation(
            kernel=body.kernel,
            inputs=tuple(self._selected(s) for ss in body.inputs.values() for s in ss),
            outputs=tuple(self.value_of[s.tensorId] for ss in body.outputs.values() for s in ss),
            params=params,
            regions=regions,
            source=Source() if tag.source is None else Source(*tag.source),
            scope=tag.scope,
            remat=tag.remat,
            effectful=tag.effectful,
        )
        if len(boxes) > 1:
            types = [self.values[v] for v in op.inputs], [self.values[v] for v in op.outputs]
            signature = registry.signature(op.kernel, op.params, *types, len(regions))
            if sum(d.role == "map" for d in signature.index) != boxes[0].rank:
                raise GraphError(
                    f"the shards of {op.kernel} are of another index space than its template's",
                    where=where,
                )
            index = msgspec.convert(node.tag(IPF_INDEX), RangeRecord).range()
            home = tuple(-s for s in index.start)
            self.covers[(len(self.operations),)] = tuple(
                _unfold_box(box.translate(home), signature) for box in boxes
            )
        self.operations.append(op)

    def _selected(self, selection: SelectionRecord) -> int:
        """The value of a selection, sliced out of its tensor where the kernel expects it alone.

        Our own graphs need no slices: their kernels take whole tensors and read a part.
        """
        whole, box = self.ranges[selection.tensorId], selection.range.range()
        v = self.value_of[selection.tensorId]
        if box == whole or self.tag is not None:
            return v
        inside = box.translate(tuple(-s for s in whole.start))
        params = {
            "start_indices": list(inside.start),
            "limit_indices": list(inside.end),
            "strides": None,
        }
        self.values.append(TensorType(box.shape, self.values[v].dtype, self.values[v].weak))
        made = len(self.values) - 1
        self.operations.append(Operation("slice", (v,), (made,), params))
        return made
