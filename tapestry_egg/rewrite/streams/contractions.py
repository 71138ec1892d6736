"""A product over blocks of what it sums: the temporal split of its contracted dim.

Where devices share operands in blocks, a product gathers what it reads of them. In a loop over
blocks of the sum a step gathers one block of each, and adds to a result that is carried: operands
are never there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import isqrt

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.rows.cuts import Cut, Rows

from .temporal import Split, with_loop

#: The name of this change of a program in the rules and steps of plans.
RULE = "blocks-of-sums"
# Of these numbers no measurement is kept.

#: Blocks that a sum is cut into, at most.
_BLOCKS = 16
#: Products that are cut so, at most: those that read this share of what the largest reads.
_PRODUCTS, _SHARE = 4, 0.5


def with_blocks_of_sums(graph: BlockGraph) -> BlockGraph:
    """The graph with the products that read most in loops over blocks of their sums; the same graph
    where there is none that can be cut so."""
    products = largest_products(graph)
    least = max((_read(graph, op) for _, op in products), default=0) * _SHARE
    for _ in range(_PRODUCTS):
        made = _with_one(graph, least)
        if made is None:
            break
        graph = made
    return graph


def _with_one(graph: BlockGraph, least: float) -> BlockGraph | None:
    for k, op in largest_products(graph):
        if _read(graph, op) < least:
            break
        for rows in _sums(graph, op):
            try:
                return with_loop(_split(graph, k, op, rows))
            except TemplateError:
                continue  # A kernel cannot run on such blocks.
    return None


def _read(graph: BlockGraph, op: Operation) -> int:
    """Bytes of the operands."""
    return sum(graph.values[v].nbytes for v in op.inputs)


def largest_products(graph: BlockGraph) -> list[tuple[int, Operation]]:
    """The plain products of a program, not those of its loops, by the bytes that they read."""
    found: list[tuple[int, int]] = []
    for k, op in enumerate(graph.operations):
        if op.regions or op.remat is not None or len(op.outputs) != 1:
            continue
        if registry.signature_in(graph, op).is_product:
            found.append((-_read(graph, op), k))
    return [(k, graph.operations[k]) for _, k in sorted(found)]


def _sums(graph: BlockGraph, op: Operation) -> Iterator[Rows]:
    """How a product has as its rows what it sums over, the longest dims first."""
    sig = registry.signature_in(graph, op)
    assert sig.gemm is not None
    for index in sorted(sig.gemm.k, key=lambda d: -sig.extents[d]):
        rows = Rows.along(sig, index)
        if rows is not None and rows.summed and _steps(sig.extents[index]) > 1:
            yield rows


def _steps(extent: int) -> int:
    """No more blocks than each has rows: devices share these."""
    return max(k for k in range(1, min(_BLOCKS, isqrt(extent)) + 1) if extent % k == 0)


def _split(graph: BlockGraph, k: int, op: Operation, rows: Rows) -> Split:
    cut: dict[int, Cut] = {}
    extent = 0
    for v, at in zip(op.inputs, rows.inputs, strict=True):
        if at is not None:
            cut[v] = at
            extent = graph.values[v].shape[at.dim] // at.inner
    return Split(
        graph=graph,
        how={k: rows},
        cut=cut,
        stacked=(),
        summed=op.outputs,
        steps=_steps(extent),
        source=op.source,
        name="sums",
        in_place=True,
    )
