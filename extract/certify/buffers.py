"""Which arrays a plan holds in memory, and from when to when, two ticks for every unit.

At the even tick of a unit the copies that it reads are made, at the odd one it runs. When values
live says `schedule/lifetimes.py`; what plans choose, their layouts and copies, is counted here from
the plan, and by `extract/problem/memory.py` from the choices of a search.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.lifetimes import Lives
from tapestry_egg.schedule.lying import LEAST_PLACE
from tapestry_egg.schedule.schedules import Schedule

from .verdict import Buffer, Copied

if TYPE_CHECKING:
    from .verdict import Buffer

_RENEWING = ("state", "carry")


def buffers(
    lives: Lives,
    v: int,
    have: Layout,
    needs: Mapping[int, Sequence[Layout]],
    back: Sequence[int],
    copies: Sequence[Copied],
    size: Callable[[Layout], float],
    passing_by: Callable[[Layout], float],
    late: bool = False,
    left: int | None = None,
    turned: tuple[int, int] | None = None,
) -> list[Buffer]:
    """All arrays that hold value v, produced as `have`; `late` where it is added up of parts,
    when the kernel that makes these is over; from tick `left` on only copies of it, or of views
    of it, are in memory. It is `turned` beside it from one tick up to before another.

    A block takes `size` bytes, one on the way to a copy what it is `passing_by`.
    `needs[u]` are the layouts in which unit u reads it, `back` the units that need something
    else than a kept copy that is there.
    """
    found: list[Buffer] = []
    kept = any(c.kept for c in copies)
    passing = lives.owns_memory(v) and lives.death(v) < lives.end
    if lives.owns_memory(v):
        begin, end = lives.birth(v), min(lives.death(v) + 2, lives.end)
        begin = min(max(begin, lives.tick(lives.maker[v]) + 2) if late else begin, end - 1)
        if kept and passing:
            end = next(c.at for c in copies if c.kept) + 1
            for u in back:
                at = lives.read(u, v)
                stop = lives.through(u, v) + 2 if have in needs[u] else at + 1
                found.append(Buffer(end, max(end, stop), size(have), have))
        elif left is not None:
            end = max(begin, left)
        elif passing:
            last = [u for u in lives.users.get(v, []) if lives.through(u, v) == lives.death(v)]
            if len(last) == 1 and last[0] in needs and have not in needs[last[0]]:
                others = [lives.through(u, v) + 2 for u in needs if u != last[0]]
                at = lives.read(last[0], v)
                joined = {c.need: c.at for c in copies if c.joined and last[0] in c.units}
                if joined.keys() >= set(needs[last[0]]):
                    at = max(joined[need] for need in needs[last[0]])
                end = max(begin, at + 1, *others)
        found.append(Buffer(begin, end, size(have), have))
    if turned is not None:
        found.append(Buffer(*turned, size(have), have))
    made = lives.root(lives.maker[v])
    looped = made.port in ("carry", "stack") and v == made.outputs[-1]
    for u, needed in needs.items():
        # What a loop carries in another layout is in no place of an old state.
        port = lives.root(u).port
        beside = looped and not lives.renews_turned(v) and not lives.owns_memory(v)
        if beside and have not in needed and port in _RENEWING:
            begin = lives.made(v) + 1
            found.append(Buffer(begin, max(begin, lives.read(u, v)), size(have), have))
        if have in needed and (u, v) in lives.doubled:
            found.append(Buffer(lives.tick(u) + 1, lives.end, size(have), have, "copy"))
    for c in copies:
        at = c.at
        stop = max((lives.copy_end(u, v) for u in c.units), default=at + 1)
        whole = size(c.need)
        reduced = c.need.dims == have.dims and set(c.need.partial) < set(have.partial)
        making = max((passing_by(x) for x in c.blocks), default=0.0)
        making += 0.0 if reduced and not c.apart else whole
        for u in c.turned:  # what several share stays as it was gathered
            if c.kept and c.need in needs[u]:
                begin, end = lives.read(u, v) + 1, lives.through(u, v) + 2
                found.append(Buffer(begin, end, whole, c.need, "making"))
        making += whole if c.turned and not c.kept else 0.0
        making += size(have) if c.turned_before else 0.0
        making += size(have) if c.wire and not lives.owns_memory(v) else 0.0
        if c.joined and v in lives.leaving and lives.leaving[v].unit in c.units:
            begin = lives.leaving[v].until  # what it is made of waits for the others
            found.append(Buffer(begin, max(begin, at + 1), size(have), have))
        found.append(Buffer(c.begin, at + 1, making, c.need, "making"))
        u = c.units[0]
        state = lives.root(u).port == "state"
        if not c.kept and state and (u, v) not in lives.doubled:
            continue
        found.append(Buffer(at + 1, max(stop, at + 1), whole, c.need, "copy"))
    return found


# Results: the places that are held for those that are not donated.
#
# XLA gives such a result an allocation of its own (BufferAssigner::MaybeAssignBuffer). Before the
# result is made, arrays lie there that are no larger, one at a time: from the largest array on each
# takes the smallest place that is free for as long as it lives. All others share the rest of
# memory.


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
