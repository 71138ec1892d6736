"""Second reads: a program in which chosen readers of chosen operations read these made again.

Where two readers want a value in different layouts, or one of them much later, it may be quicker to
make it twice than to send it or to keep it, and what makes it then runs in the kernels of either.
The second instance stands right before its first reader. Operations of it carry a number in
`Operation.remat`, one for each chain of which only the end is read by others.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.tables.kernel_rates import has_rates
from tapestry_egg.metakernels import registry

#: Who reads: an operation or its second instance, by the first value that it gives, or what leaves
#: the program, of which there is one for every value.
Kind = Literal["first", "second", "leaves"]
Reader = tuple[Kind, int]
_KINDS: tuple[Kind, ...] = ("first", "second", "leaves")


@dataclass(frozen=True)
class SecondReads:
    """Which operations, by the first value that they give, have a second instance, and who reads
    that: (operation, reader) in the order of the program. `feedback` as `feedback_pairs` gives."""

    reads: tuple[tuple[int, Reader], ...]
    feedback: tuple[tuple[int, int], ...] = ()

    @property
    def count(self) -> int:
        """How many operations have a second instance."""
        return len({made for made, _ in self.reads})

    def numbers(self) -> tuple[tuple[int, ...], ...]:
        """All of it as plain numbers, the first of which are none; `from_numbers` reads them."""
        pairs = tuple(k for pair in self.feedback for k in pair)
        return ((), pairs, *((v, _KINDS.index(kind), w) for v, (kind, w) in self.reads))

    @staticmethod
    def from_numbers(numbers: Sequence[Sequence[int]]) -> SecondReads:
        """What `numbers` wrote."""
        _, pairs, *reads = numbers
        feedback = tuple(zip(pairs[::2], pairs[1::2], strict=True))
        return SecondReads(tuple((v, (_KINDS[kind], w)) for v, kind, w in reads), feedback)


def readers(graph: BlockGraph) -> dict[int, list[int]]:
    """Of every operation, by number, those that read it, in order; what leaves as the number of
    operations."""
    producers, found = graph.producers(), dict[int, list[int]]()
    reads = [op.inputs for op in graph.operations]
    for k, values in enumerate([*reads, graph.outputs]):
        for m in dict.fromkeys(producers[v] for v in values if v in producers):
            found.setdefault(m, []).append(k)
    return found


def may_be_second(op: Operation) -> bool:
    """Whether an operation may be computed again: not one that has an effect or regions, that is a
    second instance itself, or attention that a library has (`Checkpoints` says why)."""
    if op.effectful or op.regions or _is_library_attention(op.kernel):
        return False
    return bool(op.outputs) and op.remat is None


def _is_library_attention(kernel: str) -> bool:
    """Whether a library has somewhere what else runs in blocks of scores."""
    return registry.in_blocks(kernel) and has_rates(kernel)


def with_second_reads(graph: BlockGraph, chosen: SecondReads) -> BlockGraph:
    """The program, in the order of its schedule (`second_instances.ordered`), in which those of
    `chosen` read second instances.

    Raises GraphError for an operation that is not there, or cannot be computed again, or of which
    an instance has no reader.
    """
    made = {op.outputs[0]: k for k, op in enumerate(graph.operations) if may_be_second(op)}
    lost = [v for v, _ in chosen.reads if v not in made]
    if lost:
        raise GraphError(f"value {lost[0]} cannot be computed again", where=graph.name)
    return _Reading(graph, {(made[v], reader) for v, reader in chosen.reads}).graph()


class _Reading:
    def __init__(self, graph: BlockGraph, takes: Collection[tuple[int, Reader]]) -> None:
        self.given, self.takes = graph, takes
        self.producers = graph.producers()
        self.values = list(graph.values)
        self.operations: list[Operation] = []
        self.second: dict[int, tuple[int, ...]] = {}  # operation -> what its second instance gives
        self.read = {k for k, _ in takes}
        used = [op.remat for op in graph.operations if op.remat is not None]
        self.first_number = max(used, default=-1) + 1
        self.number = self._numbers()

    def _numbers(self) -> Mapping[int, int]:
        """Of every operation that has a second instance the number that this carries."""
        at = {op.outputs[0]: k for k, op in enumerate(self.given.operations) if op.outputs}
        found: dict[int, int] = {}
        for k in sorted(self.read, reverse=True):  # what reads comes later
            own = [reader for m, reader in self.takes if m == k]
            alone = own[0] if len(own) == 1 and own[0][0] == "second" else None
            root = at.get(alone[1]) if alone is not None else None
            found[k] = self.first_number + k if root is None else found.get(root, -1)
        return found

    def graph(self) -> BlockGraph:
        for op in self.given.operations:
            reader: Reader = ("first", op.outputs[0]) if op.outputs else ("first", -1)
            inputs = self._inputs(reader, op.inputs)
            self.operations.append(registry.on_values(op, inputs, op.outputs, op.remat))
        outputs = [self._inputs(("leaves", v), (v,))[0] for v in self.given.outputs]
        made = replace(
            self.given,
            values=tuple(self.values),
            operations=tuple(self.operations),
            outputs=tuple(outputs),
        )
        self._check(made)
        return made

    def _inputs(self, reader: Reader, values: Sequence[int]) -> tuple[int, ...]:
        """What a reader reads instead of values, made right here where it was not yet."""
        found = []
        for v in values:
            k = self.producers.get(v, -1)
            if (k, reader) not in self.takes:
                found.append(v)
                continue
            if k not in self.second:
                self._repeat(k)
            found.append(self.second[k][self.given.operations[k].outputs.index(v)])
        return tuple(found)

    def _repeat(self, k: int) -> None:
        op = self.given.operations[k]
        inputs = self._inputs(("second", op.outputs[0]), op.inputs)
        first = len(self.values)
        self.values += [self.values[v] for v in op.outputs]
        self.second[k] = tuple(range(first, len(self.values)))
        self.operations.append(registry.on_values(op, inputs, self.second[k], self.number[k]))

    def _check(self, made: BlockGraph) -> None:
        read = {v for op in made.operations for v in op.inputs} | set(made.outputs)
        for k in self.read:
            for values in (self.given.operations[k].outputs, self.second.get(k, ())):
                if read.isdisjoint(values):
                    raise GraphError(
                        f"an instance of operation {k} that nothing reads", where=made.name
                    )
