"""Second places: where a program may compute values a second time for some of their readers.

A way of a place says which of its operations have a second instance, and which readers take that:
any but the first ones. What is made of a second instance's operands anew is a way, too. Whether one
pays is not asked here: all ways are searched together, as those are that rules find. First come
those of one operation, of which all are searched or none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice, product

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph

from .second_reads import Reader, SecondReads, may_be_second, readers, with_second_reads

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
