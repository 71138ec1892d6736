"""Lifetimes: when each value is made and last read, on the time line of units.

A value lives from the unit that makes it to its last reader; undonated inputs live throughout, and
so do donated inputs whose successor takes over their buffer; outputs live to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule import Schedule


@dataclass(frozen=True)
class Lifetimes:
    """When each value is made and last read, on the time line of units."""

    made: tuple[int, ...]
    last: tuple[int, ...]
    reads_at: dict[tuple[int, int], int]  # (unit, value) -> time of the read
    free: tuple[bool, ...]  # takes no memory of its own (alias, view, constant)


def lifetimes(plan: Schedule) -> Lifetimes:
    """Lifetimes of all values over the fixed order of the schedule."""
    program = plan.program
    end = len(plan.units)
    made = [0] * len(program.types)
    last = [-1] * len(program.types)
    free = [False] * len(program.types)
    reads_at: dict[tuple[int, int], int] = {}
    starts = {e: s for s, e in _region_times(plan)}
    for u, unit in enumerate(plan.units):
        root = program.instances[unit.root]
        for v in unit.outputs:
            made[v] = u
            if root.port == "stack":
                made[v] = starts.get(_region_end(plan, unit.root), u)
            if root.port in ("constant", "invariant"):
                free[v] = True
    for u, unit in enumerate(plan.units):
        root = program.instances[unit.root]
        late = root.port in ("state", "output")
        for i, p, v in unit.reads:
            if late:
                reads_at[u, v] = made[v]
            elif root.port in ("carry", "stack", "branch") and program.instances[i].body != (
                program.body_of[v]
            ):
                reads_at[u, v] = made[v]
            else:
                reads_at[u, v] = u
            last[v] = max(last[v], reads_at[u, v])
            del p
    for v, t in enumerate(made):
        last[v] = max(last[v], t)
    for unit in reversed(plan.units):
        # A value that is only another view of something keeps that something alive instead.
        members = [program.instances[i] for i in unit.members]
        if not members[-1].port and all(m.signature.fusion == "view" for m in members):
            for v in unit.outputs:
                free[v] = True
                for _, _, source in unit.reads:
                    last[source] = max(last[source], last[v])
        if members[-1].port == "invariant":
            for v in unit.outputs:
                for _, _, source in unit.reads:
                    last[source] = max(last[source], last[v])
    for unit in plan.units:
        root = program.instances[unit.root]
        if root.port == "state":
            (new,), (old,) = root.inputs, root.outputs
            made[old], last[old] = 0, end - 1
            if new != old:
                free[new] = True
        elif root.port == "input":
            (v,) = root.outputs
            made[v] = 0
            graph = program.bodies[0].graph
            position = graph.inputs.index(program.bodies[0].values.index(v))
            if not (graph.donated and graph.donated[position]):
                last[v] = end - 1
        elif root.port == "output":
            (v,) = root.inputs
            last[v] = end - 1
    return Lifetimes(tuple(made), tuple(last), reads_at, tuple(free))


def _region_times(plan: Schedule) -> list[tuple[int, int]]:
    """(first unit, last unit) of every region, by the instances that belong to it."""
    out = []
    for first, stop in plan.program.spans.values():
        units = [u for u, unit in enumerate(plan.units) if first <= unit.root < stop]
        if units:
            out.append((min(units), max(units)))
    return out


def _region_end(plan: Schedule, instance: int) -> int:
    best = -1
    for (_, _), (first, stop) in plan.program.spans.items():
        if first <= instance < stop:
            units = [u for u, unit in enumerate(plan.units) if first <= unit.root < stop]
            end = max(units)
            best = end if best < 0 else min(best, end)
    return best
