"""Extractions: the programs that the classes of equal values hold, one after another.

None is left out for what it costs on one device: sharded over a mesh, the form with more arithmetic
may be the faster one. Forms that differ in views alone (where a transpose stands, which operand of
a product comes first) compute the same kernels on the same values; one of them stands for all, and
the others are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.plans.plan import RuleStep

from .choose import Node, Terms, as_written
from .derivation import derive
from .rebuild import Rebuilt, rebuild
from .requests import Applied

# Of these numbers no measurement is kept; the front's notes tell what they leave out.

#: Operations of all forms together beyond which no further form is searched, and forms at most.
OPERATIONS, FORMS = 300, 6
# Choices that are looked at, most of which differ in views alone, by their operations together.
_LOOKED_AT = 30_000


@dataclass(frozen=True)
class Extraction:
    """A program that the classes hold, and what it chooses among their nodes."""

    built: Rebuilt
    pick: list[int]


@dataclass(frozen=True)
class Extracted:
    """Programs that the classes hold; how many more were found that differ from these, how many
    that differ from some program in views alone, and whether all choices were looked at."""

    found: tuple[Extraction, ...]
    more: int
    views: int
    complete: bool


def extractions(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    seconds: Sequence[float],
    known: Sequence[BlockGraph] = (),
    operations: int = OPERATIONS,
    holds: Callable[[Extraction], bool] | None = None,
    most: int = FORMS,
) -> Extracted:
    """The programs that differ from the given one, and from those `known`, in more than views.

    Those that replace least come first. As many are made as have `operations` together, and `most`
    in number. Where something else `holds` some, those are not, nor is any that computes what
    nothing reads.
    """
    roots = [terms.class_of[v] for v in graph.outputs]
    roots += [terms.class_of[v] for op in graph.operations if op.effectful for v in op.inputs]
    base = as_written(terms, seconds)
    seen = {kernels_of(g) for g in (graph, *known)}
    room = min(most, operations // max(1, len(graph.operations)))
    found: list[Extraction] = []
    more = views = looked = 0
    for pick in choices(without_twins(terms, catalogue), base, roots):
        if looked > _LOOKED_AT:
            return Extracted(tuple(found), more, views, False)
        looked += len(graph.operations)
        built = rebuild(graph, terms, catalogue, pick)
        if built is None or not built.rules:
            continue
        key = kernels_of(built.graph)
        if key in seen:
            views += 1
            continue
        seen.add(key)
        if holds is not None and holds(Extraction(built, pick)):
            continue
        if len(found) < room and (holds is None or not wasteful(built)):
            found.append(Extraction(built, pick))
        else:
            more += 1
    return Extracted(tuple(found), more, views, True)


def choices(
    nodes: Sequence[Sequence[tuple[int, Node]]], base: Sequence[int], roots: Sequence[int]
) -> Iterator[list[int]]:
    """Every choice of one node for each class that is needed, without circles: the node `base[c]`
    for class c wherever it is not needed. Those with few nodes other than `base` come first."""
    distance = 0
    while True:
        deeper = False
        for pick, spent, cut in _at(nodes, list(base), roots, distance):
            deeper |= cut
            if not cut and spent == distance:
                yield pick
        if not deeper:
            return
        distance += 1


def _at(
    nodes: Sequence[Sequence[tuple[int, Node]]],
    base: list[int],
    roots: Sequence[int],
    distance: int,
) -> Iterator[tuple[list[int], int, bool]]:
    """Choices with at most so many nodes other than `base`, how many they have, and whether there
    would be others with more."""
    # A branch is what has been decided, what waits to be, and how many nodes are not `base`.
    stack: list[tuple[dict[int, int], tuple[int, ...], int]] = [({}, tuple(roots), 0)]
    while stack:
        chosen, waiting, spent = stack.pop()
        while waiting and waiting[-1] in chosen:
            waiting = waiting[:-1]
        if not waiting:
            pick = list(base)
            for c, k in chosen.items():
                pick[c] = k
            yield pick, spent, False
            continue
        c = waiting[-1]
        cut = False
        for k, node in reversed(nodes[c]):
            extra = spent + (k != base[c])
            if extra > distance:
                cut = True
                continue
            stack.append(({**chosen, c: k}, (*waiting[:-1], *node.operands), extra))
        if cut:
            yield base, spent, True


def without_twins(terms: Terms, catalogue: Sequence[Applied]) -> list[list[tuple[int, Node]]]:
    """The nodes of every class with their positions, without those that are an earlier one with
    its operands in another order: they run in the same ways at the same costs."""
    out = []
    for nodes in terms.nodes:
        kept: dict[object, tuple[int, Node]] = {}
        for k, node in enumerate(nodes):
            key: object = k
            if node.signature >= 0:
                entry = catalogue[node.signature]
                if _commutes(entry):
                    key = (entry.kernel, tuple(sorted(node.operands)))
            kept.setdefault(key, (k, node))
        out.append(list(kept.values()))
    return out


def _commutes(entry: Applied) -> bool:
    return entry.kernel in _COMMUTATIVE and len(entry.inputs) == 2


_COMMUTATIVE = frozenset(("add", "mul", "max", "min", "and", "or", "xor"))


def kernels_of(graph: BlockGraph) -> frozenset[bytes]:
    """What a program's operations compute of its inputs, views left out: equal for programs that
    differ in views and in the order of operands alone, as far as equal programs are compared."""
    value: dict[int, bytes] = {v: b"input %d" % k for k, v in enumerate(graph.inputs)}
    for v, array in graph.constants.items():
        value[v] = _digest(b"constant", str(array.dtype).encode(), np.asarray(array).tobytes())
    out = set()
    for op in graph.operations:
        types = tuple([graph.values[v] for v in op.inputs])
        made = tuple([graph.values[v] for v in op.outputs])
        signature = registry.signature_of(op, types, made)
        operands = [value[v] for v in op.inputs]
        if signature.fusion == "view" and len(operands) == 1:
            value[op.outputs[0]] = operands[0]
            continue
        extents = sorted((d.role, d.size) for d in signature.index)
        said = repr((op.kernel, extents, [t.dtype for t in made], len(op.regions))).encode()
        own = _digest(said, *sorted(operands))
        for k, v in enumerate(op.outputs):
            value[v] = own if not k else _digest(own, b"%d" % k)
        out.add(own)
    return frozenset(out)


def wasteful(built: Rebuilt) -> bool:
    """Whether new operations compute something of which only slices are read, and not all of it: as
    where several products are made as one, and one of them is read."""
    graph = built.graph
    whole = set(graph.outputs)
    shares: dict[int, dict[str, int]] = {}
    for op in graph.operations:
        if op.kernel == "slice":
            nbytes = graph.values[op.outputs[0]].nbytes
            shares.setdefault(op.inputs[0], {})[repr(op.params)] = nbytes
        else:
            whole.update(op.inputs)
    return any(
        v in built.class_of and v not in whole and sum(parts.values()) < graph.values[v].nbytes
        for v, parts in shares.items()
    )


def _digest(*parts: bytes) -> bytes:
    """A short name for what some bytes say."""
    made = blake2b(digest_size=16)
    for part in parts:
        made.update(b"%d " % len(part))
        made.update(part)
    return made.digest()


# Patches: places of a program that can be computed in several ways, independent of each other. A
# change at one class is a move: another node computes it, with the new classes below. Moves that
# touch the same classes belong to one place; it holds every way that its moves make together, the
# program's own first. With n places of two ways each there are 2^n programs, of which none is built
# before it is wanted.

#: Ways to compute one place that are searched, the program's own among them.
ALTERNATIVES = 16

#: class -> the node that computes it, where that is not the program's own
Move = Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Patches:
    """The places of a program. `places[p]` are the ways to compute place p, the first one the
    program's own; `left` ways were found besides, and `complete` says whether all were looked at.
    """

    graph: BlockGraph
    terms: Terms
    catalogue: Sequence[Applied]
    base: Sequence[int]
    places: tuple[tuple[Move, ...], ...]
    left: int = 0
    complete: bool = True

    def __len__(self) -> int:
        return len(self.places)

    @property
    def values(self) -> int:
        """How many values the program as given has: all others have them, and new ones after."""
        return len(self.graph.values)

    def pick(self, ways: Sequence[int]) -> list[int]:
        """Of every class the node that computes it where place p is computed by `ways[p]`."""
        made = list(self.base)
        for place, way in zip(self.places, ways, strict=True):
            for c, k in place[way].items():
                made[c] = k
        return made

    def built(self, ways: Sequence[int]) -> Rebuilt | None:
        """The program whose place p is computed by `ways[p]`; None where it depends on itself.

        What is new stands where that stood which it takes the place of, so that all else keeps its
        order, whichever other places change.
        """
        made = rebuild(self.graph, self.terms, self.catalogue, self.pick(ways))
        return made and replace(made, graph=self._in_order(made))

    def _in_order(self, made: Rebuilt) -> BlockGraph:
        at = {v: k for k, op in enumerate(self.graph.operations) for v in op.outputs}
        stands = self.stands(made)
        operations = made.graph.operations
        producer = made.graph.producers()
        end = len(self.graph.operations)

        def place(k: int) -> tuple[int, int]:
            made = operations[k].outputs
            return min((at.get(stands.get(v, v), end) for v in made), default=end), k

        placed: dict[int, None] = {}
        for k in sorted(range(len(operations)), key=place):
            stack = [(k, False)]
            while stack:
                n, ready = stack.pop()
                if ready:
                    placed.setdefault(n)
                elif n not in placed:
                    stack.append((n, True))
                    below = [producer[v] for v in operations[n].inputs if v in producer]
                    stack += [(m, False) for m in reversed(below) if m not in placed]
        return replace(made.graph, operations=tuple(operations[k] for k in placed))

    def stands(self, built: Rebuilt) -> Mapping[int, int]:
        """New values of a program -> the values of the program as given that they stand for."""
        first: dict[int, int] = {}
        for op in self.graph.operations:
            for v in op.outputs:
                first.setdefault(self.terms.class_of[v], v)
        return {v: first[c] for v, c in built.class_of.items() if c in first}

    def steps(self, ways: Sequence[int]) -> tuple[RuleStep, ...]:
        """How the rules lead there."""
        return derive(self.graph, self.terms, self.catalogue, self.pick(ways))

    def holds(self, found: Extraction) -> bool:
        """Whether a form is one of those that the places make together."""
        ways = []
        for place in self.places:
            own = {c for way in place for c in way}
            wanted = {c: found.pick[c] for c in own if found.pick[c] != self.base[c]}
            if wanted not in place:
                return False
            ways.append(place.index(wanted))
        made = self.built(ways)
        return made is not None and kernels_of(made.graph) == kernels_of(found.built.graph)


def find_patches(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    seconds: Sequence[float],
    is_proven: Callable[[Rebuilt], bool],
    room: int,
) -> Patches:
    """The places of a program whose ways differ in more than views, and are proven.

    `seconds[s]` is the least time that signature s can take; new classes are computed by the nodes
    of the least sum where no move says otherwise. As many ways are taken as have `room` operations
    together, each as a program of its own, those first that change least.
    """
    base = as_written(terms, seconds)
    own = Patches(graph, terms, catalogue, base, ())
    first = rebuild(graph, terms, catalogue, base)
    if first is None or first.graph.operations != graph.operations:
        return own
    roots = terms.roots(graph)
    nodes = without_twins(terms, catalogue)
    moves, complete = _moves(own, nodes, roots)
    places: list[tuple[Move, ...]] = []
    left, spent = 0, len(graph.operations)
    for group in _together(terms, base, roots, moves):
        ways, more, whole = _ways(own, nodes, roots, group, is_proven)
        fits = max(0, (room - spent) // max(1, len(graph.operations)))
        kept = ways[: min(ALTERNATIVES - 1, fits)]
        left += more + len(ways) - len(kept)
        complete &= whole
        if kept:
            places.append(({}, *kept))
            spent += len(kept) * len(graph.operations)
    return Patches(graph, terms, catalogue, base, tuple(places), left, complete)


def _moves(
    own: Patches, nodes: Sequence[Sequence[tuple[int, Node]]], roots: Sequence[int]
) -> tuple[list[tuple[int, int]], bool]:
    """Changes of one class, as (class, node), that make another program than views do; and whether
    all were looked at."""
    seen = {kernels_of(own.graph)}
    looked = 0
    found: list[tuple[int, int]] = []
    for c in sorted(_live(own.terms, own.base, roots)):
        for k, node in nodes[c]:
            if k == own.base[c] or any(own.base[d] < 0 for d in node.operands):
                continue
            if looked > _LOOKED_AT:
                return found, False
            looked += len(own.graph.operations)
            pick = list(own.base)
            pick[c] = k
            built = rebuild(own.graph, own.terms, own.catalogue, pick)
            if built is None or not built.rules:
                continue
            key = kernels_of(built.graph)
            if key not in seen:
                seen.add(key)
                found.append((c, k))
    return found, True


def _live(terms: Terms, pick: Sequence[int], roots: Sequence[int]) -> set[int]:
    """The classes that are computed."""
    seen: set[int] = set()
    stack = list(roots)
    while stack:
        c = stack.pop()
        if c not in seen:
            seen.add(c)
            stack.extend(terms.nodes[c][pick[c]].operands)
    return seen


def _together(
    terms: Terms, base: Sequence[int], roots: Sequence[int], moves: Sequence[tuple[int, int]]
) -> list[list[tuple[int, int]]]:
    """Moves that touch the same classes, in the order of their first ones.

    A move touches the class that it changes, those that are computed for it or no longer, and the
    computed ones that it reads more or less often: what two places read less often may be computed
    no more where both change.
    """
    live = _live(terms, base, roots)
    groups: list[tuple[set[int], list[tuple[int, int]]]] = []
    for c, k in moves:
        pick = list(base)
        pick[c] = k
        after = _live(terms, pick, roots)
        changed = (live ^ after) | {c}
        read = {d for e in changed for d in terms.nodes[e][base[e]].operands}
        read |= set(terms.nodes[c][k].operands)
        touched = changed | {d for d in read if terms.nodes[d][base[d]].operands}
        mine = [g for g in groups if g[0] & touched]
        groups = [g for g in groups if not any(g is m for m in mine)]
        moved = sorted([m for g in mine for m in g[1]] + [(c, k)])
        groups.append((touched.union(*[g[0] for g in mine]), moved))
    return [moved for _, moved in sorted(groups, key=lambda g: g[1])]


def _ways(
    own: Patches,
    nodes: Sequence[Sequence[tuple[int, Node]]],
    roots: Sequence[int],
    moves: Sequence[tuple[int, int]],
    is_proven: Callable[[Rebuilt], bool],
) -> tuple[list[Move], int, bool]:
    """What some moves make together, those first that change least; how many more there are that
    are not proven, or compute what nothing reads; and whether all were looked at."""
    live = _live(own.terms, own.base, roots)
    allowed = [
        [
            (k, node)
            for k, node in nodes[c]
            if c not in live or k == own.base[c] or (c, k) in set(moves)
        ]
        for c in range(len(nodes))
    ]
    seen = {kernels_of(own.graph)}
    ways: list[Move] = []
    looked = left = 0
    for pick in choices(allowed, own.base, roots):
        if looked > _LOOKED_AT:
            return ways, left, False
        looked += len(own.graph.operations)
        built = rebuild(own.graph, own.terms, own.catalogue, pick)
        if built is None or not built.rules:
            continue
        key = kernels_of(built.graph)
        if key in seen:
            continue
        seen.add(key)
        if len(ways) < ALTERNATIVES and not wasteful(built) and is_proven(built):
            ways.append({c: k for c, k in enumerate(pick) if k != own.base[c]})
        else:
            left += 1
    return ways, left, True
