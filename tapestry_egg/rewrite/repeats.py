"""Repeats: stretches of a program that are there many times, as the layers of an unrolled network.

A stretch has positions and copies: the operations at one position are alike, and where one position
reads another, every copy does so. Layers, their backward passes and the updates of their parameters
hang together and make one stretch; nothing depends on the order in which the program lists them.

Operations are first coloured by what surrounds them (Weisfeiler and Leman's refinement), which only
guesses. From a colour a stretch then grows along edges in all copies at once, and every edge that
it claims has been compared in every copy: a stretch is a homomorphism from its operations into the
program for each copy. So what is true of one copy, with all that it reads from outside taken as
unknown, is true of every other.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import hashable

Ints = NDArray[np.int64]

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

    def __init__(self, net: Net, pivots: Ints, taken: NDArray[np.bool_]) -> None:
        self.net = net
        self.claimed = taken.copy()
        self.model = len(pivots) // 2
        self.alive = np.ones(len(pivots), dtype=np.bool_)
        self.least = max(LEAST_COPIES - 1, int(len(pivots) * (1.0 - _LOSS)))
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
