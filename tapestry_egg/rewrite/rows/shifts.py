"""Shifts: neighbours read by slices, pads and concatenations, on as many rows as what they read.

`x[1:] - x[:-1]` has one row less than `x`, which devices that share `x` evenly cannot share. Here
what reads rows i + c of a value has as many rows as the value has. First, moves of moves become one
(`shifts.py`): a slice of what was padded or joined, or slices that are padded or joined, are the
value at other places, with a border, or in a ring (`ring_shift`). Then regions of a program that
have a few rows less than what they are sliced from get the missing rows, as in `even_parts.py`.
These hold anything, and are left out where rows are summed or moved back to their places.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import gcd, prod

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.computed import Computed
from tapestry_egg.zspace import Projection, ZRange

from .padded import Long, Padded, Region, along, may_grow

# Of these numbers no measurement is kept.

#: A shift is by no more than this part of a dim, and leaves out, or adds, no more than that.
_NEAR = 8
#: Regions that get rows, one after another.
_ROUNDS = 64

#: A value, one of its dims, and one that it is made of or that is made of it.
_Tried = set[tuple[int, int, int]]


def with_shifts(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program, its loops and branches too, with shifts that so many devices can share; the same
    graph where there are none."""
    graph = graph.map_regions(lambda region: with_shifts(region, parts))
    graph, free = _at_once(graph, parts), frozenset[int]()
    tried: _Tried = set()
    for _ in range(_ROUNDS):
        known = moves(graph, free)
        of = graph, known, parts, tried
        found = chain(_long_regions(*of), _short_regions(*of))
        region = next(found, None)
        if region is None:
            break
        shifted = Shifted(region, known)
        graph = shifted.graph_made()
        free |= shifted.free
    return graph


def _at_once(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program with moves of moves as one, where that is a shift."""
    known, makers = moves(graph), graph.producers()
    chosen = {
        v
        for v, moved in known.items()
        if _is_new(graph.operations[makers[v]], moved) and _is_shift(graph, moved, parts)
    }
    if not chosen:
        return graph
    return Shifted(Region(graph), {v: known[v] for v in chosen}, chosen).graph_made()


def _is_new(op: Operation, moved: Moved) -> bool:
    """Whether a value is more than its operation says, which reads other operands; or one of which
    a number overwrites most, through a window that devices cannot share."""
    if not {p.source for p in moved.pieces} <= set(op.inputs):
        return True
    overwritten = moved.fill is not None and moved.fill not in op.inputs
    return overwritten and 2 * moved.covered < moved.size


def _is_shift(graph: BlockGraph, moved: Moved, parts: int) -> bool:
    """Whether a value is made of others at places near by, along dims that devices can share; or is
    another one as it is."""
    if not moved.pieces:
        return False
    shared, stays = False, len(moved.pieces) == 1
    for d, n in enumerate(moved.shape):
        extents = [graph.values[p.source].shape[d] for p in moved.pieces]
        ring = moved.ring(graph)
        offsets = [p.offset[d] for p in moved.pieces] if ring is None else [ring[d]]
        whole = all((p.start[d], p.end[d]) == (0, n) for p in moved.pieces)
        if whole and not any(offsets) and all(m == n for m in extents):
            continue
        for m, offset in zip(extents, offsets, strict=False):
            thin = _NEAR * m <= n
            if not thin and (_NEAR * abs(offset) > n or _NEAR * abs(m - n) > n):
                return False
        shared, stays = shared or gcd(n, parts) > 1, False
    return shared or stays


def _short_regions(
    graph: BlockGraph, known: Mapping[int, Moved], parts: int, tried: _Tried
) -> Iterator[Region]:
    """Regions of rows that are sliced from a few more, which devices can share better; each is
    tried once."""
    readers = graph.readers()
    for v, moved in known.items():
        if len(moved.pieces) != 1 or moved.fill is not None:
            continue
        (piece,) = moved.pieces
        for d, (n, m) in enumerate(zip(graph.values[piece.source].shape, moved.shape, strict=True)):
            if not m < n or gcd(n, parts) <= gcd(m, parts):
                continue
            near, thin = _NEAR * (n - m) <= n, _NEAR * m <= n
            if not near and not thin:
                continue
            for k in readers[v]:
                op = graph.operations[k]
                if not known.keys().isdisjoint(op.outputs) or not may_grow(graph, op):
                    continue
                if (v, d, op.outputs[0]) in tried:
                    continue
                tried.add((v, d, op.outputs[0]))
                found = along(registry.signature_in(graph, op), op, v, Long(d, n))
                if found is None or not (region := Region(graph)).grown(k, *found):
                    continue
                low = _least_moved(graph, known, region, n, n - m)
                found = along(registry.signature_in(graph, op), op, v, Long(d, n, low))
                again = Region(graph)
                if low and found and again.grown(k, *found):
                    region = again
                if near or _stays_near(graph, known, region, readers):
                    yield region


def _long_regions(
    graph: BlockGraph, known: Mapping[int, Moved], parts: int, tried: _Tried
) -> Iterator[Region]:
    """Regions of which all that is read is sliced out, with rows that devices can share better;
    each is tried once."""
    makers, readers = graph.producers(), graph.readers()
    for v, moved in known.items():
        if len(moved.pieces) != 1 or moved.fill is not None:
            continue
        (piece,) = moved.pieces
        k = makers.get(piece.source)
        if k is None or piece.source in known or not may_grow(graph, graph.operations[k]):
            continue
        op = graph.operations[k]
        for d, (n, m) in enumerate(zip(graph.values[piece.source].shape, moved.shape, strict=True)):
            if not m < n or _NEAR * (n - m) > n or gcd(m, parts) <= gcd(n, parts):
                continue
            if (v, d, piece.source) in tried:
                continue
            tried.add((v, d, piece.source))
            long, region = Long(d, m, piece.offset[d]), Region(graph, fewer=True)
            found = along(registry.signature_in(graph, op), op, piece.source, long)
            if found is None or not region.grown(k, *found):
                continue
            if _is_all_that_is_read(graph, known, region, readers):
                yield region


def _is_all_that_is_read(
    graph: BlockGraph, known: Mapping[int, Moved], region: Region, readers: Mapping[int, list[int]]
) -> bool:
    """Whether what is read of a region with fewer rows, other than by itself, is moved out of the
    rows that it has."""
    made = {v for k in region.inside for v in graph.operations[k].outputs}
    if not made.isdisjoint(graph.outputs):
        return False
    for v in made:
        long = region.reached[v]  # an operation of the region makes rows of it
        for op in (graph.operations[k] for k in readers[v] if k not in region.inside):
            if not known.keys() >= set(op.outputs):
                return False
            read = [u for u in op.outputs if readers[u] or u in graph.outputs]
            for piece in (p for u in read for p in known[u].pieces if p.source == v):
                first = piece.start[long.dim] - piece.offset[long.dim] + long.low
                last = piece.end[long.dim] - piece.offset[long.dim] + long.low
                if first < 0 or last > long.extent:
                    return False
    return True


def _stays_near(
    graph: BlockGraph, known: Mapping[int, Moved], region: Region, readers: Mapping[int, list[int]]
) -> bool:
    """Whether a region of few rows, as of the border of a grid, is computed element by element of
    rows near by, and moved to places near by, so that devices that have these rows compute it."""
    inside = [graph.operations[k] for k in region.inside]
    if any(registry.signature_in(graph, op).fusion != "loop" for op in inside):
        return False
    made = {v for op in inside for v in op.outputs}
    if not made.isdisjoint(graph.outputs):
        return False
    for v, long in region.reached.items():
        if v in made:
            outside = [graph.operations[k] for k in readers[v] if k not in region.inside]
            moved = [u for op in outside for u in op.outputs]
            if not known.keys() >= set(moved):
                return False
            places = [(known[u].shape, p) for u in moved for p in known[u].pieces if p.source == v]
            far = [p.offset[long.dim] - long.low for _, p in places]
        elif v in known:
            places = [(graph.values[p.source].shape, p) for p in known[v].pieces]
            far = [p.offset[long.dim] + long.low for _, p in places]
        else:
            return False
        added = [shape[long.dim] - long.extent for shape, _ in places]
        if any(_NEAR * abs(n) > long.extent for n in (*far, *added)):
            return False
    return True


def _least_moved(
    graph: BlockGraph, known: Mapping[int, Moved], region: Region, rows: int, added: int
) -> int:
    """How many of the rows that a region gets come first, so that least is moved, and least far."""
    wanted: dict[int, int] = {0: 0}

    def want(low: int, long: Long, v: int) -> None:
        inner = long.extent // rows
        if inner and long.extent % rows == low % inner == 0 and 0 <= low // inner <= added:
            wanted[low // inner] = wanted.get(low // inner, 0) + graph.values[v].nbytes

    for v, long in region.reached.items():
        moved = known.get(v)
        if moved is not None and len(moved.pieces) == 1:
            want(-moved.pieces[0].offset[long.dim], long, v)
    for v, moved in known.items():
        for piece in moved.pieces:
            if piece.source in region.reached and v not in region.reached:
                long = region.reached[piece.source]
                want(piece.offset[long.dim], long, v)
    return min(wanted, key=lambda low: (sum(abs(low - w) * n for w, n in wanted.items()), low))


def with_rows_looked_up(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program, its loops and branches too, with slices of one row of what so many devices share
    as reads of a row at a place: the device that has the row gives it, and the others zero. Arrays
    of which many rows are read so stay: all devices need them."""
    graph = graph.map_regions(lambda region: with_rows_looked_up(region, parts))
    rows: dict[int, tuple[Piece, list[int]]] = {}
    alone = {op.outputs[0] for op in graph.operations if len(op.outputs) == 1}
    for v, moved in moves(graph).items():
        if moved.fill is None and len(moved.pieces) == 1 and v in alone:
            (piece,) = moved.pieces
            extents = enumerate(graph.values[piece.source].shape)
            dims = [d for d, n in extents if moved.shape[d] == 1 < n and n % parts == 0]
            if dims:
                rows[v] = piece, dims
    read = Counter((piece.source, d) for piece, dims in rows.values() for d in dims)
    few = {(v, d) for (v, d), n in read.items() if _NEAR * n <= graph.values[v].shape[d]}
    rows = {v: (p, [d for d in dims if (p.source, d) in few]) for v, (p, dims) in rows.items()}
    rows = {v: (piece, dims) for v, (piece, dims) in rows.items() if dims}
    return LookedUp(graph, rows).graph_made() if rows else graph


class LookedUp(Padded):
    """Makes the program with some moved values, each of one piece, read at a place along dims."""

    def __init__(self, graph: BlockGraph, rows: Mapping[int, tuple[Piece, Sequence[int]]]) -> None:
        super().__init__(Region(graph))
        self.rows = rows

    def beside(self, op: Operation) -> None:
        if self.rows.keys().isdisjoint(op.outputs):
            super().beside(op)
            return
        piece, dims = self.rows[op.outputs[0]]
        first = [-o for o in piece.offset]
        shape = self.given.values[piece.source].shape
        start = [0 if d in dims else a for d, a in enumerate(first)]
        ends = [
            n if d in dims else a + m
            for d, (n, a, m) in enumerate(zip(shape, first, piece.end, strict=True))
        ]
        source = self._boxed(self.short(piece.source), ZRange(tuple(start), tuple(ends)), None)
        places = [
            self.constant(np.array(a if d in dims else 0, "int32"), "int32")
            for d, a in enumerate(first)
        ]
        params = {"slice_sizes": list(piece.end)}
        read = (source, *places)
        self.operations.append(replace(op, kernel="dynamic_slice", inputs=read, params=params))


class Shifted(Padded):
    """Makes the program with a region on more rows, and with what moves to and from it at places
    among all of them. Of the values that are moved, `again` are made again, too."""

    def __init__(
        self,
        region: Region,
        known: Mapping[int, Moved],
        again: Collection[int] = (),
    ) -> None:
        super().__init__(region)
        self.moved, self.again = known, frozenset(again)
        self.stands: dict[int, int] = {}  # value -> the one that is moved at once
        self.loose: set[int] = set()  # values that hold what they hold beside their pieces
        self.meant: set[int] = set()  # and those of which that is asked for

    @property
    def free(self) -> frozenset[int]:
        """Values that hold whatever they hold beside their pieces."""
        return frozenset(self.loose - self.meant)

    def beside(self, op: Operation) -> None:
        own = {v: self.moved[v] for v in op.outputs if v in self.moved}
        sources = {p.source for moved in own.values() for p in moved.pieces}
        if not self.again.isdisjoint(own) or not self.grown.keys().isdisjoint(sources):
            for v, moved in own.items():
                self.stands[v] = self._spelled(moved, moved.shape, moved.pieces)
        if len(self.stands.keys() & set(op.outputs)) < len(op.outputs):
            super().beside(op)

    def short(self, v: int) -> int:
        return self.stands[v] if v in self.stands else super().short(v)

    def longer(self, v: int, long: Long) -> int:
        """The value with all rows along a dim: what is moved is moved to all of them."""
        moved = self.moved.get(v)
        if moved is None or v in self.grown:
            return super().longer(v, long)
        d, n = long.dim, long.extent
        pieces = []
        for piece in (p.at(d, long.low) for p in moved.pieces):
            # What reaches an end of the value reaches that of all rows.
            first = 0 if piece.start[d] <= max(0, long.low) else piece.start[d]
            last = long.low + moved.shape[d]
            last = n if piece.end[d] >= min(n, last) else piece.end[d]
            start = (*piece.start[:d], first, *piece.start[d + 1 :])
            end = (*piece.end[:d], last, *piece.end[d + 1 :])
            if first < last:
                pieces.append(replace(piece, start=start, end=end))
        return self._spelled(moved, (*moved.shape[:d], n, *moved.shape[d + 1 :]), pieces)

    def _spelled(self, moved: Moved, shape: Ints, pieces: Sequence[Piece]) -> int:
        """A value of a shape with the pieces of one that is moved, where it has them."""
        ring = moved.ring(self.given)
        if ring is not None and shape == moved.shape:
            source = self.short(pieces[0].source)
            return self.new("ring_shift", (source,), self.values[source], {"shifts": list(ring)})
        groups: dict[tuple[int, Ints], list[Piece]] = {}
        for piece in pieces:
            groups.setdefault((piece.source, piece.offset), []).append(piece)
        minds = moved.fill is not None and not moved.is_covered
        gap = moved.gap if minds and shape == moved.shape else None
        # What has most pieces is everywhere, and the others are put upon it.
        first, *others = sorted(groups.values(), key=lambda g: (-len(g), -sum(p.size for p in g)))
        if moved.fill is None:
            dtype = self.given.values[first[0].source].dtype
            fill = self.scalar(dtype, "or" if dtype == "bool" else "sum")
        else:
            fill = moved.fill
        made = self._shifted(first[0], shape, fill, minds)
        if minds:
            filled = self.spread(fill, shape)
            wrong = self._wrong(first[0], shape)
            if len(first) == 1 and wrong:
                made = self._masked_by(first[0], wrong, made, filled)
            elif len(first) > 1 and gap is not None:
                made = self._masked_by(Piece(-1, *gap, ()), range(len(shape)), filled, made)
            elif len(first) > 1:
                others, made = [first, *others], filled
        for piece in (p for group in others for p in group):
            inside = self._shifted(piece, shape, fill, False)
            made = self._masked_by(piece, range(len(shape)), inside, made)
        return made

    def _source(self, piece: Piece) -> tuple[int, TensorType]:
        grown = self.grown.get(piece.source)
        v = self.short(piece.source) if grown is None else grown[0]
        return v, self.values[v]

    def _offset(self, piece: Piece) -> Ints:
        """By how much the source is moved, with all of its rows."""
        if piece.source not in self.grown:
            return piece.offset
        long = self.grown[piece.source][1]
        return piece.at(long.dim, -long.low).offset

    def _wrong(self, piece: Piece, shape: Ints) -> list[int]:
        """The dims along which the source, moved, reaches beyond the piece."""
        _, type_ = self._source(piece)
        each = zip(piece.start, piece.end, self._offset(piece), type_.shape, shape, strict=True)
        return [d for d, (a, b, o, m, n) in enumerate(each) if a > max(0, o) or b < min(n, o + m)]

    def _shifted(self, piece: Piece, shape: Ints, fill: int, minds: bool) -> int:
        """The source at the places of the piece, and a scalar elsewhere, if anybody minds."""
        v, type_ = self._source(piece)
        each = zip(self._offset(piece), type_.shape, shape, strict=True)
        config = [[o, n - m - o, 0] for o, m, n in each]
        if all(low == high == 0 for low, high, _ in config):
            return v
        if all(low <= 0 and high <= 0 for low, high, _ in config):
            start = [-low for low, _, _ in config]
            return self.sliced(v, start, [a + n for a, n in zip(start, shape, strict=True)])
        made = self.padded(v, fill, config)
        (self.meant if minds else self.loose).add(made)
        return made

    def _masked_by(self, piece: Piece, dims: Iterable[int], inside: int, outside: int) -> int:
        """One value in the box of a piece along some dims, another one elsewhere."""
        for d in dims:
            inside = self.between(d, piece.start[d], piece.end[d], inside, outside)
        return inside


# Moves: values made of boxes of other values, each at a constant distance from where it was.
#
# Slices, pads and concatenations are moves, and so are writes at places that are constants. They
# are read from projections alone, and several one after another are one.


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
        moved = _sum(op, found, computed)
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
        if _steps(projection, shape) != _steps(sig.outputs[0], shape):
            return None
        if any(n != 1 for n in projection.shape):
            return None
        offset = tuple([-int(a) for a in projection.offset])
        start = tuple([max(0, o) for o in offset])
        end = tuple([min(n, o + m) for n, o, m in zip(shape, offset, source, strict=True)])
        if all(a < b for a, b in zip(start, end, strict=True)):
            pieces.append(Piece(op.inputs[p], start, end, offset))
    made = Moved(shape, tuple(pieces), op.inputs[scalars.pop()] if scalars else None)
    return made if made.fill is not None or made.is_covered else None


def place_of(graph: BlockGraph, op: Operation, computed: Computed) -> tuple[int, Ints] | None:
    """The value that an operation puts zeros around, and where it starts; None for any other."""
    if op.regions or not any(t.moves for t in registry.templates().get(op.kernel, ())):
        return None
    moved = _moved(op, registry.signature_in(graph, op))
    if moved is None or len(moved.pieces) != 1 or not is_zero(computed, moved.fill):
        return None
    (piece,) = moved.pieces
    whole = piece.size == graph.values[piece.source].size
    return (piece.source, piece.start) if whole else None


def _steps(projection: Projection, extents: Ints) -> list[list[int]]:
    """How far each index dim that has several places moves a projection."""
    return [[a for a, n in zip(row, extents, strict=True) if n > 1] for row in projection.matrix]


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


def _sum(op: Operation, found: Mapping[int, Moved], computed: Computed) -> Moved | None:
    """The sum of values that have pieces in different places and zeros elsewhere, as derivatives
    add up what comes from parts: it has the pieces of all."""
    terms = [found[v] for v in op.inputs if v in found]
    if len(terms) < max(2, len(op.inputs)):
        return None
    first, pieces = terms[0], [p for term in terms for p in term.pieces]
    if any(t.shape != first.shape or not is_zero(computed, t.fill) for t in terms):
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


def is_zero(computed: Computed, v: int | None) -> bool:
    """Whether a value is known to be zero everywhere."""
    found = None if v is None else computed(v)
    return found is not None and not found.any()


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
