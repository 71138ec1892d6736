"""Which arrays a plan holds in memory, and from when to when, on the time line of units.

The rules of `lifetimes.py`, worked out again by other means, for the certificate: a value lives
from the unit that makes it to its last reader; what is only another view of it, and what a region
reads of it, keeps it alive. Inputs that are not donated live throughout, and so do donated ones
whose successor is written into their memory. A loop's stacked results exist from its first unit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from ..flatten import Instance
from ..schedule import Schedule, Unit

_LEAVING = ("state", "output")


@dataclass(frozen=True, slots=True)
class Buffer:
    """`amount` bytes, alive from position `begin` up to before `end`."""

    begin: int
    end: int
    amount: float


class Lives:
    """Answers for single values; `body_of[v]` is the body in which value v lives."""

    def __init__(self, schedule: Schedule, body_of: Mapping[int, int]) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.body_of = body_of
        self.end = len(schedule.units)
        self.maker = {v: u for u, unit in enumerate(schedule.units) for v in unit.outputs}
        self.users: dict[int, list[int]] = {}
        for u, unit in enumerate(schedule.units):
            for v in dict.fromkeys(v for _, _, v in unit.reads):
                self.users.setdefault(v, []).append(u)
        self._deaths: dict[int, int] = {}
        self._owners: dict[int, bool] = {}

    def owns_memory(self, v: int) -> bool:
        """Whether a value takes memory of its own: constants, views, what a region sees of an outer
        value, and a new state written into the old one's memory do not."""
        if v not in self._owners:
            unit = self.schedule.units[self.maker[v]]
            kind = self._root(unit).port
            self._owners[v] = not (
                kind in ("constant", "invariant") or self._is_view(unit) or v in self._renewed
            )
        return self._owners[v]

    def birth(self, v: int) -> int:
        u = self.maker[v]
        unit = self.schedule.units[u]
        root = self._root(unit)
        if root.port in ("input", "state"):
            return 0
        if root.port == "stack":
            for (b, _), (start, stop) in self.program.spans.items():
                if b == root.body and start <= unit.root < stop:
                    return min(
                        k for k, x in enumerate(self.schedule.units) if start <= x.root < stop
                    )
        return u

    def death(self, v: int) -> int:
        """The last position at which a value is alive."""
        if v not in self._deaths:
            self._deaths[v] = self._death(v)
        return self._deaths[v]

    def _death(self, v: int) -> int:
        root = self._root(self.schedule.units[self.maker[v]])
        users = self.users.get(v, [])
        last = max([self.birth(v), self.maker[v], *(self.read(u, v) for u in users)])
        for u in users:
            unit = self.schedule.units[u]
            port = self._root(unit).port
            if port == "output":
                return self.end - 1
            if port == "invariant" or self._is_view(unit):
                last = max(last, *(self.death(w) for w in unit.outputs))
        if root.port == "state" or (root.port == "input" and not self._donated(v)):
            return self.end - 1
        return last

    def read(self, u: int, v: int) -> int:
        """When unit u reads v: what leaves the program or a region does so when it is made."""
        root = self._root(self.schedule.units[u])
        if root.port in _LEAVING:
            return self.birth(v)
        if root.port in ("carry", "stack", "branch") and self.body_of[v] != root.body:
            return self.birth(v)
        return u

    def first_read(self, v: int) -> int:
        maker = self.maker[v]
        return min(self.read(u, v) for u in self.users[v] if u != maker)

    def copy_span(self, u: int, v: int) -> tuple[int, int]:
        """From when up to before when a copy of v that unit u reads is alive."""
        root, at = self._root(self.schedule.units[u]), self.read(u, v)
        if root.port in _LEAVING:
            return at, self.end
        if root.port == "invariant":
            return at, self.death(root.outputs[0]) + 1
        return at, at + 1

    def _root(self, unit: Unit) -> Instance:
        return self.program.instances[unit.root]

    def _is_view(self, unit: Unit) -> bool:
        members = [self.program.instances[i] for i in unit.members]
        return not members[-1].port and all(x.signature.fusion == "view" for x in members)

    @cached_property
    def _renewed(self) -> frozenset[int]:
        """New states that are written into the memory of another value, the old state."""
        states = [x for x in self.program.instances if x.port == "state"]
        return frozenset(x.inputs[0] for x in states if x.inputs != x.outputs)

    def _donated(self, v: int) -> bool:
        body = self.program.bodies[0]
        if not body.graph.donated:
            return False
        position = [body.values[x] for x in body.graph.inputs].index(v)
        return body.graph.donated[position]
