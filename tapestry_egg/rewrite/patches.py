"""Patches: places of a program that can be computed in several ways, independent of each other.

A change at one class is a move: another node computes it, with the new classes below. Moves that
touch the same classes belong to one place; it holds every way that its moves make together, the
program's own first. With n places of two ways each there are 2^n programs, of which none is built
before it is wanted. The body of a loop has places as the program around it has: all copies that the
loop runs are computed in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.plans.plan import RuleStep
from tapestry_egg.rewrite.terms.kernel_names import KernelNames
from tapestry_egg.rewrite.terms.rebuild import Rebuilt, rebuild
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rewrite.terms.terms import Node, Terms, as_written

from .derivation import derive, inside, with_region
from .extractions import Extraction, Open, choices, kernels_of, wasteful, without_twins
from .folded_program import Folded, unfold

#: Ways to compute one place that are searched, the program's own among them.
ALTERNATIVES = 16
#: Classes that are named for all ways of a program that are looked at: half a second.
NAMED = 100_000

#: class -> the node that computes it, where that is not the program's own
Move = Mapping[int, int]


@dataclass(frozen=True, eq=False)
class Places:
    """The places of one graph. `ways[p]` are the ways to compute place p, the first one the graph's
    own; `left` ways were found besides, and `complete` says whether all were looked at; behind
    `views` that are no ways none was looked for."""

    graph: BlockGraph
    terms: Terms
    catalogue: Sequence[Applied]
    base: Sequence[int]
    ways: tuple[tuple[Move, ...], ...]
    left: int = 0
    views: int = 0
    complete: bool = True

    def __len__(self) -> int:
        return len(self.ways)

    def pick(self, chosen: Sequence[int]) -> list[int]:
        """Of every class the node that computes it where place p is computed by way `chosen[p]`."""
        made = list(self.base)
        for place, way in zip(self.ways, chosen, strict=True):
            for c, k in place[way].items():
                made[c] = k
        return made

    def built(self, graph: BlockGraph, chosen: Sequence[int]) -> Rebuilt | None:
        """The graph whose place p is computed by way `chosen[p]`; None where it depends on itself.
        `graph` is the one that has these places, whatever the bodies of its loops are by now.

        What is new stands where that stood which it takes the place of, so that all else keeps its
        order, whichever other places change.
        """
        made = rebuild(graph, self.terms, self.catalogue, self.pick(chosen))
        return made and replace(made, graph=self._in_order(made))

    def change(self, graph: BlockGraph, chosen: Sequence[int]) -> Change | None:
        """The same with the rules and steps that lead there, and what new values stand for."""
        made = self.built(graph, chosen)
        if made is None:
            return None
        steps = derive(graph, self.terms, self.catalogue, self.pick(chosen))
        return Change(made.graph, made.rules, steps, self.stands(made))

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
        """New values of a graph -> the values of the graph as given that they stand for."""
        first: dict[int, int] = {}
        for op in self.graph.operations:
            for v in op.outputs:
                first.setdefault(self.terms.class_of[v], v)
        return {v: first[c] for v, c in built.class_of.items() if c in first}

    def holds(self, found: Extraction) -> bool:
        """Whether a form is one of those that the places make together."""
        chosen = []
        for place in self.ways:
            own = {c for way in place for c in way}
            wanted = {c: found.pick[c] for c in own if found.pick[c] != self.base[c]}
            if wanted not in place:
                return False
            chosen.append(place.index(wanted))
        made = self.built(self.graph, chosen)
        return made is not None and kernels_of(made.graph) == kernels_of(found.built.graph)


@dataclass(frozen=True)
class Change:
    """A graph with some places computed in other ways: the rules and steps that lead there, and
    which new values stand for which of the graph as given."""

    graph: BlockGraph
    rules: tuple[str, ...]
    steps: tuple[RuleStep, ...]
    stands: Mapping[int, int]


@dataclass(frozen=True, eq=False)
class LayerPlaces(Places):
    """The places of a graph whose equal layers are `folded`: terms, ways and what is picked are of
    the folded program, and all copies of a layer are computed in the same way."""

    folded: Folded | None = None

    @staticmethod
    def of(found: Places, graph: BlockGraph, folded: Folded) -> LayerPlaces:
        """The places of a folded program as those of the whole one: but those of what is context
        there, which other copies decide."""
        owned = {found.terms.class_of[v] for part in folded.parts for v in part.owned}
        places = [[way for way in ways if not way or owned & way.keys()] for ways in found.ways]
        ways = tuple([tuple(own) for own in places if len(own) > 1])
        own = vars(found) | {"graph": graph, "ways": ways}
        return LayerPlaces(**own, folded=folded)

    def change(self, graph: BlockGraph, chosen: Sequence[int]) -> Change | None:
        assert self.folded is not None
        pick = self.pick(chosen)
        terms, catalogue, own = unfold(graph, self.folded, self.terms, self.catalogue, pick)
        return Places(graph, terms, catalogue, own, ()).change(graph, ())


#: A graph of the nest: numbers of operation and region, from the outermost inwards.
Path = tuple[int, ...]
#: The same by what the operations give, whose numbers no place changes.
BodyName = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Built:
    """One of the programs that places make: its graph, the rules that made what is new in it, the
    steps that lead there, and in which body which new values stand for which of the program as
    given."""

    graph: BlockGraph
    rules: tuple[str, ...]
    steps: tuple[RuleStep, ...]
    stands: Mapping[BodyName, Mapping[int, int]]


@dataclass(frozen=True, eq=False)
class Patches:
    """The places of a program and of the bodies of its loops, graph by graph, `left` ways of which
    were found and are not searched."""

    graph: BlockGraph
    parts: tuple[tuple[Path, Places], ...] = ()
    distinct: int = 0  # operations that are not of equal layers, each as one; 0: all

    @property
    def places(self) -> tuple[tuple[Move, ...], ...]:
        """Of every place the ways to compute it, the program's own first."""
        return tuple([ways for _, part in self.parts for ways in part.ways])

    def __len__(self) -> int:
        return sum(len(part) for _, part in self.parts)

    @property
    def left(self) -> int:
        """Ways that were found and are not searched."""
        return sum(part.left for _, part in self.parts)

    @property
    def values(self) -> Mapping[BodyName, int]:
        """How many values the graphs of the program as given have that have places: those of other
        programs have these, and new ones after."""
        return {self._name(path): len(part.graph.values) for path, part in self.parts}

    def _name(self, path: Path) -> BodyName:
        graph, name = self.graph, []
        for number, region in zip(path[::2], path[1::2], strict=True):
            name += [graph.operations[number].outputs, (region,)]
            graph = graph.operations[number].regions[region]
        return tuple(name)

    def inside(self, number: int, region: int) -> list[tuple[Path, Places]]:
        """The parts, where this program is a region of another one's operation."""
        return [((number, region, *path), part) for path, part in self.parts]

    def within(self, room: int) -> Patches:
        """As many ways as programs of one change each have `room` operations together, in turns:
        the second way of each place first."""
        return self.first(max(0, room // max(1, self.distinct or self.graph.size) - 1))

    def first(self, fits: int) -> Patches:
        """So many ways, in turns."""
        sizes = [len(ways) for ways in self.places]
        turns = sorted((w, p) for p, n in enumerate(sizes) for w in range(1, n))[:fits]
        kept = [1 + sum(p == q for _, q in turns) for p in range(len(sizes))]
        parts, at = [], 0
        for path, part in self.parts:
            own = [ways[:n] for ways, n in zip(part.ways, kept[at:], strict=False)]
            gone = sum(map(len, part.ways)) - sum(map(len, own))
            at += len(part)
            ways = tuple([x for x in own if len(x) > 1])
            parts.append((path, replace(part, ways=ways, left=part.left + gone)))
        return replace(self, parts=tuple(parts))

    def only(self, makes: Callable[[Sequence[int]], bool]) -> Patches:
        """Those ways that make a program alone, all other places as given."""
        first, at, parts = [0] * len(self), 0, []
        for path, part in self.parts:
            own = []
            for ways in part.ways:
                good = [
                    way
                    for k, way in enumerate(ways)
                    if not k or makes([*first[:at], k, *first[at + 1 :]])
                ]
                own.append(tuple(good))
                at += 1
            gone = sum(map(len, part.ways)) - sum(map(len, own))
            kept = tuple([x for x in own if len(x) > 1])
            parts.append((path, replace(part, ways=kept, left=part.left + gone)))
        return replace(self, parts=tuple(parts))

    def programs(self, most: int) -> list[Built] | None:
        """The programs other than the given one that all places make; None where there are more."""
        sizes = [len(ways) for ways in self.places]
        if prod(sizes) > most + 1:
            return None
        made = [self.built(c) for c in product(*map(range, sizes)) if any(c)]
        return [b for b in made if b is not None]

    def built(self, chosen: Sequence[int]) -> Built | None:
        """The program whose place p is computed by way `chosen[p]`; None where a graph of it
        depends on itself. Bodies change first, as operations have their numbers until then."""
        graph = self.graph
        rules: set[str] = set()
        steps: list[RuleStep] = []
        stands: dict[BodyName, Mapping[int, int]] = {}
        ends = list(accumulate((len(part) for _, part in self.parts), initial=0))
        own = [tuple(chosen[a:b]) for a, b in pairwise(ends)]
        inwards = sorted(zip(self.parts, own, strict=True), key=lambda x: (-len(x[0][0]), x[0][0]))
        for (path, part), ways in inwards:
            if not any(ways):
                continue
            body = inside(graph, path)
            made = part.change(body, ways)
            if made is None:
                return None
            rules |= set(made.rules)
            steps += [replace(s, region=(*path, *s.region)) for s in made.steps]
            stands[self._name(path)] = made.stands
            graph = with_region(graph, path, made.graph)
        return Built(graph, tuple(sorted(rules)), tuple(steps), stands)


def find_places(
    graph: BlockGraph,
    terms: Terms,
    catalogue: Sequence[Applied],
    seconds: Sequence[float],
    is_proven: Callable[[Rebuilt], bool],
    most: int,
) -> Places:
    """The places of a graph whose ways differ in more than views, and are proven: no more than
    `most` ways beside the graph's own, the second one of each place first. Without room for any
    none is looked for.

    `seconds[s]` is the least time that signature s can take; new classes are computed by the nodes
    of the least sum where no move says otherwise.
    """
    base = as_written(terms, seconds)
    own = Places(graph, terms, catalogue, base, ())
    if not most:
        return replace(own, complete=False)
    first = rebuild(graph, terms, catalogue, base)
    if first is None or first.graph.operations != graph.operations:
        return replace(own, complete=False)
    roots = terms.roots(graph)
    nodes = without_twins(terms, catalogue)
    names = KernelNames(graph, terms, catalogue, base, roots)
    limit = names.named + NAMED
    moves, views, complete = _moves(names, nodes, limit)
    groups = _together(terms, base, roots, moves)
    offered: list[list[list[int]]] = []
    for g, group in enumerate(groups):
        share = max(0, limit - names.named) // (len(groups) - g)
        picks, whole = _offered(names, nodes, roots, group, names.named + share)
        offered.append(picks)
        complete &= whole
    ways = _in_turns(own, offered, is_proven, most)
    left = sum(map(len, offered)) - sum(map(len, ways))
    places = tuple([({}, *some) for some in ways if some])
    return Places(graph, terms, catalogue, base, places, left, views, complete)


def _moves(
    names: KernelNames, nodes: Sequence[Sequence[tuple[int, Node]]], limit: int
) -> tuple[list[tuple[int, int]], int, bool]:
    """Changes of one class, as (class, node), that make another program than views do; how many
    make no other, and whether all were looked at."""
    base, views = names.base, 0
    found: dict[tuple[int, bytes], tuple[int, int]] = {}
    for c in sorted(names.own):
        for k, node in nodes[c]:
            if k == base[c] or any(base[d] < 0 for d in node.operands):
                continue
            if names.named > limit:
                return list(found.values()), views, False
            made = names.moved(c, k)
            if made is not None and made[1] == names.own[c].key:
                views += 1
            elif made is not None:
                found.setdefault(made, (c, k))
    return list(found.values()), views, True


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


def _offered(
    names: KernelNames,
    nodes: Sequence[Sequence[tuple[int, Node]]],
    roots: Sequence[int],
    moves: Sequence[tuple[int, int]],
    limit: int,
) -> tuple[list[list[int]], bool]:
    """What some moves make together, those first that change least, and whether all were looked
    at. Only what is made of the classes that they leave open is."""
    live, base, wanted = names.own, names.base, set(moves)
    allowed = [
        [(k, x) for k, x in own if c not in live or k == base[c] or (c, k) in wanted]
        for c, own in enumerate(nodes)
    ]
    opened = Open(allowed, base)
    first = opened.first(roots)
    unsettled: set[int] = set()
    for c in live:  # each after those that it reads
        read = names.terms.nodes[c][base[c]].operands
        if opened.open[c] or not unsettled.isdisjoint(read):
            unsettled.add(c)
    seen: set[frozenset[tuple[int, bytes]]] = {frozenset()}
    found: list[list[int]] = []
    for pick in choices(allowed, base, first):
        if names.named > limit:
            return found, False
        made = names.several(pick, first, lambda c: c in live and c not in unsettled)
        if made is not None and made not in seen:
            seen.add(made)
            found.append(pick)
    return found, True


def _in_turns(
    own: Places,
    offered: Sequence[Sequence[list[int]]],
    is_proven: Callable[[Rebuilt], bool],
    most: int,
) -> list[list[Move]]:
    """Of every place the ways that are proven and compute nothing that nothing reads: as many as
    places have, and no more than `most` of all, in turns."""
    found: list[list[Move]] = [[] for _ in offered]
    seen = [{kernels_of(own.graph)} for _ in offered]
    rest = [iter(picks) for picks in offered]
    for _ in range(ALTERNATIVES - 1):
        for ways, known, picks in zip(found, seen, rest, strict=True):
            if sum(map(len, found)) >= most:
                return found
            for pick in picks:
                built = rebuild(own.graph, own.terms, own.catalogue, pick)
                if built is None or not built.rules or wasteful(built):
                    continue
                key = kernels_of(built.graph)
                if key not in known and is_proven(built):
                    known.add(key)
                    ways.append({c: k for c, k in enumerate(pick) if k != own.base[c]})
                    break
    return found
