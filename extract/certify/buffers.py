"""Which arrays a plan holds in memory, and from when to when, two ticks for every unit.

The rules of `schedule/lifetimes.py` and `extract/problem/memory.py`, worked out again by other
means, for the certificate: at the even tick of a unit the copies that it reads are made, at the odd
one it runs. A value lives from the tick at which its unit runs to its last reader's; what is only
another view of it, what its readers compute for themselves from it, and what a region reads of it,
keeps it alive; what a loop reads of it, also slice by slice, does until the loop is over. Inputs
live throughout; a new state is written into the old one's memory where nothing reads that any more.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout
from tapestry_egg.machine.fusion_costs import FusionCosts
from tapestry_egg.schedule.flatten import Instance
from tapestry_egg.schedule.inlining import Fusion, fusion
from tapestry_egg.schedule.lying import cut_inside, renewed, turned_in_loops
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.units import Unit
from tapestry_egg.tracing.constraints import KERNEL as CONSTRAINT

from .results import Leaving, PassedOn, doubled, leaving
from .verdict import Buffer, Copied

_LEAVING = ("state", "output")
_RENEWING = ("state", "carry")


class Lives:
    """Answers for single values; `body_of[v]` is the body in which value v lives."""

    def __init__(
        self,
        schedule: Schedule,
        body_of: Mapping[int, int],
        epilogues: bool = False,
        costs: FusionCosts | None = None,
    ) -> None:
        self.schedule, self.program = schedule, schedule.program
        self.epilogues, self.costs = epilogues, costs
        self.body_of = body_of
        self.end = 2 * len(schedule.units) + 2
        self.maker: dict[int, int] = {
            v: u for u, unit in enumerate(schedule.units) for v in unit.outputs
        }
        self.users: dict[int, list[int]] = {}
        for u, unit in enumerate(schedule.units):
            for v in dict.fromkeys(v for _, _, v in unit.reads):
                self.users.setdefault(v, []).append(u)
        self._known: dict[tuple[str, int], int] = {}
        self._ends: dict[tuple[int, int], int] = {}  # of spans of instances

    def buffers(
        self,
        v: int,
        have: Layout,
        needs: Mapping[int, Sequence[Layout]],
        back: Sequence[int],
        copies: Sequence[Copied],
        size: Callable[[Layout], float],
        passing_by: Callable[[Layout], float],
        late: bool = False,
        left: int | None = None,
    ) -> list[Buffer]:
        """All arrays that hold value v, produced as `have`; `late` where it is added up of parts,
        when the kernel that makes these is over; from tick `left` on only copies of it, or of views
        of it, are in memory.

        A block takes `size` bytes, one on the way to a copy what it is `passing_by`.
        `needs[u]` are the layouts in which unit u reads it, `back` the units that need something
        else than a kept copy that is there.
        """
        found: list[Buffer] = []
        kept = any(c.kept for c in copies)
        passing = self.owns_memory(v) and self.death(v) < self.end
        if self.owns_memory(v):
            begin, end = self.birth(v), min(self.death(v) + 2, self.end)
            begin = min(max(begin, self.tick(self.maker[v]) + 2) if late else begin, end - 1)
            if kept and passing:
                end = next(c.at for c in copies if c.kept) + 1
                for u in back:
                    at = self.read(u, v)
                    stop = self.through(u, v) + 2 if have in needs[u] else at + 1
                    found.append(Buffer(end, max(end, stop), size(have), have))
            elif left is not None:
                end = max(begin, left)
            elif passing:
                last = [u for u in self.users.get(v, []) if self.through(u, v) == self.death(v)]
                if len(last) == 1 and last[0] in needs and have not in needs[last[0]]:
                    others = [self.through(u, v) + 2 for u in needs if u != last[0]]
                    at = self.read(last[0], v)
                    joined = {c.need: c.at for c in copies if c.joined and last[0] in c.units}
                    if joined.keys() >= set(needs[last[0]]):
                        at = max(joined[need] for need in needs[last[0]])
                    end = max(begin, at + 1, *others)
            found.append(Buffer(begin, end, size(have), have))
        made = self._root(self.schedule.units[self.maker[v]])
        looped = made.port in ("carry", "stack") and v == made.outputs[-1]
        for u, needed in needs.items():
            # What a loop carries in another layout is in no place of an old state.
            port = self._root(self.schedule.units[u]).port
            if looped and not self.owns_memory(v) and have not in needed and port in _RENEWING:
                begin = self.made(v) + 1
                found.append(Buffer(begin, max(begin, self.read(u, v)), size(have), have))
            if have in needed and (u, v) in self._doubled:
                found.append(Buffer(self.tick(u) + 1, self.end, size(have), have, "copy"))
        for c in copies:
            at = c.at
            stop = max((self.copy_end(u, v) for u in c.units), default=at + 1)
            whole = size(c.need)
            reduced = c.need.dims == have.dims and set(c.need.partial) < set(have.partial)
            making = max((passing_by(x) for x in c.blocks), default=0.0)
            making += 0.0 if reduced and not c.apart else whole
            for u in c.turned:  # what several share stays as it was gathered
                if c.kept and c.need in needs[u]:
                    begin, end = self.read(u, v) + 1, self.through(u, v) + 2
                    found.append(Buffer(begin, end, whole, c.need, "making"))
            making += whole if c.turned and not c.kept else 0.0
            making += size(have) if c.turned_before else 0.0
            making += size(have) if c.wire and not self.owns_memory(v) else 0.0
            if c.joined and v in self.leaving and self.leaving[v].unit in c.units:
                begin = self.leaving[v].until  # what it is made of waits for the others
                found.append(Buffer(begin, max(begin, at + 1), size(have), have))
            found.append(Buffer(c.begin, at + 1, making, c.need, "making"))
            u = c.units[0]
            state = self._root(self.schedule.units[u]).port == "state"
            if not c.kept and state and (u, v) not in self._doubled:
                continue
            found.append(Buffer(at + 1, max(stop, at + 1), whole, c.need, "copy"))
        return found

    def tick(self, u: int) -> int:
        """The even tick of a unit."""
        return 2 * u

    def _once(self, what: str, v: int, work: Callable[[int], int]) -> int:
        if (what, v) not in self._known:
            self._known[what, v] = work(v)
        return self._known[what, v]

    def owns_memory(self, v: int) -> bool:
        """Whether a value takes memory of its own.

        Constants, views, what is computed where it is read, what a region sees of an outer value,
        and a new state in the old one's place do not.
        """
        return bool(self._once("owns", v, self._owns))

    def _owns(self, v: int) -> bool:
        u = self.maker[v]
        root = self._root(self.schedule.units[u])
        if root.port in ("constant", "invariant") or self._passes_on(u) or u in self._cut_inside:
            return False
        if root.port == "carry" and v != root.outputs[-1]:  # where what the loop leaves will be
            return v == root.outputs[-2] and self._is_copied(u)
        if any(self._in_place(v, old, self._under(v)) for old in self._rounds.get(v, [])):
            return False
        olds = self._renewed.get(v, [])
        if not olds or root.port in ("input", "state", "stream", "branch"):
            return True
        return not self._is_next(v, olds[-1])

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
            made = self._root(self.schedule.units[w])
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
                    for r in self.users.get(self._root(self.schedule.units[u]).outputs[-2], [])
                )
            }
            if more <= found:
                return found
            found |= more

    def _is_next(self, v: int, old: int) -> bool:
        """Whether a new state is written where the old one was: not where a loop has it turned."""
        return v not in self._turned and self._in_place(v, (old,), self._alike(v))

    @cached_property
    def _turned(self) -> frozenset[FlatId]:
        return turned_in_loops(self.schedule, self.epilogues)

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
        return {s: self._root(self.schedule.units[u]).inputs[0] for s, u in streams.items()}

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
        root = self._root(self.schedule.units[u])
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
        makes with it."""
        roots = [self._root(self.schedule.units[u]) for u in self.users.get(v, [])]
        return any(
            not x.port and x.signature.fusion == "reduce" and x.signature.reduces_rows
            for x in roots
        )

    def birth(self, v: int) -> int:
        """The tick from which the value's array is there, that of its unit's run or the next."""
        return self._once("birth", v, self._birth)

    def _birth(self, v: int) -> int:
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

    def death(self, v: int) -> int:
        """The tick of the copies for the last reader; the value is alive until the next is over."""
        return self._once("death", v, self._death)

    def _death(self, v: int) -> int:
        root = self._root(self.schedule.units[self.maker[v]])
        if root.port in ("state", "input"):
            return self.end
        last = self._read_last(v)
        if root.port == "carry" and v == root.outputs[-2] and self._is_copied(self.maker[v]):
            last = max(last, self._loop_end(self.maker[v]) + 1)
        if root.port in ("", "carry", "stack"):
            last = max([last, *(self._read_last(old) for old in self._renewed.get(v, []))])
        return last

    def _read_last(self, v: int) -> int:
        return self._once("read", v, self._last_read)

    def _last_read(self, v: int) -> int:
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
        if self._root(self.schedule.units[u]).port not in ("stream", "invariant"):
            return -1
        return self._loop_end(u)

    def _loop_end(self, u: int) -> int:
        """The even tick of the last unit of the loop of which unit u is a port; -1 for others."""
        root = self._root(self.schedule.units[u])
        number = self.schedule.units[u].root
        ends = [
            self._last_within(start, stop)
            for (b, k), (start, stop) in self.program.spans.items()
            if b == root.body
            and start <= number < stop
            and self.program.bodies[b].graph.operations[k].kernel in ("scan", "while")
        ]
        return max(ends, default=-1)

    def _last_within(self, start: int, stop: int) -> int:
        """The even tick of the last unit whose root is one of these instances; -1 without any."""
        if (start, stop) not in self._ends:
            inside = [k for k, unit in enumerate(self.schedule.units) if start <= unit.root < stop]
            self._ends[start, stop] = max(map(self.tick, inside), default=-1)
        return self._ends[start, stop]

    def read(self, u: int, v: int) -> int:
        """The tick at which unit u would copy value v: what leaves the program or a region is
        copied when it is made."""
        root = self._root(self.schedule.units[u])
        leaves = root.port in _LEAVING or (
            root.port in ("carry", "stack", "branch") and self.body_of[v] != root.body
        )
        return self._there(v) + 1 if leaves else self.tick(u)

    def first_read(self, v: int) -> int:
        maker = self.maker[v]
        return min(self.read(u, v) for u in self.users[v] if u != maker)

    def copy_end(self, u: int, v: int) -> int:
        """Before which tick a copy of v that unit u reads is gone."""
        root = self._root(self.schedule.units[u])
        if root.port == "output" or (root.port == "state" and (u, v) in self._doubled):
            return self.end
        return min(self.through(u, v) + 2, self.end)

    def made(self, v: int) -> int:
        """The tick at which the unit runs that makes a value."""
        return self._once("made", v, self._runs)

    def _there(self, v: int) -> int:
        """The tick at which all of a value is there: what a loop leaves, when that is over."""
        return self._once("there", v, self._whole)

    def _whole(self, v: int) -> int:
        root = self._root(self.schedule.units[u := self.maker[v]])
        if root.port in ("carry", "stack") and v == root.outputs[-1]:
            return self._loop_end(u) + 1
        if root.port in ("input", "state"):  # those that leave are copied one after another
            return self.tick(u) + 1
        return self.made(v)

    def _runs(self, v: int) -> int:
        unit = self.schedule.units[u := self.maker[v]]
        root = self._root(unit)
        if root.port == "stack":
            for (b, _), (a, z) in self.program.spans.items():
                if b == root.body and a <= unit.root < z:
                    units = enumerate(self.schedule.units)
                    return min(self.tick(k) for k, x in units if a <= x.root < z) + 1
        return 0 if root.port in ("input", "state") else self.tick(u) + 1

    def _root(self, unit: Unit) -> Instance:
        return self.program.instances[unit.root]

    def _passes_on(self, u: int) -> bool:
        """Whether a unit makes nothing that is stored: a view, or part of every reader."""
        port = self._root(self.schedule.units[u]).port
        return not port and (self._fused.within[u] or self._is_view(u))

    def _is_view(self, u: int) -> bool:
        members = [self.program.instances[i] for i in self.schedule.units[u].members]
        return not members[-1].port and all(x.signature.fusion == "view" for x in members)

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
    def _doubled(self) -> set[tuple[int, int]]:
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
                made = self._root(self.schedule.units[u])
                given = made.port in ("constant", "invariant", "stream", "input", "state")
                given = given or (made.port == "carry" and v != made.outputs[-1])
                if not given and not self._passes_on(u):
                    found.setdefault(v, []).append(tuple(x.outputs[:-1]))
        return found

    @cached_property
    def _renewed(self) -> dict[int, list[int]]:
        """New state -> the old ones whose place it takes."""
        found: dict[int, list[int]] = {}
        for unit in self.schedule.units:
            if (x := self._root(unit)).port == "state":
                new = x.inputs[0]
                made = self.schedule.units[self.maker[new]]
                if self._root(made).signature.kernel == CONSTRAINT:
                    if len(made.members) == 1:  # it only asks how another value lies
                        new = self._root(made).inputs[0]
                found.setdefault(new, []).append(x.outputs[0])
                for before in self._begun_with(new, x.outputs[0]):
                    found.setdefault(before, []).append(x.outputs[0])
        return found

    def _begun_with(self, v: int, old: int) -> list[int]:
        """What the loop that leaves v in an old state's place began with, or what v was written
        into, if nothing else reads that later: it is where v is. And what that was begun with, from
        one to the one before."""
        found: list[int] = []
        while self._is_next(v, old):
            x = self._root(self.schedule.units[u := self.maker[v]])
            carried = x.port == "carry" and v == x.outputs[-1]
            begun = x.inputs[0] if carried else self._renewing.get(u)
            if not x.port and x.signature.written_into is not None:
                begun = x.inputs[x.signature.written_into]
            if begun is None or self._read_last(begun) != self._over_until(u):
                break
            v = begun
            if self._root(self.schedule.units[self.maker[v]]).port not in ("", "carry", "stack"):
                break
            found.append(v)
        return found
