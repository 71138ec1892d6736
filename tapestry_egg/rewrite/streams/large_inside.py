"""Large values that loops keep or are given, made in their bodies again.

A loss in the body of a loop has logits that the forward loop of its derivative keeps for every
step, and labels as rows of zeros and a one that stand before the loop. Where the body makes these
of what is small, they can be in blocks there (`blocks.py`): what is small is kept and given
instead. The same operations on the same operands: no number changes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.attention.loops import (
    Link,
    fixed,
    in_loops,
    making,
    with_pairs,
    without_unread_streams,
)

#: The name of the change by `with_invariants_inside`, in the rules and steps of plans.
RULE = "invariants-inside"

# What is made inside a loop has so many times the elements of what it is made of, at least.
_SMALLER = 8

#: The largest product of a graph that is worth blocks, and None where there is none.
OfLargest = Callable[[BlockGraph], "Operation | None"]
#: Whether a body then runs in blocks.
Runs = Callable[[BlockGraph], bool]


def with_large_inside(graph: BlockGraph, largest: OfLargest, in_blocks: Runs) -> BlockGraph:
    """The graph with loops that neither keep nor are given what is as large as the product that is
    worth blocks in their bodies, where these are `in_blocks` then. Their bodies also number rows
    themselves."""
    if not any(largest(r) for op in graph.operations if op.is_scan for r in op.regions):
        return graph

    def change(
        forward: Operation, backward: Operation, values: list[TensorType]
    ) -> tuple[Operation, Operation] | None:
        return _without_kept(forward, backward, values, largest, in_blocks)

    numbers = _numbers(graph) | fixed(graph)
    made = in_loops(graph, lambda op: making(graph, op, numbers, numbers))
    paired = with_pairs(made, change)
    made = made if paired is made else without_unread_streams(paired)
    return in_loops(made, lambda op: _without_given(made, op, largest, in_blocks))


def with_invariants_inside(graph: BlockGraph) -> BlockGraph:
    """The graph with loops that are not given large values that do not change from round to round,
    where these are made one by one of values with an eighth of their elements at most: each round
    makes them where it reads them. The same graph if there are none."""
    graph = graph.map_regions(with_invariants_inside)
    contracted = _contracted(graph)

    def change(op: Operation) -> Operation:
        for v in op.inputs[: counts(op)[0]]:
            small = graph.values[v].size // _SMALLER
            again = _as_large(graph, small) - contracted
            if v in again and _of_small(graph, [v], again, small):
                op = making(graph, op, {v}, again)
        return op

    return in_loops(graph, change)


def _can_be_made_again(op: Operation) -> bool:
    return op.remat is None and registry.is_repeatable(op)


def _as_large(graph: BlockGraph, size: int) -> set[int]:
    """The values of so many elements at least that can be made again."""
    return {
        v
        for op in graph.operations
        if _can_be_made_again(op)
        for v in op.outputs
        if graph.values[v].size >= size
    }


def _without_kept(
    forward: Operation,
    backward: Operation,
    values: list[TensorType],
    largest: OfLargest,
    in_blocks: Runs,
) -> tuple[Operation, Operation] | None:
    """Both loops, where the backward one makes again what is as large as the largest product of the
    forward one, and made of it or one by one; None where it reads nothing of the kind."""
    if forward.rounds != backward.rounds:
        return None
    (inner,), (outer,) = forward.regions, backward.regions
    product = largest(inner)
    if product is None:
        return None
    size = inner.values[product.outputs[0]].size
    again, numbers = _as_large(inner, size), _numbers(inner)
    of_product, simple = set(product.outputs), again - _contracted(inner)
    for op in inner.operations:
        if not of_product.isdisjoint(op.inputs):
            of_product.update(op.outputs)
    link = Link(forward, backward, values)
    kept = {
        j: v
        for j, v in link.kept().items()
        if v in again and (v in of_product or _of_small(inner, [v], simple, size))
    }
    if not kept or not _of_small(inner, kept.values(), again, size):
        return None
    again |= numbers
    kept.update((j, v) for j, v in link.kept().items() if v in numbers)
    made = link.body.cloned(inner, list(kept.values()), lambda v: link.given(v, again))
    link.body.replaced = {outer.inputs[j]: made[v] for j, v in kept.items()}
    early, late = link.loops(set(kept))
    gone = set(kept.values())
    before = replace(inner, outputs=tuple([v for v in early.regions[0].outputs if v not in gone]))
    if not (in_blocks(without_unread(before)) and in_blocks(late.regions[0])):
        return None
    return early, late


def _numbers(graph: BlockGraph) -> set[int]:
    """What says where to read rows, put together of columns: that one counts must be seen."""
    return {
        op.outputs[0]
        for op in graph.operations
        if any(t.joins for t in registry.templates().get(op.kernel, ()))
        and _can_be_made_again(op)
        and kind(graph.values[op.outputs[0]].dtype) == "int"
        and all(graph.values[v].shape[-1:] == (1,) for v in op.inputs)
    }


def _of_small(graph: BlockGraph, wanted: Collection[int], again: set[int], size: int) -> bool:
    """Whether values can be made of what is smaller, those `again` being made again."""
    makers = graph.producers()
    waiting, seen = list(wanted), set[int]()
    while waiting:
        v = waiting.pop()
        if v in seen or v in graph.constants:
            continue
        seen.add(v)
        if v in again:
            waiting += graph.operations[makers[v]].inputs
        elif graph.values[v].size >= size:
            return False
    return True


def _without_given(
    graph: BlockGraph, op: Operation, largest: OfLargest, in_blocks: Runs
) -> Operation:
    """A loop whose body makes large values that do not change from step to step, where these are
    made of small ones one by one; the same operation where it is given none."""
    (region,) = op.regions
    product = largest(region)
    if product is None:
        return op
    size = region.values[product.outputs[0]].size
    again = _as_large(graph, size) - _contracted(graph)
    wanted = {v for v in op.inputs if v in again and _of_small(graph, [v], again, size)}
    made = making(graph, op, wanted, again)
    return made if made is op or in_blocks(made.regions[0]) else op


def _contracted(graph: BlockGraph) -> set[int]:
    """The results of operations that sum or multiply many elements into each of theirs: to make
    them in every step is no small work."""
    return {
        v
        for op in graph.operations
        if not op.regions and registry.signature_in(graph, op).contracts
        for v in op.outputs
    }
