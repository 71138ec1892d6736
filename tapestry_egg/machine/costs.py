"""What things cost on a target: seconds and bytes on the wire. Pure functions, no state.

All amounts are per device and in base units (flop, bytes, seconds). Joules are in `energy.py`.
Amounts may be floats or NumPy arrays, which broadcast. The functions price one
operation or one change of layout; costs of a plan are sums of these, so every one of them is
monotone in its amounts.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.arrays import kind as kind_of
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.tables.kernel_rates import convolution_rate, kernel_rate
from tapestry_egg.machine.tables.lookup import measured_collective, measured_gemm
from tapestry_egg.monoids import monoids

from .target import Target
from .topology import Span

Amount = TypeVar("Amount", float, NDArray[np.float64])

#: Changes of layout that move data between devices, and those that only touch local memory.
MOVING = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "permute")
#: A permute to the devices beside: no change of layout.
BESIDE = "permute_beside"
LOCAL = ("slice", "to_partial")


def kernel_seconds(
    flops: Amount,
    hbm_bytes: Amount,
    dtype: str,
    target: Target,
    contraction: bool,
    gemm: Gemm[Amount] | None = None,
    steps: Amount | float = 0.0,
) -> Amount:
    """Time of one kernel: max(flops / rate, hbm_bytes / bandwidth) + launch.

    The roofline of Williams, Waterman and Patterson (CACM 52(4), 2009), with sustained instead of
    peak rates, plus the floor that a kernel takes however small. `dtype` is that of the operands;
    `contraction` says that the matrix units can do the work (dots, convolutions), and `gemm` as
    which product of matrices, where it is one. Where the target has measured times of products,
    such a kernel takes what they say of its shape (`tables/matmuls.py`), launch included, and what
    it does beside the product at the same rate; never less than its traffic does, nor than its
    flops at the rate that products keep up within the device's power (`Target.sustained`). A
    convolution takes what was measured of as many channels (`kernels/convolution.yaml`), where
    anything was, and a kernel more where it has a padded operand: its implicit product lies outside
    what tables hold. None takes less than `steps` that wait for one another
    (`Target.step_seconds`).
    """
    dtype = target.computed_as(dtype)
    memory = hbm_bytes / target.hbm_bytes_per_second
    memory = _larger(memory, memory * 0.0 + steps * target.step_seconds)
    if gemm is not None and gemm.convolved is not None:
        attained = convolution_rate(gemm.convolved, dtype, target.name)
        if attained is not None:
            padded = gemm.convolved.padded
            copies = copying_seconds(2.0 * padded, padded * 0.0 + (padded > 0), target)
            return _larger(flops / attained, memory) + target.launch_seconds + copies
    if gemm is not None and target.matmuls is not None and "@" not in dtype:
        measured = measured_gemm(gemm, target.matmuls, target.launch_seconds)
        if measured is not None:
            measured = measured / target.matmul_speed
            more = flops / (2.0 * gemm.batch * gemm.m * gemm.n * gemm.k)
            limited = flops / target.sustained_rate(dtype)
            return _larger(_larger(measured * _larger(more, more * 0.0 + 1.0), limited), memory)
    compute = flops / target.rate(dtype, contraction)
    return _larger(compute, memory) + target.launch_seconds


def like_roofline(
    kernel: str,
    measured: Sequence[float] | None,
    flops: Amount,
    dtype: str,
    target: Target,
    contraction: bool,
    spilled: Amount | float = 0.0,
) -> Amount:
    """The flops that take as long at the target's sustained rate as these do in a kernel whose own
    rate has been measured (`tables/kernel_rates.py`). Of all others the same ones, and those that
    take as long as the `spilled` bytes do that each of them moves: such a kernel runs in blocks,
    one part after the other."""
    rate, own = kernel_rate(kernel, measured, dtype, target.name), target.rate(dtype, contraction)
    if rate is None:
        return flops * (1.0 + spilled * own / target.hbm_bytes_per_second)
    return flops * (own / rate)


def carried_as(kind: str, monoid: str | None, dtype: str) -> str:
    """The collective that carries a change of layout out.

    Reductions are their own collective where the monoid's mesh form is one: all-reduces under psum,
    pmax and pmin, scattered ones under psum. Else they gather, or exchange, and combine on the
    device.
    """
    if kind not in ("all_reduce", "reduce_scatter"):
        return kind
    known = monoids().get(monoid or "")
    native = known.native(kind_of(dtype)) if known else ""
    if kind == "reduce_scatter":
        return kind if native == "psum" else "all_to_all"
    return kind if native else "all_gather"


def collective_wire_bytes(kind: str, local_bytes: Amount, group: int) -> Amount:
    """Bytes that each device sends in a bandwidth-optimal algorithm.

    `local_bytes` is the device's block before the change, `group` the number g of devices that take
    part together. all_gather b(g-1); all_reduce 2b(g-1)/g; reduce_scatter and all_to_all b(g-1)/g;
    slice and to_partial 0; a permute b (Chan et al., "Collective communication: theory,
    practice, and experience", 2007; in terms of the full tensor V: V(g-1)/g, 2V(g-1)/g, V(g-1)/g,
    V(g-1)/g²).
    Raises PlanError for any other kind.
    """
    if kind == "all_gather":
        return local_bytes * (group - 1)
    if kind == "all_reduce":
        return local_bytes * (2 * (group - 1) / group)
    if kind in ("reduce_scatter", "all_to_all"):
        return local_bytes * ((group - 1) / group)
    if kind in LOCAL:
        return local_bytes * 0.0
    if kind in ("permute", BESIDE):
        return local_bytes * 1.0 if group > 1 else local_bytes * 0.0
    raise _unknown(kind)


def wire_shares(kind: str, spans: Sequence[Span]) -> dict[str, float]:
    """The share of what a device sends that goes over each level of the network, on the average of
    all devices, of a collective whose group spans these levels, innermost first.

    As `collective_seconds` counts them: a gather's outer levels come first and carry single blocks,
    a reduction's come last and carry reduced ones; of an all-to-all every device sends to each of
    the others, and of a permute the last of every inner group sends outwards.
    """
    amounts: dict[str, float] = {}
    inside, whole = 1, _group(tuple(spans))
    for span in spans:
        outside = whole // (inside * span.group)
        if kind == "all_gather":
            amount = float(outside * (span.group - 1))
        elif kind == "all_to_all":
            amount = float(inside * (span.group - 1))
        elif kind == "permute":
            amount = 1.0 / inside - (1.0 / (inside * span.group) if outside > 1 else 0.0)
        else:
            amount = (span.group - 1) / (inside * span.group)
        amounts[span.level] = amount
        inside *= span.group
    total = sum(amounts.values())
    return {level: amount / total for level, amount in amounts.items()}


def copying_seconds(moved: Amount, launches: Amount | float, target: Target) -> Amount:
    """Time of kernels that move bytes from memory to memory."""
    return moved / target.hbm_bytes_per_second + launches * target.launch_seconds


def turning_seconds(local_bytes: Amount, target: Target) -> Amount:
    """Time of a kernel that writes a block with its dims in another order."""
    return 2.0 * local_bytes / target.hbm_bytes_per_second + target.launch_seconds


def collective_seconds(
    kind: str, local_bytes: Amount, axes: tuple[int, ...], mesh: MeshShape, target: Target
) -> Amount:
    """Time of one change of layout over the given mesh axes: launch + Σ_levels (α·hops + bytes/β).

    The α-β model (Hockney), level by level where the group spans several levels of the network:
    reduce-scatter goes from the inside out, so that the slow links carry the reduced block, and
    all-gather the other way round; an all-reduce is both. With n devices inside a level and m
    outside, an all-reduce of V moves 2V(n-1)/n inside and 2(V/n)(m-1)/m outside; the levels follow
    one another, no overlap is counted. Latency grows with the hops of a ring; an all-reduce over a
    switch takes at most 2⌈log2 g⌉ of them (a tree), as fits 10, 15, 31 us on 2, 4, 8 GPUs.
    Where the target has measured times over its innermost level (`tables/collectives.py`), that
    level takes what they say, launch and latency included, and the levels outside run beside it:
    the slowest paces all, as NCCL pipelines them, and their latencies add up. Where a step of a
    ring was measured at a level, all-gather and reduce-scatter take one for each device of the
    group but one, since NCCL's rings go through all of them, and an all-reduce takes twice as many,
    or goes by trees, which wait for few hops and may send less: whichever is quicker. An all-to-all
    waits for a hop, and for a message to each device there where those were measured.
    `slice` and `to_partial` send nothing and cost one read and write of their result in memory.
    A permute to the next device takes one hop at the slowest level it crosses, over a torus by the
    links of one direction, half of those that a ring has; where permutes around a ring were
    measured, the innermost level takes what they say. Any other permute does the same, and over a
    torus no less than an all-to-all of the same blocks.
    A group of one device costs nothing. Raises PlanError for an unknown kind.
    """
    spans: tuple[Span, ...] = target.spans(mesh, axes)
    if kind not in (*MOVING, *LOCAL, BESIDE):
        raise _unknown(kind)
    if not spans:
        return local_bytes * 0.0
    if kind in LOCAL:
        return local_traffic(kind, local_bytes, _group(spans)) / target.hbm_bytes_per_second
    if kind in ("permute", BESIDE):
        return _permute_seconds(kind, local_bytes, spans, target)
    within = _measured_level(kind, local_bytes, spans, target)
    seconds = local_bytes * 0.0 + max([target.launch_seconds, *[x.base_seconds for x in spans]])
    waits, slowest = local_bytes * 0.0, within
    inside, outside = 1, _group(spans)
    for number, span in enumerate(spans):
        n = span.group
        outside //= n
        ways = _ways(kind, local_bytes, span, inside, outside)
        if slowest is not None and number > 0:
            paced = [(_larger(slowest, busy), waits + wait) for busy, wait in ways]
            slowest, waits = _quicker(paced)
        busy, wait = _quicker(ways)
        seconds = seconds + busy + wait
        inside *= n
    return seconds if slowest is None else slowest + waits


# Added bytes: what bytes add at least to the seconds of any collective that they join.


# Amounts, from none to all that one collective may have, at which its seconds are looked at.
_POINTS = 1 << 15


def least_added(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float, size: float
) -> float:
    """Seconds that `size` bytes add at least to those of a collective of a kind that no more than
    `most` bytes enter, whatever else enters it."""
    seconds = _seconds_up_to(name, axes, mesh, target, most)
    steps = int(size / (most / (_POINTS - 1)))
    # From x bytes to x + size, whatever x is between two points: seconds rise with bytes.
    least = (seconds[steps:-1] - seconds[1 : _POINTS - steps]).min(initial=np.inf)
    return max(0.0, float(least))


# Searches ask for the same few kinds again and again, from problems that share nothing else.
@lru_cache(maxsize=128)
def _seconds_up_to(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float
) -> NDArray[np.float64]:
    """Seconds of one collective that none up to `most` bytes enter, at all points."""
    amounts = np.linspace(0.0, most, _POINTS)
    return np.array(collective_seconds(name, amounts, axes, mesh, target))


def _ways(
    kind: str, local_bytes: Amount, span: Span, inside: int, outside: int
) -> list[tuple[Amount, Amount]]:
    """Seconds that a collective sends over one level, and those that it waits, in each way that it
    may go; `inside` devices of its group are in the levels within, `outside` groups around."""
    n, still = span.group, local_bytes * 0.0
    hops = still + _steps(kind, span) * span.latency_seconds
    ring = still + (inside * n - 1) * span.ring_seconds
    if kind == "all_gather":
        busy = local_bytes * (outside * (n - 1) / span.bytes_per_second)
        return [(busy, ring if span.ring_seconds else hops)]
    if kind == "all_to_all":
        busy = local_bytes * (span.exchange_seconds_per_byte / outside)
        if span.message_seconds:
            hops = still + span.latency_seconds + inside * (n - 1) * span.message_seconds
        return [(busy, hops)]
    passes = 2 if kind == "all_reduce" else 1
    share = passes * (n - 1) / (inside * n)
    busy = local_bytes * (share / span.bytes_per_second)
    if not span.ring_seconds:
        return [(busy, hops)]
    ways = [(busy, passes * ring)]
    if kind == "all_reduce":
        ways.append((local_bytes * (share / span.tree_bytes_per_second), hops))
    return ways


def _quicker(ways: Sequence[tuple[Amount, Amount]]) -> tuple[Amount, Amount]:
    """Of pairs of seconds those with the least sum."""
    (busy, wait), *others = ways
    for b, w in others:
        if isinstance(busy, np.ndarray):
            better = b + w < busy + wait
            busy, wait = np.where(better, b, busy), np.where(better, w, wait)
        elif b + w < busy + wait:
            busy, wait = b, w
    return busy, wait


def _permute_seconds(
    kind: str, local_bytes: Amount, spans: tuple[Span, ...], target: Target
) -> Amount:
    within = _measured_within("permute_ring", local_bytes, spans, target)
    slowest = local_bytes * 0.0 if within is None else within
    for span in spans if within is None else spans[1:]:
        ways = 2.0 if span.kind == "torus" else 1.0
        begin = max(target.launch_seconds, span.base_seconds) + span.latency_seconds
        busy = ways / span.bytes_per_second
        if kind != BESIDE:  # blocks go as far as those of an all-to-all
            busy = max(busy, span.exchange_seconds_per_byte)
        slowest = _larger(slowest, begin + local_bytes * busy)
    return slowest


def _measured_level(
    kind: str, local_bytes: Amount, spans: tuple[Span, ...], target: Target
) -> Amount | None:
    """Time of the part of a collective within the innermost level, where that was measured."""
    outside = _group(spans[1:])
    if kind == "all_gather":  # the table counts the whole tensor; the slow links go first
        nbytes = local_bytes * float(spans[0].group * outside)
    elif kind == "all_to_all":
        nbytes = local_bytes / float(outside)
    else:
        nbytes = local_bytes
    return _measured_within(kind, nbytes, spans, target)


def _measured_within(
    kind: str, nbytes: Amount, spans: tuple[Span, ...], target: Target
) -> Amount | None:
    """Time of a collective over the innermost level by the target's table, of bytes as that counts
    them; None where it has none of the kind."""
    if target.collectives is None or spans[0].level != target.levels[0].name:
        return None
    table, place = target.collectives, (spans[0].group, target.shape[-1])
    measured = measured_collective(table, kind, nbytes, *place)
    if measured is None or target.link_speed == 1.0:
        return measured
    delay = measured_collective(table, kind, nbytes * 0.0, *place)
    assert delay is not None
    return delay + (measured - delay) / target.link_speed


def _group(spans: tuple[Span, ...]) -> int:
    return prod(s.group for s in spans)


def _steps(kind: str, span: Span) -> int:
    """Hops that the first byte waits for at one level."""
    if kind != "all_reduce":
        return span.hops
    if span.kind == "switch":
        return min(span.hops, 2 * (span.group - 1).bit_length())
    return 2 * span.hops


def local_traffic(kind: str, local_bytes: Amount, group: int) -> Amount:
    """Memory bytes of a change without communication: its result, read once and written once."""
    return local_bytes * (2.0 / group if kind == "slice" else 2.0)


def _larger(a: Amount, b: Amount) -> Amount:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        out: Amount = np.maximum(a, b)
        return out
    return max(a, b)


def _unknown(kind: str) -> PlanError:
    return PlanError(
        f"unknown change of layout {kind!r}",
        hint=f"Known are {', '.join((*MOVING, *LOCAL))}.",
    )
