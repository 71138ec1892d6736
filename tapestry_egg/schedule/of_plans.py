"""Schedules of plans: those of their programs, but for what waits for collectives that are one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.plans.plan import BodyPlan, Kept, Merged

from .flatten import FlatProgram, flatten
from .schedules import Schedule, order_of, schedule


def plan_schedule(body: BodyPlan, feedback: Mapping[int, int]) -> Schedule:
    """The schedule of a plan's body; `feedback` as `feedback_pairs` gives it.

    Raises PlanError where copies that are made by one collective wait for each other.
    """
    program = flatten(body.graph, dict(feedback))
    return schedule(program, sent_together(program, body.merged))


def sent_together(program: FlatProgram, merged: Sequence[Merged]) -> list[list[FlatId]]:
    """The values of copies that are made by one collective, by their numbers in the flat program.

    Copies of one value are no set that anything waits for."""
    values = program.bodies[0].values
    return [[values[v] for v, _ in members] for members in merged]


def with_merged(
    body: BodyPlan, feedback: Mapping[int, int], merged: tuple[Merged, ...]
) -> tuple[BodyPlan, Schedule]:
    """The same plan with copies `merged`, in the order that this takes, and its schedule.

    Readers of a merged copy come after the last of the values that it is made of. Raises PlanError
    where some of these are made from what reads others, and where effects would change places.
    """
    program = flatten(body.graph, dict(feedback))
    order = order_of(program, sent_together(program, merged))
    effects = [k for k in order if body.graph.operations[k].effectful]
    if effects != sorted(effects):
        raise PlanError("what has an effect would run in another order")
    graph = body.graph
    if order != list(range(len(order))):
        graph = replace(graph, operations=tuple(graph.operations[k] for k in order))
    place = {k: n for n, k in enumerate(order)}
    strategies = tuple(body.strategies[k] for k in order)
    moved = replace(
        body,
        graph=graph,
        strategies=strategies,
        kept={v: _served(body, v, kept, place) for v, kept in body.kept.items()},
        merged=merged,
    )
    found = plan_schedule(moved, feedback)
    return _numbered(moved, found), found


def _served(body: BodyPlan, v: int, kept: Kept, place: Mapping[int, int]) -> Kept:
    """A kept copy that serves the readers that it served, wherever they are now."""
    if kept.until >= len(body.graph.operations):
        return kept
    reading = [
        place[k]
        for k, (op, s) in enumerate(zip(body.graph.operations, body.strategies, strict=True))
        if k <= kept.until and (v, kept.layout) in zip(op.inputs, s.needs, strict=True)
    ]
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
