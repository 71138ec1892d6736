"""Blocks of tokens: what is made of the largest product of a program, one block of rows at a time.

A temporal split: the product's operations, those that read what it makes down to where its columns
are summed or multiplied away, and those that make what these need of the same size
(`regions.py`), become the body of a scan. One dim of rows is cut; what has it is streamed, what
sums over it is carried, in float32 at least where it starts from zero, and all else stands still.
So the logits of a loss and their derivative are never there as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims

from .large_inside import with_large_inside
from .regions import Region
from .temporal import Split, with_loop

#: The names of these changes of a program in the rules and steps of plans: of products much larger
#: than their operands, and of the program's largest as well.
RULE, OF_LARGEST = "blocks-of-rows", "blocks-of-largest"
#: Either.
RULES = frozenset((RULE, OF_LARGEST))
#: Blocks that a dim is cut into, at most. No measurement of it is kept.
_BLOCKS = 16
#: A product is worth it if it is so many times as large as its operands: logits of narrow models
#: are ten times and more. README's hidden layer is 2.7 times as large, as are 16 384 rows of logits
#: over 32 000 words at a width of 4096: its front on eight devices takes three times as long with
#: blocks, so that those of such products are another change (`with_blocks_of_largest`).
_LARGE = 4
#: There a product also is worth it that is no smaller than its operands, nor than this share of the
#: largest such product of the program.
_OF_LARGEST = 0.5
#: Products that are computed again and get loops, too, one after another.
_AGAIN = 2


def with_blocks(graph: BlockGraph) -> BlockGraph:
    """The graph with its largest product, and what reads it, in a loop over blocks of rows, in
    bodies of loops too; the same graph where there is none, or where something needs all rows at
    once. Large products that are computed once more, for the backward pass, get loops of their own.
    """
    return _with_blocks(graph, math.inf)


def with_blocks_of_largest(graph: BlockGraph) -> BlockGraph:
    """The same, where the program's largest product need only be larger than its operands."""
    return _with_blocks(graph, _OF_LARGEST * _size_of_largest(graph))


def _with_blocks(graph: BlockGraph, least: float) -> BlockGraph:
    """The graph with blocks of products that are much larger than their operands, or that have
    `least` elements and no fewer than these."""

    def largest(body: BlockGraph) -> Operation | None:
        return next(_products(body, least, again=False), None)

    def in_blocks(body: BlockGraph) -> bool:
        return _with_blocks(body, least) is not body

    inside = with_large_inside(graph, largest, in_blocks)
    made = inside.map_regions(lambda region: _with_blocks(region, least))
    graph = graph if made is inside else made
    graph = _once(graph, least)
    for _ in range(_AGAIN):
        made = _once(graph, least, again=True)
        if made is graph:
            break
        graph = _each_once(made)
    return graph


def _size_of_largest(graph: BlockGraph) -> int:
    """Elements of the largest product that is no smaller than its operands, also in bodies."""
    own = next(_products(graph, 0.0, again=False), None)
    inner = [_size_of_largest(r) for op in graph.operations for r in op.regions]
    return max([graph.values[own.outputs[0]].size if own else 0, *inner])


def _each_once(graph: BlockGraph) -> BlockGraph:
    """The graph in which equal operations are one: both loops read the same views of what enters
    them, and what these are made of moves once, as where a compiler sees that they are equal."""
    known: dict[Any, tuple[int, ...]] = {}
    to: dict[int, int] = {}
    operations = []
    for op in graph.operations:
        inputs = tuple([to.get(v, v) for v in op.inputs])
        op = op if inputs == op.inputs else replace(op, inputs=inputs)
        if op.remat is None and registry.is_repeatable(op):
            key = op.kernel, hashable(op.params), inputs
            if key in known:
                to.update(zip(op.outputs, known[key], strict=True))
                continue
            known[key] = op.outputs
        operations.append(op)
    outputs = tuple([to.get(v, v) for v in graph.outputs])
    return without_unread(replace(graph, operations=tuple(operations), outputs=outputs))


def _once(graph: BlockGraph, least: float, again: bool = False) -> BlockGraph:
    """The same of the largest product; `again`: of those that are computed again."""
    counted = with_batch_dims(graph)
    if counted is not graph:
        counted = _each_once(counted)  # what gathers and scatters count rows by is then one
    for op in _products(counted, least, again):
        for dim in _dims(counted, op):
            region = Region(counted, op, dim)
            if region.grown() and region.is_worth_it:
                try:
                    return with_loop(_split(region))
                except TemplateError:
                    continue  # A kernel cannot run on such blocks.
    return graph


def _products(graph: BlockGraph, least: float, again: bool) -> Iterator[Operation]:
    """The two largest products that are worth blocks, where there are so many."""
    found: list[tuple[int, int, Operation]] = []
    for op in graph.operations:
        if op.regions or len(op.outputs) != 1 or (again and op.remat is None):
            continue
        size = graph.values[op.outputs[0]].size
        read = sum(graph.values[v].size for v in op.inputs)
        if size < min(_LARGE * read, max(least, read)):
            continue
        if registry.signature_in(graph, op).is_product:
            found.append((-size, len(found), op))
    yield from (op for _, _, op in sorted(found, key=lambda f: f[:2])[:2])


def _dims(graph: BlockGraph, op: Operation) -> list[int]:
    """The dims of a product's result that have blocks, those of the first operand first, from the
    last one on: a batch stays whole where there is something else to cut."""
    shape = graph.values[op.outputs[0]].shape
    return [d for d in reversed(range(len(shape))) if _steps(shape[d]) > 1]


def _steps(extent: int) -> int:
    return max(k for k in range(1, _BLOCKS + 1) if extent % k == 0)


def _split(region: Region) -> Split:
    return Split(
        graph=region.graph,
        how=region.inside,
        cut=region.cut,
        stacked=region.stacked,
        summed=region.summed,
        steps=_steps(region.extent),
        source=region.product.source,
        name="blocks",
    )
