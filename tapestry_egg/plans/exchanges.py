"""Exchanges: what devices send one another while they run an operation that is cut.

An operand may lie in blocks that an operation's boxes reach over, by less than a block: a window's
margins, a shift. Then every device sends the rows at the ends of its block to the neighbours whose
boxes reach there, by permutes, and runs the kernel on its block with the margins. Which rows these
are follows from the projection alone. If the operands of several operations are there when the
first of them runs, their rows are sent together: one permute carries all rows of one type that go
the same way, and rows that several operations read are sent once. Operations of later kernels read
theirs when they run; until then these are in memory.

Along a dim that is cumulative, or reduced to states of several arrays, every device runs the kernel
on its block, gathers the states of all, and combines them with its own result. How large states are
follows from the dim's monoid.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import prod

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.zspace import Projection

from .collectives import places_of
from .fetch import group_of, produced_layouts
from .plan import BodyPlan

Cuts = tuple[tuple[int, ...], ...]
#: Along which axes of a mesh rows are sent, whether around, and of which dim.
Way = tuple[tuple[int, ...], bool, int]
#: Which device sends to which.
_Pairs = tuple[tuple[int, int], ...]

#: Where the states of all devices take so many bytes, each combines a part of them: below, what is
#: sent takes less time than one more collective.
EXCHANGED = 1 << 20

#: So many bytes of rows at most are sent with those of another kernel, and held until they are
#: read: with more, what they hold counts for more than what a permute takes to start.
AHEAD = 1 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows of dim `dim` of operand `operand` that devices send along `axes`: `low` from each to the
    next one, `high` from each to the one before. `row_bytes` is what is read of one row by then:
    with the margins of earlier dims, and without what no device reads; `whole_bytes` is the block
    with this dim's margins. The kernel that reads it is computed element by element if it `fuses`:
    XLA for GPUs then reads edges and block where they are, and stores no block with margins.
    `window` says from where to where the block is sent, dim by dim, counted from its begin; the
    first device and the last are neighbours if rows are sent `around`.

    Where there are `states`, devices combine these instead: the collectives, each with the bytes
    that a device gives to it. `dim` is then an index dim, and `whole_bytes` is what a kernel reads
    and writes to combine them. If they are exchanged, each device combines its part of them, along
    dim `scattered` of the result, and the parts are gathered.

    Where there are neither rows nor states, a device cuts a box of `whole_bytes` out of what it has
    of the operand, for a kernel that reads arrays."""

    operand: int
    dim: int
    axes: tuple[int, ...]
    low: int
    high: int
    row_bytes: int
    whole_bytes: int
    states: tuple[tuple[str, int], ...] = ()
    scattered: int | None = None
    fuses: bool = False
    window: tuple[tuple[int, int], ...] = ()
    around: bool = False
    dtype: str = ""

    @property
    def is_rows(self) -> bool:
        """Whether rows are sent, not states, and no box is cut out."""
        return bool(self.low or self.high)

    @property
    def way(self) -> Way:
        """The way that rows are sent."""
        return self.axes, self.around, self.dim

    def held(self, mesh: MeshShape) -> int:
        """Bytes that stand beside operands and results while the operation runs."""
        parts = mesh.parts(self.axes)
        states = [n * (parts if kind == "all_gather" else 1) for kind, n in self.states]
        return sum(states) if states else self.whole_bytes


@dataclass(frozen=True, slots=True)
class Reach:
    """Where devices' boxes begin and end in one dim of an operand, seen from their blocks.

    `low` rows before its block and `high` after it are what a device lacks at most. `begin` and
    `end` say where all boxes are, inside the tensor, counted from the begin of the block; None
    where they are not at the same place on every device.
    """

    low: int
    high: int
    begin: int | None
    end: int | None


def reaches(
    signature: OperationSignature, p: int, layout: Layout, cuts: Cuts, mesh: MeshShape
) -> tuple[Reach, ...]:
    """How operand p's boxes stand to its blocks, dim by dim, over all devices of the mesh."""
    projection, tensor = signature.inputs[p], signature.input_types[p]
    extents, beyond = signature.extents, signature.beyond(p)
    starts = np.zeros((mesh.devices, len(extents)), np.int64)
    for d, n in enumerate(extents):
        starts[:, d] = block_numbers(cuts[d], mesh) * (n // mesh.parts(cuts[d]))
    sizes = np.array([n // mesh.parts(c) for n, c in zip(extents, cuts, strict=True)], np.int64)
    first, after = projection.images(starts, starts + sizes)
    found = []
    for k, (n, axes) in enumerate(zip(tensor.shape, layout.dims, strict=True)):
        block = n // mesh.parts(axes)
        at = block_numbers(axes, mesh) * block
        inside = first[:, k].clip(0, n), after[:, k].clip(0, n)
        low, high = int((at - inside[0]).max()), int((inside[1] - at - block).max())
        off = first[:, k] - at, after[:, k] - at
        if low <= 0 and high <= 0:
            off = inside[0] - at, inside[1] - at
        begin, end = [int(x[0]) if (x == x[0]).all() else None for x in off]
        if beyond is not None and not axes and (beyond == AROUND or p in signature.takes):
            begin = end = None  # all of it is read, or the kernel leaves out what is not
        found.append(Reach(max(0, low), max(0, high), begin, end))
    return tuple(found)


def exchanges(
    signature: OperationSignature, cuts: Cuts, needs: tuple[Layout, ...], mesh: MeshShape
) -> tuple[Exchange, ...]:
    """What an operation so cut gets from neighbours, operand by operand and dim by dim, in order;
    then the states that devices combine.

    `needs` are the layouts of its operands. Whether the cuts serve them is for the certificate to
    say (`extract/certify/legality.py`), which knows nothing of this. The signature remembers it,
    as equal layers run alike, in all plans.
    """
    known: dict[Hashable, tuple[Exchange, ...]]
    known = signature.__dict__.setdefault("_exchanges", {})
    found = known.get(key := (cuts, needs, mesh))
    if found is None:
        found = known[key] = _exchanges(signature, cuts, needs, mesh)
    return found


def _exchanges(
    signature: OperationSignature, cuts: Cuts, needs: tuple[Layout, ...], mesh: MeshShape
) -> tuple[Exchange, ...]:
    found: list[Exchange] = []
    if 0 in signature.extents or len(cuts) != len(signature.index):
        return ()
    ports = zip(signature.inputs, signature.input_types, needs, strict=True)
    for p, (projection, tensor, layout) in enumerate(ports):
        if not any(layout.dims) or in_blocks(projection, tensor, layout, cuts, signature.extents):
            if signature.fusion == "kernel":
                found += _cut_out(signature, p, layout, cuts, mesh)
            continue
        reach = reaches(signature, p, layout, cuts, mesh)
        local = list(layout.local_shape(tensor.shape, mesh))
        window = [(0, n) for n in local]
        for k, r in enumerate(reach):
            if not (r.low or r.high) and r.begin is not None and r.end is not None:
                window[k] = max(0, r.begin), min(local[k], r.end)
                local[k] = max(0, window[k][1] - window[k][0])
        for k, r in enumerate(reach):
            if not (r.low or r.high):
                continue
            row = tensor.itemsize * prod(n for j, n in enumerate(local) if j != k)
            whole = local[k] + r.low + r.high
            fuses = signature.fusion == "loop"
            found.append(
                Exchange(
                    *(p, k, layout.dims[k], r.low, r.high, row, row * whole),
                    fuses=fuses,
                    window=tuple(window),
                    around=signature.beyond(p) == AROUND,
                    dtype=tensor.dtype,
                )
            )
            window[k] = begin, end = margined(r, local[k])
            local[k] = end - begin
    return (*found, *states_combined(signature, cuts, mesh))


def _cut_out(
    signature: OperationSignature, p: int, layout: Layout, cuts: Cuts, mesh: MeshShape
) -> Iterator[Exchange]:
    """The box that a device takes of operand p if it has more along some dim: kernels that go
    element by element, or add up, read it where it lies; others read arrays, a copy."""
    projection, tensor = signature.inputs[p], signature.input_types[p]
    some = [
        k
        for k, axes in enumerate(layout.dims)
        if not axes and any(a and c for a, c in zip(projection.matrix[k], cuts, strict=True))
    ]
    if not some:
        return
    extents = [n // mesh.parts(c) for n, c in zip(signature.extents, cuts, strict=True)]
    held = layout.local_shape(tensor.shape, mesh)
    box = [min(n, b) for n, b in zip(held, projection.footprint(extents), strict=True)]
    if any(box[k] < held[k] for k in some):
        nbytes = tensor.itemsize * prod(box)
        yield Exchange(p, some[0], (), 0, 0, 0, nbytes, dtype=tensor.dtype)


def states_combined(
    signature: OperationSignature, cuts: Cuts, mesh: MeshShape
) -> Iterator[Exchange]:
    """The states that devices combine along cut dims of the roles `scan` and `join`.

    The elements of a `join` dim's monoid are those of the first operand, with their places in the
    dtype of the last result. If results are other than the monoid's own, a block keeps several
    states, no more than it has elements.
    """
    for d, dim in enumerate(signature.index):
        parts = mesh.parts(cuts[d])
        if dim.role not in ("scan", "join") or parts == 1:
            continue
        local = [n // mesh.parts(c) for n, c in zip(signature.extents, cuts, strict=True)]
        shape = signature.outputs[-1].footprint(local)
        made, read = prod(shape), prod(signature.inputs[0].footprint(local))
        rule, first, last = monoid(dim.monoid), signature.input_types[0], signature.output_types[-1]
        dtypes = {p.name: t.dtype for p, t in zip(rule.element, (first, last), strict=False)}
        sizes = [TensorType((), dtypes.get(p.dtype, p.dtype)).itemsize for p in rule.state]
        many = made // local[d] if dim.role == "scan" else min(made, read)
        states, combined, scattered = [many * n for n in sizes], made * last.itemsize, None
        gathered = parts * sum(states)
        if dim.role == "join":
            combined, own = gathered, len(signature.outputs) == len(rule.result)
            if own and gathered >= EXCHANGED:
                scattered = next((k for k, n in enumerate(shape) if n % parts == 0), None)
        kinds = [("all_gather" if scattered is None else "all_to_all", n) for n in states]
        if scattered is not None:
            combined = sum(states)
            kinds.append(("all_gather", made * last.itemsize // parts))
        yield Exchange(0, d, cuts[d], 0, 0, 0, combined, tuple(kinds), scattered)


def margined(reach: Reach, block: int) -> tuple[int, int]:
    """What is left of a block with margins once what no device reads is gone: from where to where,
    counted from the begin of the block."""
    begin = -reach.low if reach.begin is None else max(-reach.low, reach.begin)
    end = block + reach.high if reach.end is None else min(block + reach.high, reach.end)
    return begin, end


def in_blocks(
    projection: Projection, tensor: TensorType, layout: Layout, cuts: Cuts, extents: Sequence[int]
) -> bool:
    """Whether an operand's boxes are plainly its blocks: every dim that is cut follows one index
    dim cut so, step by step and no further. Said without a look at any device."""
    for k, axes in enumerate(layout.dims):
        reached = [d for d, a in enumerate(projection.matrix[k]) if a]
        if axes and not (
            len(reached) == 1
            and cuts[reached[0]] == axes
            and projection.matrix[k][reached[0]] == projection.shape[k]
            and projection.offset[k] == 0
            and projection.shape[k] * extents[reached[0]] == tensor.shape[k]
        ):
            return False
    return True


def exchanges_of(body: BodyPlan, k: int, mesh: MeshShape) -> tuple[Exchange, ...]:
    """What operation k of a body gets from neighbours; nothing where it has regions."""
    op, strategy, values = body.graph.operations[k], body.strategies[k], body.graph.values
    if op.regions or not any(strategy.cuts) or not any(any(x.dims) for x in strategy.needs):
        return ()
    types = [tuple([values[v] for v in own]) for own in (op.inputs, op.outputs)]
    return exchanges(registry.signature_of(op, *types), strategy.cuts, strategy.needs, mesh)


@dataclass(frozen=True, slots=True)
class Reader:
    """An operation among those of its body: its number, its `unit`, the values that it reads, in
    which layouts, those that it makes, and what it gets from neighbours. It `copies` where it reads
    a value in another layout than that in which it was made; `remat` is its checkpoint region."""

    operation: int
    reads: tuple[int, ...]
    needs: tuple[Layout, ...]
    makes: tuple[int, ...]
    exchanges: tuple[Exchange, ...]
    unit: int = 0
    copies: bool = False
    remat: int | None = None

    @property
    def rows(self) -> tuple[Exchange, ...]:
        """The exchanges of rows, operand by operand and dim by dim, in order."""
        return tuple([e for e in self.exchanges if e.is_rows])


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of one block that a permute carries: `low` or `high` ones of exchange `exchange` of the
    operation `reader`, which is the first of those that read them. `key` tells the block from
    others."""

    reader: int
    exchange: Exchange
    low: int
    high: int
    key: Hashable

    @property
    def nbytes(self) -> int:
        """Bytes that a device sends."""
        return (self.low + self.high) * self.exchange.row_bytes


@dataclass(frozen=True, slots=True)
class Permute:
    """One permute, over `axes` between these `pairs` of devices, and the rows that it carries."""

    axes: tuple[int, ...]
    pairs: _Pairs
    pieces: tuple[Piece, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that a device sends."""
        return sum([piece.nbytes for piece in self.pieces])


@dataclass(frozen=True, slots=True)
class Round:
    """Permutes that wait for none of each other, and the exchanges that are done by them: the
    operation, its exchange, and the key of the block that is sent."""

    permutes: tuple[Permute, ...]
    exchanges: tuple[tuple[int, Exchange, Hashable], ...]


@dataclass(frozen=True, slots=True)
class There:
    """After which operation of a body values can be there, and whether some are copies: what the
    reader's own unit makes is computed when it is needed. `made` says it of what other units make,
    -1 of what enters the body."""

    made: Callable[[int], int]
    own: dict[tuple[int, int], tuple[int, bool]] = field(default_factory=dict)  # (unit, value)

    def reads(self, reader: Reader) -> tuple[int, bool]:
        """After which operation all operands of the next reader can be there; whether its unit
        makes copies of some, or of what they are computed from."""
        own = [self.own.get((reader.unit, v)) or (self.made(v), False) for v in reader.reads]
        last = max([place for place, _ in own], default=-1)
        return last, reader.copies or any([copies for _, copies in own])

    def leaves(self, reader: Reader, last: int, copies: bool) -> None:
        """The next reader's results can be there after operation `last`."""
        self.own.update({(reader.unit, v): (last, copies) for v in reader.makes})


def sent_together(
    readers: Sequence[Reader], made: Callable[[int], int], at_once: bool = False
) -> tuple[tuple[Reader, ...], ...]:
    """Which operations of a body send rows together: those whose operands are there when the first
    of them runs. `readers` are in program order, all of each unit of which one gets rows; `made`
    as `There` has it. With `at_once` no rows are waited for, so that groups are as few as can be.
    """
    there, groups = There(made), list[list[Reader]]()
    for reader in readers:
        last, copies = there.reads(reader)
        if reader.rows:
            later = [g for g in groups if g[0].operation > last]
            group = next((g for g in later if _joins(reader, g[0], copies)), None)
            if group is None:
                groups.append(group := [])
            group.append(reader)
            last = last if at_once else group[0].operation
        there.leaves(reader, last, copies)
    return tuple([tuple(g) for g in groups])


def _joins(reader: Reader, first: Reader, copies: bool) -> bool:
    """Whether an operation's rows go with those of an earlier one, if their operands are there:
    those of another kernel do if they are few, sent in the ways of the first, and no copies."""
    amount = sum([(e.low + e.high) * e.row_bytes for e in reader.rows])
    ways = {e.way for e in reader.rows} <= {e.way for e in first.rows}
    ahead = amount <= AHEAD and ways and not (copies or first.copies)
    return reader.unit == first.unit or (reader.remat == first.remat and ahead)


def rounds(
    readers: Sequence[Reader],
    mesh: MeshShape,
    dtype: Callable[[int, Exchange], str] = lambda _, e: e.dtype,
) -> tuple[Round, ...]:
    """The permutes of operations that send rows together, in the order in which they wait for one
    another: rows along a later dim go with the margins of earlier ones. `dtype` says as what type
    an operation's rows are sent."""
    left = [
        [(r, e) for e in r.rows if e.operand == p]
        for r in readers
        for p in dict.fromkeys([e.operand for e in r.rows])
    ]
    found: list[Round] = []
    while left:
        later = {e.axes for chain in left for _, e in chain[1:]}
        first = [chain[0][1].axes for chain in left]
        axes = next((a for a in first if a not in later), first[0])
        now = [chain.pop(0) for chain in left if chain[0][1].axes == axes]
        left = [chain for chain in left if chain]
        found.append(_round(now, mesh, dtype))
    return tuple(found)


def _round(
    now: Sequence[tuple[Reader, Exchange]], mesh: MeshShape, dtype: Callable[[int, Exchange], str]
) -> Round:
    blocks: dict[Hashable, list[tuple[Reader, Exchange]]] = {}
    for reader, e in now:
        blocks.setdefault(_block(reader, e), []).append((reader, e))
    permutes: dict[tuple[_Pairs, str, Hashable], list[Piece]] = {}
    for key, own in blocks.items():
        (reader, e), *_ = own
        sent = dtype(reader.operation, e)
        alone = key if sent.startswith("key<") else None
        up, down = neighbours(e.axes, e.around, mesh)
        low, high = max([x.low for _, x in own]), max([x.high for _, x in own])
        for pairs, rows in ((up, (low, 0)), (down, (0, high))):
            if any(rows):
                piece = Piece(reader.operation, e, *rows, key)
                permutes.setdefault((pairs, sent, alone), []).append(piece)
    return Round(
        tuple(
            [
                Permute(pieces[0].exchange.axes, pairs, tuple(pieces))
                for (pairs, *_), pieces in permutes.items()
            ]
        ),
        tuple([(r.operation, e, key) for key, own in blocks.items() for r, e in own]),
    )


def _block(reader: Reader, e: Exchange) -> Hashable:
    """What tells the block, and the part of it, whose rows an operation reads."""
    of = replace(e, operand=-1, low=0, high=0, whole_bytes=0, fuses=False)
    return reader.reads[e.operand], reader.needs[e.operand], of


@lru_cache(maxsize=1024)
def neighbours(axes: tuple[int, ...], around: bool, mesh: MeshShape) -> tuple[_Pairs, _Pairs]:
    """Which device of a group sends to which, numbered as JAX's permutes have it: each to the next
    one, and each to the one before."""
    places = places_of([a for a in axes if mesh.sizes[a] > 1], mesh)
    up = [*pairwise([*places, places[0]] if around else places)]
    return tuple(sorted(up)), tuple(sorted([(b, a) for a, b in up]))


def together(
    body: BodyPlan, found: Sequence[tuple[Exchange, ...]]
) -> tuple[tuple[Reader, ...], ...]:
    """The operations of a body that get rows from neighbours, those in one that send together;
    `found` are the exchanges of all operations."""
    units = [group_of(body, k) if group_of(body, k) >= 0 else -1 - k for k in range(len(found))]
    some = {u for u, own in zip(units, found, strict=True) if any([e.is_rows for e in own])}
    if not some:
        return ()
    layouts, made = produced_layouts(body), body.graph.producers()
    readers = []
    for k, (op, strategy) in enumerate(zip(body.graph.operations, body.strategies, strict=True)):
        if units[k] in some:
            reads = zip(op.inputs, strategy.needs, strict=True)
            copies = any([layouts[v] != need for v, need in reads])
            ports = op.inputs, strategy.needs, op.outputs
            readers.append(Reader(k, *ports, found[k], units[k], copies, op.remat))
    return sent_together(readers, lambda v: made.get(v, -1))


def sent_again(groups: Sequence[Sequence[Reader]]) -> frozenset[tuple[int, int]]:
    """(operation, operand) pairs of which devices send rows that they sent before for operations
    of another group: a compiler must be kept from sending them once only."""
    before: set[Hashable] = set()
    found = set()
    for group in groups:
        own = set()
        for reader in group:
            for e in reader.rows:
                sent = {
                    (_block(reader, e), *rows) for rows in ((e.low, 0), (0, e.high)) if any(rows)
                }
                if sent & before:
                    found.add((reader.operation, e.operand))
                own |= sent
        before |= own
    return frozenset(found)


@lru_cache(maxsize=1024)
def block_numbers(axes: tuple[int, ...], mesh: MeshShape) -> NDArray[np.int64]:
    """Which block every device holds of a dim cut by `axes`, row-major over the mesh: s64[devices].

    `collectives.block_number` says it of the device that runs. Not to be written to.
    """
    coordinates = np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
    number = np.zeros(mesh.devices, np.int64)
    for a in axes:
        number = number * mesh.sizes[a] + coordinates[a]
    number.flags.writeable = False
    return number
