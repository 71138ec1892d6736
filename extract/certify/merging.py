"""Copies that one collective makes: whether they can be, when it runs, and what a member takes.

The members are changes of one kind over the same axes, by the same monoid, sums of one type. They
are made when all of their values are there, and before the first of them is read; of what one
collective of all their bytes takes, each takes the share that its bytes are of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.compiler_choices import type_together
from tapestry_egg.machine.costs import MOVING, carried_as
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.plan import Change

from .kernel_work import block_bytes
from .moves import Move

if TYPE_CHECKING:
    from .recount import Walk

#: What tells a copy of the program's own body: its value's number there, where it leads, and the
#: how manieth of these it is.
Key = tuple[int, Layout, int]
#: What all members of one collective have in common: kind, axes, monoid, and of sums the type.
Kind = tuple[str, tuple[int, ...], str | None, str | None]


@dataclass(frozen=True, slots=True)
class Joined:
    """What a copy has of the collective that makes it: of `every` bytes that enter it on a device,
    made from place `window[0]` to `window[1]` of the order; in memory from tick `begin`, and there
    after tick `at`. `copying` are the seconds in which all of it is copied into one array and out
    of it; `apart` says that no member is written where it is read."""

    every: float
    window: tuple[int, int]
    begin: int
    at: int
    copying: float
    apart: bool


class Unmerged(Exception):
    """Why copies cannot be made by one collective; `at` is the (body, operation) that reads one."""

    def __init__(self, what: str, at: tuple[int, int]) -> None:
        super().__init__(what)
        self.at = at


def joined(walk: Walk) -> Mapping[Move, Joined]:
    """Per copy of a plan that is made with others, the collective that makes it.

    Raises Unmerged where the plan's `merged` lists what cannot be.
    """
    found: dict[Move, Joined] = {}
    if not walk.plan.body.merged:
        return found
    end = (0, len(walk.plan.body.graph.operations))
    by_key = own_moves(walk)
    for members in walk.plan.body.merged:
        lacking = [key for key in members if key not in by_key or by_key[key] in found]
        if lacking or len(set(members)) < max(len(members), 2):
            raise Unmerged("what is merged is no two copies of the program's own, or is twice", end)
        moves = [by_key[key] for key in members]
        kinds = {kind_of(walk, move) for move in moves}
        if len(kinds) > 1 or None in kinds:
            raise Unmerged("copies of several kinds are no one collective", moves[0].reader)
        if payload(walk, moves) > most_bytes(walk, moves[0]):
            raise Unmerged("the compiler makes no one collective of so much", moves[0].reader)
        one = together(walk, moves)
        if one is None:
            raise Unmerged("a copy is read before all that it is made with", moves[0].reader)
        found.update(dict.fromkeys(moves, one))
    for b, body in enumerate(walk.bodies):
        if b and body.merged:
            raise Unmerged("copies inside a region are no one collective", end)
    return found


def own_moves(walk: Walk) -> dict[Key, Move]:
    """The copies of the program's own body that are read outside kernels, each by one of them."""
    found: dict[tuple[int, Layout], dict[int, list[Move]]] = {}
    for move in walk.moves:
        if walk.body_of[move.value] == 0 and not move.inner:
            own = found.setdefault((walk.local[move.value], move.need), {})
            own.setdefault(move.reader[1], []).append(move)
    return {
        (v, need, n): moves[0]
        for (v, need), own in found.items()
        for n, (_, moves) in enumerate(sorted(own.items()))
        if len(moves) == 1
    }


def kind_of(walk: Walk, move: Move) -> Kind | None:
    """What a copy does, if that is one collective that the compiler makes one with others; else
    None."""
    step = _step(walk, move)
    combiner = walk.target.combiner
    if step is None or combiner is None or step.kind not in combiner.kinds:
        return None
    dtype = walk.program.types[move.value].dtype
    if dtype.startswith("key<") or carried_as(step.kind, step.monoid, dtype) != step.kind:
        return None
    return step.kind, step.axes, step.monoid, type_together(step.kind, dtype)


def _step(walk: Walk, move: Move) -> Change | None:
    """The only step of a copy, if it sends something."""
    copies = walk.bodies[walk.body_of[move.value]].copies
    steps = copies.get((walk.local[move.value], move.have, move.need), ())
    one = steps[0] if len(steps) == 1 and steps[0].kind in MOVING else None
    return one if one is not None and walk.mesh.parts(one.axes) > 1 else None


def entering(walk: Walk, moves: Iterable[Move]) -> float:
    """Bytes of the blocks on one device that enter the collective of some copies."""
    types = walk.program.types
    return sum(float(block_bytes(types[m.value], m.have, walk.mesh)) for m in moves)


def payload(walk: Walk, moves: Sequence[Move]) -> float:
    """Bytes that the compiler holds against its threshold: what enters, of gathers what leaves."""
    kind = kind_of(walk, moves[0])
    whole = walk.mesh.parts(kind[1]) if kind is not None and kind[0] == "all_gather" else 1
    return entering(walk, moves) * whole


def most_bytes(walk: Walk, move: Move) -> float:
    """The most payload of one collective; 0 where the compiler makes none of several."""
    combiner = walk.target.combiner
    return 0.0 if combiner is None or kind_of(walk, move) is None else float(combiner.bytes)


def together(walk: Walk, moves: Sequence[Move]) -> Joined | None:
    """The collective of some copies; None where one is read before all are made."""
    streams, lives = walk.ground.streams, walk.ground.lives
    told = [(m.value, walk.readers_of(m), m.combines) for m in moves]
    window = streams.window(told)
    if window is None:
        return None
    made = max(lives.made(m.value) + 1 for m in moves)
    at = max(made, min(walk.read_at(m) for m in moves))
    leave = any(streams.leaves(value, readers) for value, readers, _ in told)
    begin = at if streams.alone or leave else min(at, 2 * window[0])
    every, took = entering(walk, moves), copying(walk, moves)
    return Joined(every, window, begin, at, took, took > 0.0)


def copying(walk: Walk, moves: Sequence[Move]) -> float:
    """Seconds in which what enters one collective is copied into one array, and what leaves it out
    of it: two kernels that read and write all of it."""
    kind = kind_of(walk, moves[0])
    if len(moves) < 2 or kind is None:
        return 0.0
    return copied_apart(kind, entering(walk, moves), walk.target)


def copied_apart(kind: Kind, amount: float, target: Target) -> float:
    """The same of any copies of one kind, two or more, of which so many bytes enter."""
    if target.combiner is None or kind[0] not in target.combiner.contiguous:
        return 0.0
    return 2.0 * (2.0 * amount / target.hbm_bytes_per_second + target.launch_seconds)
