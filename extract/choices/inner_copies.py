"""Inner copies: ways to run a unit as two kernels, with a copy between them that is sent.

sin(x·w + y·v) with both products cut along their summed dims has two partial operands. The sum of
them is partial too, and what makes it and what reads it are one kernel: to combine each operand
takes two collectives, to combine the sum takes one and a second kernel. And where a kernel makes
something smaller on the way, numbers of fewer bits or one array of several, that is less to send
than what it reads and what it makes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId, InstanceId, LayoutId
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.costs import LOCAL, carried_as
from tapestry_egg.schedule.inlining import read_in_place
from tapestry_egg.schedule.lifetimes import Lifetimes, lifetimes
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.units import Unit, two_kernels
from tapestry_egg.shard.strategies import Saturated

from .copies import CopyTable
from .once import Once

#: Bytes below which it matters little what is sent; no measurement of the number is kept.
_SMALL = 1 << 16
#: Whole layout -> the partial ones that one collective combines to it, and the whole ones that one
#: makes it of, as numbers of the algebra's layouts.
_Sources = tuple[Mapping[LayoutId, tuple[LayoutId, ...]], Mapping[LayoutId, tuple[LayoutId, ...]]]


@dataclass(frozen=True)
class InnerCopy:
    """A value inside a unit that may be combined or sent there: the kernels `first` and `rest`
    around it, and the numbers of the unit's reads that may be partial sums of it, if there are
    two. With `sent` it may lie otherwise for the rest than it is made. `over` says that it is
    written over something that is read."""

    value: FlatId
    first: Unit
    rest: Unit
    partial_reads: tuple[int, ...]
    sent: bool
    over: bool


class InnerCopies:
    """The inner copies of the units of one schedule, and between which layouts they are made."""

    def __init__(
        self,
        schedule: Schedule,
        saturated: Saturated,
        copies: Mapping[TensorType, CopyTable],
        once: Once | None = None,
        epilogues: bool = False,
        costs: FusionCosts | None = None,
    ) -> None:
        self.epilogues, self.costs = epilogues, costs
        self.schedule, self.saturated, self.copies = schedule, saturated, copies
        self.once = once or Once()
        self.instances = schedule.program.instances
        self._found: dict[int, tuple[InnerCopy, ...]] = {}
        self._two: dict[InstanceId, tuple[Unit, Unit, bool] | None] = self.once(
            dict, "kernels run as two", schedule
        )
        self._largest: dict[int, int] = {}  # unit -> the most bytes that it reads of a value
        # unit -> value -> members that read it, where two reads of the unit or more may be partial
        self._readers: dict[int, dict[FlatId, list[InstanceId]]] = {}
        self._partial: dict[tuple[int, tuple[int, ...]], bool] = {}
        self._sources: dict[TensorType, _Sources] = {}

    def of(self, u: int) -> tuple[InnerCopy, ...]:
        """The values of unit u of which one may be copied inside it: sums that two operands or
        more may leave partial, and that what reads them cannot pass on; and what is smaller than
        the largest array that is read for it, and than the largest made of it or read beside it."""
        every = self._every(u)  # what every reader computes again nothing is sent of
        return () if every and self._lives.within[u] else every

    @property
    def others(self) -> int:
        """Values inside units that are not copied together with another one of their unit; of a
        unit that its readers compute again also not alone."""
        units = range(len(self.schedule.units))
        return sum(len(self._every(u)) - bool(self.of(u)) for u in units)

    def _every(self, u: int) -> tuple[InnerCopy, ...]:
        if u not in self._found:
            unit = self.schedule.units[u]
            made = [self._copy(u, i) for i in unit.members[:-1]]
            self._found[u] = tuple(s for s in made if s is not None)
        return self._found[u]

    def _copy(self, u: int, i: InstanceId) -> InnerCopy | None:
        unit, instance = self.schedule.units[u], self.instances[i]
        if len(instance.outputs) != 1:
            return None
        (value,) = instance.outputs
        summed = self._gives_partial(i) and not self._passed_on(u, value)
        made = self._parts(unit, i) if summed or self._may_be_least(u, i) else None
        if made is None:
            return None
        first, rest, sent = made
        partial = self._partial_reads(unit, i, first) if summed else ()
        partial = partial if len(partial) > 1 else ()
        if not (partial or sent):
            return None
        return InnerCopy(value, first, rest, partial, sent, self._over(u, i, value, first))

    def _parts(self, unit: Unit, i: InstanceId) -> tuple[Unit, Unit, bool] | None:
        """A kernel run as two with what a member makes between them, and whether that may be
        sent for being smaller than what is around it; None where it cannot be. The same on all
        meshes."""
        if i not in self._two:
            (value,) = self.instances[i].outputs
            parts = two_kernels(self.schedule.program, unit, value)
            sent = parts is not None and self._may_be_sent(i) and self._is_least(value, *parts)
            self._two[i] = None if parts is None else (*parts, sent)
        return self._two[i]

    def _passed_on(self, u: int, value: FlatId) -> bool:
        """Whether a sum that a member leaves partial is passed on by another, or too few of what
        the unit reads can be partial for any to be left so."""
        if u not in self._readers:
            readers: dict[FlatId, list[InstanceId]] = {}
            unit = self.schedule.units[u]
            if sum(self._made_partial(v) for *_, v in unit.reads) > 1:
                for m in unit.members:
                    for v in dict.fromkeys(self.instances[m].inputs):
                        readers.setdefault(v, []).append(m)
            self._readers[u] = readers
        readers = self._readers[u]
        return not readers or any(self._takes_partial(m, value) for m in readers.get(value, ()))

    def _may_be_sent(self, i: InstanceId) -> bool:
        """Whether what a member makes is an array, computed element by element."""
        instance = self.instances[i]
        return instance.signature.fusion == "loop" and self._size(instance.outputs[0]) > 1

    def _may_be_least(self, u: int, i: InstanceId) -> bool:
        """Whether what a member makes may be sent, and has fewer bytes than something its unit
        reads, which is of some size: as it must to be sent for that."""
        if u not in self._largest:
            sizes = self.schedule.program.sizes
            reads = self.schedule.units[u].reads
            self._largest[u] = max([sizes[v] for *_, v in reads], default=0)
        largest, (value,) = self._largest[u], self.instances[i].outputs
        less = self.schedule.program.sizes[value] < largest and largest >= _SMALL
        return less and self._may_be_sent(i)

    def _size(self, v: FlatId) -> int:
        return self.schedule.program.types[v].size

    def _is_least(self, value: FlatId, first: Unit, rest: Unit) -> bool:
        """Whether a value has fewer bytes than the largest array that is read for it, and than the
        largest that is made of it or read beside it, both of some size: else these are sent."""
        size = self.schedule.program.sizes
        before = max((size[v] for *_, v in first.reads), default=0)
        after = max(size[v] for v in (*rest.outputs, *(v for *_, v in rest.reads if v != value)))
        least = min(before, after)
        return size[value] < least and least >= _SMALL

    def _partial_reads(self, unit: Unit, i: InstanceId, first: Unit) -> tuple[int, ...]:
        summed = self._summed(i, set(first.members))
        return tuple(
            k
            for k, (m, p, v) in enumerate(unit.reads)
            if (m, p) in summed and self._made_partial(v)
        )

    def _summed(self, i: InstanceId, first: set[InstanceId]) -> set[tuple[InstanceId, int]]:
        """The operands, by instance and number, of which partial sums lead to those of instance i
        through the members `first` of its unit."""
        maker = {v: m for m in first for v in self.instances[m].outputs}
        found: set[tuple[InstanceId, int]] = set()
        seen, stack = {i}, [i]
        while stack:
            m = stack.pop()
            if not self._gives_partial(m):
                continue
            for p, v in enumerate(self.instances[m].inputs):
                if self._any_partial(m, (p, len(self.instances[m].inputs))):
                    found.add((m, p))
                    if v in maker and maker[v] not in seen:
                        seen.add(maker[v])
                        stack.append(maker[v])
        return found

    def _over(self, u: int, i: int, value: FlatId, first: Unit) -> bool:
        """Whether a sum takes the place of something that nothing else reads any more."""
        program, lives = self.schedule.program, self._lives
        types = program.types
        return self.instances[i].signature.fusion == "loop" and any(
            (types[v].shape, types[v].dtype) == (types[value].shape, types[value].dtype)
            and not lives.free[v]
            and lives.last[v] == 2 * u
            for v in read_in_place(program, first)
        )

    def sources(self, one: InnerCopy, need: LayoutId) -> tuple[LayoutId, ...]:
        """The layouts, as numbers of the algebra's, from which one collective makes a whole one."""
        tensor = self.schedule.program.types[one.value]
        if tensor not in self._sources:
            self._sources[tensor] = self._one_collective(tensor)
        combined, sent = self._sources[tensor]
        found = combined.get(need, ()) if one.partial_reads else ()
        return (*found, *(sent.get(need, ()) if one.sent else ()))

    def _one_collective(self, tensor: TensorType) -> _Sources:
        table, number = self.copies[tensor], self.saturated.encoding.algebra.number
        found: tuple[dict[LayoutId, list[LayoutId]], ...] = ({}, {})
        for a, b, step in table.single():
            have, need = table.layouts[a], table.layouts[b]
            if need.partial or carried_as(step.kind, step.monoid, tensor.dtype) != step.kind:
                continue
            if step.kind in ("all_reduce", "reduce_scatter"):
                found[0].setdefault(number[need], []).append(number[have])
            elif step.kind not in LOCAL and not have.partial and table.following[a, b] == b:
                found[1].setdefault(number[need], []).append(number[have])
        combined, sent = ({b: tuple(a) for b, a in own.items()} for own in found)
        return combined, sent

    def _made_partial(self, v: FlatId) -> bool:
        """Whether a value that a unit reads can be made as partial sums."""
        u = self.schedule.producer[v]
        return u >= 0 and self._gives_partial(self.schedule.units[u].root)

    def _gives_partial(self, i: int) -> bool:
        return self._any_partial(i, (len(self.instances[i].inputs),))

    def _takes_partial(self, i: int, v: FlatId) -> bool:
        return self._any_partial(
            i, tuple(p for p, w in enumerate(self.instances[i].inputs) if w == v)
        )

    def _any_partial(self, i: int, ports: tuple[int, ...]) -> bool:
        """Whether some strategy of an instance has partial sums at all of some ports."""
        signature = self.saturated.encoding.signature_of[i]
        if (signature, ports) not in self._partial:
            self._partial[signature, ports] = any(
                all(p < len(r.layouts) and r.layouts[p].partial for p in ports)
                for r in self.saturated.strategies[signature]
            )
        return self._partial[signature, ports]

    @cached_property
    def _lives(self) -> Lifetimes:
        return self.once(
            lambda: lifetimes(self.schedule, self.epilogues, self.costs),
            "lifetimes",
            self.schedule,
        )
