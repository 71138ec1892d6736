"""Changes of whole programs: those that code makes, by the names that plans have for them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import partial

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.plan import EVEN_PARTS, ROWS, SHIFTS, devices_of, is_split, parts_of_batch
from tapestry_egg.rewrite.rows import even_parts, shifts
from tapestry_egg.rewrite.streams import (
    apart,
    blocks,
    large_inside,
    micro_batches,
    streamed,
    temporal,
    written_out,
)
from tapestry_egg.tracing.settings import plain_settings

from . import stacked

#: Change of a program -> how it is made, in the order in which they are.
CHANGES: Mapping[str, Callable[[BlockGraph], BlockGraph]] = {
    large_inside.RULE: large_inside.with_invariants_inside,
    streamed.RULE: streamed.with_streams,
    blocks.RULE: blocks.with_blocks,
    blocks.OF_LARGEST: blocks.with_blocks_of_largest,
    temporal.RULE: temporal.with_blocks_of_sums,
    **{
        name: partial(written_out.with_loops_written_out, most=most, shared=shared)
        for name, (most, shared) in written_out.NAMES.items()
    },
}


def changed(graph: BlockGraph, rules: Collection[str]) -> BlockGraph:
    """The program with those of these changes that `rules` name, made as where it was traced."""
    with plain_settings(graph):
        if apart.RULE in rules or apart.STATES in rules:
            graph = apart.with_rounds_at_once(graph, states=apart.STATES in rules)
        graph = stacked.with_stacked_copies(graph) if stacked.RULE in rules else graph
        for name in sorted(rules):
            devices = devices_of(name, SHIFTS)
            graph = graph if devices is None else shifts.with_shifts(graph, devices)
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
