"""Neighbours: what it takes that devices exchange what strategies lack of operands or states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import BESIDE, collective_seconds, collective_wire_bytes
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.exchanges import Exchange, Reader, exchanges, rounds, sent_together
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
        self._found: dict[int, dict[int, tuple[Exchange, ...]]] = {}

    def costs(self, unit: Unit, choice: NDArray[np.int32]) -> NDArray[np.float64] | None:
        """Seconds, joules of the mesh, bytes beside operands and results, and bytes sent by a
        device for one run, where member m runs by strategy `choice[row, m]`: f64[rows, 4]. None
        where no strategy exchanges anything."""
        every = [self._of(self.signature_of[i]) for i in unit.members]
        some = [m for m, found in enumerate(every) if found]
        if not some:
            return None
        kinds, row = np.unique(choice[:, some], axis=0, return_inverse=True)
        made = np.zeros((len(kinds), 4))
        for k, numbers in enumerate(kinds.tolist()):
            found = {m: every[m].get(n, ()) for m, n in zip(some, numbers, strict=True)}
            if any(found.values()):
                readers = self._readers(unit, found, dict(zip(some, numbers, strict=True)))
                made[k] = unit_exchange_costs(readers, self.made, self.mesh, self.target)[:4]
        return made[row.reshape(-1)]

    def lateness(self, unit: Unit) -> tuple[int, ...]:
        """How many members of a unit come before each value that it reads is there: on that depends
        which of them exchange rows together. None where fewer than two may do so."""
        if sum([bool(self._of(self.signature_of[i])) for i in unit.members]) < 2:
            return ()
        places = [self.schedule.program.instances[i].operation for i in unit.members]
        return tuple([sum([p <= self.made.get(v, -1) for p in places]) for _, _, v in unit.reads])

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


def unit_exchange_costs(
    unit: Sequence[Reader], made: Mapping[int, int], mesh: MeshShape, target: Target
) -> ExchangeCosts:
    """What the exchanges of one unit's operations take, in program order; `made` as `makers` gives
    it.

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
    for group in sent_together(unit, lambda v: made.get(v, -1)):
        for n, one in enumerate(p for x in rounds(group, mesh) for p in x.permutes):
            sends.append((BESIDE, float(one.nbytes), one.axes))
            several, inside = len(one.pieces) > 1, _is_inside(one.pieces[0].exchange, target)
            if several or inside:
                copied.append((float(one.nbytes), 1))
                held[group[0].operation, "permute", n] = 2.0 * one.nbytes
    for reader in unit:
        for e in reader.exchanges:
            sends += [(kind, float(payload), e.axes) for kind, payload in e.states]
            if not (e.is_rows and _is_inside(e, target)):
                copied.append((float(e.whole_bytes), 2 if e.states else 1))
                held[reader.operation, e.operand] = float(e.held(mesh))
    seconds = energy = sent = moved = 0.0
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


def _is_inside(e: Exchange, target: Target) -> bool:
    """Whether the operation's own kernel reads the block and its edges where they are."""
    return e.fuses and target.stores_products
