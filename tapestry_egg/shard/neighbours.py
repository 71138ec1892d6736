"""Neighbours: what it takes that devices exchange what strategies lack of operands or states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds, collective_wire_bytes
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.exchanges import Exchange, exchanges

from .strategies import Saturated


class Neighbours:
    """The exchanges of all strategies of a saturated program, by signature and strategy number."""

    def __init__(self, saturated: Saturated, mesh: MeshShape, target: Target) -> None:
        self.saturated, self.mesh, self.target = saturated, mesh, target
        self._found: dict[int, dict[int, tuple[Exchange, ...]]] = {}
        self._costs: dict[int, NDArray[np.float64] | None] = {}

    def costs(self, signature: int) -> NDArray[np.float64] | None:
        """Seconds, joules of the mesh, bytes beside operands and results, and bytes sent by a
        device for one run: f64[strategies, 4]. None where no strategy exchanges anything."""
        if signature not in self._costs:
            found = self._of(signature)
            made = np.zeros((len(self.saturated.strategies[signature]), 4))
            for n, needed in found.items():
                made[n] = exchange_costs(needed, self.mesh, self.target)[:4]
            self._costs[signature] = made if found else None
        return self._costs[signature]

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


class ExchangeCosts(NamedTuple):
    """Seconds, joules of the mesh; bytes in memory, bytes sent and bytes moved of one device."""

    seconds: float
    joules: float
    held: float
    sent: float
    moved: float


def exchange_costs(found: Sequence[Exchange], mesh: MeshShape, target: Target) -> ExchangeCosts:
    """What one operation's exchanges take.

    Every collective is on its own. Then a kernel writes the block with its margins, which are in
    memory beside the block while the operation runs; of operands with margins along several dims
    the arrays in between are gone by then. Where the operation's own kernel reads block and edges,
    a kernel takes each edge out instead, and edges are all that is beside the block. Of an operand
    that exists only inside a kernel the rows that are sent are computed for themselves, in the same
    time at most. States that are gathered are combined by one kernel, and with the result by
    another.
    """
    seconds = energy = sent = moved = 0.0
    arrays: dict[int, float] = {}
    for e in found:
        for kind, payload in e.sends:
            seconds += collective_seconds(kind, float(payload), e.axes, mesh, target)
            energy += collective_joules(kind, float(payload), e.axes, mesh, target)
            sent += collective_wire_bytes(kind, float(payload), mesh.parts(e.axes))
        inside = e.fuses and target.stores_products
        edges = float(sum(n for _, n in e.sends)) if inside else 0.0
        traffic = 2.0 * (edges if inside else e.whole_bytes)
        kernels = len(e.sends) if inside else 2 if e.states else 1
        took = traffic / target.hbm_bytes_per_second + kernels * target.launch_seconds
        seconds, moved = seconds + took, moved + traffic
        energy += joules(0.0, traffic, 0.0, took, mesh.devices, target, contraction=False)
        if inside:
            arrays[e.operand] = arrays.get(e.operand, 0.0) + 2.0 * edges
        else:
            arrays[e.operand] = float(e.held(mesh))
    return ExchangeCosts(seconds, energy, sum(arrays.values()), sent, moved)
