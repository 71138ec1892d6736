"""A program with its attention fused, in loops and branches too."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import EVEN_PARTS, ROWS, SHIFTS, devices_of, is_split, parts_of_batch
from tapestry_egg.rewrite import stacked
from tapestry_egg.rewrite.attention.attention import with_fused_attention
from tapestry_egg.rewrite.attention.loops import (
    with_kept_results,
    with_masks_inside,
    with_scores_inside,
    without_unread_streams,
)
from tapestry_egg.rewrite.rows import even_parts, shifts

from . import apart, blocks, large_inside, micro_batches, temporal

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


#: Change of a program -> how it is made, in the order in which they are.
CHANGES: Mapping[str, Callable[[BlockGraph], BlockGraph]] = {
    large_inside.RULE: large_inside.with_invariants_inside,
    RULE: with_streams,
    blocks.RULE: blocks.with_blocks,
    blocks.OF_LARGEST: blocks.with_blocks_of_largest,
    temporal.RULE: temporal.with_blocks_of_sums,
}


def changed(graph: BlockGraph, rules: Collection[str]) -> BlockGraph:
    """The program with those of these changes that `rules` name."""
    if apart.RULE in rules or apart.STATES in rules:
        graph = apart.with_rounds_at_once(graph, states=apart.STATES in rules)
    for name in sorted(rules):
        devices = devices_of(name, SHIFTS)
        graph = graph if devices is None else shifts.with_shifts(graph, devices)
    graph = stacked.with_stacked_copies(graph) if stacked.RULE in rules else graph
    for name, change in CHANGES.items():
        graph = change(graph) if name in rules else graph
    for name in sorted(rules):
        steps = parts_of_batch(name)
        graph = graph if steps is None else micro_batches.with_micro_batches(graph, steps)
    for name in sorted(rules):
        devices = devices_of(name, EVEN_PARTS)
        graph = graph if devices is None else even_parts.with_even_parts(graph, devices)
    for name in sorted(rules):
        devices = devices_of(name, ROWS)
        graph = graph if devices is None else shifts.with_rows_looked_up(graph, devices)
    return graph


def is_change(rule: str) -> bool:
    """Whether a rule of that name is one of these changes."""
    shared = (devices_of(rule, kind) for kind in (SHIFTS, ROWS))
    named = rule in CHANGES or rule in (apart.RULE, apart.STATES, stacked.RULE)
    return named or is_split(rule) or any(n is not None for n in shared)


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
