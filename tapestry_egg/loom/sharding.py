"""Shards by construction: the applications that a signature gives for a cover of its index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from uuid import UUID, uuid5

import msgspec

from tapestry_egg.errors import GraphError
from tapestry_egg.zspace import ZRange, cover_fault

from .nodes import (
    APPLICATION,
    IPF_INDEX,
    IPF_SIGNATURE,
    OPERATION,
    ApplicationBody,
    LoomGraph,
    Node,
    RangeRecord,
    SelectionRecord,
    SignatureRecord,
    body_of,
    node_of,
    range_record,
)


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
