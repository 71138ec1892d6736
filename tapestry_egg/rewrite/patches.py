"""Patches: places of a program that can be computed in several ways, independent of each other.

A change at one class of equal values is a *move*: another node computes it, with the new classes
below. Moves that touch the same classes belong to one place; a patch holds every way that its moves
make together, the program's own first. With n places of two ways each there are 2^n programs, of
which none is built before it is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.plan import RuleStep

from .choose import Node, Terms, as_written
from .derivation import derive
from .extractions import Extraction, choices, kernels_of, wasteful, without_twins
from .rebuild import Rebuilt, rebuild
from .requests import Applied

# Of these numbers no measurement is kept; what they leave out is counted.

#: Ways to compute one place that are searched, the program's own among them.
ALTERNATIVES = 16
# Programs that are looked at, for all moves and for every place, by their operations together.
_LOOKED_AT = 30_000

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
