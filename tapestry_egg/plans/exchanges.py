"""Exchanges: what devices send one another while they run an operation that is cut.

An operand may lie in blocks that an operation's boxes reach over, by less than a block: a window's
margins, a shift. Then every device sends the rows at the ends of its block to the neighbours whose
boxes reach there, by permutes, and runs the kernel on its block with the margins. Which rows these
are follows from the projection alone.

Along a dim that is cumulative, or reduced to states of several arrays, every device runs the kernel
on its block, gathers the states of all, and combines them with its own result. How large states are
follows from the dim's monoid.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import BESIDE
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.zspace import Projection

from .plan import BodyPlan

Cuts = tuple[tuple[int, ...], ...]

#: Where the states of all devices take so many bytes, each combines a part of them: below, what is
#: sent takes less time than one more collective.
EXCHANGED = 1 << 20


@dataclass(frozen=True, slots=True)
class Exchange:
    """Rows of dim `dim` of operand `operand` that devices send along `axes`: `low` from each to the
    next one, `high` from each to the one before. `row_bytes` is what is read of one row by then:
    with the margins of earlier dims, and without what no device reads; `whole_bytes` is the block
    with this dim's margins. The kernel that reads it is computed element by element if it `fuses`:
    XLA for GPUs then reads edges and block where they are, and stores no block with margins.

    Where there are `states`, devices combine these instead: the collectives, each with the bytes
    that a device gives to it. `dim` is then an index dim, and `whole_bytes` is what a kernel reads
    and writes to combine them. If they are exchanged, each device combines its part of them, along
    dim `scattered` of the result, and the parts are gathered."""

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

    @property
    def sends(self) -> tuple[tuple[str, int], ...]:
        """The collectives: kind, and bytes that a device gives to each."""
        rows = [(BESIDE, n * self.row_bytes) for n in (self.low, self.high) if n]
        return (*rows, *self.states)

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
    say (`extract/certify/legality.py`), which knows nothing of this.
    """
    found: list[Exchange] = []
    if 0 in signature.extents or len(cuts) != len(signature.index):
        return ()
    ports = zip(signature.inputs, signature.input_types, needs, strict=True)
    for p, (projection, tensor, layout) in enumerate(ports):
        if not any(layout.dims) or in_blocks(projection, tensor, layout, cuts, signature.extents):
            continue
        reach = reaches(signature, p, layout, cuts, mesh)
        local = list(layout.local_shape(tensor.shape, mesh))
        for k, r in enumerate(reach):
            if not (r.low or r.high) and r.begin is not None and r.end is not None:
                local[k] = max(0, min(local[k], r.end) - max(0, r.begin))
        for k, r in enumerate(reach):
            if not (r.low or r.high):
                continue
            row = tensor.itemsize * prod(n for j, n in enumerate(local) if j != k)
            whole = local[k] + r.low + r.high
            fuses = signature.fusion == "loop"
            found.append(
                Exchange(p, k, layout.dims[k], r.low, r.high, row, row * whole, fuses=fuses)
            )
            begin, end = margined(r, local[k])
            local[k] = end - begin
    return (*found, *states_combined(signature, cuts, mesh))


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
    types = [tuple([values[v].strong for v in own]) for own in (op.inputs, op.outputs)]
    return exchanges(registry.signature_of(op, *types), strategy.cuts, strategy.needs, mesh)


def sent_again(body: BodyPlan, mesh: MeshShape) -> frozenset[tuple[int, int]]:
    """(operation, operand) pairs of which devices send rows that they sent before for another
    operation, or operand: a compiler must be kept from sending them once only."""
    sent: set[tuple[int, Layout, Exchange]] = set()
    found = set()
    for k, op in enumerate(body.graph.operations):
        for e in exchanges_of(body, k, mesh):
            layout = body.strategies[k].needs[e.operand]
            for low, high in ((e.low, 0), (0, e.high)):
                if low or high:
                    one = replace(e, operand=-1, low=low, high=high, whole_bytes=0, fuses=False)
                    key = (op.inputs[e.operand], layout, one)
                    if key in sent:
                        found.add((k, e.operand))
                    sent.add(key)
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
