"""The ground of certificates: what all plans of one schedule on one machine have in common."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

from tapestry_egg.graph.ids import FlatId, InstanceId
from tapestry_egg.machine.target import Target
from tapestry_egg.schedule.leaving import Leaving
from tapestry_egg.schedule.lifetimes import lives_of
from tapestry_egg.schedule.lying import made_straight, read_straight, window_dims
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.traffic import Traffic, traffic_of

from .longest_path import Streams


class Ground:
    """What all plans of one schedule have in common."""

    def __init__(self, schedule: Schedule, target: Target) -> None:
        self.schedule, self.target = schedule, target
        self.program = schedule.program
        self.body_of = self.program.body_of
        self.local: dict[int, int] = {
            v: k for body in self.program.bodies for k, v in enumerate(body.values)
        }
        self.times = [body.weight for body in self.program.bodies]
        self.lives = lives_of(schedule, target.epilogues, target.fusing)
        self.streams = Streams(schedule, target.slowdown)

    @cached_property
    def traffic(self) -> Traffic:
        """How units go through memory."""
        return traffic_of(self.schedule, self.target)

    @cached_property
    def unit_of(self) -> dict[InstanceId, int]:
        """Unit by its root."""
        return {unit.root: u for u, unit in enumerate(self.schedule.units)}

    @cached_property
    def windows(self) -> Mapping[FlatId, frozenset[int]]:
        """The dims of values along which windows move."""
        return window_dims(self.program, self.target.tiles)

    @cached_property
    def straight(self) -> frozenset[tuple[int, int]]:
        """Units and what they read that must lie as its dims are written."""
        return read_straight(self.schedule, self.target.tiles is not None)

    @cached_property
    def made_straight(self) -> frozenset[FlatId]:
        """Values that lie as their dims are written when they are made."""
        return made_straight(self.schedule, self.target.tiles is not None)

    @cached_property
    def left(self) -> Mapping[int, Leaving]:
        """What may leave as a copy, by the value that is then no longer in memory. A view in tiles
        takes what its source does not."""
        every = self.lives.leaving.values()
        return {x.source: x for x in every if x.read == x.source or self.target.tiles is None}

    @cached_property
    def inside(self) -> frozenset[int]:
        """Values that exist only inside a kernel."""
        units = self.schedule.units
        made = {v for x in units for i in x.members for v in self.program.instances[i].outputs}
        return frozenset(made - {v for x in units for v in x.outputs})

    @cached_property
    def reads(self) -> tuple[tuple[tuple[InstanceId, int, FlatId, int, bool], ...], ...]:
        """Per unit: (instance, operand, value, operation that reads it, whether in a region)."""
        return tuple(
            tuple((i, p, v, *self._reader(i, self.body_of[v])) for i, p, v in unit.reads)
            for unit in self.schedule.units
        )

    @cached_property
    def first_reads(self) -> dict[int, list[tuple[int, int]]]:
        """Per value: the units that read it and do not make it, each with its first operation."""
        found: dict[int, list[tuple[int, int]]] = {}
        for u, unit in enumerate(self.schedule.units):
            first: dict[int, int] = {}
            for _, _, w, at, _ in self.reads[u]:
                first[w] = min(first.get(w, at), at)
            for v, at in first.items():
                if v not in unit.outputs:
                    found.setdefault(v, []).append((u, at))
        return found

    def _reader(self, i: int, b: int) -> tuple[int, bool]:
        """The operation of body b at which instance i reads; past the last: at the end."""
        instance = self.program.instances[i]
        if instance.body == b and not instance.port:
            return instance.operation, False
        for (outer, operation), (start, stop) in self.program.spans.items():
            if outer == b and start <= i < stop:
                return operation, True
        return len(self.program.bodies[b].graph.operations), True
