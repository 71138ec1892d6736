"""What it takes to get rows from neighbours before an operation runs, counted again."""

from __future__ import annotations

from collections.abc import Sequence

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import BESIDE, collective_seconds
from tapestry_egg.machine.energy import collective_joules, joules
from tapestry_egg.machine.target import Target
from tapestry_egg.plans.exchanges import Exchange

from .kernel_work import Work


def margin_work(found: Sequence[Exchange], mesh: MeshShape, target: Target) -> Work:
    """One run's permutes of edges, and the kernels that put blocks and edges together, one dim
    after the other: they read and write the block with its margins, each once."""
    seconds = energy = traffic = wire = 0.0
    for e in found:
        for rows in (e.low, e.high):
            if rows:
                sent = float(rows * e.row_bytes)
                seconds += collective_seconds(BESIDE, sent, e.axes, mesh, target)
                energy += collective_joules(BESIDE, sent, e.axes, mesh, target)
                wire += sent
        moved = 2.0 * e.whole_bytes
        took = moved / target.hbm_bytes_per_second + target.launch_seconds
        energy += joules(0.0, moved, 0.0, took, mesh.devices, target, contraction=False)
        seconds, traffic = seconds + took, traffic + moved
    return Work(seconds, energy, 0.0, traffic, wire, "exchange")


def margin_bytes(found: Sequence[Exchange]) -> float:
    """Bytes of a device's operands with their margins, which stand beside the blocks."""
    return float(sum({e.operand: e.whole_bytes for e in found}.values()))
