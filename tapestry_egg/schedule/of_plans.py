"""Schedules of plans: those of their programs, but for what waits for collectives that are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.fetch import fetches
from tapestry_egg.plans.plan import BodyPlan, Kept, Merged

from .flatten import FlatProgram, flatten
from .schedules import Schedule, merged_order, schedule


def plan_schedule(body: BodyPlan, feedback: Mapping[int, int]) -> Schedule:
    """The schedule of a plan's body; `feedback` as `feedback_pairs` gives it.

    Raises PlanError where copies that are made by one collective wait for each other, or are none.
    """
    program = flatten(body.graph, dict(feedback))
    waiting = _waiting(body, body.merged)[1] if body.merged else ()
    return schedule(program, _together(program, waiting))


#: Copies that are sent at once: each value's number in the graph, and the operations that take it.
_Takers = Sequence[Sequence[tuple[int, tuple[int, ...]]]]


def _waiting(body: BodyPlan, merged: Sequence[Merged]) -> tuple[_Takers, _Takers]:
    """Who takes copies that are made by one collective; and who comes after these: who takes them,
    and of values with a kept one all readers, as it is there for each that might take it."""
    found: dict[tuple[int, Layout, int], list[int]] = {}
    readers: dict[int, set[int]] = {}
    kept: set[tuple[int, Layout, int]] = set()
    for k, reads in enumerate(fetches(body)):
        for f in reads:
            found.setdefault(f.key, []).append(k)
            readers.setdefault(f.value, set()).add(k)
            if f.keep:
                kept.add(f.key)
    missing = [key for members in merged for key in members if key not in found]
    if missing:
        raise PlanError(f"value {missing[0][0]} has no such copy", where=body.graph.name)
    takers = [[(key[0], tuple(found[key])) for key in members] for members in merged]
    waiting = [
        [(key[0], tuple(sorted(readers[key[0]]) if key in kept else found[key])) for key in members]
        for members in merged
    ]
    return takers, waiting


def _together(program: FlatProgram, takers: _Takers) -> list[list[tuple[FlatId, tuple[int, ...]]]]:
    """The same, by the numbers of values in the flat program."""
    values = program.bodies[0].values
    return [[(values[v], taken) for v, taken in members] for members in takers]


def with_merged(
    body: BodyPlan,
    feedback: Mapping[int, int],
    merged: tuple[Merged, ...],
    known: Schedule | None = None,
) -> tuple[BodyPlan, Schedule]:
    """The same plan with copies `merged`, in the order that this takes, and its schedule; `known`
    is that of the plan with none merged, if it has been made.

    Who takes a merged copy comes after the last of the values that it is made of. Raises PlanError
    where some of these are made from what takes others, and where effects would change places.
    """
    takers, waiting = _waiting(body, merged)
    feedback = dict(feedback)
    apart = known or schedule(flatten(body.graph, feedback))
    together = _together(apart.program, waiting)
    order, found = merged_order(apart, body.graph, together, feedback)
    effects = [k for k in order if body.graph.operations[k].effectful]
    if effects != sorted(effects):
        raise PlanError("what has an effect would run in another order")
    place = {k: n for n, k in enumerate((*order, len(order)))}
    readers: dict[int, list[tuple[int, Layout]]] = {v: [] for v in body.kept}
    for k, (op, s) in enumerate(zip(body.graph.operations, body.strategies, strict=True)):
        for v, need in zip(op.inputs, s.needs, strict=True):
            if v in readers:
                readers[v].append((k, need))
    moved = replace(
        body,
        graph=found.program.bodies[0].graph,
        strategies=tuple(body.strategies[k] for k in order),
        kept={v: _served(body, kept, readers[v], place) for v, kept in body.kept.items()},
        merged=(),
    )
    takers = [[(v, tuple(sorted(place[k] for k in ks))) for v, ks in own] for own in takers]
    moved = _numbered(moved, found)
    return replace(moved, merged=_renamed(moved, merged, takers)), found


def _renamed(body: BodyPlan, merged: Sequence[Merged], takers: _Takers) -> tuple[Merged, ...]:
    """Merged copies by the how manieth they are in the order of `body`, by who takes them there.

    Raises PlanError where those take several."""
    reads = fetches(body) if merged else ()
    found: list[Merged] = []
    for members, taken in zip(merged, takers, strict=True):
        own = []
        for (v, need, _), (_, ks) in zip(members, taken, strict=True):
            times = {f.time for k in ks for f in reads[k] if (f.value, f.need) == (v, need)}
            if len(times) != 1:
                raise PlanError("who took one copy takes several in another order")
            own.append((v, need, times.pop()))
        found.append(tuple(own))
    return tuple(found)


def _served(
    body: BodyPlan, kept: Kept, readers: Sequence[tuple[int, Layout]], place: Mapping[int, int]
) -> Kept:
    """A kept copy that serves the `readers` that it served, wherever they are now."""
    if kept.until >= len(body.graph.operations):
        return kept
    reading = [place[k] for k, need in readers if k <= kept.until and need == kept.layout]
    return Kept(kept.layout, max(reading, default=place[kept.until]))


def _numbered(body: BodyPlan, found: Schedule) -> BodyPlan:
    """The same plan with the kernels numbered as its schedule has them."""
    bodies = found.program.bodies
    groups = groups_of(found)
    inner = {(int(b.parent), b.operation, b.region): n for n, b in enumerate(bodies)}

    def numbered(one: BodyPlan, n: int) -> BodyPlan:
        strategies = tuple(
            replace(s, bodies=tuple(numbered(x, inner[n, k, r]) for r, x in enumerate(s.bodies)))
            if s.bodies
            else s
            for k, s in enumerate(one.strategies)
        )
        return replace(one, strategies=strategies, groups=groups[n])

    return numbered(body, 0)


def groups_of(found: Schedule) -> list[tuple[int, ...]]:
    """Per body, the unit that each of its operations runs in; -1 where it is on its own."""
    program = found.program
    groups = [[-1] * len(body.graph.operations) for body in program.bodies]
    for u, unit in enumerate(found.units):
        for i in unit.members if len(unit.members) > 1 else ():
            instance = program.instances[i]
            if instance.operation >= 0:
                groups[instance.body][instance.operation] = u
    return [tuple(g) for g in groups]
