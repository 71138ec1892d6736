"""Results: the places that are held for those that are not donated.

XLA gives such a result an allocation of its own (BufferAssigner::MaybeAssignBuffer). Before the
result is made, arrays lie there that are no larger, one at a time: from the largest array on each
takes the smallest place that is free for as long as it lives. All others share the rest of memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.lying import LEAST_PLACE
from tapestry_egg.schedule.schedules import Schedule

if TYPE_CHECKING:
    from .verdict import Buffer


@dataclass
class _Place:
    """Bytes that are a result's in the end, and at which ticks, bit by bit, something is there."""

    amount: float
    taken: int


def in_places(
    held: Sequence[tuple[FlatId, Buffer]], stay: Collection[int], end: int
) -> list[tuple[FlatId, Buffer]]:
    """The arrays of a step that lasts up to tick `end`: results from the first tick on, and without
    what lies in their places before. Values that `stay`, as new states do, are no results."""
    results = {k for k, (v, x) in enumerate(held) if _is_result(x, end) and v not in stay}
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
