"""Passed on: new states that are what enters in the place of another.

XLA copies such a value to the other place (AddCopiesForAliasedInputOutputs, in its
copy_insertion.cc) once nothing reads there any more: at once where nothing does, at the end else.
States that change places take one array beside.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from tapestry_egg.schedule.flatten import Instance
from tapestry_egg.schedule.schedules import Schedule


class PassedOn:
    """Which states of a program get what another was; `maker[v]` is the unit that makes value v."""

    def __init__(self, schedule: Schedule, maker: Mapping[int, int]) -> None:
        self.schedule, self.maker = schedule, maker
        self.states = [u for u in range(len(schedule.units)) if self._root(u).port == "state"]
        of = {u: self.maker[self._seen(self._root(u).inputs[0])] for u in self.states}
        #: unit of a state -> that of the other whose old value it becomes, as it is or as a view
        self.source = {u: w for u, w in of.items() if w != u and self._root(w).port == "state"}

    def changes_first(self) -> int | None:
        """Of the states that change places one of the largest: one array serves all of them."""
        rings = [u for u in self.source if u in self._before(u)]
        types = self.schedule.program.types
        size = {u: types[self._root(u).outputs[0]].nbytes for u in rings}
        return min(rings, key=lambda u: (-size[u], u), default=None)

    def waits(self, u: int) -> bool:
        """Whether unit u is a state that is given another's old value at the end alone."""
        return u in self.source and u not in self._vacant

    def overwritten(self, old: int) -> bool:
        """Whether an old state's place is given another argument."""
        new = self._seen(self._root(self.maker[old]).inputs[0])
        return new != old and self._root(self.maker[new]).port in ("input", "state")

    @cached_property
    def _vacant(self) -> set[int]:
        """Units of states whose old value nothing reads, but to copy it to such a place."""
        read: dict[int, set[int]] = {}
        for u, unit in enumerate(self.schedule.units):
            if not self._is_view(u):
                for *_, v in unit.reads:
                    read.setdefault(self._seen(v), set()).add(u)
        found = set[int]()
        while True:
            more = {
                u
                for u in self.states
                if all(
                    r in found and self.source.get(r) == u
                    for r in read.get(self._root(u).outputs[0], ())
                )
            }
            if more <= found:
                return found
            found |= more

    def _before(self, u: int) -> set[int]:
        """The states whose old values come to a state's place, from one to the next."""
        found = set[int]()
        while u in self.source and self.source[u] not in found:
            u = self.source[u]
            found.add(u)
        return found

    def _seen(self, v: int) -> int:
        """What a value is a view of."""
        while self._is_view(self.maker[v]):
            v = next(source for *_, source in self.schedule.units[self.maker[v]].reads)
        return v

    def _is_view(self, u: int) -> bool:
        members = [self.schedule.program.instances[i] for i in self.schedule.units[u].members]
        return not members[-1].port and all(x.signature.fusion == "view" for x in members)

    def _root(self, u: int) -> Instance:
        return self.schedule.program.instances[self.schedule.units[u].root]
