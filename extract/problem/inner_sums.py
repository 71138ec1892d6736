"""Inner sums: ways to run a unit as two kernels, with a sum between them combined over devices.

sin(x·w + y·v) with both products cut along their summed dims has two partial operands. The sum of
them is partial too, and what makes it and what reads it are one kernel: to combine each operand
takes two collectives, to combine the sum takes one and a second kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.ids import FlatId, InstanceId, LayoutId
from tapestry_egg.machine.costs import carried_as
from tapestry_egg.schedule.inlining import read_in_place
from tapestry_egg.schedule.lifetimes import Lifetimes, lifetimes
from tapestry_egg.schedule.parts import two_kernels
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.units import Unit
from tapestry_egg.shard.strategies import Saturated

from .copies import CopyTable
from .once import Once


@dataclass(frozen=True)
class InnerSum:
    """A value inside a unit that may be combined there: the kernels `first` and `rest` around it,
    and the numbers of the unit's reads that may be partial sums of it. `over` says that it is
    written over one of them."""

    value: FlatId
    first: Unit
    rest: Unit
    partial_reads: tuple[int, ...]
    over: bool


class InnerSums:
    """The inner sums of the units of one schedule, and between which layouts they are combined."""

    def __init__(
        self,
        schedule: Schedule,
        saturated: Saturated,
        copies: Mapping[TensorType, CopyTable],
        once: Once | None = None,
        epilogues: bool = False,
    ) -> None:
        self.epilogues = epilogues
        self.schedule, self.saturated, self.copies = schedule, saturated, copies
        self._once = once or Once()
        self.instances = schedule.program.instances
        self._found: dict[int, tuple[InnerSum, ...]] = {}
        self._partial: dict[tuple[int, tuple[int, ...]], bool] = {}
        self._sources: dict[TensorType, dict[LayoutId, tuple[LayoutId, ...]]] = {}

    def of(self, u: int) -> tuple[InnerSum, ...]:
        """The sums of unit u of which one may be combined inside it: those that two operands or
        more may leave partial, and that what reads them cannot pass on."""
        every = self._every(u)  # what every reader computes again no collective can combine
        return () if every and self._lives.within[u] else every

    @property
    def others(self) -> int:
        """Sums inside units that are not combined together with another one of their unit; of a
        unit that its readers compute again also not alone."""
        units = range(len(self.schedule.units))
        return sum(len(self._every(u)) - bool(self.of(u)) for u in units)

    def _every(self, u: int) -> tuple[InnerSum, ...]:
        if u not in self._found:
            unit = self.schedule.units[u]
            made = [self._sum(u, i) for i in unit.members[:-1]]
            self._found[u] = tuple(s for s in made if s is not None)
        return self._found[u]

    def _sum(self, u: int, i: InstanceId) -> InnerSum | None:
        unit, instance = self.schedule.units[u], self.instances[i]
        if len(instance.outputs) != 1 or not self._gives_partial(i):
            return None
        (value,) = instance.outputs
        readers = [m for m in unit.members if value in self.instances[m].inputs]
        if any(self._takes_partial(m, value) for m in readers):
            return None
        parts = two_kernels(self.schedule.program, unit, value)
        if parts is None:
            return None
        summed = self._summed(i, set(parts[0].members))
        partial = tuple(
            k
            for k, (m, p, v) in enumerate(unit.reads)
            if (m, p) in summed and self._made_partial(v)
        )
        if len(partial) < 2:
            return None
        return InnerSum(value, *parts, partial, self._over(u, i, value, parts[0]))

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

    def sources(self, tensor: TensorType) -> Mapping[LayoutId, tuple[LayoutId, ...]]:
        """Whole layout -> the partial ones that one collective combines to it, as numbers of the
        algebra's layouts."""
        if tensor not in self._sources:
            table, number = self.copies[tensor], self.saturated.encoding.algebra.number
            found: dict[LayoutId, list[LayoutId]] = {}
            for (a, b), step in table.step_of.items():
                have, need = table.layouts[a], table.layouts[b]
                combines = carried_as(step.kind, step.monoid, tensor.dtype) == step.kind
                if combines and step.kind in ("all_reduce", "reduce_scatter") and not need.partial:
                    found.setdefault(number[need], []).append(number[have])
            self._sources[tensor] = {b: tuple(a) for b, a in found.items()}
        return self._sources[tensor]

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
        return self._once(
            lambda: lifetimes(self.schedule, self.epilogues), "lifetimes", self.schedule
        )
