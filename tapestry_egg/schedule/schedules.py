"""The schedule: the units of a program in the order in which they run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from heapq import heappop, heappush
from typing import Any, TypeVar

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.ids import FlatId, InstanceId, UnitId

from .flatten import FlatProgram, flatten
from .repeated import repeat_cheap
from .units import Unit, fuse, unit_with

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
    plans have it; `feedback` as `feedback_pairs` gives. The graph remembers it, as several passes
    ask for that of the same form."""
    known: dict[tuple[tuple[int, int], ...], Schedule] = graph.__dict__.setdefault("_scheduled", {})
    key = tuple(sorted(feedback.items()))
    if key not in known:
        known[key] = _scheduled(graph, feedback)
    return known[key]


def _scheduled(graph: BlockGraph, feedback: Mapping[int, int]) -> Schedule:
    graph = repeat_cheap(graph)
    program = flatten(graph, feedback)
    return _in_their_order(graph, program, eager(program, fuse(program)), feedback)[1]


def _in_their_order(
    graph: BlockGraph, program: FlatProgram, units: Sequence[Unit], feedback: Mapping[int, int]
) -> tuple[list[int], Schedule]:
    """The operations of a graph in the order of some units of it, and the schedule of the same
    graph in that order: of the same operations in another order the units are the same, and stay in
    their order."""
    order = [k for group in operation_groups(program, units) for k in group]
    moved = flatten(_reordered(graph, order), feedback)
    return order, _arranged(moved, _moved(program, units, order, moved))


def in_order(graph: BlockGraph, feedback: Mapping[int, int]) -> BlockGraph:
    """The same program with its operations in the order in which the schedule runs them.

    Plans count time in operations, and lowering emits them one after another; after this the
    positions in the graph and those in the schedule agree, unit by unit.
    """
    return _reordered(graph, order_of(flatten(graph, feedback)))


def _reordered(graph: BlockGraph, order: Sequence[int]) -> BlockGraph:
    if all(k == n for n, k in enumerate(order)):
        return graph
    return replace(graph, operations=tuple([graph.operations[k] for k in order]))


def _moved(
    program: FlatProgram, units: Sequence[Unit], order: Sequence[int], moved: FlatProgram
) -> list[Unit]:
    """The units of a program as those of the same one with its operations in another order."""
    before, after = program.first_instances, moved.first_instances
    place = list(range(len(program.instances)))
    for n, k in enumerate(order):
        for i in range(before[k], before[k + 1]):
            place[i] = after[n] + i - before[k]
    value: dict[FlatId, FlatId] = {}
    for x, i in zip(program.instances, place, strict=True):
        value.update(zip(x.outputs, moved.instances[i].outputs, strict=True))
    found = []
    for unit in units:
        members = sorted([InstanceId(place[i]) for i in unit.members])
        found.append(unit_with(moved, members, {value[v] for v in unit.outputs}))
    return found


def order_of(program: FlatProgram, together: Together = ()) -> list[int]:
    """The operations of a program itself (not of its regions) in the order of `schedule`."""
    units = eager(program, fuse(program), together)
    return [k for group in operation_groups(program, units) for k in group]


def orders_of(given: Schedule) -> Orders:
    """The orders that the units of a schedule may take, found once."""
    return given.once(lambda: Orders(given.program, given.units), "orders")


def merged_order(
    given: Schedule, graph: BlockGraph, together: Together, feedback: Mapping[int, int]
) -> tuple[list[int], Schedule]:
    """The operations of a scheduled graph in their order if some values are sent `together`, and
    its schedule in that order. Raises PlanError where some of these are made from what reads
    others."""
    units = [given.units[u] for u in orders_of(given).taken(together)]
    return _in_their_order(graph, given.program, units, feedback)


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


# The order of units: the program's, but that what frees memory runs as soon as it can.
#
# Memory-aware compilers order so too: an optimizer step that consumes a gradient and writes into
# donated buffers runs when the gradient is there, not after all the others.


# Bytes that must be freed for an operation to run before its turn; no measurement of the number is
# kept. The updates of biases and scales stay together at the end, so that the compiler can merge
# their collectives.
_SMALL = 1 << 16

#: Sets of copies that are sent at once: each value, and the program's own operations that take it.
Together = Sequence[Collection[tuple[FlatId, Collection[int]]]]


def eager(program: FlatProgram, units: Sequence[Unit], together: Together = ()) -> list[Unit]:
    """Program order, except that a unit that frees more than it makes runs as soon as it can.

    A region's units stay together. What takes one of several copies that are sent `together` waits
    for the values of all; raises PlanError where some of these are made from what reads others.
    """
    return [units[u] for u in Orders(program, units).taken(together)]


class Orders:
    """The orders that the units of a program take, whatever is sent together."""

    def __init__(self, program: FlatProgram, units: Sequence[Unit]) -> None:
        self.program, self.units = program, units
        self.groups, group_of = _groups(program, units)
        #: of each unit the first one of its group: a group's units run one after the other
        self.first = [self.groups[g][0] for g in group_of]
        self.reads = [self._reads(group) for group in self.groups]
        self.made = [{v for u in group for v in units[u].outputs} for group in self.groups]
        self.maker = {v: group_of[u] for u, unit in enumerate(units) for v in unit.outputs}
        maker = self.maker
        self.after = [{maker[v] for v in vs if v in maker} - {g} for g, vs in enumerate(self.reads)]
        self.followers: list[set[int]] = [set() for _ in self.groups]
        self.users: dict[FlatId, set[int]] = defaultdict(set)
        for g, (vs, others) in enumerate(zip(self.reads, self.after, strict=True)):
            for v in vs:
                self.users[v].add(g)
            for other in others:
                self.followers[other].add(g)
        self._note_ports()
        self.behind = [sorted(gs, reverse=True) for gs in self.followers]
        sizes, renewed = program.sizes, self.renewed
        # What each group makes, with its bytes, the old state in whose place it is, if it is a new
        # one, and whether the group reads that; and what it reads that may be freed.
        self.making = [
            [(v, sizes[v], renewed.get(v), renewed.get(v) in self.reads[g]) for v in vs]
            for g, vs in enumerate(self.made)
        ]
        self.freeing = [[(v, sizes[v]) for v in vs if v not in self.kept] for vs in self.reads]
        #: whether a group may free more than is small, with the last reads of all that it reads
        self.may_free = [sum([size for _, size in own]) > _SMALL for own in self.freeing]

    @cached_property
    def group_of(self) -> dict[int, int]:
        """Operation of the program itself -> the group in which it runs."""
        return {
            k: g
            for g, group in enumerate(self.groups)
            for u in group
            for i in self.units[u].members
            if (k := self.program.operation_of[i]) >= 0
        }

    def _reads(self, group: Sequence[int]) -> set[FlatId]:
        """What the units of a group read, but for what leaves the program in the end."""
        late = ("state", "output")
        inner = [u for u in group if self.program.instances[self.units[u].root].port not in late]
        return {v for u in inner for _, _, v in self.units[u].reads}

    def _note_ports(self) -> None:
        """What the program's boundary does with memory."""
        roots = [(u, self.program.instances[u.root]) for u in self.units]
        # A state port holds the state that enters and the value that takes its place in the end.
        # The new one is no growth once the last reader of the old one has run: it is written over.
        self.renewed = {x.inputs[0]: x.outputs[0] for _, x in roots if x.port == "state"}
        # What is there from beginning to end, or must be there at the end: no reader frees it.
        held = ("state", "input", "constant")
        self.kept = {v for u, x in roots if x.port in held for v in u.outputs}
        self.kept |= {v for u, x in roots if x.port == "output" for _, _, v in u.reads}

    def taken(self, together: Together = ()) -> list[int]:
        """All units, by their places in `units`, in their order; taken anew from there it is the
        same.

        Raises PlanError where some values that are sent together are made from what reads others.
        """
        order = _Order(self, together).whole()
        return [u for g in order for u in self.groups[g]]


class _Order:
    """Which groups have run, and which wait for how many others."""

    def __init__(self, given: Orders, together: Together) -> None:
        self.given = given
        # At nought a group may run before its turn.
        self.waiting = [len(others) for others in given.after]
        # Of what is sent at once: groups of its makers that have not run, and those that wait for
        # all of them; and of which of these sets a group is a maker.
        self.unmade: list[int] = []
        self.takers: list[Collection[int]] = []
        self.makes: dict[int, list[int]] = defaultdict(list)
        for copies in together:
            self._send(copies)
        self.left = {v: len(gs) for v, gs in given.users.items()}  # readers that have not run yet
        self.done = [False] * len(given.groups)
        # Groups whose turn came before what is sent with what they read.
        self.overdue: set[int] = set()
        self.order: list[int] = []

    def _send(self, copies: Collection[tuple[FlatId, Collection[int]]]) -> None:
        """Let every group that takes some of what is sent at once wait for the makers of all of it.
        What makes a value that it takes itself waits for those of the others."""
        given, group_of = self.given, self.given.group_of
        maker = {v: given.maker.get(v) for v, _ in copies}
        takers: set[int] = set()
        for v, taken in copies:
            for g in {group_of[k] for k in taken if k in group_of}:
                if maker[v] is None or maker[v] in given.after[g]:
                    takers.add(g)
                else:
                    self._wait((g,), {by for w, by in maker.items() if w != v})
        self._wait(takers, set(maker.values()))

    def _wait(self, takers: Collection[int], makers: set[int | None]) -> None:
        """Let groups wait until some makers have run; what enters the program has none."""
        some = [by for by in makers if by is not None]
        if not some:
            return
        for by in some:
            self.makes[by].append(len(self.unmade))
        self.unmade.append(len(some))
        self.takers.append(takers)
        for g in takers:
            self.waiting[g] += 1

    def whole(self) -> list[int]:
        """All groups in their order."""
        for g in range(len(self.done)):
            if self.waiting[g]:
                self.overdue.add(g)
            else:
                self._run(g)
        if not all(self.done):
            raise PlanError("values that are sent together are made from what reads others of them")
        return self.order

    def _run(self, g: int) -> None:
        """Run group g, then whatever can free memory now, then what those enable, before the next
        group in program order. Only groups that free are moved, and only to an earlier place, so
        all else keeps the user's order; what is overdue runs once nothing is left that frees, as it
        would if its turn came then."""
        given, done, left, waiting = self.given, self.done, self.left, self.waiting
        freeing, overdue = [g], list[int]()
        while freeing or overdue:
            now = freeing.pop() if freeing else heappop(overdue)
            if done[now]:
                continue
            done[now] = True
            self.order.append(now)
            for v in given.reads[now]:
                left[v] -= 1
            behind: Sequence[int] = given.behind[now]
            for f in behind:
                waiting[f] -= 1
            if now in self.makes and (sent := self._sent_by(now)):
                behind = sorted({*behind, *sent}, reverse=True)
            ready = [f for f in behind if not (waiting[f] or done[f])]
            frees = [f for f in ready if self._frees(f)]
            for f in ready:
                if f in self.overdue and f not in frees:
                    heappush(overdue, f)
            last = self._last_readers(now)
            freeing.extend(dict.fromkeys([*frees, *last]) if last else frees)

    def _sent_by(self, now: int) -> list[int]:
        """The groups that take what can be sent now that group `now` has run: the last of its
        makers."""
        found: list[int] = []
        for n in self.makes[now]:
            self.unmade[n] -= 1
            if not self.unmade[n]:
                found += self.takers[n]
        for f in found:
            self.waiting[f] -= 1
        return found

    def _last_readers(self, now: int) -> list[int]:
        """What became ready earlier, and frees memory now that group `now` has read as well."""
        found = set()
        for v in self.given.reads[now]:
            if self.left[v] == 1:
                (last,) = [u for u in self.given.users[v] if not self.done[u]] or [now]
                if not (self.done[last] or self.waiting[last]) and self._frees(last):
                    found.add(last)
        return sorted(found, reverse=True)

    def _frees(self, g: int) -> bool:
        """Whether group g frees more than is small, if it runs now."""
        return self.given.may_free[g] and self._change(g) < -_SMALL

    def _change(self, g: int) -> int:
        """Bytes alive after group g, less those alive before."""
        left, change = self.left, 0
        for v, size, old, reads in self.given.making[g]:
            # A new state takes the old one's place, once nothing else reads the old one.
            if left.get(v) if old is None else left.get(old, 0) > reads:
                change += size
        for v, size in self.given.freeing[g]:
            if left[v] == 1:
                change -= size
        return change


def _groups(program: FlatProgram, units: Sequence[Unit]) -> tuple[list[list[int]], list[int]]:
    """Units that must stay together, in order: those of one outermost region, others alone."""
    outermost = sorted(
        span for (body, _), span in program.spans.items() if program.bodies[body].parent < 0
    )
    groups: list[list[int]] = []
    group_of: list[int] = []
    region: dict[tuple[int, int], int] = {}
    for u, unit in enumerate(units):
        span = next(((a, b) for a, b in outermost if a <= unit.root < b), None)
        if span is None or span not in region:
            groups.append([])
            if span is not None:
                region[span] = len(groups) - 1
        g = region[span] if span is not None else len(groups) - 1
        groups[g].append(u)
        group_of.append(g)
    return groups, group_of
