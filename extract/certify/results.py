"""Results: what is held for those that are not donated, and how long for what they are made of.

XLA gives such a result an allocation of its own (BufferAssigner::MaybeAssignBuffer). Before the
result is made, arrays lie there that are no larger, one at a time: from the largest array on each
takes the smallest place that is free for as long as it lives. All others share the rest of memory.

Where a result is a copy, what it was copied from is gone once nothing else reads that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.flatten import Instance
from tapestry_egg.schedule.lying import LEAST_PLACE
from tapestry_egg.schedule.schedules import Schedule

if TYPE_CHECKING:
    from .buffers import Lives
    from .passed_on import PassedOn
    from .verdict import Buffer


@dataclass
class _Place:
    """Bytes that are a result's in the end, and at which ticks, bit by bit, something is there."""

    amount: float
    taken: int


def in_places(
    held: Sequence[tuple[FlatId, Buffer]], renewed: Collection[int], end: int
) -> list[tuple[FlatId, Buffer]]:
    """The arrays of a step that lasts up to tick `end`: results from the first tick on, and without
    what lies in their places before. Values that are `renewed` states are no results."""
    results = {k for k, (v, x) in enumerate(held) if _is_result(x, end) and v not in renewed}
    if not results:
        return list(held)
    places = [_Place(held[k][1].amount, _ticks(held[k][1])) for k in results]
    places.sort(key=lambda p: p.amount)
    inside: set[int] = set()
    largest = places[-1].amount
    for k in sorted(range(len(held)), key=lambda k: (-held[k][1].amount, held[k][1].begin)):
        x = held[k][1]
        if k in results or not 0.0 < x.amount <= largest or (x.begin == 0 and x.end >= end):
            continue
        ticks = _ticks(x)
        for place in places:
            if place.amount >= x.amount and not place.taken & ticks:
                place.taken |= ticks
                inside.add(k)
                break
    found: list[tuple[FlatId, Buffer]] = []
    for k, (v, x) in enumerate(held):
        if k in results:
            x = replace(x, begin=0, role="result")
        if k not in inside:
            found.append((v, x))
    return found


def may_have_places(schedule: Schedule, target: Target) -> bool:
    """Whether some result of a program is not donated and large enough, on however many devices: of
    any size where a machine has tiles, as what fills a tile in part takes all of it."""
    program = schedule.program
    roots = (program.instances[unit.root] for unit in schedule.units)
    least = LEAST_PLACE if target.tiles is None else 1
    return any(x.port == "output" and program.types[x.inputs[0]].nbytes >= least for x in roots)


def _is_result(x: Buffer, end: int) -> bool:
    made = x.role in ("made", "copy") and x.begin > 0
    return made and x.end >= end and x.amount >= LEAST_PLACE


def _ticks(x: Buffer) -> int:
    return (1 << x.end) - (1 << x.begin)


@dataclass(frozen=True, slots=True)
class Leaving:
    """Output `unit` reads value `read`, which is `source` or a view of it, and nothing else needs
    that from tick `until` on: it is gone then where the output takes a copy."""

    unit: int
    read: int
    source: int
    until: int


def leaving(lives: Lives) -> tuple[Leaving, ...]:
    """What leaves a program by one output alone."""
    found = []
    for u, unit in enumerate(lives.schedule.units):
        if _root(lives, u).port != "output":
            continue
        ((*_, read),) = unit.reads
        source = read
        while _is_view(lives, maker := lives.maker[source]):
            source = next(v for *_, v in lives.schedule.units[maker].reads)
        until = _until(lives, u, source)
        if until < lives.end:
            found.append(Leaving(u, read, source, until))
    return tuple(found)


def _until(lives: Lives, leaves: int, source: int) -> int:
    """The tick from which a kernel's result is needed by the output alone, if by no other; the
    last one else."""
    made = _root(lives, lives.maker[source]).port in ("", "carry", "stack")
    if not made or not lives.owns_memory(source):
        return lives.end
    until, views = 0, [source]
    for w in views:
        for u in lives.users.get(w, ()):
            if _is_view(lives, u):
                views.append(lives.schedule.units[u].outputs[-1])
            elif u == leaves:
                until = max(until, lives.read(u, w) + 1)
            elif _root(lives, u).port in ("state", "output"):
                return lives.end
            else:
                until = max(until, lives.through(u, w) + 2)
    return until


def _root(lives: Lives, u: int) -> Instance:
    return lives.program.instances[lives.schedule.units[u].root]


def _is_view(lives: Lives, u: int) -> bool:
    members = [lives.program.instances[i] for i in lives.schedule.units[u].members]
    return not members[-1].port and all(x.signature.fusion == "view" for x in members)


def change_order(views: Sequence[Instance], rank: int) -> bool:
    """Whether views, the last first, put the dims of something into another order together."""
    orders = [x.signature.permutation for x in views]
    place = list(range(rank))
    for order in orders:
        if order is None:  # a view of the same order
            continue
        if len(order) != rank:
            return True
        place = [order[d] for d in place]
    return place != sorted(place)


def doubled(lives: Lives, passed: PassedOn, turned: Collection[int]) -> set[tuple[int, int]]:
    """Outputs, unit and value, whose memory is that of an argument or leaves otherwise, too; or
    what a loop has turned; and new states that are what enters with its dims turned, or that
    change places with others, one for all."""
    inputs = (x for x in lives.schedule.units if lives.program.instances[x.root].port == "input")
    taken = {v for unit in inputs for v in unit.outputs}
    found: set[tuple[int, int]] = set()
    for u, unit in enumerate(lives.schedule.units):
        if _root(lives, u).port not in ("state", "output"):
            continue
        ((*_, v),) = unit.reads
        w, views = v, list[Instance]()
        while _is_view(lives, lives.maker[w]):
            made = lives.schedule.units[lives.maker[w]]
            views += [lives.program.instances[i] for i in reversed(made.members)]
            w = next(source for *_, source in made.reads)
        enters = _root(lives, lives.maker[w]).port in ("input", "state")
        new, rank = _root(lives, u).port == "state", len(lives.program.types[v].shape)
        if enters and change_order(views, rank) if new else w in {*taken, *turned}:
            found.add((u, v))
        taken.add(w)
        old = _root(lives, lives.maker[w])
        if not new and old.port == "state" and passed.overwritten(w):
            found.add((u, v))
    if (first := passed.changes_first()) is not None:
        found.add((first, _root(lives, first).inputs[0]))
    return found
