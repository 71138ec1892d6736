"""Blocks of tokens: what is made of the largest product of a program, one block of rows at a time.

A temporal split: the product's operations, those that read what it makes down to where its columns
are summed or multiplied away, and those that make what these need of the same size
(`regions.py`), become the body of a scan. One dim of rows is cut; what has it is streamed, what
sums over it is carried, in float32 at least where it starts from zero, and all else stands still.
So the logits of a loss and their derivative are never there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims

from .regions import Region
from .temporal import Split, with_loop

#: The name of this change of a program in the rules and steps of plans.
RULE = "blocks-of-rows"
#: Blocks that a dim is cut into, at most. No measurement of it is kept.
_BLOCKS = 16
#: A product is worth it if it is so many times as large as its operands: logits are ten times and
#: more. README's hidden layer is 2.7 times as large; a loop there halves the peak, takes five times
#: as long, and ten times as long to search.
_LARGE = 4


def with_blocks(graph: BlockGraph) -> BlockGraph:
    """The graph with its largest product, and what reads it, in a loop over blocks of rows; the
    same graph where there is none, or where something needs all rows at once."""
    counted = with_batch_dims(graph)
    for op in _products(counted):
        for dim in _dims(counted, op):
            region = Region(counted, op, dim)
            if region.grown() and region.is_worth_it:
                try:
                    return with_loop(_split(region))
                except TemplateError:
                    continue  # A kernel cannot run on such blocks.
    return graph


def _products(graph: BlockGraph) -> Iterator[Operation]:
    found: list[tuple[int, int, Operation]] = []
    for op in graph.operations:
        if op.regions or len(op.outputs) != 1:
            continue
        types = tuple(graph.values[v] for v in op.inputs), (graph.values[op.outputs[0]],)
        size = types[1][0].size
        if size < _LARGE * sum(t.size for t in types[0]):
            continue
        if registry.signature_of(op, *types).is_product:
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
