"""Neighbours: what it takes that devices exchange what strategies lack of operands or states."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.ids import InstanceId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import (
    BESIDE,
    collective_seconds,
    collective_wire_bytes,
    least_added,
)
from tapestry_egg.machine.energy import (
    collective_dynamic_joules,
    collective_joules,
    idle_joules,
    joules,
)
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.exchanges import (
    Exchange,
    Permute,
    Reader,
    There,
    Way,
    exchanges,
    rounds,
    sent_together,
)
from tapestry_egg.schedule.schedules import Schedule
from tapestry_egg.schedule.units import Unit

from .strategies import Saturated


class Neighbours:
    """The exchanges of all strategies of a saturated program, and what those of units take."""

    def __init__(
        self, schedule: Schedule, saturated: Saturated, mesh: MeshShape, target: Target
    ) -> None:
        self.schedule, self.saturated, self.mesh, self.target = schedule, saturated, mesh, target
        self.signature_of = saturated.encoding.signature_of
        self.made = schedule.once(lambda: makers(schedule), "makers")
        self.sends_ahead = False  # whether something may be, of the units seen so far
        self._found: dict[int, dict[int, tuple[Exchange, ...]]] = {}

    def costs(self, unit: Unit, choice: NDArray[np.int32]) -> NDArray[np.float64] | None:
        """Seconds, joules of the mesh, bytes beside operands and results, and bytes sent by a
        device for one run, where member m runs by strategy `choice[row, m]`: f64[rows, 4]. None
        where no strategy exchanges anything. What earlier kernels' permutes may carry costs nothing
        but its bytes: whether they do is for the certificate to say."""
        every = [self._of(self.signature_of[i]) for i in unit.members]
        some = [m for m, found in enumerate(every) if found]
        if not some:
            return None
        kinds, row = np.unique(choice[:, some], axis=0, return_inverse=True)
        made = np.zeros((len(kinds), 4))
        ahead = {(self._operation(i), way): most for i, way, most in self._ahead(unit)}
        for k, numbers in enumerate(kinds.tolist()):
            found = {m: every[m].get(n, ()) for m, n in zip(some, numbers, strict=True)}
            if any(found.values()):
                readers = self._readers(unit, found, dict(zip(some, numbers, strict=True)))
                given = readers, self._groups(readers, ahead), self.mesh, self.target, ahead
                made[k] = unit_exchange_costs(*given)[:4]
        return made[row.reshape(-1)]

    def lateness(self, unit: Unit) -> Hashable:
        """What decides which members of a unit exchange rows together, and which of them may do so
        with those of earlier units: how many members come before each value that it reads is there,
        and `_ahead`."""
        if not any([self._of(self.signature_of[i]) for i in unit.members]):
            return ()
        places = [self._operation(i) for i in unit.members]
        number = {int(i): m for m, i in enumerate(unit.members)}
        late = [sum([p <= self._made(v) for p in places]) for _, _, v in unit.reads]
        return *late, *[(number[i], *rest) for i, *rest in self._ahead(unit)]

    def _groups(self, readers: Sequence[Reader], ahead: Ahead) -> tuple[tuple[Reader, ...], ...]:
        """Which operations of a unit send rows together, in groups that are as few as can be if an
        earlier kernel may send some."""
        if not ahead:
            return sent_together(readers, self._made)
        carried = tuple([r for r in readers if r.rows and _is_carried(r, ahead)])
        others = [replace(r, exchanges=()) if r in carried else r for r in readers]
        return (carried, *sent_together(others, self._made, at_once=True))

    def _made(self, v: int) -> int:
        return self.made.get(v, -1)

    def _operation(self, i: int) -> int:
        return self.schedule.program.instances[i].operation

    def _ahead(self, unit: Unit) -> list[tuple[InstanceId, Way, float]]:
        """Members of a unit whose rows an earlier unit's permute may carry, their ways, and the
        most bytes of such a permute; none if it may carry the same rows for an operation of its
        own."""
        instances, there = self.schedule.program.instances, There(self._made)
        found: list[tuple[InstanceId, Way, float]] = []
        for i in unit.members:
            x, own = instances[i], self._ways(self.signature_of[i])
            reader = Reader(x.operation, x.inputs, (), x.outputs, ())
            last, _ = there.reads(reader)
            there.leaves(reader, last, copies=False)
            carried: dict[Way, float] = {}
            for operation, other, ways in self._senders.get(x.body, ()) if own else ():
                if last < operation < x.operation and other not in unit.members:
                    same = not set(instances[other].inputs).isdisjoint(x.inputs)
                    for way in own.keys() & ways.keys():
                        most = 0.0 if same else self._most[x.body, *way[:2]]
                        carried[way] = min(most, carried.get(way, most))
            found += [(i, way, most) for way, most in sorted(carried.items())]
            self.sends_ahead |= bool(carried)
        return found

    def _ways(self, signature: int) -> Mapping[Way, float]:
        """In which ways operations of a signature may send rows, with the most bytes of these."""
        found: dict[Way, float] = {}
        for every in self._of(signature).values():
            own: dict[Way, float] = {}
            for e in (e for e in every if e.is_rows):
                own[e.way] = own.get(e.way, 0.0) + (e.low + e.high) * e.row_bytes
            found.update({way: max(n, found.get(way, 0.0)) for way, n in own.items()})
        return found

    @cached_property
    def _senders(self) -> dict[int, list[tuple[int, InstanceId, Mapping[Way, float]]]]:
        """Per body, the operations that may send rows: their numbers, instances, and ways."""
        found: dict[int, list[tuple[int, InstanceId, Mapping[Way, float]]]] = {}
        for i, x in enumerate(self.schedule.program.instances):
            if not x.port and (ways := self._ways(self.signature_of[i])):
                found.setdefault(x.body, []).append((x.operation, InstanceId(i), ways))
        return found

    @cached_property
    def _most(self) -> dict[tuple[object, ...], float]:
        """The most bytes that one permute may carry, by body, axes, and whether around."""
        found: dict[tuple[object, ...], float] = {}
        for body, senders in self._senders.items():
            for (*way, _), n in (x for *_, ways in senders for x in ways.items()):
                found[body, *way] = found.get((body, *way), 0.0) + n
        return found

    def _readers(
        self, unit: Unit, found: dict[int, tuple[Exchange, ...]], numbers: dict[int, int]
    ) -> list[Reader]:
        readers = []
        for m, i in enumerate(unit.members):
            instance, needs = self.schedule.program.instances[i], tuple[Layout, ...]()
            if found.get(m):
                strategies = self.saturated.strategies[self.signature_of[i]]
                needs = strategies[numbers[m]].layouts[: len(instance.inputs)]
            ports = instance.inputs, needs, instance.outputs
            readers.append(Reader(instance.operation, *ports, found.get(m, ())))
        return readers

    def _of(self, signature: int) -> dict[int, tuple[Exchange, ...]]:
        if signature not in self._found:
            model = self.saturated.encoding.signatures[signature]
            rows = enumerate(self.saturated.strategies[signature])
            made = {
                n: exchanges(model, s.cuts, s.layouts[: len(model.inputs)], self.mesh)
                for n, s in rows
            }
            self._found[signature] = {n: e for n, e in made.items() if e}
        return self._found[signature]


def makers(schedule: Schedule) -> dict[int, int]:
    """Flat value -> the operation of its body that makes it; of what enters a body, none."""
    return {
        body.values[v]: k
        for body in schedule.program.bodies
        for v, k in body.graph.producers().items()
    }


class ExchangeCosts(NamedTuple):
    """Seconds, joules of the mesh; bytes in memory, bytes sent and bytes moved of one device."""

    seconds: float = 0.0
    joules: float = 0.0
    held: float = 0.0
    sent: float = 0.0
    moved: float = 0.0


#: By operation and way of rows that an earlier kernel's permute may carry, the most bytes of that;
#: none if it may carry the same rows for an operation of its own.
Ahead = Mapping[tuple[int, Way], float]


def unit_exchange_costs(
    unit: Sequence[Reader],
    groups: Sequence[Sequence[Reader]],
    mesh: MeshShape,
    target: Target,
    ahead: Ahead = MappingProxyType({}),
) -> ExchangeCosts:
    """What the exchanges of one unit's operations take, in program order, and what the permutes of
    `groups` do that operations of this unit are the first of; no more than that if earlier kernels
    may send some rows `ahead`.

    Every permute, and every collective of states, is on its own. A kernel takes out the rows of a
    permute that carries those of several blocks; of one block, where the operation's own kernel
    reads block and edges. These edges are then all that is beside the block. Else a kernel writes
    each block with its margins, which are in memory beside the block while the operation runs; of
    operands with margins along several dims the arrays in between are gone by then. Of an operand
    that exists only inside a kernel the rows that are sent are computed for themselves, in the same
    time at most. States that are gathered are combined by one kernel, and with the result by
    another.
    """
    sends: list[tuple[str, float, tuple[int, ...]]] = []
    copied: list[tuple[float, int]] = []  # bytes that kernels write, and how many of them
    held: dict[object, float] = {}
    seconds = energy = sent = moved = 0.0
    few: dict[object, list[Permute]] = {}  # permutes that may be fewer
    for group in groups:
        carried = [r for r in group if _is_carried(r, ahead)]
        own = [r for r in group if r not in carried]
        for n, one in enumerate(p for x in rounds(own, mesh) for p in x.permutes):
            several = len(one.pieces) > 1 and not ahead
            inside = all([_is_inside(p.exchange, target) for p in one.pieces])
            if ahead:
                few.setdefault((one.axes, one.pairs), []).append(one)
            else:
                sends.append((BESIDE, float(one.nbytes), one.axes))
            if several or inside:
                copied.append((float(one.nbytes), 1))
                held[group[0].operation, "permute", n] = 2.0 * one.nbytes
        for one in (p for x in rounds(carried, mesh) for p in x.permutes):
            every = [(ahead[p.reader, p.exchange.way], float(p.nbytes)) for p in one.pieces]
            more, given = sum([n for most, n in every if most]), (one.axes, mesh, target)
            if more:
                took = least_added(BESIDE, *given, max(every)[0] + more, more)
                seconds += took
                energy += collective_dynamic_joules(BESIDE, more, *given)
                energy += idle_joules(took, mesh.devices, target)
                sent += collective_wire_bytes(BESIDE, more, mesh.parts(one.axes))
    for alike in few.values():  # with more bytes in one, and none in others, they take least
        sizes = [float(sum([one.nbytes for one in alike])), *[0.0] * (len(alike) - 1)]
        sends += [(BESIDE, nbytes, alike[0].axes) for nbytes in sizes]
    for reader in unit:
        for e in reader.exchanges:
            sends += [(kind, float(payload), e.axes) for kind, payload in e.states]
            if not (e.is_rows and _is_inside(e, target)):
                copied.append((float(e.whole_bytes), 2 if e.states else 1))
                held[reader.operation, e.operand] = float(e.held(mesh))
    for kind, payload, axes in sends:
        seconds += collective_seconds(kind, payload, axes, mesh, target)
        energy += collective_joules(kind, payload, axes, mesh, target)
        sent += collective_wire_bytes(kind, payload, mesh.parts(axes))
    for amount, kernels in copied:
        traffic = 2.0 * amount
        took = traffic / target.hbm_bytes_per_second + kernels * target.launch_seconds
        seconds, moved = seconds + took, moved + traffic
        energy += joules(0.0, traffic, 0.0, took, mesh.devices, target, contraction=False)
    return ExchangeCosts(seconds, energy, sum(held.values()), sent, moved)


def held_until_read(
    groups: Sequence[Sequence[Reader]], mesh: MeshShape
) -> Iterator[tuple[int, int, float]]:
    """Rows that come for units other than the one that sends first: the first unit, the last one,
    and the bytes that are in memory between them."""
    for group in groups:
        unit = {r.operation: r.unit for r in group}
        first = min(unit.values())
        for one in rounds(group, mesh) if len(set(unit.values())) > 1 else ():
            for permute in one.permutes:
                keys = {piece.key for piece in permute.pieces}
                last = max([unit[k] for k, _, key in one.exchanges if key in keys])
                if last > first:
                    yield first, last, float(permute.nbytes)


def _is_carried(reader: Reader, ahead: Ahead) -> bool:
    """Whether an earlier kernel's permutes may carry all rows of an operation."""
    return bool(ahead) and all([(reader.operation, e.way) in ahead for e in reader.rows])


def _is_inside(e: Exchange, target: Target) -> bool:
    """Whether the operation's own kernel reads the block and its edges where they are."""
    return e.fuses and target.stores_products
