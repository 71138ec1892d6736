"""Lifetimes: when each value is in memory, on a time line of two ticks per unit.

At tick 2u the copies that unit u reads are made (collectives: source and destination are both
there), at tick 2u + 1 the unit runs (operands and results are there). This is XLA's buffer
assignment over a sequential schedule (xla/service/buffer_assignment.cc): a buffer is live from the
instruction that defines it to its last reader, and

- inputs live throughout, and so do the program's results once made; a donated input's buffer
  serves the new state that takes its place, if nothing reads the old one after that, and no
  loop that leaves it has it turned all along (`schedule/lying.py`);
- an elementwise result takes over the buffer of an operand of the same type that dies there, unless
  the kernel that makes it reduces its rows, too (columns are reduced by another), and a scatter
  that of what it scatters into (HloDataflowAnalysis: CanShareOperandBuffer);
- what a loop reads from outside, stacks whose slices it takes among it, is live until its last
  round is over; a slice is taken where it is read first, or cut out inside the kernels that read it
  (`schedule/lying.py`); a stack that renews another is in that one's place;
- what a loop carries has one buffer from its begin to the last reader of what it leaves there; a
  round's next value is written into it, unless the old one is still to be read by then: the next
  one has a buffer of its own until it is; where a loop leaves a new state, what it begins with is
  in the old one's place, too;
- what one carry hands to another is copied at the end of a round, from where it is read until then;
  to where nothing is read any more it is copied at once, and read there. Carries that change places
  take one array beside, one that gets a view of an old value that of the view;
- a result that is an argument, or another result too, is copied at the end;
- a new state that is another's old value is copied to its place once nothing reads there any more
  (xla/service/copy_insertion.cc: AddCopiesForAliasedInputOutputs): at once where
  nothing does, else at the end. States that change places take one array beside, as carries do;
- views are bitcasts, and what every reader computes for itself (`schedule.fusion`) never exists:
  both keep alive what they read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.fusion_costs import FusionCosts
from tapestry_egg.tracing.constraints import KERNEL as CONSTRAINT

from .inlining import Fusion, fusion
from .lying import Passing, cut_inside, renewed, turned_in_loops, viewed
from .schedules import Schedule
from .units import is_view


@dataclass(frozen=True)
class Lifetimes:
    """Where value v lives: from tick `made[v]`, read last by what happens at `last[v]` and one
    tick later. `reads_at[u, v]` is the tick of the copies that unit u makes of v, `reads_until`
    that of the last unit that reads v, or such a copy, by way of u. What is `free` takes no memory
    of its own: an alias, a constant, a view, what is computed where it is read, as all that a unit
    makes that is `within` its readers. Outputs that are `copied`, unit and value, take an array of
    their own from their tick on. What leaves by an output, and by no other, may do so as a copy, of
    it or of a view of it: `leaving[u, v]` is, for the output and for each of these views, what the
    value v that unit u reads is a view of, if not that itself, and the tick from which the array
    that v is in is no longer in memory if u reads a copy of it."""

    made: tuple[int, ...]
    last: tuple[int, ...]
    reads_at: dict[tuple[int, int], int]
    reads_until: dict[tuple[int, int], int]
    free: tuple[bool, ...]
    within: tuple[bool, ...]
    copied: frozenset[tuple[int, int]]
    leaving: dict[tuple[int, FlatId], tuple[FlatId, int]]
    times: int


def lifetimes(
    schedule: Schedule, epilogues: bool = False, costs: FusionCosts | None = None
) -> Lifetimes:
    """Lifetimes of all values over the fixed order of the schedule."""
    key = "lifetimes", epilogues, costs
    return schedule.once(lambda: _Lives(schedule, epilogues, costs).build(), *key)


class _Lives:
    def __init__(self, schedule: Schedule, epilogues: bool, costs: FusionCosts | None) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.fusion: Fusion = fusion(schedule, epilogues, costs)
        self.end = 2 * len(schedule.units) + 2
        n = len(schedule.program.types)
        self.made = [0] * n
        self.last = [-1] * n
        self.free = [False] * n
        self.nowhere = [False] * n  # a view, or computed where it is read
        self._ends: dict[int, int] = {}  # of a loop's first instance
        self.ready = [0] * n  # the tick at which all of a value is there
        self.reads_at: dict[tuple[int, int], int] = {}
        self.reads_until: dict[tuple[int, int], int] = {}
        self.spans = sorted(_region_units(schedule), key=lambda s: s[1] - s[0])
        self.turned = turned_in_loops(schedule, epilogues)
        self.renewed = renewed(schedule, epilogues)
        self.inside = cut_inside(schedule, self.fusion, epilogues)
        self.passing = Passing(schedule)

    def build(self) -> Lifetimes:
        self._make()
        self._read()
        self._hold()
        self._carry()
        self._slice()
        self._boundary()
        self._take_over()
        return Lifetimes(
            tuple(self.made),
            tuple(self.last),
            self.reads_at,
            self.reads_until,
            tuple(self.free),
            self.fusion.within,
            self._copied(),
            self._leaving(),
            self.end,
        )

    def _make(self) -> None:
        for u, unit in enumerate(self.schedule.units):
            root = self.program.instances[unit.root]
            for v in unit.outputs:
                self.made[v] = 2 * u + 1
                if root.port == "stack":
                    begin = [a for a, b in self.spans if a <= u <= b]
                    self.made[v] = 2 * begin[0] + 1 if begin else 2 * u + 1
                if root.port in ("constant", "invariant") or u in self.inside:
                    self.free[v] = True
                self.ready[v] = self.made[v]
            if root.port in ("carry", "stack"):
                self.ready[unit.outputs[-1]] = self._loop_ends(unit.root) + 1
            if root.port == "carry":
                for v in unit.outputs[:-1]:
                    self.free[v] = not (v == unit.outputs[-2] and self._takes_another(u))

    def _read(self) -> None:
        """What leaves the program, or a region, is read when it is made."""
        for u, unit in enumerate(self.schedule.units):
            root = self.program.instances[unit.root]
            for i, _, v in unit.reads:
                inside = self.program.instances[i].body != self.program.body_of[v]
                at_once = root.port in ("state", "output") or (
                    root.port in ("carry", "stack", "branch") and inside
                )
                at = self.ready[v] + 1 if at_once else 2 * u
                self.reads_at[u, v] = at
                self.last[v] = max(self.last[v], self.end if root.port == "output" else at)
        self.reads_until = dict(self.reads_at)
        for k, t in enumerate(self.ready):
            self.last[k] = max(self.last[k], t - 1)

    def _hold(self) -> None:
        """Views, fused units and what a region reads from outside keep their sources alive."""
        for u, unit in reversed(list(enumerate(self.schedule.units))):
            port = self.program.instances[unit.root].port
            view = is_view(self.program, unit)
            passes = self.fusion.within[u] or view or port == "invariant"
            over = self._loop_ends(unit.root) if port in ("invariant", "stream") else 0
            for v in unit.outputs if passes or over else ():
                self.free[v] = self.free[v] or passes
                self.nowhere[v] = self.nowhere[v] or (passes and not port)
                for _, _, source in unit.reads:
                    until = max(self.reads_until[u, source], self.last[v] if passes else 0, over)
                    self.reads_until[u, source] = until
                    self.last[source] = max(self.last[source], until)

    def _carry(self) -> None:
        """A round's next value waits for the last reader of the old one."""
        for u, source in self.handed.items():
            unit, over = self.schedule.units[u], self._loop_ends(self.schedule.units[u].root)
            if self._takes_another(u):
                self.last[unit.outputs[-2]] = max(self.last[unit.outputs[-2]], over + 1)
            if source is not None:
                v = self.program.instances[unit.root].inputs[1]
                at_once = all(
                    self._is_vacant(r) for r, other in self.handed.items() if other == source
                )
                self.last[v] = self.made[v] if at_once else max(self.last[v], over + 1)
        for old, following in self._carried():
            self.last[following] = max(self.last[following], *(self.last[v] for v in old))

    @cached_property
    def handed(self) -> dict[int, int | None]:
        """The carries that get an old value, by their units: whose, if it is another's and gets
        there as it is; None for a view."""
        found: dict[int, int | None] = {}
        for u, unit in enumerate(self.schedule.units):
            root = self.program.instances[unit.root]
            if root.port != "carry":
                continue
            v = self._viewed(root.inputs[1])
            by, direct = self.schedule.producer[v], v == root.inputs[1]
            unit = self.schedule.units[by]
            given = self.program.instances[unit.root].port == "carry" and v != unit.outputs[-1]
            if given and not (direct and by == u):
                found[u] = by if direct else None
        return found

    def _is_vacant(self, u: int, below: frozenset[int] = frozenset()) -> bool:
        """Whether nothing reads a carry's old value, or only such a carry to which it is handed; a
        loop's condition, which reads a value of its own, has by then."""
        read = set(self.schedule.readers[self.schedule.units[u].outputs[-2]])
        on = {r for r, source in self.handed.items() if source == u}
        return u not in below and read <= on and all(self._is_vacant(r, below | {u}) for r in on)

    def _takes_another(self, u: int) -> bool:
        """Whether writing a carry takes an array beside: it gets a view of an old value, or is the
        first of several that change places."""
        if u not in self.handed:
            return False
        ring, at = [u], self.handed[u]
        while at is not None and at not in ring:
            ring.append(at)
            at = self.handed.get(at)
        return self.handed[u] is None or (at == u == min(ring))

    def _carried(self) -> list[tuple[tuple[FlatId, ...], FlatId]]:
        """Per carry of a loop, what a round reads of it, and its next value, if that is stored when
        it is made: no view, and nothing that the round was given."""
        found = []
        for unit in self.schedule.units:
            root = self.program.instances[unit.root]
            if root.port == "carry":
                following = root.inputs[1]
                u = self.schedule.producer[following]
                maker = self.program.instances[self.schedule.units[u].root]
                left = maker.port in ("carry", "stack") and following == maker.outputs[-1]
                computed = not maker.port and not self.nowhere[following]
                if left or computed or maker.port == "branch":
                    found.append((root.outputs[:-1], following))
        return found

    def _loop_ends(self, port: int) -> int:
        """The tick of the copies for the last unit of the loop that a port belongs to; 0 for those
        of a conditional, whose branches run once."""
        body = self.program.instances[port].body
        for (b, k), (first, stop) in self.program.spans.items():
            if b == body and first <= port < stop:
                if self.program.bodies[b].graph.operations[k].kernel == "cond":
                    return 0
                if first not in self._ends:
                    units = enumerate(self.schedule.units)
                    self._ends[first] = 2 * max(u for u, x in units if first <= x.root < stop)
                return self._ends[first]
        return 0

    def _slice(self) -> None:
        """Slices of a stack are taken where they are read first."""
        readers: dict[FlatId, list[int]] = {}
        for (_, v), at in self.reads_at.items():
            readers.setdefault(FlatId(v), []).append(at)
        for unit in self.schedule.units:
            if self.program.instances[unit.root].port == "stream":
                for v in unit.outputs:
                    self.made[v] = max(self.made[v], min(readers.get(v, [0])))

    def _copied(self) -> frozenset[tuple[int, int]]:
        """Outputs that are an argument or what leaves elsewhere, too: as it is, or as a view; or
        that a loop leaves turned. And new states that are arguments or old states turned: these are
        written beside them, and then into the old one's place."""
        leave: dict[FlatId, list[tuple[int, FlatId]]] = {}
        for u, unit in enumerate(self.schedule.units):
            if self.program.instances[unit.root].port in ("state", "output"):
                (v,) = (v for *_, v in unit.reads)
                leave.setdefault(self._viewed(v), []).append((u, v))
        root = [self.program.instances[unit.root].port for unit in self.schedule.units]
        found: set[tuple[int, int]] = set()
        for source, ends in leave.items():
            given = root[self.schedule.producer[source]]
            again = ends[given != "input" and source not in self.turned :]
            found.update((u, v) for u, v in again if root[u] == "output")
            if given in ("input", "state"):
                found.update((u, v) for u, v in ends if root[u] == "state" and self._is_turned(v))
            if given == "state" and self.passing.is_given_another(source):
                found.update((u, v) for u, v in ends if root[u] == "output")
        if (first := self.passing.first_of_ring()) is not None:
            found.add((first, self.schedule.units[first].reads[0][2]))
        return frozenset(found)

    def _is_turned(self, v: FlatId) -> bool:
        """Whether a value is something else with its dims in another order, by views alone."""
        order = tuple(range(len(self.program.types[v].shape)))
        while True:
            unit = self.schedule.units[self.schedule.producer[v]]
            if not is_view(self.program, unit):
                return list(order) != sorted(order)
            for i in reversed(unit.members):
                moved = self.program.instances[i].signature.permutation
                if moved is not None and len(moved) != len(order):
                    return True
                order = order if moved is None else tuple(moved[d] for d in order)
            v = unit.reads[0][2]

    def _leaving(self) -> dict[tuple[int, FlatId], tuple[FlatId, int]]:
        """Outputs whose value is in memory to the end for them alone, and the views on the way."""
        found: dict[tuple[int, FlatId], tuple[FlatId, int]] = {}
        for u, unit in enumerate(self.schedule.units):
            if self.program.instances[unit.root].port != "output":
                continue
            ((_, _, v),) = unit.reads
            source = self._viewed(v)
            maker = self.program.instances[self.schedule.units[self.schedule.producer[source]].root]
            others = self._read_beside(source, u)
            if maker.port not in ("", "carry", "stack") or self.free[source] or others is None:
                continue
            until = max([self.reads_at[u, v] + 1, *(t + 2 for t in others)])
            if until < self.end:
                found[u, v] = source, until
                while v != source:
                    by = self.schedule.producer[v]
                    v = self.schedule.units[by].reads[0][2]
                    found[by, v] = source, until
        return found

    def _read_beside(self, v: FlatId, leaves: int) -> list[int] | None:
        """The ticks of the last copies for all that reads a value, or views of it, but for the
        output that it leaves by; None where it leaves otherwise, too."""
        found: list[int] = []
        for u in self.schedule.readers[v]:
            unit = self.schedule.units[u]
            if is_view(self.program, unit):
                inner = self._read_beside(unit.outputs[-1], leaves)
                if inner is None:
                    return None
                found += inner
            elif u != leaves:
                if self.program.instances[unit.root].port in ("state", "output"):
                    return None
                found.append(self.reads_until[u, v])
        return found

    def _viewed(self, v: FlatId) -> FlatId:
        return viewed(self.schedule, v)

    def _boundary(self) -> None:
        for u, source in self.passing.sources.items():
            if not self.passing.is_left_alone(u):
                old = self.program.instances[self.schedule.units[source].root].outputs[0]
                self.last[old] = self.end
        for unit in self.schedule.units:
            root = self.program.instances[unit.root]
            if root.port == "state":
                (new,), (old,) = root.inputs, root.outputs
                new = constrained_source(self.schedule, new)
                maker = self.program.instances[
                    self.schedule.units[self.schedule.producer[new]].root
                ]
                if not maker.port or maker.port in ("carry", "stack"):
                    # Written where the old state was, unless that is still to be read; a view of
                    # something else is not written at all.
                    self.free[new] = self.free[new] or self._replaces(new, old)
                    self.last[new] = max(self.last[new], self.last[old])
                    self._hand_on(new, old)
                self.made[old], self.last[old] = 0, self.end
            elif root.port == "input":
                (v,) = root.outputs
                self.made[v], self.last[v] = 0, self.end

    def _hand_on(self, new: FlatId, old: FlatId) -> None:
        """What a loop begins with, or what is written into, and leaves as a new state is in the old
        one's place before that: it has one buffer."""
        while self.free[new]:
            loop = self.schedule.producer[new]
            root = self.program.instances[self.schedule.units[loop].root]
            if loop in self.renewed:
                new = self._renews(loop)
            elif root.port == "carry" and new == root.outputs[-1]:
                new = root.inputs[0]
            elif not root.port and root.signature.written_into is not None:
                new = root.inputs[root.signature.written_into]
            else:
                return
            maker = self.program.instances[self.schedule.units[self.schedule.producer[new]].root]
            if maker.port not in ("", "carry", "stack") or self.last[new] != self._is_read_at(loop):
                return
            self.free[new] = self.free[new] or self._replaces(new, old)

    def _replaces(self, new: FlatId, old: FlatId) -> bool:
        """Whether a new state is written over the old one: it is read no more, or by what makes the
        new one alone, at the places that it writes."""
        u = self.schedule.producer[new]
        if new in self.turned:
            return False
        if self.last[old] < self.made[new] - 1:
            return True
        return self.last[old] == self._is_read_at(u) and old in self._read_in_place(u, new)

    def _renews(self, stack: int) -> FlatId:
        """What the unit of a stack renews."""
        stream = self.schedule.units[self.renewed[stack]]
        return self.program.instances[stream.root].inputs[0]

    def _is_read_at(self, u: int) -> int:
        """The tick of the copies for the last that a unit reads of what it may write over."""
        return self._loop_ends(self.schedule.units[u].root) if u in self.renewed else 2 * u

    def _take_over(self) -> None:
        """Results that are written over an operand that nothing reads any more."""
        for old, following in self._carried():
            maker = self.schedule.producer[following]
            read = max(self.last[v] for v in old)
            over = self._over(maker, following)
            dying = read == self._is_read_at(maker) and not over.isdisjoint(old)
            if read < self.made[following] - 1 or dying:
                self.free[following] = True
        for u, unit in enumerate(self.schedule.units):
            if not unit.outputs or self.free[unit.outputs[-1]]:
                continue
            v, at = unit.outputs[-1], self._is_read_at(u)
            if any(self.last[w] == at and not self.free[w] for w in self._over(u, v)):
                self.made[v] = max(self.made[v], at + 2)

    def _over(self, u: int, v: FlatId) -> set[FlatId]:
        """What value v, that unit u makes, may be written over, if nothing reads it any more."""
        unit = self.schedule.units[u]
        if not self.program.instances[unit.root].port:
            using = self.schedule.readers[v]
            if len(unit.outputs) != 1 or any(self._reduces(r) for r in using):
                return set()  # one kernel makes it and reduces it
        return self._read_in_place(u, v) - self.fusion.elements

    def _read_in_place(self, u: int, v: FlatId) -> set[FlatId]:
        """The values like v that unit u reads only where it writes v."""
        root, types = self.program.instances[self.schedule.units[u].root], self.program.types
        if u in self.renewed:
            return {self._renews(u)}
        if root.port:
            return {root.inputs[0]} if root.port == "carry" and v == root.outputs[-1] else set()
        loop = root.signature.fusion == "loop"
        begun = {root.inputs[p] for p in root.signature.written_over}
        read = self.fusion.aligned[u] - self.fusion.aliased if loop else begun
        like = types[v].shape, types[v].dtype
        return {w for w in read if (types[w].shape, types[w].dtype) == like}

    def _reduces(self, u: int) -> bool:
        root = self.program.instances[self.schedule.units[u].root]
        return not root.port and root.signature.fusion == "reduce" and root.signature.reduces_rows


def constrained_source(schedule: Schedule, value: FlatId) -> FlatId:
    """What a value is that only asks how another lies: that one."""
    unit = schedule.units[schedule.producer[value]]
    if (
        schedule.program.instances[unit.root].signature.kernel != CONSTRAINT
        or len(unit.members) > 1
    ):
        return value
    return unit.reads[0][2]


def _region_units(schedule: Schedule) -> list[tuple[int, int]]:
    """(first unit, last unit) of every region, by the instances that belong to it."""
    out = []
    for first, stop in schedule.program.spans.values():
        units = [u for u, unit in enumerate(schedule.units) if first <= unit.root < stop]
        if units:
            out.append((min(units), max(units)))
    return out


def left_as_results(schedule: Schedule) -> list[FlatId]:
    """The values that outputs read."""
    found = []
    for unit in schedule.units:
        if schedule.program.instances[unit.root].port == "output":
            ((*_, v),) = unit.reads
            found.append(v)
    return found
