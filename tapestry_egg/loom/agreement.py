"""Constraints on signatures and shards: what selections must be, given the projections.

The index space of an operation is its tag `IPFIndex`, the projections are its tag `IPFSignature`.
An operation without a signature is valid, and cannot be sharded anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tapestry_egg.zspace import Projection, ZRange, ZSpaceError, cover_fault

from .constraints import Checked, selections
from .issues import ValidationIssue
from .nodes import APPLICATION, IPF_INDEX, IPF_SIGNATURE, OPERATION, Node, SignatureRecord


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
