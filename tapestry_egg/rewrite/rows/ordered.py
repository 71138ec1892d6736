"""Graphs whose operations stand in an order in which they can run, and are all read."""

from __future__ import annotations

from dataclasses import replace
from heapq import heapify, heappop, heappush

from tapestry_egg.graph.blockgraph import BlockGraph, Operation


def in_order(graph: BlockGraph) -> BlockGraph:
    """The graph with every operation after those that make what it reads, and every one with
    effects after those before it; else in the order that it has."""
    made = {*graph.inputs, *graph.constants}
    waiting: dict[int, list[int]] = {}
    missing: list[int] = []
    ready: list[int] = []
    effects: dict[int, list[int]] = {}  # an operation with effects -> the next one
    last: int | None = None
    for k, op in enumerate(graph.operations):
        absent = {v for v in op.inputs if v not in made}
        missing.append(len(absent))
        if op.effectful:
            if last is not None:
                effects[last] = [k]
                missing[k] += 1
            last = k
        for v in absent:
            waiting.setdefault(v, []).append(k)
        if not missing[k]:
            ready.append(k)
    heapify(ready)
    operations: list[Operation] = []
    while ready:
        at = heappop(ready)
        op = graph.operations[at]
        operations.append(op)
        for k in (*effects.get(at, ()), *(k for v in op.outputs for k in waiting.get(v, ()))):
            missing[k] -= 1
            if not missing[k]:
                heappush(ready, k)
    return replace(graph, operations=tuple(operations))
