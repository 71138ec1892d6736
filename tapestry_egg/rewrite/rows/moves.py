"""Moves: values whose elements are elements of others, each at a constant distance from where it was.

A slice, a pad, a concatenation and what is made of several of these put boxes of values into a box.
They are read from projections alone, and one after another are one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from math import prod

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.zspace import Projection

from .regions import may_grow, signature_in

#: Values of more pieces are left as they are written.
_MOST = 32

Ints = tuple[int, ...]


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
    def is_covered(self) -> bool:
        """Whether pieces are all of it."""
        return sum(p.size for p in self.pieces) == prod(self.shape)

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
    for op in graph.operations:
        own = _own(graph, op)
        if own is None:
            continue
        if op.outputs[0] in free:
            own = replace(own, fill=None)
        known = {
            p.source: found[p.source]
            for p in own.pieces
            if p.source in found and makers[p.source].remat == op.remat
        }
        found[op.outputs[0]] = _composed(graph, own, known)
        makers[op.outputs[0]] = op
    return found


def _own(graph: BlockGraph, op: Operation) -> Moved | None:
    """What one operation moves, as its projections say; None where it does anything else."""
    if not any(t.moves or t.repeats for t in registry.templates().get(op.kernel, ())):
        return None
    if len(op.outputs) != 1 or not may_grow(graph, op):
        return None
    sig = signature_in(graph, op)
    shape = sig.output_types[0].shape
    if sig.elements != "kept" or sig.opaque or not sig.output_types[0].size:
        return None
    if len(op.inputs) == 1 and not sig.input_types[0].rank and sig.repeats:
        return Moved(shape, (), op.inputs[0])
    if not sig.moved or sig.dilates or sig.adds or sig.writes:
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
        if len(source) != len(shape) or any(n != 1 for n in projection.shape):
            return None
        if projection.matrix != Projection.identity(len(shape)).matrix:
            return None
        offset = tuple([-int(a) for a in projection.offset])
        start = tuple([max(0, o) for o in offset])
        end = tuple([min(n, o + m) for n, o, m in zip(shape, offset, source, strict=True)])
        if all(a < b for a, b in zip(start, end, strict=True)):
            pieces.append(Piece(op.inputs[p], start, end, offset))
    made = Moved(shape, tuple(pieces), op.inputs[scalars.pop()] if scalars else None)
    return made if made.fill is not None or made.is_covered else None


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
