"""Which operands of a loop its body takes as they are, and which results hold all of its rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .blockgraph import BlockGraph, Operation

#: Values outside of a loop, and what they are in its body.
Ports = Sequence[tuple[int, int]]


def counts(op: Operation) -> tuple[int, int]:
    """How many operands of a scan are the same in every round, and how many are carried."""
    return int(op.params["num_consts"]), int(op.params["num_carry"])


def with_operands(
    op: Operation, body: BlockGraph, kept: Sequence[int], consts: Ports = (), streams: Ports = ()
) -> Operation:
    """A scan with another body, which reads the operands at some places and further ones: those
    that are the same in every round, and those of which each round has a slice."""
    (given,), (first, carried) = op.regions, counts(op)
    same, others = [k for k in kept if k < first], [k for k in kept if k >= first]

    def joined(own: Sequence[int], side: int) -> tuple[int, ...]:
        more, last = ([x[side] for x in ports] for ports in (consts, streams))
        return (*(own[k] for k in same), *more, *(own[k] for k in others), *last)

    params = {**op.params, "num_consts": len(same) + len(consts)}
    params["num_carry"] = sum(k < first + carried for k in others)
    inner = replace(body, inputs=joined(given.inputs, 1))
    return replace(op, inputs=joined(op.inputs, 0), params=params, regions=(inner,))


def stacked(op: Operation) -> range:
    """The results of a scan that hold something of every round; no other loop has any."""
    first = int(op.params["num_carry"]) if op.is_scan else len(op.outputs)
    return range(first, len(op.outputs))


def taken(op: Operation) -> Mapping[int, int]:
    """The operands of a loop that its body, its last region, takes and does not carry -> their
    places there."""
    if op.is_scan:
        consts, carries = counts(op)
        places = [*range(consts), *range(consts + carries, len(op.inputs))]
        return {p: p for p in places}
    if op.is_while:
        tests, consts = int(op.params["cond_nconsts"]), int(op.params["body_nconsts"])
        return {tests + k: k for k in range(consts)}
    return {}
