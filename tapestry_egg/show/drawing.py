"""Drawings of programs and plans in files: SVG whose boxes open, or DOT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.reference.executor import Covers
from tapestry_egg.zspace import ZRange

from .pages import graph_pages, plan_pages, signature_of
from .picture import Page, dot_text
from .picture_svg import drawn_page, pages_svg

if TYPE_CHECKING:
    from tapestry_egg.plans.plan import Plan


def draw(
    graph: BlockGraph,
    path: str | Path,
    covers: Covers | None = None,
    operations: range | None = None,
) -> Path:
    """Draw a program into a file: `.svg`, or `.dot` for the text that Graphviz reads.

    Returns the path. See `graph_pages` for the rest. Raises GraphError for other endings.
    """
    return _write(path, lambda: graph_pages(graph, covers, operations))


def draw_plan(plan: Plan, path: str | Path) -> Path:
    """The same of a plan."""
    return _write(path, lambda: plan_pages(plan))


def _write(path: str | Path, made: Callable[[], Sequence[Page]]) -> Path:
    ending = Path(path).suffix.lower()
    if ending not in ("", ".svg", ".dot", ".gv"):
        raise GraphError(
            f"a graph cannot be drawn as {ending}",
            where=str(path),
            hint="Call the file .svg, or .dot for Graphviz: `dot -Tpng graph.dot -o graph.png`.",
        )
    pages = made()
    if ending in (".dot", ".gv"):
        text = dot_text(pages)
    else:
        by = {page.id: page for page in pages}
        text = pages_svg([drawn_page(page, by) for page in pages], alone=True)
    write_atomic(Path(path), text)
    return Path(path)


def plan_covers(plan: Plan) -> dict[tuple[int, ...], tuple[ZRange, ...]]:
    """The blocks that a plan cuts each operation of its graph into, one per part of the mesh.

    Operations of regions are left out.
    """
    out: dict[tuple[int, ...], tuple[ZRange, ...]] = {}
    graph = plan.body.graph
    for i, (op, strategy) in enumerate(zip(graph.operations, plan.body.strategies, strict=True)):
        if op.regions or not any(strategy.cuts):
            continue
        boxes = [ZRange.from_shape(signature_of(graph, op).extents)]
        for d, axes in enumerate(strategy.cuts):
            if axes:
                boxes = [b for box in boxes for b in box.blocks(d, plan.mesh.parts(axes))]
        out[i,] = tuple(boxes)
    return out


def parse_cover(graph: BlockGraph, text: str) -> tuple[tuple[int, ...], tuple[ZRange, ...]]:
    """A cover as people write it: `3:m=2,k=4` cuts operation 3 into 2 by 4 equal parts.

    Dims have the names of the operation's template. Raises GraphError where there is no such
    operation or dim.
    """
    number, _, rest = text.partition(":")
    if not number.isdigit() or int(number) >= len(graph.operations):
        raise GraphError(
            f"{text!r} begins with no operation",
            where=graph.name,
            hint="Write NUMBER:DIM=PARTS,...; `tapestry-egg show` lists the operations from 0.",
        )
    op = graph.operations[int(number)]
    signature = signature_of(graph, op)
    names = [d.name for d in signature.index]
    counts = [1] * len(names)
    for entry in filter(None, (e.strip() for e in rest.split(","))):
        name, _, parts = entry.partition("=")
        if name not in names or not parts.isdigit() or int(parts) < 1:
            raise GraphError(
                f"{entry!r} cuts no index dim of {op.kernel}",
                where=f"{graph.name}, operation {number}",
                hint=f"Its dims are {', '.join(names) or 'none'}; write DIM=PARTS.",
            )
        counts[names.index(name)] *= int(parts)
    boxes = ZRange.from_shape(signature.extents).sections(counts)
    return (int(number),), tuple(box for box in boxes if not box.is_empty)
