"""Second instances: a program that computes chosen values again for their late readers.

The first instance then ends with the early readers, and memory is free in between. XLA must not
merge the two: the operations of the second carry a number in `Operation.remat`, as those of
`jax.checkpoint` do, and lowering puts a barrier before them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import in_order

from .second_reads import SecondReads, with_second_reads


@dataclass(frozen=True)
class Recomputation:
    """Which values have a second instance: `segments` of value ids of the program in the order of
    its schedule. Operations after number `boundary` read it. `feedback` as `feedback_pairs` gives.
    """

    boundary: int
    segments: tuple[tuple[int, ...], ...]
    feedback: tuple[tuple[int, int], ...] = ()

    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """All of it as plain numbers; `from_numbers` reads them."""
        pairs = tuple(k for pair in self.feedback for k in pair)
        return ((self.boundary,), pairs, *self.segments)

    @staticmethod
    def from_numbers(numbers: Sequence[Sequence[int]]) -> Recomputation:
        """What `numbers` wrote."""
        (boundary,), pairs, *segments = numbers
        feedback = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        return Recomputation(boundary, tuple(tuple(s) for s in segments), feedback)


def ordered(graph: BlockGraph, feedback: Mapping[int, int]) -> BlockGraph:
    """The graph in the order and with the repeated views that its schedule has."""
    return in_order(repeat_cheap(graph), feedback)


def with_second_instances(graph: BlockGraph, chosen: Recomputation) -> BlockGraph:
    """The program where operations after the boundary read second instances of the chosen values.

    `graph` is in the order of its schedule (`ordered`). A second instance stands right before the
    first operation that reads it, and is made of second instances where there are some. Raises
    GraphError where a chosen value is not made by an operation up to the boundary.
    """
    early = graph.operations[: max(chosen.boundary + 1, 0)]
    made = {v for op in early if not (op.effectful or op.regions) for v in op.outputs}
    for v in (v for segment in chosen.segments for v in segment):
        if v not in made:
            raise GraphError(
                f"value {v} cannot be computed again: no plain operation up to number "
                f"{chosen.boundary} makes it",
                where=graph.name,
            )
    return _Doubling(graph, chosen).graph()


class _Doubling:
    def __init__(self, graph: BlockGraph, chosen: Recomputation) -> None:
        self.given, self.boundary = graph, chosen.boundary
        self.segment_of = {v: s for s, values in enumerate(chosen.segments) for v in values}
        self.producers = graph.producers()
        self.values = list(graph.values)
        self.operations: list[Operation] = []
        self.second: dict[int, int] = {}
        used = [op.remat for op in graph.operations if op.remat is not None]
        self.first_number = max(used, default=-1) + 1

    def graph(self) -> BlockGraph:
        for k, op in enumerate(self.given.operations):
            if k > self.boundary:
                inputs = tuple([self._read(v) for v in op.inputs])
                op = registry.on_values(op, inputs, op.outputs, op.remat)
            self.operations.append(op)
        return replace(self.given, values=tuple(self.values), operations=tuple(self.operations))

    def _read(self, v: int) -> int:
        """The value to read instead of v after the boundary."""
        if v not in self.segment_of:
            return v
        stack = [v]
        while stack:
            u = stack[-1]
            op = self.given.operations[self.producers[u]]
            below = [w for w in op.inputs if w in self.segment_of and w not in self.second]
            if u not in self.second and not below:
                self._repeat(op, self.segment_of[u])
            if below:
                stack += below
            else:
                stack.pop()
        return self.second[v]

    def _repeat(self, op: Operation, segment: int) -> None:
        inputs = tuple([self.second.get(v, v) for v in op.inputs])
        outputs = []
        for v in op.outputs:
            self.values.append(self.values[v])
            self.second[v] = len(self.values) - 1
            outputs.append(self.second[v])
        number = self.first_number + segment
        self.operations.append(registry.on_values(op, inputs, tuple(outputs), number))


def retake(graph: BlockGraph, numbers: Sequence[Sequence[int]]) -> BlockGraph:
    """The program with the second instances that the numbers of a `Recomputation` say, or those of
    `SecondReads`."""
    if not numbers[0]:
        reads = SecondReads.from_numbers(numbers)
        return with_second_reads(ordered(graph, dict(reads.feedback)), reads)
    chosen = Recomputation.from_numbers(numbers)
    return with_second_instances(ordered(graph, dict(chosen.feedback)), chosen)


def count_twice(numbers: Sequence[Sequence[int]]) -> int:
    """How many values or operations such numbers compute a second time."""
    if not numbers[0]:
        return SecondReads.from_numbers(numbers).count
    return sum(map(len, Recomputation.from_numbers(numbers).segments))
