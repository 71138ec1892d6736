"""Fold: a deep program as a short one that has all its distinct parts, and back again.

Of every stretch that a program repeats (`repeats.py`), the folded program has one copy with some
context around it, and it has what is there once. Its parts are not joined: what a part reads from
outside is an input of the folded program. So whatever rules say of a part holds in every copy, by
putting the copy's values in the place of the part's, and a choice for the folded program becomes
one for the whole. Rewrites across the edge of a part and its context are not seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.ids import ClassId
from tapestry_egg.rewrite.terms.rebuild import Builder
from tapestry_egg.rewrite.terms.requests import Applied
from tapestry_egg.rewrite.terms.terms import Node, Terms

from .repeats import CONTEXT, MOST_READERS, Ints, Net, Stretch, stretches

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
                kind, number = self.builder.source(v)
                for copy, out in enumerate(part.values[v].tolist()):
                    if kind == "new":
                        self.class_of[out] = self._class(k, copy, ClassId(number))
                    elif number != v:
                        instead[out] = self._value(k, copy, number)
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
                _, u = self.builder.source(value)
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
