"""Moves: values made of boxes of other values, each at a constant distance from where it was.

Slices, pads and concatenations are moves, and so are writes at places that are constants. They are
read from projections alone, and several one after another are one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.computed import Computed
from tapestry_egg.zspace import Projection

from .regions import may_grow

#: Values of more pieces are left as they are written.
_MOST = 32

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box [start, end) of a value: element i of it is element i - offset of the source."""

    source: int
    start: Ints
    end: Ints
    offset: Ints

    @property
    def size(self) -> int:
        return prod([b - a for a, b in zip(self.start, self.end, strict=True)])

    def at(self, dim: int, by: int) -> Piece:
        """The piece so many places further along a dim."""

        def further(of: Ints) -> Ints:
            return (*of[:dim], of[dim] + by, *of[dim + 1 :])

        return Piece(self.source, further(self.start), further(self.end), further(self.offset))

    def within(self, outer: Piece) -> Piece | None:
        """What an outer piece of the value reads of this piece, as a piece of the outer value."""
        start = [a + o for a, o in zip(self.start, outer.offset, strict=True)]
        end = [b + o for b, o in zip(self.end, outer.offset, strict=True)]
        start = list(map(max, start, outer.start))
        end = list(map(min, end, outer.end))
        if any(a >= b for a, b in zip(start, end, strict=True)):
            return None
        offset = [a + b for a, b in zip(self.offset, outer.offset, strict=True)]
        return Piece(self.source, tuple(start), tuple(end), tuple(offset))

    def meets(self, other: Piece) -> bool:
        """Whether some place is in both."""
        first = map(max, self.start, other.start)
        return all(a < b for a, b in zip(first, map(min, self.end, other.end), strict=True))

    def joined(self, other: Piece) -> Piece | None:
        """Both as one piece; None where they do not make one box of one source."""
        if (self.source, self.offset) != (other.source, other.offset):
            return None
        off = [
            d
            for d in range(len(self.start))
            if (self.start[d], self.end[d]) != (other.start[d], other.end[d])
        ]
        if len(off) != 1:
            return None
        first, last = sorted((self, other), key=lambda p: p.start[off[0]])
        if first.end[off[0]] != last.start[off[0]]:
            return None
        return replace(first, end=last.end)


@dataclass(frozen=True)
class Moved:
    """A value of pieces that do not overlap, and of one scalar, `fill`, elsewhere; where there is
    none, nobody minds what is elsewhere."""

    shape: Ints
    pieces: tuple[Piece, ...]
    fill: int | None = None

    @property
    def gap(self) -> Box | None:
        """The box that no piece has any of, if all that they lack is one."""
        left = [((0,) * len(self.shape), self.shape)]
        for p in self.pieces:
            left = [b for box in left for b in _beside(box, (p.start, p.end))]
        every = _joined([Piece(-1, a, b, ()) for a, b in left])
        return (every[0].start, every[0].end) if len(every) == 1 else None

    @property
    def is_covered(self) -> bool:
        """Whether pieces are all of it."""
        return self.covered == self.size

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def covered(self) -> int:
        """How many elements pieces have."""
        return sum(p.size for p in self.pieces)

    def ring(self, graph: BlockGraph) -> Ints | None:
        """By how much each dim of one value of this shape is shifted, what leaves at one end coming
        in at the other; None for anything else."""
        sources = {p.source for p in self.pieces}
        if len(self.pieces) < 2 or len(sources) > 1 or self.fill is not None:
            return None
        if graph.values[sources.pop()].shape != self.shape or not self.is_covered:
            return None
        places = {
            tuple([o % n for o, n in zip(p.offset, self.shape, strict=True)]) for p in self.pieces
        }
        if len(places) > 1:
            return None
        each = zip(places.pop(), self.shape, strict=True)
        return tuple([o if 2 * o <= n else o - n for o, n in each])


def moves(graph: BlockGraph, free: Collection[int] = ()) -> dict[int, Moved]:
    """The values of a program that moves make, of as early sources as can be. In those that are
    `free` nobody minds what is beside pieces."""
    found: dict[int, Moved] = {}
    makers: dict[int, Operation] = {}
    computed = Computed.of(graph)
    for op in graph.operations:
        if not registry.templates().get(op.kernel) or not may_grow(graph, op):
            continue
        for v, own in _own(graph, op, found, computed):
            if v in free:
                own = replace(own, fill=None)
            known = {
                p.source: found[p.source]
                for p in own.pieces
                if p.source in found and makers[p.source].remat == op.remat
            }
            found[v] = _composed(graph, own, known)
            makers[v] = op
    return found


def _own(
    graph: BlockGraph, op: Operation, found: Mapping[int, Moved], computed: Computed
) -> list[tuple[int, Moved]]:
    """The results of one operation that are moved, as its projections say, and what they are."""
    templates = registry.templates()[op.kernel]
    if any(t.moves or t.repeats for t in templates):
        sig = registry.signature_in(graph, op)
        if sig.elements != "kept" or sig.opaque or not graph.values[op.outputs[0]].size:
            return []
        if sig.parts:
            return _parts(graph, op)
        moved = _moved(op, sig)
    elif any(t.adds for t in templates):
        moved = _sum(graph, op, found)
    elif any(t.writes for t in templates):
        moved = _written(graph, op, found, computed)
    else:
        moved = None
    return [] if moved is None else [(op.outputs[0], moved)]


def _moved(op: Operation, sig: OperationSignature) -> Moved | None:
    """A value that is one operand, or several, each at a distance from where it was."""
    shape = sig.output_types[0].shape
    if len(op.inputs) == 1 and not sig.input_types[0].rank and sig.repeats:
        return Moved(shape, (), op.inputs[0])
    if not sig.moved or sig.dilates or sig.adds or len(op.outputs) > 1:
        return None
    if sig.extents != shape or sig.outputs[0] != Projection.identity(len(shape)):
        return None
    filled = {sig.beyond(p) for p in sig.moved} - {None}
    scalars = {q for q in filled if isinstance(q, int)}
    if set(range(len(op.inputs))) != {*sig.moved, *scalars} or len(scalars) > 1:
        return None
    pieces = []
    for p in sig.moved:
        projection, source = sig.inputs[p], sig.input_types[p].shape
        if projection.matrix != sig.outputs[0].matrix or any(n != 1 for n in projection.shape):
            return None
        offset = tuple([-int(a) for a in projection.offset])
        start = tuple([max(0, o) for o in offset])
        end = tuple([min(n, o + m) for n, o, m in zip(shape, offset, source, strict=True)])
        if all(a < b for a, b in zip(start, end, strict=True)):
            pieces.append(Piece(op.inputs[p], start, end, offset))
    made = Moved(shape, tuple(pieces), op.inputs[scalars.pop()] if scalars else None)
    return made if made.fill is not None or made.is_covered else None


def _parts(graph: BlockGraph, op: Operation) -> list[tuple[int, Moved]]:
    """The parts of an operand, one after another."""
    whole, found = graph.values[op.inputs[0]].shape, []
    offset = [0] * len(whole)
    for v in op.outputs:
        shape = graph.values[v].shape
        piece = Piece(op.inputs[0], (0,) * len(shape), shape, tuple(offset))
        found.append((v, Moved(shape, (piece,))))
        offset = [o - (m if m < n else 0) for o, m, n in zip(offset, shape, whole, strict=True)]
    return found


def _sum(graph: BlockGraph, op: Operation, found: Mapping[int, Moved]) -> Moved | None:
    """The sum of values that have pieces in different places and zeros elsewhere, as derivatives
    add up what comes from parts: it has the pieces of all."""
    terms = [found[v] for v in op.inputs if v in found]
    if len(terms) < max(2, len(op.inputs)):
        return None
    first, pieces = terms[0], [p for term in terms for p in term.pieces]
    if any(t.shape != first.shape or not _is_zero(graph, t.fill) for t in terms):
        return None
    if any(p.meets(q) for k, p in enumerate(pieces) for q in pieces[:k]):
        return None
    return Moved(first.shape, tuple(pieces), first.fill)


def _inside(start: Sequence[int], shape: Sequence[int], whole: Ints) -> Box | None:
    """The box of that shape; None where it is not inside."""
    end = tuple([a + n for a, n in zip(start, shape, strict=True)])
    fits = min(start, default=0) >= 0 and all(b <= n for b, n in zip(end, whole, strict=True))
    return (tuple(start), end) if fits else None


def _written(
    graph: BlockGraph, op: Operation, found: Mapping[int, Moved], computed: Computed
) -> Moved | None:
    """A value that is another one in which a part is written over, at a place that is known."""
    into, part, *at = [op.inputs[p] for p in registry.signature_in(graph, op).writes]
    where = [computed(v) for v in at]
    start = [int(x) for x in where if x is not None]
    shape, whole = graph.values[part].shape, graph.values[into].shape
    box = _inside(start, shape, whole) if len(start) == len(shape) else None
    if box is None:
        return None
    none = (0,) * len(whole)
    pieces = [Piece(into, a, b, none) for a, b in _beside((none, whole), box)]
    new = found.get(part)
    if new is not None and not new.pieces:
        return Moved(whole, tuple(pieces), new.fill)
    if graph.values[part].rank != len(whole):
        return None
    return Moved(whole, (*pieces, Piece(part, *box, box[0])))


def _beside(box: Box, hole: Box) -> list[Box]:
    """What is left of a box without another one: boxes that do not overlap."""
    found = []
    start, end = list(box[0]), list(box[1])
    for d, (a, b) in enumerate(zip(*hole, strict=True)):
        a, b = max(a, start[d]), min(b, end[d])
        if a >= b:
            return [box]
        for first, last in ((start[d], a), (b, end[d])):
            if first < last:
                side = (*start[:d], first, *start[d + 1 :]), (*end[:d], last, *end[d + 1 :])
                found.append(side)
        start[d], end[d] = a, b
    return found


def _is_zero(graph: BlockGraph, v: int | None) -> bool:
    return v is not None and v in graph.constants and not graph.constants[v].any()


def _composed(graph: BlockGraph, own: Moved, known: Mapping[int, Moved]) -> Moved:
    """What moves of moves make; what is written where that is no move."""
    pieces: list[Piece] = []
    fills = {} if own.fill is None or own.is_covered else {_number(graph, own.fill): own.fill}
    for piece in own.pieces:
        inner = known.get(piece.source)
        if inner is None:
            pieces.append(piece)
            continue
        taken = [q for p in inner.pieces if (q := p.within(piece)) is not None]
        pieces += taken
        if inner.fill is not None and sum(q.size for q in taken) < piece.size:
            fills.setdefault(_number(graph, inner.fill), inner.fill)
    made = Moved(own.shape, _joined(pieces), next(iter(fills.values()), None))
    return made if len(fills) <= 1 and len(made.pieces) <= _MOST else own


def _number(graph: BlockGraph, v: int) -> object:
    """What tells scalars apart: the bits of a constant, of others which value it is."""
    if v in graph.constants:
        return graph.values[v].dtype, graph.constants[v].tobytes()
    return v


def _joined(pieces: list[Piece]) -> tuple[Piece, ...]:
    """The pieces, those that make one box of one source as one."""
    found: list[Piece] = []
    for piece in pieces:
        near = next((p for p in found if p.joined(piece)), None)
        while near is not None and (both := near.joined(piece)) is not None:
            found.remove(near)
            piece = both
            near = next((p for p in found if p.joined(piece)), None)
        found.append(piece)
    return tuple(found)
