"""Loops that run two rounds at a time, so that what they carry is not copied.

A round whose next value is not written over the old one, as a stencil's or a product's is not, ends
in a copy into the array that the loop carries (XLA's copy insertion, `hlo/copy_insertion.cc`). Of
two rounds in one the first writes into another array and the second back into the carried one.
Where each round has slices of stacks or fills some, XLA would put those of two rounds together
first: such loops stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.target import Target

from .schedules import scheduled
from .traffic import traffic_of


def in_pairs(graph: BlockGraph, feedback: Mapping[int, int], target: Target) -> BlockGraph:
    """The program with loops in pairs of rounds wherever that saves a copy of what they carry; the
    same graph if there are none."""
    if not (target.slices and any(map(_may_pair, _operations(graph)))):
        return graph
    schedule = scheduled(graph, feedback)
    traffic, found = traffic_of(schedule, target), set[object]()
    for unit in schedule.units:
        carry = schedule.program.instances[unit.root]
        if carry.port == "carry" and traffic.is_copied(unit) and traffic.takes_turns(unit):
            found.add(_key(schedule.program.loop_of(carry)))
    return _paired(graph, found) if found else graph


def _paired(graph: BlockGraph, loops: set[object]) -> BlockGraph:
    operations = []
    for op in graph.operations:
        if op.regions:
            op = replace(op, regions=tuple([_paired(r, loops) for r in op.regions]))
        if _may_pair(op) and _key(op) in loops:
            op = replace(op, params={**op.params, "unroll": 2})
        operations.append(op)
    return replace(graph, operations=tuple(operations))


def _operations(graph: BlockGraph) -> Iterator[Operation]:
    for op in graph.operations:
        yield op
        for region in op.regions:
            yield from _operations(region)


def _may_pair(op: Operation) -> bool:
    """Whether a loop has a known number of rounds, and neither reads nor fills stacks."""
    if not op.is_scan or op.params["unroll"] != 1 or op.rounds < 2:
        return False
    carries: int = op.params["num_carry"]
    carried = len(op.inputs) == op.params["num_consts"] + carries
    return carried and len(op.outputs) == carries


def _key(op: Operation) -> object:
    """What a loop keeps in its schedule, where operations are in another order."""
    return op.outputs, op.source
