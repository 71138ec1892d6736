"""Which operands of a loop its body takes as they are, and which results hold all of its rounds."""

from __future__ import annotations

from collections.abc import Mapping

from .blockgraph import Operation


def counts(op: Operation) -> tuple[int, int]:
    """How many operands of a scan are the same in every round, and how many are carried."""
    return int(op.params["num_consts"]), int(op.params["num_carry"])


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
