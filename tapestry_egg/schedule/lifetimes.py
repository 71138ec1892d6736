"""Lifetimes: when each value is in memory, on a time line of two ticks per unit.

At tick 2u the copies that unit u reads are made (collectives: source and destination are both
there), at tick 2u + 1 the unit runs (operands and results are there). This is XLA's buffer
assignment over a sequential schedule (xla/service/buffer_assignment.cc): a buffer is live from the
instruction that defines it to its last reader, and

- inputs live throughout, and so do the program's results once made; a donated input's buffer
  serves the new state that takes its place, if nothing reads the old one after that; where it
  is turned while it is renewed (`schedule/lying.py`), there is another array beside;
- what products read in another order than it lies in has a copy beside it (`schedule/lying.py`),
  which a loop has until its last round is over; only while it is made if nothing else needs what it
  is of, since that then counts in its place;
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

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any, TypeVar

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.compiler_choices import FusionCosts

from .flatten import Instance
from .inlining import Fusion, fusion
from .leaving import Leaving, PassedOn, doubled, leaving
from .lying import Turned, TurnedCopy, cut_inside, renewed, turned_copies, turned_while_renewed
from .schedules import Schedule
from .units import Unit, is_view

_LEAVING = ("state", "output")


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
    that v is in is no longer in memory if u reads a copy of it. What is free may be `turned` while
    it is renewed, from a tick up to before another, and takes an array beside the old one."""

    made: tuple[int, ...]
    last: tuple[int, ...]
    reads_at: dict[tuple[int, int], int]
    reads_until: dict[tuple[int, int], int]
    free: tuple[bool, ...]
    within: tuple[bool, ...]
    copied: frozenset[tuple[int, int]]
    leaving: dict[tuple[int, FlatId], tuple[FlatId, int]]
    turned: dict[int, tuple[Turned, int, int]]
    times: int


def lifetimes(
    schedule: Schedule, epilogues: bool = False, costs: FusionCosts | None = None
) -> Lifetimes:
    """Lifetimes of all values over the fixed order of the schedule."""
    key = "lifetimes", epilogues, costs
    return schedule.once(lambda: lives_of(schedule, epilogues, costs).table(), *key)


def lives_of(
    schedule: Schedule, epilogues: bool = False, costs: FusionCosts | None = None
) -> Lives:
    """The same, value by value as asked for."""
    return schedule.once(lambda: Lives(schedule, epilogues, costs), "lives", epilogues, costs)


T = TypeVar("T", bound=int)


def _remembered(work: Callable[[Lives, int], T]) -> Callable[[Lives, int], T]:
    """An answer for a value that is worked out once."""

    @wraps(work)
    def answer(lives: Lives, v: int) -> T:
        return lives.once(work, v)

    return answer


class Lives:
    """When single values are in memory, in the order of a schedule."""

    def __init__(
        self,
        schedule: Schedule,
        epilogues: bool = False,
        costs: FusionCosts | None = None,
    ) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.epilogues, self.costs = epilogues, costs
        self.end = 2 * len(schedule.units) + 2
        self.maker: dict[int, int] = {
            v: u for u, unit in enumerate(schedule.units) for v in unit.outputs
        }
        self.users: dict[int, list[int]] = {}
        for u, unit in enumerate(schedule.units):
            for v in dict.fromkeys(v for _, _, v in unit.reads):
                self.users.setdefault(v, []).append(u)
        self._known: dict[tuple[str, int], Any] = {}
        self._ends: dict[tuple[int, int], int] = {}  # of spans of instances

    def table(self) -> Lifetimes:
        """The lives of all values."""
        made, last = [0] * len(self.program.types), [-1] * len(self.program.types)
        for v in reversed(self.maker):  # readers first, so that no answer waits for many others
            made[v], last[v] = self.birth(v), self.death(v)
        reads = [(u, v) for v, users in self.users.items() for u in users]
        return Lifetimes(
            tuple(made),
            tuple(last),
            {(u, v): self.read(u, v) for u, v in reads},
            {(u, v): self.through(u, v) for u, v in reads},
            tuple(v in self.maker and not self.owns_memory(v) for v in range(len(made))),
            self._fused.within,
            frozenset(self.doubled),
            {(u, v): (x.source, x.until) for x in self.leaving.values() for u, _, v in x.path},
            {v: x for v in self._may_be_turned if (x := self.turned(v)) is not None},
            self.end,
        )

    def tick(self, u: int) -> int:
        """The even tick of a unit."""
        return 2 * u

    def once(self, work: Callable[[Lives, int], T], v: int) -> T:
        """An answer for a value, worked out when it is asked for first."""
        key = work.__name__, v  # a name can be pickled, and the function that is decorated cannot
        if key not in self._known:
            self._known[key] = work(self, v)
        found: T = self._known[key]
        return found

    @_remembered
    def owns_memory(self, v: int) -> bool:
        """Whether a value takes memory of its own.

        Constants, views, what is computed where it is read, what a region sees of an outer value,
        and a new state in the old one's place do not.
        """
        u = self.maker[v]
        root = self.root(u)
        if root.port in ("constant", "invariant") or self._passes_on(u) or u in self._cut_inside:
            return False
        if root.port == "carry" and v != root.outputs[-1]:  # where what the loop leaves will be
            return v == root.outputs[-2] and self._is_copied(u)
        olds = (*self._rounds.get(v, []), *self._written_before.get(v, []))
        if any(self._in_place(v, old, self._under(v)) for old in olds):
            return False
        states = self._renewed.get(v, [])
        if not states or root.port in ("input", "state", "stream", "branch"):
            return True
        return not self._is_next(v, states[-1])

    def turned(self, v: int) -> tuple[Turned, int, int] | None:
        """What may be turned of v: where v is in an old state's place, from which tick up to before
        which it is beside the old one; else a copy for products, from when on that is beside it."""
        if self.renews_turned(v):
            turned = self._turned[FlatId(v)]
            return turned, self.birth(turned.first), min(self.death(v) + 2, self.end)
        copy = self.turned_copies.get(FlatId(v))
        return None if copy is None else (copy.turned, *self._beside(copy))

    def renews_turned(self, v: int) -> bool:
        """Whether what may be turned of v is a new state, and no copy."""
        return v in self._turned and not self.owns_memory(v)

    def _beside(self, copy: TurnedCopy) -> tuple[int, int]:
        """From which tick up to before which a copy for products is in memory beside what it is of:
        until the last of them has run, or nothing else needs that any more."""
        begin = min(map(self.tick, copy.readers))
        end = max(max(self.tick(u), self._loop_end(u)) for u in copy.readers) + 2
        given = self.root(self.maker[copy.source]).port in ("input", "state")
        if given or not self.owns_memory(copy.source):
            return begin, end
        others = [u for u in self.users.get(copy.source, []) if u not in copy.readers]
        needed = [self.through(u, copy.source) + 2 for u in others]
        return begin, min(end, max([begin + 1, *needed]))

    @cached_property
    def turned_parts(self) -> frozenset[FlatId]:
        """What products read of states that may be turned while they are renewed."""
        found = (self._turned[v] for v in self._turned if self.renews_turned(v))
        return frozenset(v for way in found for v in way.parts)

    @cached_property
    def turned_copies(self) -> Mapping[FlatId, TurnedCopy]:
        """By what is turned for products as it is read, the copy that is made."""
        if self.epilogues:
            return {}
        return turned_copies(self.schedule, self._fused.within, self.turned_parts)

    @property
    def _may_be_turned(self) -> set[FlatId]:
        return {*self._turned, *self.turned_copies}

    def _is_copied(self, u: int) -> bool:
        """Whether something is held beside a carry, of unit u, until all carries are written: its
        next value, a view of what was there before the round, or its old one, which is the last of
        a ring of carries that another is to have."""
        if u not in self._given:
            return False
        ring, giver = [u], self._given[u]
        while giver is not None and giver not in ring:
            ring.append(giver)
            giver = self._given.get(giver)
        return self._given[u] is None or (giver == u and u == min(ring))

    @cached_property
    def _given(self) -> dict[int, int | None]:
        """Unit of a carry whose next value was there before the round -> the unit of the carry
        whose old value that is, None where it is a view of one."""
        found: dict[int, int | None] = {}
        for u, unit in enumerate(self.schedule.units):
            if (carry := self._root(unit)).port != "carry":
                continue
            v, same = carry.inputs[1], True
            while self._is_view(w := self.maker[v]):
                v, same = next(source for *_, source in self.schedule.units[w].reads), False
            made = self.root(w)
            if made.port == "carry" and v != made.outputs[-1] and not (same and w == u):
                found[u] = w if same else None
        return found

    @cached_property
    def _unread(self) -> set[int]:
        """The units of carries whose old value nothing in a round reads, but such that it is given
        to; what the condition of a loop reads, it reads before."""
        found: set[int] = set()
        while True:
            more = {
                u
                for u in self._given
                if all(
                    self._given.get(r) == u and r in found
                    for r in self.users.get(self.root(u).outputs[-2], [])
                )
            }
            if more <= found:
                return found
            found |= more

    def _is_next(self, v: int, old: int) -> bool:
        """Whether a new state is written where the old one was."""
        return self._in_place(v, (old,), self._alike(v))

    @cached_property
    def _turned(self) -> Mapping[FlatId, Turned]:
        of = self.schedule, self.epilogues
        return self.schedule.once(lambda: turned_while_renewed(*of), "turned", self.epilogues)

    def _in_place(self, v: int, old: tuple[int, ...], over: set[int]) -> bool:
        """Whether a next value is written where the old one was, which then is read no more: before
        it is made, or, if it may be written `over` that, by what makes it."""
        u, read = self.maker[v], max(self._read_last(w) for w in old)
        return read < self.made(v) - 1 or (read == self._over_until(u) and bool(set(old) & over))

    def _over_until(self, u: int) -> int:
        """The tick of the last copies that unit u reads of what it may write over."""
        return self._loop_end(u) if u in self._renewing else self.tick(u)

    @cached_property
    def _renewing(self) -> Mapping[int, int]:
        """Units of stacks -> what they renew."""
        streams = renewed(self.schedule, self.epilogues)
        return {s: self.root(u).inputs[0] for s, u in streams.items()}

    @cached_property
    def _cut_inside(self) -> frozenset[int]:
        """The units whose slices of a stack are no arrays."""
        return cut_inside(self.schedule, self._fused, self.epilogues)

    def _under(self, v: int) -> set[int]:
        """The values of v's type over which it may be written, were they read no more."""
        unit = self.schedule.units[self.maker[v]]
        whole = len(unit.outputs) == 1 and not self._is_reduced(v)
        return self._alike(v) - self._fused.elements if whole or self._root(unit).port else set()

    def _alike(self, v: int) -> set[int]:
        """The values of v's type that what makes it reads only where it writes v; not those that
        its unit makes on the way, which are no arrays."""
        u = self.maker[v]
        root = self.root(u)
        if u in self._renewing:
            read = {self._renewing[u]}
        elif root.port:
            carried = root.port == "carry" and v == root.outputs[-1]
            read = {root.inputs[0]} if carried else set()
        elif root.signature.fusion == "loop":
            read = set(self._fused.aligned[u] - self._fused.aliased)
        else:
            read = {root.inputs[p] for p in root.signature.written_over}
        types = self.program.types
        same = (types[v].shape, types[v].dtype)
        stored = read & self.maker.keys()
        return {w for w in stored if (types[w].shape, types[w].dtype) == same}

    def _is_reduced(self, v: int) -> bool:
        """Whether a sum or the like is taken of a value along its last dim, which then one kernel
        makes with it; not where a part of it is written into what was there."""
        if self.root(self.maker[v]).signature.writes:
            return False
        roots = [self.root(u) for u in self.users.get(v, [])]
        return any(
            not x.port and x.signature.fusion == "reduce" and x.signature.reduces_rows
            for x in roots
        )

    @_remembered
    def birth(self, v: int) -> int:
        """The tick from which the value's array is there, that of its unit's run or the next."""
        unit = self.schedule.units[u := self.maker[v]]
        root, made = self._root(unit), self.made(v)
        if root.port == "stream" and self.users.get(v):
            return max(made, self.first_read(v))
        if v != unit.outputs[-1] or not self.owns_memory(v):
            return made
        until = self._over_until(u)
        for w in self._under(v):
            if self.owns_memory(w) and self.death(w) == until:
                return max(made, until + 2)
        return made

    @_remembered
    def death(self, v: int) -> int:
        """The tick of the copies for the last reader; the value is alive until the next is over."""
        root = self.root(self.maker[v])
        if root.port in ("state", "input"):
            return self.end
        last = self._read_last(v)
        if root.port == "carry" and v == root.outputs[-2] and self._is_copied(self.maker[v]):
            last = max(last, self._loop_end(self.maker[v]) + 1)
        if root.port in ("", "carry", "stack"):
            last = max([last, *(self._read_last(old) for old in self._renewed.get(v, []))])
        return last

    @_remembered
    def _read_last(self, v: int) -> int:
        last = self._there(v) - 1
        to = [r for r in self.users.get(v, []) if self._given.get(r) == self.maker[v]]
        if to and self._unread.issuperset(to):
            return self.made(v)  # it is read where it is copied to at once
        last = max([last, *(self._loop_end(r) + 1 for r in to)])
        for old in self._rounds.get(v, []):
            last = max(last, *(self._read_last(w) for w in old))
        for u in self.users.get(v, []):
            last = max(last, self.read(u, v))
            unit = self.schedule.units[u]
            port = self._root(unit).port
            if port == "output" or self._passed.waits(u):
                return self.end
            if port == "invariant" or self._passes_on(u):
                last = max(last, *(self._read_last(w) for w in unit.outputs))
            last = max(last, self._over(u))
        return last

    def through(self, u: int, v: int) -> int:
        """The tick of the last copies made for what reads value v by way of unit u."""
        unit, last = self.schedule.units[u], self.read(u, v)
        if self._root(unit).port == "invariant" or self._passes_on(u):
            last = max(last, *(self._read_last(w) for w in unit.outputs))
        return max(last, self._over(u))

    def _over(self, u: int) -> int:
        """The even tick of the last unit of the loop into which unit u, a port, brings a value that
        every round reads; -1 for all other units."""
        if self.root(u).port not in ("stream", "invariant"):
            return -1
        return self._loop_end(u)

    def _loop_end(self, u: int) -> int:
        """The even tick of the last unit of the loop of which unit u is a port; -1 for others."""
        root = self.root(u)
        number = self.schedule.units[u].root
        ends = [
            self._last_within(start, stop)
            for (b, k), (start, stop) in self.program.spans.items()
            if b == root.body
            and start <= number < stop
            and not self.program.bodies[b].graph.operations[k].is_branch
        ]
        return max(ends, default=-1)

    def _last_within(self, start: int, stop: int) -> int:
        """The even tick of the last unit whose root is one of these instances; -1 without any."""
        if (start, stop) not in self._ends:
            self._ends[start, stop] = max(map(self.tick, self._within(start, stop)), default=-1)
        return self._ends[start, stop]

    def _within(self, start: int, stop: int) -> tuple[int, ...]:
        """The units whose root is one of these instances."""
        units = self.schedule.units

        def inside() -> tuple[int, ...]:
            return tuple([k for k, x in enumerate(units) if start <= x.root < stop])

        return self.schedule.once(inside, "units within", start, stop)

    def read(self, u: int, v: int) -> int:
        """The tick at which unit u would copy value v: what leaves the program or a region is
        copied when it is made."""
        root = self.root(u)
        leaves = root.port in _LEAVING or (
            root.port in ("carry", "stack", "branch") and self.program.body_of[v] != root.body
        )
        return self._there(v) + 1 if leaves else self.tick(u)

    def first_read(self, v: int) -> int:
        maker = self.maker[v]
        return min(self.read(u, v) for u in self.users[v] if u != maker)

    def copy_end(self, u: int, v: int) -> int:
        """Before which tick a copy of v that unit u reads is gone."""
        root = self.root(u)
        if root.port == "output" or (root.port == "state" and (u, v) in self.doubled):
            return self.end
        return min(self.through(u, v) + 2, self.end)

    @_remembered
    def made(self, v: int) -> int:
        """The tick at which the unit runs that makes a value."""
        unit = self.schedule.units[u := self.maker[v]]
        root = self._root(unit)
        if root.port == "stack":
            for (b, _), (a, z) in self.program.spans.items():
                if b == root.body and a <= unit.root < z:
                    units = enumerate(self.schedule.units)
                    return min(self.tick(k) for k, x in units if a <= x.root < z) + 1
        return 0 if root.port in ("input", "state") else self.tick(u) + 1

    @_remembered
    def _there(self, v: int) -> int:
        """The tick at which all of a value is there: what a loop leaves, when that is over."""
        root = self.root(u := self.maker[v])
        if root.port in ("carry", "stack") and v == root.outputs[-1]:
            return self._loop_end(u) + 1
        if root.port in ("input", "state"):  # those that leave are copied one after another
            return self.tick(u) + 1
        return self.made(v)

    def root(self, u: int) -> Instance:
        """The last operation of a unit."""
        return self.program.instances[self.schedule.units[u].root]

    def _root(self, unit: Unit) -> Instance:
        return self.program.instances[unit.root]

    def _passes_on(self, u: int) -> bool:
        """Whether a unit makes nothing that is stored: a view, or part of every reader."""
        return self._passing[u]

    @cached_property
    def _passing(self) -> list[bool]:
        within, ports = self._fused.within, [self._root(x).port for x in self.schedule.units]
        return [not p and (within[u] or self._is_view(u)) for u, p in enumerate(ports)]

    def _is_view(self, u: int) -> bool:
        return is_view(self.program, self.schedule.units[u])

    @cached_property
    def leaving(self) -> Mapping[int, Leaving]:
        """By the value that an output reads, what leaves by that alone."""
        return {x.read: x for x in leaving(self)}

    @cached_property
    def staying(self) -> frozenset[int]:
        """The values that leave by no output, and those that are new states."""
        leaves: set[int] = set()
        for unit in self.schedule.units:
            if self._root(unit).port == "output":
                v = next(v for *_, v in unit.reads)
                leaves.add(v)
                while self._is_view(u := self.maker[v]):
                    v = next(source for *_, source in self.schedule.units[u].reads)
                    leaves.add(v)
        return frozenset(self.maker.keys() - leaves | self._renewed.keys())

    def computed_again(self, u: int) -> bool:
        """Whether every reader of what a unit makes computes it for itself."""
        return self._fused.within[u]

    @cached_property
    def doubled(self) -> set[tuple[int, int]]:
        return doubled(self, self._passed, self._turned)

    @cached_property
    def _passed(self) -> PassedOn:
        return PassedOn(self.schedule, self.maker)

    @cached_property
    def _fused(self) -> Fusion:
        return fusion(self.schedule, self.epilogues, self.costs)

    @cached_property
    def _rounds(self) -> dict[int, list[tuple[int, ...]]]:
        """A value that the next round of a loop begins with -> what this one has in its place; of
        values that are stored when they are made."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for unit in self.schedule.units:
            if (x := self._root(unit)).port == "carry":
                (_, v), u = x.inputs, self.maker[x.inputs[1]]
                made = self.root(u)
                given = made.port in ("constant", "invariant", "stream", "input", "state")
                given = given or (made.port == "carry" and v != made.outputs[-1])
                if not given and not self._passes_on(u):
                    found.setdefault(v, []).append(tuple(x.outputs[:-1]))
        return found

    @cached_property
    def _written_before(self) -> dict[int, list[tuple[int, ...]]]:
        """What parts were written into in a round, before its next value was there -> what that
        round has in its place."""
        found: dict[int, list[tuple[int, ...]]] = {}
        for v, olds in self._rounds.items():
            for old in olds:
                for before in self._begun_with(v, old, self._under):
                    if before in old:
                        break
                    found.setdefault(before, []).append(old)
        return found

    @cached_property
    def _renewed(self) -> dict[int, list[int]]:
        """New state -> the old ones whose place it takes."""
        found: dict[int, list[int]] = {}
        for unit in self.schedule.units:
            if (x := self._root(unit)).port == "state":
                new, old = constrained_source(self.schedule, x.inputs[0]), x.outputs[0]
                for v in (new, *self._begun_with(new, (old,), self._alike)):
                    found.setdefault(v, []).append(old)
        return found

    def _begun_with(
        self, v: int, old: tuple[int, ...], over: Callable[[int], set[int]]
    ) -> list[int]:
        """What the loop that leaves v in an old one's place began with, or what v was written into,
        if nothing else reads that later: it is where v is. And what that was begun with, from one
        to the one before; each may be written `over` the values that this says."""
        found: list[int] = []
        while self._in_place(v, old, over(v)):
            x = self.root(u := self.maker[v])
            carried = x.port == "carry" and v == x.outputs[-1]
            begun = x.inputs[0] if carried else self._renewing.get(u)
            if not x.port and x.signature.written_into is not None:
                begun = x.inputs[x.signature.written_into]
            if begun not in self.maker or self._read_last(begun) != self._over_until(u):
                break
            v = begun
            if self.root(self.maker[v]).port not in ("", "carry", "stack"):
                break
            found.append(v)
        return found


def constrained_source(schedule: Schedule, value: FlatId) -> FlatId:
    """What a value is that only asks how another lies: that one."""
    unit = schedule.units[schedule.producer[value]]
    if schedule.program.instances[unit.root].signature.means != "layout" or len(unit.members) > 1:
        return value
    return unit.reads[0][2]


def left_as_results(schedule: Schedule) -> list[FlatId]:
    """The values that outputs read."""
    found = []
    for unit in schedule.units:
        if schedule.program.instances[unit.root].port == "output":
            ((*_, v),) = unit.reads
            found.append(v)
    return found
