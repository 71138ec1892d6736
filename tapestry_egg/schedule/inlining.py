"""Inlining: what XLA computes inside its readers, instead of storing it."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from tapestry_egg.graph.ids import FlatId
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection

from .flatten import FlatProgram
from .schedules import Schedule
from .units import Unit


@dataclass(frozen=True)
class Fusion:
    """What XLA computes inside the readers instead of storing it.

    `within[u]`: what unit u makes never exists in memory, every reader computes it for itself.
    `aligned[u]`: the stored values that unit u therefore reads in the end, all of them only at the
    places in memory that it writes: in the place of one it may write its result. A kernel that
    turns something goes through tiles, and writes over nothing.
    """

    within: tuple[bool, ...]
    aligned: tuple[frozenset[FlatId], ...]


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
    elsewhere, turns = (
        list(x) for x in zip(*(_read_elsewhere(program, u) for u in units), strict=True)
    )
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
            turns[r] |= turns[u]
            elsewhere[r] |= operands[u] if v in elsewhere[r] else elsewhere[u]
            operands[r] = (operands[r] - {v}) | operands[u]
        for w in operands[u]:
            readers[w] = (readers[w] - {u}) | using
    aligned = [
        frozenset() if turned else frozenset(x - y)
        for x, y, turned in zip(operands, elsewhere, turns, strict=True)
    ]
    return Fusion(tuple(within), tuple(aligned))


def _read_elsewhere(program: FlatProgram, unit: Unit) -> tuple[set[FlatId], bool]:
    """The values from outside that a unit reads at other places in memory than it writes, and
    whether it reads something with dims in another order."""
    makers = {v: i for i in unit.members for v in program.instances[i].outputs}
    moved: set[int] = set()  # members of which something is read elsewhere
    found: set[FlatId] = set()
    turns = False
    for i in reversed(unit.members):
        instance = program.instances[i]
        for p, v in enumerate(instance.inputs):
            turned, aligned = _read_as(instance.signature, p)
            turns |= turned
            if i in moved or not aligned:
                if v in makers:
                    moved.add(makers[v])
                else:
                    found.add(v)
    return found, turns


def _read_as(signature: OperationSignature, p: int) -> tuple[bool, bool]:
    """Whether operand p has its dims permuted, and whether it is read where the result is written;
    the signature remembers it, as equal operations have the same one."""
    known: dict[int, tuple[bool, bool]] = signature.__dict__.setdefault("_read_as", {})
    if p not in known:
        known[p] = _turns(signature, p), _aligned(signature, p)
    return known[p]


def _turns(signature: OperationSignature, p: int) -> bool:
    """Whether an operation permutes the dims of operand p."""
    if len(signature.outputs) != 1:
        return False
    shapes = signature.input_types[p].shape, signature.output_types[0].shape
    before, after = (
        _places(x, shape)
        for x, shape in zip((signature.inputs[p], signature.outputs[0]), shapes, strict=True)
    )
    return before != after and sorted(before) == sorted(after)


def _aligned(signature: OperationSignature, p: int) -> bool:
    """Whether an operation reads all of operand p where its result has the same index, both
    row-major; so do reshapes, and operations on elements."""
    if len(signature.outputs) != 1:
        return False
    reads, writes = signature.inputs[p], signature.outputs[0]
    if {*reads.shape, *writes.shape} - {1}:
        return False
    own, result = signature.input_types[p], signature.output_types[0]
    return own.size == result.size and _places(reads, own.shape) == _places(writes, result.shape)


def _places(projection: Projection, shape: tuple[int, ...]) -> tuple[int, ...]:
    """By how much the place in a row-major array grows with each index dim; where it begins."""
    steps = [prod(shape[k + 1 :]) for k in range(len(shape))]
    grows = [
        sum(s * x for s, x in zip(steps, c, strict=True))
        for c in zip(*projection.matrix, strict=True)
    ]
    return *grows, sum(s * x for s, x in zip(steps, projection.offset, strict=True))
