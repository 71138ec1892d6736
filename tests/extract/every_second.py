"""Every program that computes some values of a program a second time.

An oracle for what is searched of them: any operations have a second instance, right before the
first that reads it, and every reader of what has two takes either one. No choice is preferred.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import combinations, product

from tapestry_egg.graph.blockgraph import BlockGraph, Operation

from .every_form import TooMany

#: What reads a value: an operation, its second instance, or what leaves at one place.
Reader = tuple[str, int]
#: The values of which a reader takes the second instance.
Takes = Mapping[tuple[Reader, int], bool]


def every_second(graph: BlockGraph, most: int) -> list[BlockGraph]:
    """The programs other than the given one, whose operations are in the order in which they run.
    Raises TooMany where there are more than `most`."""
    found = []
    plain = [k for k, op in enumerate(graph.operations) if not (op.effectful or op.regions)]
    for count in range(1, len(plain) + 1):
        for again in combinations(plain, count):
            if not _may_be_read(graph, again):
                continue
            for takes in _takings(graph, again):
                if len(found) == most:
                    raise TooMany
                found.append(_made(graph, again, takes))
    return found


def _readers(graph: BlockGraph, again: tuple[int, ...]) -> dict[Reader, tuple[int, ...]]:
    """What is read by all that reads: values of the program as given."""
    found: dict[Reader, tuple[int, ...]] = {}
    for k, op in enumerate(graph.operations):
        found["first", k] = op.inputs
        if k in again:
            found["second", k] = op.inputs
    return found | {("leaves", n): (v,) for n, v in enumerate(graph.outputs)}


def _may_be_read(graph: BlockGraph, again: tuple[int, ...]) -> bool:
    """Whether there are two readers at least for what each of some operations makes."""
    producer = graph.producers()
    readers = [producer.get(v) for v in graph.outputs]
    for k, op in enumerate(graph.operations):
        readers += [producer.get(v) for v in dict.fromkeys(op.inputs)] * (1 + (k in again))
    return all(readers.count(k) > 1 for k in again)


def _takings(graph: BlockGraph, again: tuple[int, ...]) -> Iterator[Takes]:
    """Which instances are read, so that each has a reader."""
    producer = graph.producers()
    reads = [
        (reader, v)
        for reader, values in _readers(graph, again).items()
        for v in dict.fromkeys(values)
        if producer.get(v) in again
    ]
    for taken in product((False, True), repeat=len(reads)):
        own = dict(zip(reads, taken, strict=True))
        instances = {(producer[v], second) for (_, v), second in own.items()}
        if len(instances) == 2 * len(again) and not _early(graph, own):
            yield own


def _early(graph: BlockGraph, takes: Takes) -> bool:
    """Whether a value's second instance is made before its first: all who read that come later."""
    first: dict[tuple[int, bool], int] = {}
    for ((kind, k), v), second in takes.items():
        at = k if kind != "leaves" else len(graph.operations)
        first[v, second] = min(at, first.get((v, second), at))
    return any(first[v, True] < first[v, False] for v, second in first if second)


def _made(graph: BlockGraph, again: tuple[int, ...], takes: Takes) -> BlockGraph:
    values, operations = list(graph.values), []
    twin: dict[int, int] = {}
    producer = graph.producers()

    def read(reader: Reader, v: int) -> int:
        if not takes.get((reader, v), False):
            return v
        if v not in twin:
            repeat(producer[v])
        return twin[v]

    def repeat(k: int) -> None:
        op = graph.operations[k]
        inputs = tuple([read(("second", k), v) for v in op.inputs])
        for v in op.outputs:
            values.append(graph.values[v])
            twin[v] = len(values) - 1
        outputs = tuple([twin[v] for v in op.outputs])
        operations.append(replace(op, inputs=inputs, outputs=outputs, remat=k))

    for k, op in enumerate(graph.operations):
        inputs = tuple([read(("first", k), v) for v in op.inputs])
        operations.append(op if inputs == op.inputs else replace(op, inputs=inputs))
    outputs = tuple([read(("leaves", n), v) for n, v in enumerate(graph.outputs)])
    made: list[Operation] = operations
    return replace(graph, values=tuple(values), operations=tuple(made), outputs=outputs)
