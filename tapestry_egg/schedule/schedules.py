"""The schedule: the units of a program in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import UnitId

from .eager import Orders, Together, eager
from .flatten import FlatProgram, flatten
from .repeated import repeat_cheap
from .units import Unit, fuse

T = TypeVar("T")


@dataclass(frozen=True)
class Schedule:
    """Units in the order they run. `readers[v]` are the units that read value v, in that order.

    `known` remembers what was worked out of the units, for whoever asks again. A copy of the
    schedule under other `rules` and `steps` shares it.
    """

    program: FlatProgram
    units: tuple[Unit, ...]
    producer: tuple[UnitId, ...]  # value -> unit that makes it, -1 inside a unit or never
    readers: tuple[tuple[UnitId, ...], ...]
    known: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    def once(self, make: Callable[[], T], *key: Hashable) -> T:
        """What `make` gives, made at the first call with this key."""
        if key not in self.known:
            self.known[key] = make()
        found: T = self.known[key]
        return found


def schedule(program: FlatProgram, together: Together = ()) -> Schedule:
    """Group the instances of a flat program into units and order them.

    Who reads one of the values that are sent `together` waits for all of them. Raises PlanError
    where some of these are made from what reads others.
    """
    return _arranged(program, eager(program, fuse(program), together))


def scheduled(graph: BlockGraph, feedback: Mapping[int, int]) -> Schedule:
    """The schedule of a program whose cheap operations are repeated and which is in its order, as
    plans have it; `feedback` as `feedback_pairs` gives."""
    return schedule(flatten(in_order(repeat_cheap(graph), feedback), feedback))


def in_order(graph: BlockGraph, feedback: Mapping[int, int]) -> BlockGraph:
    """The same program with its operations in the order in which the schedule runs them.

    Plans count time in operations, and lowering emits them one after another; after this the
    positions in the graph and those in the schedule agree, unit by unit.
    """
    order = order_of(flatten(graph, feedback))
    return replace(graph, operations=tuple(graph.operations[k] for k in order))


def order_of(program: FlatProgram, together: Together = ()) -> list[int]:
    """The operations of a program itself (not of its regions) in the order of `schedule`."""
    units = eager(program, fuse(program), together)
    return [k for group in operation_groups(program, units) for k in group]


def orders_of(given: Schedule) -> Orders:
    """The orders that the units of a schedule may take, found once."""
    return given.once(lambda: Orders(given.program, given.units), "orders")


def merged_order(given: Schedule, together: Together) -> list[int]:
    """The operations of a program itself in the order of its schedule if some values are sent
    `together`. Raises PlanError where some of these are made from what reads others."""
    units = [given.units[u] for u in orders_of(given).taken(together)]
    return [k for group in operation_groups(given.program, units) for k in group]


def operation_groups(program: FlatProgram, units: Sequence[Unit]) -> list[list[int]]:
    """Operations of the program itself (not of its regions) that run together, in order."""
    groups: list[list[int]] = []
    seen: set[int] = set()
    for unit in units:
        group = []
        for i in unit.members:
            k = program.operation_of[i]
            if k >= 0 and k not in seen:
                seen.add(k)
                group.append(k)
        if group:
            groups.append(group)
    return groups


def read_position(schedule: Schedule, unit: int, value: int) -> int:
    """Index, in the graph of the value's body, of the last operation of a unit that reads it.

    What a region reads, its operation reads; what leaves the body is read after all operations.
    """
    program, body = schedule.program, schedule.program.body_of[value]
    position = -1
    for i, _, v in schedule.units[unit].reads:
        if v != value:
            continue
        instance = program.instances[i]
        if instance.operation >= 0 and instance.body == body:
            position = max(position, instance.operation)
            continue
        position = max(
            position,
            next(
                (
                    operation
                    for (b, operation), (start, stop) in program.spans.items()
                    if b == body and start <= i < stop
                ),
                len(program.bodies[body].graph.operations),
            ),
        )
    return position


def _arranged(program: FlatProgram, units: Sequence[Unit]) -> Schedule:
    producer = [UnitId(-1)] * len(program.types)
    readers: list[list[UnitId]] = [[] for _ in program.types]
    for k, unit in enumerate(units):
        u = UnitId(k)
        for v in unit.outputs:
            producer[v] = u
        for v in dict.fromkeys(v for _, _, v in unit.reads):
            readers[v].append(u)
    return Schedule(program, tuple(units), tuple(producer), tuple(tuple(r) for r in readers))
