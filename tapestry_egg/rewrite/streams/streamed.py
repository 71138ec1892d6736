"""A program with its attention fused, in loops and branches too."""

from __future__ import annotations

from dataclasses import replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.attention.attention import with_fused_attention
from tapestry_egg.rewrite.attention.loops import (
    with_kept_results,
    with_masks_inside,
    with_scores_inside,
    without_unread_streams,
)

#: The name of this change of a program in the rules and steps of plans.
RULE = "fused-attention"
#: Kernels are put together, and programs cut over time, only where rules of this ruleset are used.
RULESET = "fusion"


def with_streams(graph: BlockGraph) -> BlockGraph:
    """The program with fused attention wherever softmaxes of scores are recognised; the same graph
    where there is none. It computes the same, up to the order of sums."""
    return streams_of(graph)[0]


def streams_of(graph: BlockGraph) -> tuple[BlockGraph, int]:
    """`with_streams`; and of how many softmaxes not all was read, as there is a limit: they stay as
    they are written, or read their mask from memory."""
    if not any(registry.meaning(op.kernel) == "exponential" for op in graph.walk()):
        return graph, 0
    made, ended = _streamed(graph)
    return made if count_streams(made) > count_streams(graph) else graph, ended


def _streamed(graph: BlockGraph) -> tuple[BlockGraph, int]:
    made, ended = with_scores_inside(with_masks_inside(graph)), 0
    operations: list[Operation] = []
    for op in made.operations:
        regions = [_streamed(r) for r in op.regions]
        ended += sum(n for _, n in regions)
        operations.append(replace(op, regions=tuple(r for r, _ in regions)) if regions else op)
    made, mine = with_fused_attention(replace(made, operations=tuple(operations)))
    made = without_unread_streams(with_kept_results(without_unread_streams(made)))
    return made, ended + mine


def count_streams(graph: BlockGraph) -> int:
    """How many kernels of a program run in blocks of scores, as fused attention does."""
    return sum(registry.in_blocks(op.kernel) for op in graph.walk())
