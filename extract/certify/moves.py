"""The copies of a plan: those between kernels, those inside one, which then runs as two, and those
that are written again with their dims in order, for kernels that take no other; and what is read
again, as it does not lie as in the kernel that has it at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import LOCAL, copying_seconds, turning_seconds
from tapestry_egg.machine.energy import joules, turning_joules
from tapestry_egg.plans.collectives import after, turns
from tapestry_egg.plans.plan import Change
from tapestry_egg.schedule.inlining import read_in_place
from tapestry_egg.schedule.units import Unit, two_kernels

from .ground import Ground
from .kernel_work import Work, block_bytes, elements, held_bytes
from .verdict import Buffer

if TYPE_CHECKING:
    from .recount import Walk


@dataclass(frozen=True, slots=True)
class Move:
    """One copy that is made: by unit `unit` for itself, or kept for several (`unit` -1); `inner`
    are those of a value that exists only inside the unit."""

    value: int
    have: Layout
    need: Layout
    unit: int
    reader: tuple[int, int]  # (body, operation) that makes it; number of operations: the outputs
    region: bool  # the reader is a region operation, or the outputs of a body
    inner: bool = False

    @property
    def combines(self) -> bool:
        """Whether it combines partial values."""
        return bool(set(self.have.partial) - set(self.need.partial))


@dataclass(frozen=True, slots=True)
class InTwo:
    """A unit that runs as two kernels, since a value inside it is combined or sent on the way."""

    first: Unit
    rest: Unit
    move: Move


def inner_moves(
    ground: Ground, given: Mapping[int, Layout], needed: Mapping[tuple[int, int], Layout]
) -> Iterator[Move]:
    """The reads of values inside units in another layout than they are made in, in order."""
    for u, unit in enumerate(ground.schedule.units):
        for i in unit.members:
            instance = ground.program.instances[i]
            at = (int(instance.body), instance.operation)
            for p, v in enumerate(instance.inputs):
                if v in ground.inside and needed[i, p] != given[v]:
                    yield Move(v, given[v], needed[i, p], u, at, region=False, inner=True)


def in_two(
    ground: Ground,
    move: Move,
    needed: Mapping[tuple[int, int], Layout],
    steps: Sequence[Change],
) -> InTwo | None:
    """The two kernels around what is copied inside a unit by some steps; None where it is neither a
    combined sum nor sent whole by one collective, where some reader wants it otherwise, or where
    the unit cannot be two kernels.

    What no collective reads a compiler does not store, and what views make it stores only for that.
    """
    unit, v = ground.schedule.units[move.unit], FlatId(move.value)
    parts = two_kernels(ground.program, unit, v)
    if parts is None or ground.lives.computed_again(move.unit):
        return None
    wanted = {needed[i, p] for i, p, w in parts[1].reads if w == v}
    sent = len(steps) == 1 and steps[0].kind not in LOCAL and not move.have.partial
    sent = sent and ground.program.instances[parts[0].root].signature.fusion == "loop"
    if not (move.combines or sent) or move.need.partial or wanted != {move.need}:
        return None
    return InTwo(*parts, move)


def copy_in_memory(ground: Ground, two: InTwo, mesh: MeshShape) -> Iterator[tuple[FlatId, Buffer]]:
    """The arrays of a value that one kernel makes and another reads while its unit runs: as it is
    made, unless it is written over what it is made of, and as it is read."""
    v, at, move = FlatId(two.move.value), 2 * two.move.unit + 1, two.move
    types, lives, tiles = ground.program.types, ground.lives, ground.target.tiles
    over = ground.program.instances[two.first.root].signature.fusion == "loop" and any(
        (types[w].shape, types[w].dtype) == (types[v].shape, types[v].dtype)
        and lives.owns_memory(w)
        and lives.death(w) == at - 1
        for w in read_in_place(ground.program, two.first)
    )
    if not over:
        size = held_bytes(types[v], move.have, mesh, tiles)
        yield v, Buffer(at, at + 1, size, move.have, "making")
    if move.have.dims != move.need.dims:  # an all-reduce writes where it reads
        size = held_bytes(types[v], move.need, mesh, tiles)
        yield v, Buffer(at, at + 1, size, move.need, "making")


def turned_for(walk: Walk, move: Move) -> list[tuple[int, float, float]]:
    """The units that read a copy turned, with the seconds, and the joules of the mesh, of the
    kernels that write it so, in one run."""
    if move.inner or not turns_on_the_way(walk, move, "all_gather"):
        return []
    units = (move.unit,) if move.unit >= 0 else walk.served(move.value)
    found = []
    for u in units:
        reads = [walk.needed[i, p] for i, p, w, *_ in walk.ground.reads[u] if w == move.value]
        if (u, move.value) in walk.ground.straight and move.need in reads:
            found.append((u, *turning(walk, move.value, move.need)))
    return found


def turning(walk: Walk, value: int, layout: Layout) -> tuple[float, float]:
    """Seconds, and joules of the mesh, of a kernel that writes a value's blocks in order."""
    amount = float(block_bytes(walk.program.types[value], layout, walk.mesh))
    return (
        turning_seconds(amount, walk.target),
        turning_joules(amount, walk.mesh.devices, walk.target),
    )


def turns_on_the_way(walk: Walk, move: Move, kind: str) -> bool:
    """Whether a change of this kind on the way of a copy takes, or leaves, another order of dims
    than that in which they are written."""
    key = walk.local[move.value], move.have, move.need
    shape, layout = walk.program.types[move.value].shape, move.have
    for step in walk.bodies[walk.body_of[move.value]].copies[key]:
        before, layout = layout, after(step, layout)
        if step.kind == kind:
            k = step.dim or 0
            cut = (before if kind == "all_gather" else layout).dims[k]
            if turns(step, shape, kind, shape[k] // walk.mesh.parts(cut), walk.target.tiles):
                return True
    return False


def turns_before(walk: Walk, move: Move) -> bool:
    """Whether what a copy is made of is written in another order first."""
    return move.value in walk.ground.made_straight and turns_on_the_way(
        walk, move, "reduce_scatter"
    )


def read_again(walk: Walk, u: int, of: int | None = None) -> list[Work]:
    """One run's reading again of what unit u reads, and the kernel of another unit (that `of` one)
    has at hand, where it does not lie there as u reads it."""
    units, found = walk.schedule.units, []
    for shared in walk.ground.traffic.shared(u):
        own, others = units[u].reads, units[shared.unit].reads
        i, p, v = own[shared.read]
        there = {walk.needed[j, q] for j, q, w in others if w == shared.value}
        alike = all(walk.needed[j, q] in there for j, q, w in own if w == v)
        if alike or of not in (None, shared.unit):
            continue
        tensor = walk.program.types[v]
        block = elements(tensor, walk.needed[i, p], walk.mesh) * tensor.itemsize
        moved = shared.share * block
        seconds = float(copying_seconds(moved, shared.launches, walk.target))
        energy = joules(0.0, moved, 0.0, seconds, walk.mesh.devices, walk.target)
        found.append(Work(seconds, energy, 0.0, moved, 0.0, "memory"))
    return found
