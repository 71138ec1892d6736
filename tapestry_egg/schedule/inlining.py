"""Inlining: what XLA computes inside its readers, instead of storing it."""

from __future__ import annotations

from dataclasses import dataclass

from tapestry_egg.graph.ids import FlatId

from .schedules import Schedule


@dataclass(frozen=True)
class Fusion:
    """What XLA computes inside the readers instead of storing it.

    `within[u]`: what unit u makes never exists in memory, every reader computes it for itself.
    `operands[u]`: the stored values that unit u therefore reads in the end.
    """

    within: tuple[bool, ...]
    operands: tuple[frozenset[FlatId], ...]


def fusion(schedule: Schedule) -> Fusion:
    """Which units are computed again inside each of their readers.

    A model of XLA's priority fusion for GPUs (xla/service/gpu/transforms/priority_fusion.cc): an
    elementwise producer is fused into all of its readers at once, or into none. That needs readers
    that are elementwise or reductions themselves (not contractions, collectives or the program's
    boundary), and must not cost more memory traffic: apart, the producer's operands are read, its
    result is written and read by every reader; within, every reader reads the operands instead,
    where it does not read them already. So GELU's steps are recomputed in the backward pass from
    one product, while a sum of two stored values with four readers is stored too.
    """
    program, units = schedule.program, schedule.units
    size = program.sizes
    operands = [{v for _, _, v in unit.reads} for unit in units]
    readers: list[set[int]] = [set() for _ in program.types]
    for u, unit in enumerate(units):
        for _, _, v in unit.reads:
            readers[v].add(u)
    within = [False] * len(units)

    def kind(u: int) -> str:
        root = program.instances[units[u].root]
        return root.port or root.signature.fusion

    for u, unit in enumerate(units):
        if len(unit.outputs) != 1 or kind(u) not in ("loop", "view"):
            continue
        (v,) = unit.outputs
        using = readers[v]
        if not using or any(
            kind(r) not in ("loop", "view", "reduce") or units[r].body != unit.body for r in using
        ):
            continue
        apart = sum(size[w] for w in operands[u]) + size[v] * (1 + len(using))
        inside = sum(size[w] for r in using for w in operands[u] - operands[r])
        if inside > apart:
            continue
        within[u] = True
        for r in using:
            operands[r] = (operands[r] - {v}) | operands[u]
        for w in operands[u]:
            readers[w] = (readers[w] - {u}) | using
    return Fusion(tuple(within), tuple(frozenset(x) for x in operands))
