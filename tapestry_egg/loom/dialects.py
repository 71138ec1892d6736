"""Dialects: which nodes and tags a graph may have, and what must hold of them.

EXPRESSIONS    tensors and operations (the unsharded program)
APPLICATIONS   the same with notes and applications (its shards)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tapestry_egg.zspace import Projection, ZRange, ZSpaceError, cover_fault

from .constraints import (
    Checked,
    Constraint,
    LoomError,
    ValidationIssue,
    dtypes_are_known,
    no_cycles,
    schema_issues,
    selections,
    selections_fit,
)
from .nodes import (
    APPLICATION,
    IO_SEQUENCE_POINT,
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
    SequencePoint,
    SignatureRecord,
    TensorBody,
)

# Constraints on signatures and shards: what selections must be, given the projections.
#
# The index space of an operation is its tag `IPFIndex`, the projections are its tag `IPFSignature`.
# An operation without a signature is valid, and cannot be sharded anew.


def signatures_agree(checked: Checked) -> Iterator[ValidationIssue]:
    """Every selection of an operation is the image of its whole index space.

    The signature has projections for the same names, as many of each, and comes with an index.
    """
    for node, body in checked.nodes(OPERATION):
        tags = checked.tags[node.id]
        signature, index = tags.get(IPF_SIGNATURE), tags.get(IPF_INDEX)
        if signature is None:
            continue
        if index is None:
            what = "An operation with an IPFSignature lacks an IPFIndex"
            yield checked.issue("NodeValidationError", what, node)
            continue
        yield from _images(checked, node, body, signature, index.range())


def applications_agree(checked: Checked) -> Iterator[ValidationIssue]:
    """Applications belong to an operation, select from its tensors, and inside its selections;
    every operation has at least one, and together they make its outputs, each element once."""
    shards: dict[str, list[tuple[Node, Any]]] = {n.id: [] for n, _ in checked.nodes(OPERATION)}
    operations = {n.id: (n, b) for n, b in checked.nodes(OPERATION)}
    for node, body in checked.nodes(APPLICATION):
        if body.operationId not in operations:
            what = "An application refers to no operation"
            yield checked.issue("NodeReferenceError", what, node, Reference=body.operationId)
            continue
        _, of = operations[body.operationId]
        unlike = _unlike(of, body)
        if unlike:
            yield checked.issue("NodeValidationError", unlike, node)
            continue
        shards[body.operationId].append((node, body))
        for (place, whole), (_, part) in zip(selections(of), selections(body), strict=True):
            outer, inner = whole.range.range(), part.range.range()
            if outer.rank != inner.rank or not outer.contains(inner):
                what = f"{place} of an application leaves that of its operation"
                data = {"Selection": str(inner), "Operation": str(outer)}
                yield checked.issue("NodeValidationError", what, node, **data)
    for id, own in shards.items():
        node, of = operations[id]
        if not own:
            yield checked.issue("NodeValidationError", "An operation has no application", node)
            continue
        parts = [dict(selections(body)) for _, body in own]
        for place, whole in selections(of):
            if place.startswith("outputs"):
                boxes = [part[place].range.range() for part in parts]
                fault = cover_fault(boxes, whole.range.range())
                if fault:
                    what = f"{place} is not made by the applications, each element once: {fault}"
                    yield checked.issue(
                        "NodeValidationError", what, node, Applications=[n.id for n, _ in own]
                    )


def application_indexes_agree(checked: Checked) -> Iterator[ValidationIssue]:
    """The applications of an operation with a signature have indexes that cover its index space,
    each point once, and select exactly the images of their index."""
    for node, _ in checked.nodes(OPERATION):
        tags = checked.tags[node.id]
        signature, index = tags.get(IPF_SIGNATURE), tags.get(IPF_INDEX)
        if signature is None or index is None:
            continue
        boxes = []
        own = checked.shards.get(node.id, [])
        for shard, body in own:
            box = checked.tags[shard.id].get(IPF_INDEX)
            if box is None:
                what = "An application of an operation with an IPFSignature lacks an IPFIndex"
                yield checked.issue("NodeValidationError", what, shard)
                continue
            boxes.append(box.range())
            yield from _images(checked, shard, body, signature, box.range())
        if own and len(boxes) == len(own):
            fault = cover_fault(boxes, index.range())
            if fault:
                what = f"The indexes of the applications do not cover the operation's: {fault}"
                yield checked.issue(
                    "NodeValidationError", what, node, Applications=[n.id for n, _ in own]
                )


def _images(
    checked: Checked, node: Node, body: Any, signature: SignatureRecord, index: ZRange
) -> Iterator[ValidationIssue]:
    fault = _unlike(body, signature)
    if fault:
        yield checked.issue("NodeValidationError", f"{fault}, in the IPFSignature", node)
        return
    for side in ("inputs", "outputs"):
        for name, listed in getattr(body, side).items():
            records = getattr(signature, side)[name]
            for k, (selection, record) in enumerate(zip(listed, records, strict=True)):
                box, place = selection.range.range(), f"{side}.{name}[{k}]"
                try:
                    projection: Projection = record.projection(index.rank)
                except ZSpaceError as e:
                    yield checked.issue(
                        "NodeValidationError", f"The projection of {place}: {e.what}", node
                    )
                    continue
                image = projection.image(index)
                if image != box:
                    yield checked.issue(
                        "NodeValidationError",
                        f"{place} is not the image of the index",
                        node,
                        Selection=str(box),
                        Image=str(image),
                        Index=str(index),
                    )


def _unlike(one: Any, other: Any) -> str:
    """How the names, counts or tensors of two sets of selections differ, `` where they do not."""
    for side in ("inputs", "outputs"):
        mine, theirs = getattr(one, side), getattr(other, side)
        if set(mine) != set(theirs):
            return f"{side} have names {sorted(mine)} and {sorted(theirs)}"
        for name in mine:
            if len(mine[name]) != len(theirs[name]):
                return f"{side}.{name} has {len(mine[name])} and {len(theirs[name])} entries"
            for k, (a, b) in enumerate(zip(mine[name], theirs[name], strict=True)):
                if getattr(a, "tensorId", 0) != getattr(b, "tensorId", getattr(a, "tensorId", 0)):
                    return f"{side}.{name}[{k}] is of another tensor"
    return ""


@dataclass(frozen=True)
class Dialect:
    """A set of node types and tag types (full name -> record class) with constraints."""

    name: str
    node_types: Mapping[str, Any]
    tag_types: Mapping[str, Any] = field(default_factory=dict)
    constraints: tuple[Constraint, ...] = ()

    def extended(
        self,
        name: str,
        node_types: Mapping[str, Any] | None = None,
        tag_types: Mapping[str, Any] | None = None,
        constraints: tuple[Constraint, ...] = (),
    ) -> Dialect:
        """A dialect that has all of this one and more."""
        return Dialect(
            name,
            {**self.node_types, **(node_types or {})},
            {**self.tag_types, **(tag_types or {})},
            (*self.constraints, *constraints),
        )

    def issues(self, graph: LoomGraph) -> list[ValidationIssue]:
        """All that is wrong with a graph.

        The constraints are asked only of a graph whose nodes all fit their schema.
        """
        checked = Checked(graph, self.node_types, self.tag_types)
        found = list(schema_issues(checked))
        if found:
            return found
        for constraint in self.constraints:
            found.extend(constraint(checked))
        return found

    def check(self, graph: LoomGraph, where: str = "") -> LoomGraph:
        """The graph itself. Raises LoomError with every issue where there is one."""
        found = self.issues(graph)
        if found:
            raise LoomError(found, where=where or f"graph {graph.id}")
        return graph


EXPRESSIONS = Dialect(
    "operation expressions",
    {TENSOR: TensorBody, OPERATION: OperationBody},
    {IPF_SIGNATURE: SignatureRecord, IPF_INDEX: RangeRecord, IO_SEQUENCE_POINT: SequencePoint},
    (dtypes_are_known, selections_fit, no_cycles, signatures_agree),
)

APPLICATIONS = EXPRESSIONS.extended(
    "application expressions",
    {NOTE: NoteBody, APPLICATION: ApplicationBody},
    constraints=(applications_agree, application_indexes_agree),
)
