"""Passing: states whose next value is what another state was.

A new state that enters in another's place is copied to its own once nothing reads there any more:
at once where nothing does, else at the end. States that change places take one array beside (XLA's
AddCopiesForAliasedInputOutputs, in its copy_insertion.cc).
"""

from __future__ import annotations

from functools import cached_property

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.schedule.flatten import Instance

from .schedules import Schedule
from .units import is_view


def viewed(schedule: Schedule, v: FlatId) -> FlatId:
    """What a view is of in the end; any other value is itself."""
    while True:
        unit = schedule.units[schedule.producer[v]]
        if not is_view(schedule.program, unit):
            return v
        v = unit.reads[0][2]


class Passing:
    """The states of a program that are passed on, by their units."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.program = schedule, schedule.program

    @cached_property
    def sources(self) -> dict[int, int]:
        """The new states that are another's old value, or a view of it: by their units, whose."""
        found: dict[int, int] = {}
        for u, unit in enumerate(self.schedule.units):
            if (root := self.program.instances[unit.root]).port != "state":
                continue
            by = self.schedule.producer[viewed(self.schedule, root.inputs[0])]
            if by != u and self._root(by).port == "state":
                found[u] = by
        return found

    def is_left_alone(self, u: int, below: frozenset[int] = frozenset()) -> bool:
        """Whether nothing reads the old value of a state but others that it may be copied to at
        once."""
        read, views = set[int](), [self._root(u).outputs[0]]
        for v in views:
            for r in self.schedule.readers[v]:
                if is_view(self.program, self.schedule.units[r]):
                    views.append(self.schedule.units[r].outputs[-1])
                else:
                    read.add(r)
        on = {r for r, source in self.sources.items() if source == u}
        return u not in below and read <= on and all(self.is_left_alone(r, below | {u}) for r in on)

    def first_of_ring(self) -> int | None:
        """Of states that change places the first of the largest: one array serves all of them."""
        found = []
        for u in self.sources:
            ring = [u]
            while (at := self.sources.get(ring[-1])) is not None and at not in ring:
                ring.append(at)
            if at == u:
                found.append((-self.program.types[self._root(u).outputs[0]].nbytes, u))
        return min(found)[1] if found else None

    def is_given_another(self, old: FlatId) -> bool:
        """Whether an argument, another than it, is written into an old state's place."""
        new = viewed(self.schedule, self._root(self.schedule.producer[old]).inputs[0])
        return new != old and self._root(self.schedule.producer[new]).port in ("input", "state")

    def _root(self, u: int) -> Instance:
        return self.program.instances[self.schedule.units[u].root]
