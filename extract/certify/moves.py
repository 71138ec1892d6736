"""The copies of a plan: those between kernels, and those inside one, which then runs as two."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.schedule.parts import two_kernels
from tapestry_egg.schedule.units import Unit

from .buffers import Buffer
from .ground import Ground
from .kernel_work import held_bytes


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
    """A unit that runs as two kernels, since a sum inside it is combined on the way."""

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


def in_two(ground: Ground, move: Move, needed: Mapping[tuple[int, int], Layout]) -> InTwo | None:
    """The two kernels around what is copied inside a unit; None where it is no combined sum, where
    some reader wants it otherwise, or where the unit cannot be two kernels."""
    unit, v = ground.schedule.units[move.unit], FlatId(move.value)
    parts = two_kernels(ground.program, unit, v)
    if parts is None or ground.lives.computed_again(move.unit):
        return None
    wanted = {needed[i, p] for i, p, w in parts[1].reads if w == v}
    if not move.combines or move.need.partial or wanted != {move.need}:
        return None
    return InTwo(*parts, move)


def sum_in_memory(ground: Ground, two: InTwo, mesh: MeshShape) -> Iterator[tuple[FlatId, Buffer]]:
    """The arrays of a sum that one kernel makes and another reads while its unit runs: partial,
    unless it is written over what it is made of, and whole."""
    v, at, move = FlatId(two.move.value), 2 * two.move.unit + 1, two.move
    types, lives, tiles = ground.program.types, ground.lives, ground.target.tiles
    over = ground.program.instances[two.first.root].signature.fusion == "loop" and any(
        (types[w].shape, types[w].dtype) == (types[v].shape, types[v].dtype)
        and lives.owns_memory(w)
        and lives.death(w) == at - 1
        for _, _, w in two.first.reads
    )
    if not over:
        size = held_bytes(types[v], move.have, mesh, tiles)
        yield v, Buffer(at, at + 1, size, move.have, "making")
    if move.have.dims != move.need.dims:  # an all-reduce writes where it reads
        size = held_bytes(types[v], move.need, mesh, tiles)
        yield v, Buffer(at, at + 1, size, move.need, "making")
