"""Fold: a deep program as a short one that has all its distinct parts, and back again.

Of every stretch that a program repeats, the folded program has one copy with some context around
it, and it has what is there once. Its parts are not joined: what a part reads from outside is an
input of the folded program. So whatever rules say of a part holds in every copy, by putting the
copy's values in the place of the part's, and a choice for the folded program becomes one for the
whole. Rewrites across the edge of a part and its context are not seen.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.rewrite.terms.rebuild import Builder, Node, Terms
from tapestry_egg.rewrite.terms.requests import Applied

# Repeats: stretches of a program that are there many times, as the layers of an unrolled network.
#
# A stretch has positions and copies: the operations at one position are alike, and where one
# position reads another, every copy does so. Layers, their backward passes and the updates of their
# parameters hang together and make one stretch; nothing depends on the order in which the program
# lists them.
#
# Operations are first coloured by what surrounds them (Weisfeiler and Leman's refinement), which
# only guesses. From a colour a stretch then grows along edges in all copies at once, and every edge
# that it claims has been compared in every copy: a stretch is a homomorphism from its operations
# into the program for each copy. So what is true of one copy, with all that it reads from outside
# taken as unknown, is true of every other.


Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]

# Of these numbers no measurement is kept. Operations that they keep out of all stretches are in the
# folded program themselves.

#: Fewer copies than this are not worth finding.
LEAST_COPIES = 4
# How far around an operation its colour looks.
_ROUNDS = 6
#: Operations around a stretch, or around what is there once, that belong to it as context, by
#: their distance.
CONTEXT = 6
# Nor are operations so near to a place where the copies differ its own.
_MARGIN = 2
# A stretch may lose this share of its copies for one more position: those at the ends of a chain.
_LOSS = 0.25
#: Values with more readers tie everything to everything; their readers are not followed.
MOST_READERS = 12
# Operations from which a stretch is grown. Of those that save nearly as much as the one that saves
# most (this share of it), that with the best edges is kept.
_PIVOTS = 6
_NEARLY = 0.9


@dataclass(frozen=True, eq=False)
class Stretch:
    """Operations alike: `images[position, copy]` is an operation of the program.

    Positions are in the program's order in copy `model`. Those that are not `owned` are context:
    they belong to another copy or stretch, or to all copies in common.
    """

    images: Ints  # [positions, copies]
    owned: NDArray[np.bool_]  # [positions]
    model: int

    @property
    def copies(self) -> int:
        return self.images.shape[1]


def stretches(net: Net) -> tuple[Stretch, ...]:
    """Disjoint stretches that save work when only one copy of each is looked at, largest first."""
    taken = np.zeros(net.count, dtype=np.bool_)
    found: list[Stretch] = []
    colours = net.colours(_ROUNDS)
    given_up: set[int] = set()
    while pivots := _pivots(colours, taken, given_up):
        grown = []
        for colour in pivots:
            members = np.flatnonzero((colours == colour) & ~taken)
            stretch = _Growth(net, members, taken).stretch()
            grown.append((_saved(stretch), stretch))
        most = max(saved for saved, _ in grown)
        if most <= 0:
            given_up.update(pivots)
            continue
        good = [s for saved, s in grown if saved >= _NEARLY * most]
        found.append(min(good, key=lambda s: _torn(net, s)))
        taken[found[-1].images[found[-1].owned]] = True
    return tuple(found)


def grown(net: Net, operations: Ints, taken: Flags) -> Stretch:
    """The stretch around operations of one kind, with a copy for each of them; without operations
    that are `taken`."""
    return _Growth(net, operations, taken, 0.0).stretch()


def _pivots(colours: Ints, taken: NDArray[np.bool_], given_up: set[int]) -> list[int]:
    """Colours to grow from: spread over those that are there as often as most are."""
    free = np.flatnonzero(~taken)
    kinds, first, counts = np.unique(colours[free], return_index=True, return_counts=True)
    usable = [
        (int(first[k]), int(kinds[k]), int(counts[k]))
        for k in range(len(kinds))
        if counts[k] >= LEAST_COPIES and int(kinds[k]) not in given_up
    ]
    if not usable:
        return []
    common = Counter(n for _, _, n in usable)
    often = max(common, key=lambda n: (common[n] * n, n))
    alike = [colour for _, colour, n in sorted(usable) if n == often]
    step = max(1, len(alike) // _PIVOTS)
    return alike[step // 2 :: step][:_PIVOTS]


def _saved(s: Stretch) -> int:
    """Operations that need not be looked at."""
    return int(s.owned.sum()) * (s.copies - 1) - len(s.images)


def _torn(net: Net, s: Stretch) -> tuple[int, int]:
    """What the edges of a copy tear apart: equal contractions that share an operand, which rules
    merge, and how many values cross."""
    mine = set(s.images[s.owned, s.model].tolist())
    reads = {v for o in mine for v in net.inputs[o]}
    siblings = 0
    for v in reads:
        if net.readers[v] > MOST_READERS:
            continue
        alike: dict[tuple[int, int], list[bool]] = {}
        for k in range(int(net.first[v]), int(net.first[v] + net.readers[v])):
            o = int(net.reader[k])
            if net.contracts[o]:
                alike.setdefault((int(net.kind[o]), int(net.port[k])), []).append(o in mine)
        siblings += sum(any(inside) and not all(inside) for inside in alike.values())
    crossing = sum(int(net.producer[v]) >= 0 and int(net.producer[v]) not in mine for v in reads)
    return siblings, crossing


class Net:
    """The edges of a program as arrays.

    `kind[o]` is the number of operation o's signature; `producer[v]` and `slot[v]` say which
    operation makes value v, as which of its outputs (-1: none does). The operands of o stand in
    `operand` from `begin[o]` on; the `readers[v]` edges to those that read v stand in `reader` and
    `port` from `first[v]` on, ordered by kind and port. `given[v]` is equal for inputs of one type
    and for constants of equal content; `leaves[v]` counts how often v is an output of the program.
    """

    def __init__(self, graph: BlockGraph) -> None:
        values, operations = graph.values, graph.operations
        self.count = len(operations)
        self.inputs = [op.inputs for op in operations]
        self.outputs = [op.outputs for op in operations]
        numbers: dict[object, int] = {}
        self.contracts = [
            not op.regions and registry.signature_in(graph, op).multiplies for op in operations
        ]
        self.kind: Ints = np.empty(self.count, dtype=np.int64)
        self.producer: Ints = np.full(len(values), -1, dtype=np.int64)
        self.slot: Ints = np.zeros(len(values), dtype=np.int64)
        for i, op in enumerate(operations):
            key = (
                op.kernel,
                hashable(op.params),
                tuple([values[v] for v in op.inputs]),
                tuple([values[v] for v in op.outputs]),
                op.remat is None,
                op.effectful,
                tuple([_region(r) for r in op.regions]),
            )
            self.kind[i] = numbers.setdefault(key, len(numbers))
            for q, v in enumerate(op.outputs):
                self.producer[v], self.slot[v] = i, q
        # What a value is when no operation makes it: constants of equal content are one.
        given: dict[object, int] = {}
        self.given: Ints = np.array(
            [given.setdefault(_content(graph, v), len(given)) for v in range(len(values))],
            dtype=np.int64,
        )
        reads = [(i, p, v) for i, vs in enumerate(self.inputs) for p, v in enumerate(vs)]
        edges: Ints = np.array(reads, dtype=np.int64).reshape(len(reads), 3)
        self.operand: Ints = np.ascontiguousarray(edges[:, 2])
        arity = np.array([len(vs) for vs in self.inputs], dtype=np.int64)
        self.begin: Ints = np.concatenate([[0], np.cumsum(arity)])[:-1].astype(np.int64)
        order = np.lexsort((edges[:, 0], edges[:, 1], self.kind[edges[:, 0]], edges[:, 2]))
        self.reader: Ints = edges[order, 0]
        self.port: Ints = edges[order, 1]
        self.readers: Ints = np.bincount(edges[:, 2], minlength=len(values)).astype(np.int64)
        self.first: Ints = (np.cumsum(self.readers) - self.readers).astype(np.int64)
        self.edges = edges
        self.leaves: Ints = np.zeros(len(values), dtype=np.int64)
        np.add.at(self.leaves, np.array(graph.outputs, dtype=np.int64), 1)

    def colours(self, rounds: int) -> Ints:
        """A number for each operation: equal where all is alike so many edges around."""
        made = self.producer >= 0
        at, port, value = self.edges.T
        colour = _mixed(self.kind, 1)
        source = _mixed(self.given, 2)
        for _ in range(rounds):
            whose = source.copy()
            whose[made] = _mixed(colour[self.producer[made]], 3) + _mixed(self.slot[made], 4)
            below = np.zeros(self.count, dtype=np.uint64)
            np.add.at(below, at, _mixed(whose[value] + _mixed(port, 5), 6))
            using = _mixed(self.leaves, 7)
            np.add.at(using, value, _mixed(colour[at] + _mixed(port, 8), 9))
            above = np.zeros(self.count, dtype=np.uint64)
            np.add.at(
                above, self.producer[made], _mixed(using[made] + _mixed(self.slot[made], 4), 10)
            )
            colour = _mixed(colour + _mixed(below, 11) + _mixed(above, 12), 13)
        _, numbers = np.unique(colour, return_inverse=True)
        return np.asarray(numbers, dtype=np.int64)


def _content(graph: BlockGraph, v: int) -> object:
    array = graph.constants.get(v)
    if array is None:
        return graph.values[v]
    if array.size > 64:
        return graph.values[v], id(array)
    return graph.values[v], np.asarray(array).tobytes()


def _region(graph: BlockGraph) -> str:
    from .derivation import digest

    return digest(graph)


_STEP = 0x9E3779B97F4A7C15
_MIX = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], dtype=np.uint64)


def _mixed(x: NDArray[np.uint64] | Ints, salt: int) -> NDArray[np.uint64]:
    """A pseudo-random number for each number (the finaliser of splitmix64, Steele et al. 2014)."""
    z = x.astype(np.uint64) + np.uint64(salt * _STEP % 2**64)
    z = (z ^ (z >> np.uint64(30))) * _MIX[0]
    z = (z ^ (z >> np.uint64(27))) * _MIX[1]
    return z ^ (z >> np.uint64(31))


class _Growth:
    """One stretch, grown from a pivot in every copy at once."""

    def __init__(
        self, net: Net, pivots: Ints, taken: NDArray[np.bool_], loss: float = _LOSS
    ) -> None:
        self.net = net
        self.claimed = taken.copy()
        self.model = len(pivots) // 2
        self.alive = np.ones(len(pivots), dtype=np.bool_)
        self.least = max(LEAST_COPIES - 1, int(len(pivots) * (1.0 - loss)))
        self.images: list[Ints] = []
        self.owned: list[bool] = []
        self.position: dict[int, int] = {}  # operation of the model copy -> position
        self.apart: set[int] = set()  # positions around which the copies differ
        self._stamp: Ints = np.full(net.count, -1, dtype=np.int64)
        self._numbers: Ints = np.arange(len(pivots), dtype=np.int64)
        self._add(pivots, True)
        queue = deque((0,))
        rest: list[int] = []
        while queue:
            t = queue.popleft()
            rest.append(t)
            for image in self._around(t):
                if self._is_free(image):
                    queue.append(self._add(image, True))
        ring = rest
        for _ in range(CONTEXT):
            ring = [
                self._add(image, False)
                for t in ring
                for image in self._around(t)
                if int(image[self.model]) not in self.position
            ]

    def stretch(self) -> Stretch:
        """What was grown. Copies may be fused or rewritten differently where their surroundings
        differ: what is near is not owned."""
        near = set(self.apart)
        for _ in range(_MARGIN):
            near |= {n for t in near for n in self._near(t)}
        for t in near:
            self.owned[t] = False
        images = np.array(self.images, dtype=np.int64)
        order = np.argsort(images[:, self.model], kind="stable")
        model = int(self.alive[: self.model].sum())
        return Stretch(
            np.ascontiguousarray(images[order][:, self.alive]), np.array(self.owned)[order], model
        )

    def _add(self, image: Ints, owned: bool) -> int:
        self.position[int(image[self.model])] = len(self.images)
        self.images.append(image)
        self.owned.append(owned)
        if owned:
            self.claimed[image[self.alive]] = True
        return len(self.images) - 1

    def _is_free(self, image: Ints) -> bool:
        """Whether nobody has these operations yet, and no two copies share one."""
        if int(image[self.model]) in self.position:
            return False
        living = image[self.alive]
        if self.claimed[living].any():
            return False
        numbers = self._numbers[: len(living)]
        self._stamp[living] = numbers
        return bool((self._stamp[living] == numbers).all())

    def _agreed(self, same: NDArray[np.bool_]) -> bool:
        """Whether the copies agree, where need be without a few of them."""
        both = self.alive & same
        if both.sum() < self.alive.sum():
            if both.sum() < self.least or not both[self.model]:
                return False
            self.alive = both
        return True

    def _around(self, t: int) -> list[Ints]:
        """The new neighbours of a position: operations alike in all copies that it reads, or that
        read it."""
        net, here = self.net, self.images[t]
        found: list[Ints] = []
        model = int(here[self.model])
        # What all copies share is read everywhere.
        shared = bool((here[self.alive] == model).all())
        for q in range(0 if shared else len(net.outputs[model])):
            v = np.array([net.outputs[o][q] for o in here.tolist()], dtype=np.int64)
            count = int(net.readers[v[self.model]])
            if count > MOST_READERS:
                continue
            if not self._agreed(net.readers[v] == count):
                self.apart.add(t)
                continue
            for k in range(count):
                at = np.minimum(net.first[v] + k, len(net.reader) - 1)
                if self._new(int(net.reader[at[self.model]])):
                    self._note(t, net.reader[at], net.port[at], found)
        for p in range(len(net.inputs[model])):
            v = net.operand[net.begin[here] + p]
            if self._new(int(net.producer[v[self.model]])):
                self._note(t, net.producer[v], net.slot[v], found)
        return found

    def _near(self, t: int) -> list[int]:
        """The positions next to one in the model copy."""
        net, model = self.net, int(self.images[t][self.model])
        found = [int(net.producer[v]) for v in net.inputs[model]]
        for v in net.outputs[model]:
            if net.readers[v] <= MOST_READERS:
                found += net.reader[net.first[v] : net.first[v] + net.readers[v]].tolist()
        return [self.position[o] for o in found if o in self.position]

    def _new(self, model: int) -> bool:
        return model >= 0 and model not in self.position

    def _note(self, t: int, image: Ints, port: Ints, found: list[Ints]) -> None:
        """Keep a neighbour of a position if it is of one kind, at one port, in all copies."""
        kinds = np.where(image >= 0, self.net.kind[image], -1)
        same = (kinds == kinds[self.model]) & (port == port[self.model])
        if self._agreed(same):
            found.append(np.where(self.alive, image, image[self.model]))
        else:
            self.apart.add(t)


#: Programs with fewer operations are searched as they are. No measurement of this or of the numbers
#: below is kept; the front's notes count the operations of which the rules saw another copy only.
LEAST_OPERATIONS = 1500
# A folded program that is not this much shorter is not worth what its edges hide.
_LEAST_SHARE = 0.75


@dataclass(frozen=True, eq=False)
class Part:
    """A piece of a folded program. `values[v]` are the values that its value v stands for, one for
    each copy; `owned` are those whose making is decided here. `remat[r]` are the copies' numbers of
    the recomputed region r."""

    values: Mapping[int, Ints]
    owned: tuple[int, ...]
    remat: Mapping[int, tuple[int, ...]]


@dataclass(frozen=True, eq=False)
class Folded:
    """A short program in the place of a deep one. The `scope` of each of its operations says which
    one it is, and `weights[scope]` how many operations of the deep program it stands for: none if
    it is context."""

    graph: BlockGraph
    weights: Mapping[str, float]
    parts: tuple[Part, ...]


def fold(graph: BlockGraph) -> Folded | None:
    """The folded program, or None where folding would save little."""
    if len(graph.operations) < LEAST_OPERATIONS:
        return None
    net = Net(graph)
    found = stretches(net)
    if not found:
        return None
    builder = _Folder(graph, net)
    for s in (_remainder(net, found), *found):
        builder.part(s)
    if len(builder.operations) > _LEAST_SHARE * len(graph.operations):
        return None
    return builder.folded()


def _remainder(net: Net, found: Sequence[Stretch]) -> Stretch:
    """What no stretch owns, once, with its context."""
    rest = np.ones(net.count, dtype=np.bool_)
    for s in found:
        rest[s.images[s.owned]] = False
    own = np.flatnonzero(rest)
    inside = set(own.tolist())
    ring = own.tolist()
    for _ in range(CONTEXT):
        near = []
        for o in ring:
            near += [int(net.producer[v]) for v in net.inputs[o]]
            for v in net.outputs[o]:
                if net.readers[v] <= MOST_READERS:
                    near += net.reader[net.first[v] : net.first[v] + net.readers[v]].tolist()
        ring = sorted({o for o in near if o >= 0} - inside)
        inside.update(ring)
    images: Ints = np.array(sorted(inside), dtype=np.int64)
    return Stretch(images[:, None], rest[images], 0)


@dataclass(frozen=True)
class _Told:
    """What the operations of a part read and give, operation by operation.

    A value of the part is told by what it is in the copies, an array [copies] of values of the
    program; its bytes are the key. Two operands are one value here only if they are one in every
    copy: what holds of the part then holds of each. What is read is told with whether the part
    makes it.
    """

    reads: list[list[tuple[Ints, bool]]]
    gives: list[list[Ints]]


def _told(net: Net, s: Stretch) -> _Told:
    """The values of a stretch."""
    position = {int(o): t for t, o in enumerate(s.images[:, s.model])}
    told = _Told([], [])
    for image in s.images:
        model = int(image[s.model])
        told.reads.append([])
        for p in range(len(net.inputs[model])):
            copies = np.ascontiguousarray(net.operand[net.begin[image] + p])
            # Made in the part only if in every copy the same position makes it, as the same
            # output; where one copy reads from elsewhere (the first layer), it is an input.
            source = position.get(int(net.producer[copies[s.model]]))
            slots = net.slot[copies]
            inside = (
                source is not None
                and np.array_equal(net.producer[copies], s.images[source])
                and bool((slots == slots[0]).all())
            )
            told.reads[-1].append((copies, inside))
        outputs = range(len(net.outputs[model]))
        told.gives.append(
            [np.array([net.outputs[o][q] for o in image.tolist()], np.int64) for q in outputs]
        )
    return told


class _Folder:
    """Puts the parts of a folded program together."""

    def __init__(self, graph: BlockGraph, net: Net) -> None:
        self.graph, self.net = graph, net
        self.values: list[TensorType] = []
        self.operations: list[Operation] = []
        self.inputs: list[int] = []
        self.outputs: list[int] = []
        self.constants: dict[int, np.ndarray] = {}
        self.weights: dict[str, float] = {}
        self.parts: list[Part] = []
        self.remats = 0

    def part(self, s: Stretch) -> None:
        """Append one copy of a stretch. What is read from outside counts as one value where it is
        one in every copy. Values keep the order that they have in the program."""
        told = _told(self.net, s)
        stands = self._numbered(s, told)
        number = {c.tobytes(): v for v, c in stands.items()}
        outside = {number[c.tobytes()] for row in told.reads for c, inside in row if not inside}
        self._give(s, stands, sorted(outside))
        made = Counter(number[c.tobytes()] for row in told.reads for c, inside in row if inside)
        remats: dict[tuple[int | None, ...], int] = {}
        owned: list[int] = []
        for t, image in enumerate(s.images):
            op = self.graph.operations[int(image[s.model])]
            remat = None
            if op.remat is not None:
                # Recomputed regions have numbers of the whole program, as different in the copies
                # as their values, and are told by the tuple of them in the same way.
                regions = tuple([self.graph.operations[o].remat for o in image.tolist()])
                remat = remats.setdefault(regions, self.remats + len(remats))
            scope = str(len(self.operations))
            # The scope names the operation, so that its weight is found again in what rules make of
            # it. Context weighs nothing: its own copy or stretch pays for it.
            self.weights[scope] = float(s.copies) if s.owned[t] else 0.0
            inputs = tuple([number[c.tobytes()] for c, _ in told.reads[t]])
            outputs = tuple([number[c.tobytes()] for c in told.gives[t]])
            self.operations.append(
                replace(op, inputs=inputs, outputs=outputs, scope=scope, remat=remat)
            )
            if s.owned[t]:
                owned += outputs
            self.outputs += [v for v in outputs if self._leaves(stands[v], made[v])]
        self.remats += len(remats)
        self.parts.append(
            Part(
                stands,
                tuple(owned),
                {number: tuple([n or 0 for n in regions]) for regions, number in remats.items()},
            )
        )

    def _numbered(self, s: Stretch, told: _Told) -> dict[int, Ints]:
        """New values for all that a part reads and gives: what each stands for in the copies.

        In the order of the model copy's values, which is the program's: of equal values the
        earliest, by which a class is computed as it is written, is the earliest here too.
        """
        every = {c.tobytes(): c for row in told.reads for c, _ in row}
        every.update({c.tobytes(): c for row in told.gives for c in row})
        ordered = sorted(every.values(), key=lambda c: (int(c[s.model]), c.tobytes()))
        first = len(self.values)
        self.values += [self.graph.values[int(c[s.model])] for c in ordered]
        return {first + k: c for k, c in enumerate(ordered)}

    def _give(self, s: Stretch, stands: Mapping[int, Ints], outside: Sequence[int]) -> None:
        """Make inputs, or constants, of what a part reads from outside."""
        constants, content = self.graph.constants, self.net.given
        for v in outside:
            given = int(stands[v][s.model])
            # A constant stays one if it has this content in every copy; else rules must not see it.
            if given in constants and (content[stands[v]] == content[given]).all():
                self.constants[v] = constants[given]
            else:
                self.inputs.append(v)

    def _leaves(self, copies: Ints, inside: int) -> bool:
        """Whether a value is an output in some copy, or read by others than the `inside` readers
        of its part: it must stay computable."""
        net = self.net
        return bool((net.leaves[copies] > 0).any() or (net.readers[copies] > inside).any())

    def folded(self) -> Folded:
        graph = BlockGraph(
            self.graph.name,
            tuple(self.values),
            tuple(self.operations),
            tuple(self.inputs),
            tuple(self.outputs),
            self.constants,
        )
        return Folded(graph, self.weights, tuple(self.parts))


def class_weights(folded: Folded, terms: Terms) -> list[float]:
    """How often the whole program computes each class of the folded one: as often as the program's
    values in it, and a new class as often as those that may be computed from it."""
    producers = folded.graph.producers()
    weights = [-1.0] * len(terms.nodes)
    for v, c in terms.class_of.items():
        i = producers.get(v)
        own = 0.0 if i is None else folded.weights[folded.graph.operations[i].scope]
        weights[c] = max(weights[c], own)
    stack = [ClassId(c) for c, w in enumerate(weights) if w >= 0.0]
    given = set(stack)
    while stack:
        c = stack.pop()
        for n in terms.nodes[c]:
            for d in n.operands if n.value < 0 else ():
                if d not in given and weights[d] < weights[c]:
                    weights[d] = weights[c]
                    stack.append(d)
    return [max(w, 0.0) for w in weights]


def unfold(
    graph: BlockGraph,
    folded: Folded,
    terms: Terms,
    catalogue: Sequence[Applied],
    pick: Sequence[int],
) -> tuple[Terms, list[Applied], list[int]]:
    """A choice for the folded program as one for the whole program: its terms, their signatures,
    and the pick among them. Each value is a class of its own, with the operation as it is written
    and what was chosen instead; `graph` may differ from that folded in what regions compute."""
    return _Unfolder(graph, folded, terms, catalogue, pick).unfolded()


class _Unfolder:
    """Carries what is chosen for the values that a part owns over to all copies of the part."""

    def __init__(
        self,
        graph: BlockGraph,
        folded: Folded,
        terms: Terms,
        catalogue: Sequence[Applied],
        pick: Sequence[int],
    ) -> None:
        self.graph, self.folded, self.terms, self.pick = graph, folded, terms, pick
        self.builder = Builder(folded.graph, terms, catalogue, pick)
        self.catalogue = list(catalogue)
        self.class_of = {v: ClassId(v) for v in range(len(graph.values))}
        self.nodes: list[list[Node]] = [[] for _ in graph.values]
        self.made: dict[tuple[ClassId, int], frozenset[str]] = {}
        self.new: dict[tuple[int, int, ClassId], ClassId] = {}  # part, copy, class -> class here
        self.pending: list[tuple[int, int, ClassId]] = []
        self.numbers: dict[tuple[int, int], int] = {}  # signature, region -> signature
        self.part_of = {v: k for k, part in enumerate(folded.parts) for v in part.values}

    def unfolded(self) -> tuple[Terms, list[Applied], list[int]]:
        instead: dict[int, int] = {}  # value -> the value of the program that takes its place
        for k, part in enumerate(self.folded.parts):
            for v in part.owned:
                source = self.builder.source(v)
                for copy, out in enumerate(part.values[v].tolist()):
                    if source < 0:
                        self.class_of[out] = self._class(k, copy, ClassId(~source))
                    elif source != v:
                        instead[out] = self._value(k, copy, source)
                        c = self.terms.class_of[v]
                        signatures = {n.signature for n in self.terms.nodes[c]} | {-1}
                        rules = [self.terms.rules(c, s) for s in signatures]
                        self.made[ClassId(out), -1] = frozenset().union(*rules)
        producers = self.graph.producers()
        for v, c in self.class_of.items():
            i = producers.get(v)
            reads = self.graph.operations[i].inputs if i is not None else ()
            self.nodes[c].append(Node(-1, tuple([self.class_of[u] for u in reads]), v))
        for v, u in instead.items():
            self.nodes[v].append(Node(-1, (self.class_of[u],), u))
        while self.pending:
            self._fill(*self.pending.pop())
        chosen = [len(nodes) - 1 for nodes in self.nodes]
        terms = Terms(tuple(map(tuple, self.nodes)), self.class_of, self.made, self.terms.saturated)
        return terms, self.catalogue, chosen

    def _class(self, part: int, copy: int, c: ClassId) -> ClassId:
        """The class here of a new operation for one copy."""
        key = (part, copy, c)
        if key not in self.new:
            self.new[key] = ClassId(len(self.nodes))
            self.nodes.append([])
            self.pending.append(key)
        return self.new[key]

    def _value(self, part: int, copy: int, v: int) -> int:
        """What a value of the folded program is in one copy of a part.

        A value of another part is equal to something in this one only if it depends on no input:
        then it is the same in all copies.
        """
        own = self.part_of[v]
        return int(self.folded.parts[own].values[v][copy if own == part else 0])

    def _fill(self, part: int, copy: int, c: ClassId) -> None:
        """Give a new class its node."""
        node = self.terms.nodes[c][self.pick[c]]
        operands = []
        for d in node.operands:
            value = self.terms.nodes[d][self.pick[d]].value
            if value < 0:
                operands.append(self._class(part, copy, d))
            else:
                u = self.builder.source(value)
                operands.append(self.class_of[self._value(part, copy, u)])
        number = self._signature(part, copy, node.signature)
        at = self.new[part, copy, c]
        self.nodes[at].append(Node(number, tuple(operands)))
        rules = self.terms.rules(c, node.signature)
        self.made[at, number] = self.made.get((at, number), frozenset()) | rules

    def _signature(self, part: int, copy: int, number: int) -> int:
        """The signature as it is in one copy: its recomputed region has another number there."""
        remat = self.catalogue[number].remat
        if remat is None:
            return number
        own = next(
            k for k in (part, *range(len(self.folded.parts))) if remat in self.folded.parts[k].remat
        )
        there = self.folded.parts[own].remat[remat][copy if own == part else 0]
        key = (number, there)
        if key not in self.numbers:
            self.numbers[key] = len(self.catalogue)
            self.catalogue.append(replace(self.catalogue[number], remat=there))
        return self.numbers[key]
