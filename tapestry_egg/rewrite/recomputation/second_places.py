"""Second places: where a program may compute values a second time for some of their readers.

A way of a place says which of its operations have a second instance, and which readers take that:
any but the first ones. What is made of a second instance's operands anew is a way, too. Whether one
pays is not asked here: all ways are searched together, as those are that rules find. First come
those of one operation, of which all are searched or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations, islice, product
from typing import Literal

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.machine.tables.kernel_rates import has_rates
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import in_order

# Second reads: a program in which chosen readers of chosen operations read these made again.
#
# Where two readers want a value in different layouts, or one of them much later, it may be quicker
# to make it twice than to send it or to keep it, and what makes it then runs in the kernels of
# either. The second instance stands right before its first reader. Operations of it carry a number
# in `Operation.remat`, one for each chain of which only the end is read by others.


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


#: Who takes the second instance of which operation: none in the first way of every place.
Way = tuple[tuple[int, Reader], ...]
# Ways that are looked at for every one that there is room for: most that several operations have
# leave an instance without a reader.
_LOOKED = 200


@dataclass(frozen=True)
class SecondPlaces:
    """The places of a program in the order of its schedule. Of `left` operations that several read
    no second instance is searched; with `more`, not all ways of several operations together."""

    graph: BlockGraph
    feedback: Mapping[int, int] = field(default_factory=dict)
    places: tuple[tuple[Way, ...], ...] = ()
    left: int = 0
    more: bool = False

    def chosen(self, ways: Sequence[int]) -> SecondReads:
        """Who reads second instances where place p has its way `ways[p]`."""
        every = [r for p, w in zip(self.places, ways, strict=True) for r in p[w]]
        return SecondReads(tuple(every), tuple(sorted(self.feedback.items())))

    def built(self, graph: BlockGraph, chosen: SecondReads) -> BlockGraph | None:
        """A program with second instances: the one that has these places, or one of which others
        are computed in another way; None where that lacks who makes or reads them."""
        if graph is not self.graph and not self._has(graph, chosen):
            return None
        try:
            return with_second_reads(graph, chosen)
        except GraphError:
            return None

    def _has(self, graph: BlockGraph, chosen: SecondReads) -> bool:
        """Whether the operations that are chosen, and those that read them, are those of another
        program, too."""
        own, other = (
            {op.outputs[0]: op for op in g.operations if op.outputs} for g in (self.graph, graph)
        )
        wanted = {v for v, _ in chosen.reads}
        wanted |= {v for _, (kind, v) in chosen.reads if kind != "leaves"}
        return all(
            v in other
            and (own[v].kernel, own[v].inputs, own[v].outputs)
            == (other[v].kernel, other[v].inputs, other[v].outputs)
            for v in wanted
        )


def second_places(graph: BlockGraph, feedback: Mapping[int, int], fits: int) -> SecondPlaces:
    """The places of a program, in the order of its schedule, with no more ways than `fits`."""
    found = _Found(graph)
    several = [len(found.readers.get(k, ())) for k in found.plain]
    several = [n for n in several if n > 1]
    if sum(2 ** (n - 1) - 1 for n in several) > fits:
        return SecondPlaces(graph, feedback, left=len(several))
    sets = found.together()
    ways: list[list[Way]] = [[()] for _ in sets]
    count = 0
    for size in range(1, max(map(len, sets), default=0) + 1):
        for own, kept in zip(sets, ways, strict=True):
            for operations in combinations(own, size):
                some = list(islice(found.ways(operations), fits - count + 1))
                if count + len(some) > fits or found.looked > _LOOKED * fits:
                    kept += some[: fits - count]
                    return SecondPlaces(graph, feedback, _several(ways), more=True)
                count += len(some)
                kept += some
    return SecondPlaces(graph, feedback, _several(ways))


def _several(ways: Sequence[Sequence[Way]]) -> tuple[tuple[Way, ...], ...]:
    """The places that have ways."""
    return tuple([tuple(own) for own in ways if len(own) > 1])


class _Found:
    """What may be computed again of a program, and by whom it is read."""

    def __init__(self, graph: BlockGraph) -> None:
        self.graph, self.end = graph, len(graph.operations)
        self.plain = [k for k, op in enumerate(graph.operations) if may_be_second(op)]
        self.readers = readers(graph)
        self.looked = 0

    def together(self) -> list[list[int]]:
        """The operations that may be computed again, those in one list that are near each other:
        what is changed for one, or is read for it, is for another one, too."""
        producers = self.graph.producers()
        groups: list[tuple[set[int], list[int]]] = []
        several = [k for k in self.plain if len(self.readers.get(k, ())) > 1]
        above = self._above(several)
        for k in (k for k in self.plain if k in above):
            inputs = self.graph.operations[k].inputs
            touched = {k, *self.readers[k], *(producers[v] for v in inputs if v in producers)}
            touched.discard(self.end)
            mine = [g for g in groups if g[0] & touched]
            groups = [g for g in groups if not any(g is m for m in mine)]
            own = sorted([m for g in mine for m in g[1]] + [k])
            groups.append((touched.union(*[g[0] for g in mine]), own))
        return [own for _, own in sorted(groups, key=lambda g: g[1])]

    def _above(self, several: Sequence[int]) -> set[int]:
        """Those operations, and the ones that may be computed again for them."""
        producers, plain, found = self.graph.producers(), set(self.plain), set[int]()
        stack = list(several)
        while stack:
            k = stack.pop()
            if k not in found:
                found.add(k)
                made = {producers.get(v) for v in self.graph.operations[k].inputs}
                stack += [m for m in made if m is not None and m in plain]
        return found

    def ways(self, operations: Sequence[int]) -> Iterator[Way]:
        """The ways in which just these operations have a second instance."""
        again = set(operations)
        reads: list[tuple[int, Reader]] = []
        for k in operations:
            for r in self.readers[k]:
                # A first instance of what is computed again reads first ones.
                if r not in again:
                    reads += [(k, reader) for reader in self._reader(k, r)]
                elif len(operations) > 1:
                    reads.append((k, ("second", self.graph.operations[r].outputs[0])))
        for taken in product((False, True), repeat=len(reads)):
            self.looked += 1
            way = tuple([r for r, second in zip(reads, taken, strict=True) if second])
            if self._is_legal(operations, way):
                yield tuple([(self.graph.operations[k].outputs[0], reader) for k, reader in way])

    def _reader(self, k: int, r: int) -> list[Reader]:
        if r < self.end:
            own = self.graph.operations[r].outputs
            return [("first", own[0])] if own else []
        return [("leaves", v) for v in self.graph.operations[k].outputs if v in self.graph.outputs]

    def _is_legal(self, operations: Sequence[int], way: Way) -> bool:
        """Whether every second instance has a reader, none before those of the first instance."""
        made = {op.outputs[0]: k for k, op in enumerate(self.graph.operations) if op.outputs}
        late: dict[int, int] = {}  # where the second instance is first read
        takes = {(k, reader) for k, reader in way}
        for k in sorted(operations, reverse=True):
            own = [reader for m, reader in way if m == k]
            if not own:
                return False
            places = [
                self.end if kind == "leaves" else late[made[w]] if kind == "second" else made[w]
                for kind, w in own
            ]
            late[k] = min(places)
            firsts = []
            for r in self.readers[k]:
                every: list[Reader] = self._reader(k, r)
                firsts += [r for reader in every if (k, reader) not in takes]
                if r in late and (k, ("second", self.graph.operations[r].outputs[0])) not in takes:
                    firsts.append(late[r])
            if not firsts or min(firsts) > late[k]:
                return False
        return True


# Second instances: a program that computes chosen values again for their late readers.
#
# The first instance then ends with the early readers, and memory is free in between. XLA must not
# merge the two: the operations of the second carry a number in `Operation.remat`, as those of
# `jax.checkpoint` do, and lowering puts a barrier before them.


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
