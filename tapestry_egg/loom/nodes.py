"""The Loom form of a graph: nodes with a type, a body and tags, as JSON with schema names.

    {"id": uuid, "nodes": [{"id": uuid, "type": uri, "label"?, "body": {..}, "tags"?: {uri: {..}}}]}

Edges are not nodes: operations and applications name the tensors that they select from. An
*operation* is a kernel applied to selections of tensors, an *application* one shard of it. The
schema is that of Tapestry's Loom, version 2024-01; `loom:Tensor` is short for the full name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from tapestry_egg.errors import GraphError
from tapestry_egg.packed import write_packed
from tapestry_egg.zspace import Projection, ZRange, ZSpaceError

SCHEMA = "http://tensortapestry.org/schemas/loom/2024-01/"
NODES, TAGS = f"{SCHEMA}node_types.jsd#/nodes/", f"{SCHEMA}tag_types.jsd#/tags/"
NOTE, TENSOR = f"{NODES}Note", f"{NODES}Tensor"
OPERATION, APPLICATION = f"{NODES}Operation", f"{NODES}Application"
IPF_SIGNATURE, IPF_INDEX = f"{TAGS}IPFSignature", f"{TAGS}IPFIndex"
IO_SEQUENCE_POINT = f"{TAGS}IOSequencePoint"

_Name = Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z_][a-zA-Z0-9_]*$")]


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class RangeRecord(_Record, frozen=True):
    """A half-open box: `start`, and `end` beyond the last point."""

    start: list[int]
    end: list[int]

    def range(self) -> ZRange:
        """Raises ZSpaceError where the two do not make a range."""
        return ZRange(tuple(self.start), tuple(self.end))


class AffineMapRecord(_Record, frozen=True):
    """A·x + b, with one row of `projection` per tensor dim."""

    projection: list[list[int]]
    offset: list[int]


class ProjectionRecord(_Record, frozen=True):
    """An index projection function: the box of `shape` at the image of an index point."""

    affineMap: AffineMapRecord
    shape: list[int]

    def projection(self, index_rank: int) -> Projection:
        """Raises ZSpaceError where the pieces do not fit together or have another index rank."""
        made = Projection(
            tuple(tuple(row) for row in self.affineMap.projection),
            tuple(self.affineMap.offset),
            tuple(self.shape),
            index_rank=index_rank,
        )
        if any(s < 1 for s in made.shape):
            raise ZSpaceError(f"shape {made.shape} of a projection has an extent below 1")
        return made


class SignatureRecord(_Record, frozen=True):
    """Projections of every selection of an operation, in the arrangement of the selections."""

    inputs: dict[_Name, list[ProjectionRecord]]
    outputs: dict[_Name, list[ProjectionRecord]]


class SelectionRecord(_Record, frozen=True):
    """A box of a tensor."""

    tensorId: str
    range: RangeRecord


Selections = dict[_Name, Annotated[list[SelectionRecord], msgspec.Meta(min_length=1)]]


class NoteBody(_Record, frozen=True):
    """A remark."""

    message: str


class TensorBody(_Record, frozen=True):
    """A tensor: its dtype and the box of coordinates that it has."""

    dtype: str
    range: RangeRecord


class OperationBody(_Record, frozen=True, omit_defaults=True):
    """A kernel applied to selections."""

    kernel: str
    params: dict[str, Any] = {}
    inputs: Selections = {}
    outputs: Selections = {}


class ApplicationBody(_Record, frozen=True, omit_defaults=True):
    """One shard of an operation."""

    operationId: str
    inputs: Selections = {}
    outputs: Selections = {}


class SequencePoint(_Record, frozen=True):
    """Marks what exchanges data with the world, in strict order."""


class Node(_Record, frozen=True, omit_defaults=True):
    """One node; `body` and the values of `tags` are plain data until a dialect has checked them."""

    id: str
    type: str
    label: str | None = None
    body: Any = None
    tags: dict[str, Any] = {}

    @property
    def kind(self) -> str:
        """The full name of its type."""
        return full_name(self.type)

    def tag(self, name: str) -> Any:
        """The value of a tag, by full or short name; None where it has none."""
        for key, value in self.tags.items():
            if full_name(key) == full_name(name):
                return value
        return None

    def summary(self) -> dict[str, Any]:
        """What an issue says of it."""
        label = {} if self.label is None else {"label": self.label}
        return {"id": self.id, **label, "type": self.type}


class LoomGraph(_Record, frozen=True):
    """A graph: an id, and its nodes in any order."""

    id: str
    nodes: tuple[Node, ...] = ()

    def of_kind(self, kind: str) -> Iterator[Node]:
        """The nodes of a type, by full name."""
        return (node for node in self.nodes if node.kind == kind)

    def by_id(self) -> dict[str, Node]:
        """Id -> node."""
        return {node.id: node for node in self.nodes}


_BODIES: Mapping[str, Any] = {
    NOTE: NoteBody,
    TENSOR: TensorBody,
    OPERATION: OperationBody,
    APPLICATION: ApplicationBody,
}


def full_name(name: str) -> str:
    """`loom:Tensor` and `loom:IPFIndex` as full names; anything else as it is."""
    if not name.startswith("loom:"):
        return name
    short = name.removeprefix("loom:")
    tag = f"{TAGS}{short}"
    return tag if tag in (IPF_SIGNATURE, IPF_INDEX, IO_SEQUENCE_POINT) else f"{NODES}{short}"


def body_of(node: Node) -> Any:
    """The body of a node of one of the four types, typed. Raises msgspec.ValidationError."""
    return msgspec.convert(node.body, _BODIES[node.kind])


def node_of(
    id: str,
    kind: str,
    body: msgspec.Struct,
    *,
    label: str | None = None,
    tags: Mapping[str, Any] | None = None,
) -> Node:
    """A node with a typed body; tags may be typed too."""
    plain = {k: msgspec.to_builtins(v) for k, v in (tags or {}).items()}
    return Node(id=id, type=kind, label=label, body=msgspec.to_builtins(body), tags=plain)


def range_record(box: ZRange) -> RangeRecord:
    """A range as Loom has it."""
    return RangeRecord(start=list(box.start), end=list(box.end))


def projection_record(p: Projection) -> ProjectionRecord:
    """A projection as Loom has it; of a rank 0 tensor it does not say the index rank."""
    affine = AffineMapRecord(projection=[list(r) for r in p.matrix], offset=list(p.offset))
    return ProjectionRecord(affineMap=affine, shape=list(p.shape))


# ---- JSON --------------------------------------------------------------------------------------


def loom_from_json(document: object, where: str = "$") -> LoomGraph:
    """A graph from plain data. Bodies stay as they are; `Dialect.issues` checks them.

    Raises GraphError with the JSON path of what is no graph.
    """
    try:
        return msgspec.convert(document, LoomGraph)
    except msgspec.ValidationError as e:
        what, _, path = str(e).partition(" - at ")
        at = path.strip("`").removeprefix("$")
        raise GraphError(f"not a Loom graph: {what}", where=where + at) from None
    except RecursionError:
        raise GraphError("nested too deeply", where=where) from None


def loom_to_json(graph: LoomGraph) -> dict[str, Any]:
    """A graph as plain data, fields without content left out."""
    return {"id": graph.id, "nodes": [msgspec.to_builtins(node) for node in graph.nodes]}


def loom_text(graph: LoomGraph) -> str:
    """A graph as the text of a JSON file, one node per line."""
    lines = ",\n".join(msgspec.json.encode(node).decode() for node in graph.nodes)
    head = msgspec.json.encode(graph.id).decode()
    return f'{{"id": {head}, "nodes": [\n{lines}\n]}}\n'


def write_loom(graph: LoomGraph, path: str | Path) -> None:
    """Write a graph to a JSON file, whole or not at all; compressed where its name ends in `.gz`.

    `te.load` reads it back.
    """
    write_packed(path, loom_text(graph).encode())
