"""From Loom graphs, ours or of others, to block graphs: nothing in a file is ever executed.

The dims that Loom's index space leaves out (`write.py`) come back from the kernels' templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
    constant_of,
    convert,
    graph_from_record,
    program_of,
    type_of_text,
    type_text,
)
from tapestry_egg.tracing.plain import check_params
from tapestry_egg.tracing.spelled import Spelled
from tapestry_egg.tracing.trace import Program
from tapestry_egg.zspace import ZRange

from .dialects import APPLICATIONS, EXPRESSIONS
from .nodes import (
    APPLICATION,
    IPF_INDEX,
    NOTE,
    OPERATION,
    TENSOR,
    LoomGraph,
    Node,
    NoteBody,
    RangeRecord,
    SelectionRecord,
    body_of,
    loom_from_json,
)


def from_loom(
    loom: LoomGraph, where: str = ""
) -> tuple[BlockGraph, dict[tuple[int, ...], tuple[ZRange, ...]]]:
    """The block graph of a Loom graph, and the covers of the operations with several shards.

    Tensors move to the origin; a selection that is a part of its tensor becomes a `slice`. Without
    our tags, tensors that nothing makes are the inputs, and those that nothing reads the outputs.
    Raises LoomError for a graph that breaks a constraint, GraphError for shards of a kernel without
    a template.
    """
    program, covers = program_from_loom(loom, where)
    return program.graph, covers


def program_from_loom(
    loom: LoomGraph, where: str = "", *, shards: bool = True
) -> tuple[Program, dict[tuple[int, ...], tuple[ZRange, ...]]]:
    """The same, with the pytrees that the program takes and gives; those of others are flat.

    `where` names the document, as in `g.json: $`: errors extend it by the JSON path of the fault.
    Without `shards` there are no covers, and kernels with shards need no template.
    """
    where = where or f"Loom graph {loom.id}: $"
    (PROGRAMS if any(loom.of_kind(APPLICATION)) else UNSHARDED).check(loom, where)
    return _Reader(loom, where, shards).program()


def program_from_document(
    document: Mapping[str, Any], where: str, *, shards: bool
) -> tuple[Program, dict[tuple[int, ...], tuple[ZRange, ...]]]:
    """The same of a Loom graph as JSON."""
    return program_from_loom(loom_from_json(document, where), where, shards=shards)


class _Reader:
    """One pass over a checked Loom graph."""

    def __init__(self, loom: LoomGraph, where: str, shards: bool) -> None:
        self.loom, self.where, self.shards = loom, where, shards
        self.values: list[TensorType] = []
        self.ranges: dict[str, ZRange] = {}
        self.value_of: dict[str, int] = {}
        self.constants: dict[int, Any] = {}
        self.operations: list[Operation] = []
        self.covers: dict[tuple[int, ...], tuple[ZRange, ...]] = {}
        self.place = {node.id: f"{where}.nodes[{k}]" for k, node in enumerate(loom.nodes)}
        notes = [n for n in loom.of_kind(NOTE) if n.tag(PROGRAM) is not None]
        self.tag = msgspec.convert(notes[0].tag(PROGRAM), ProgramTag) if notes else None
        self.tag_place = f"{self.place[notes[0].id]}.tags['{PROGRAM}']" if notes else where

    def program(self) -> tuple[Program, dict[tuple[int, ...], tuple[ZRange, ...]]]:
        graph, covers = self.graph()
        if self.tag is None or self.tag.in_tree is None:
            return Program.of(graph), covers
        trees = self.tag.in_tree, self.tag.out_tree
        return program_of(graph, *trees, self.tag_place), covers

    def graph(self) -> tuple[BlockGraph, dict[tuple[int, ...], tuple[ZRange, ...]]]:
        for node in self.loom.of_kind(TENSOR):
            self._tensor(node)
        shards: dict[str, list[ZRange]] = {}
        for node in self.loom.of_kind(APPLICATION) if self.shards else ():
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
                    f"the program names a tensor {id!r} that is none", where=self.tag_place
                )
        return tuple(self.value_of[id] for id in ids)

    def _tensor(self, node: Node) -> None:
        body, tag = body_of(node), msgspec.convert(node.tag(VALUE) or {}, ValueTag)
        place = self.place[node.id]
        self.ranges[node.id] = body.range.range()
        type_ = TensorType(self.ranges[node.id].shape, body.dtype, tag.weak)
        type_of_text(type_text(type_), f"{place}.body")  # bytes that can be counted
        v = self.value_of[node.id] = len(self.values)
        self.values.append(type_)
        if tag.constant is not None:
            self.constants[v] = constant_of(
                tag.constant, type_, f"{place}.tags['{VALUE}'].constant"
            )

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
        where = f"{self.place[node.id]}.body.params"
        documents = params.pop(REGIONS, [])
        check_params(params, where)
        records = convert(documents, list[RegionRecord], f"{where}.{REGIONS}")
        regions = tuple(
            graph_from_record(r.graph, r.sources, f"{where}.{REGIONS}[{k}].graph")
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
            places=None if tag.places is None else tuple(Source(*p) for p in tag.places),
        )
        if len(boxes) > 1:
            types = [self.values[v] for v in op.inputs], [self.values[v] for v in op.outputs]
            signature = registry.signature(op.kernel, op.params, *types, len(regions))
            if sum(d.role == "map" for d in signature.index) != boxes[0].rank:
                raise GraphError(
                    f"the shards of {op.kernel} are of another index space than its template's",
                    where=self.place[node.id],
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
        spelled = Spelled(self.values, operations=self.operations)
        return spelled.sliced(v, inside.start, inside.end)


def _unfold_box(box: ZRange, signature: OperationSignature) -> ZRange:
    starts, ends = iter(box.start), iter(box.end)
    start = tuple(next(starts) if d.role == "map" else 0 for d in signature.index)
    end = tuple(next(ends) if d.role == "map" else d.size for d in signature.index)
    return ZRange(start, end)


# What a program has beyond Loom: tags of our own, and the dialects of graphs that may have them.
#
# Weak types, constants, source lines, regions, the order of inputs and pytrees have no place in
# Loom. They go into tags, and into a parameter for regions, so that nothing is lost on the way.


PROGRAM, VALUE, ORIGIN = "tapestry-egg:Program", "tapestry-egg:Value", "tapestry-egg:Origin"
REGIONS = "$regions"


class ProgramTag(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """On a note: the graph's name, inputs and outputs in order, by tensor id; the pytrees that the
    program takes and gives, where it takes and gives other than flat tuples."""

    name: str
    inputs: list[str]
    outputs: list[str]
    input_names: list[str] = []
    output_names: list[str] = []
    donated: list[bool] = []
    in_tree: Any = None
    out_tree: Any = None


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
    places: list[SourceRecord] | None = None


class RegionRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A nested graph in the parameters of an operation, with its source lines."""

    graph: GraphRecord
    sources: list[SourceRecord] = []


_OURS: Mapping[str, Any] = {PROGRAM: ProgramTag, VALUE: ValueTag, ORIGIN: OriginTag}

#: Application expressions with what a traced program has beyond them, and the same without shards.
PROGRAMS = APPLICATIONS.extended("programs", tag_types=_OURS)
UNSHARDED = EXPRESSIONS.extended("unsharded programs", {NOTE: NoteBody}, _OURS)
