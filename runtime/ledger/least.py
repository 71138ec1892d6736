"""Bytes that a device holds whatever its compiler fuses, by cuts of the emitted program.

While a step runs, its arrays are in memory, and whatever all later steps need is computed of: a
compiler may compute element by element, or move elements, as often and as late as it likes, so that
of the values that are there by then it holds those that are smallest together (a minimum cut); it
computes nothing earlier than the program does. What cannot be
computed again is made by the step that makes it: a product, a collective, a sum, a loop.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .equations import Program, Region, Step
from .memory import Held, hands_on, places_of

#: Steps of a region that are looked at: of those that hold most by plain liveness.
_STEPS = 8
_UNIT = 1 << 10  # bytes; flows are of 32 bits


def held_at_least(program: Program, region: Region, donated: Sequence[bool]) -> int:
    """The most bytes that a device must hold at some of the steps; `donated` says it of inputs."""
    usual = Held(program, region, float("inf"), "some")
    renewed = places_of(usual, donated)
    return sum(program.bytes[v] for v in region.inputs) + _beside(usual, renewed.keys())


def _beside(usual: Held, renewed: Collection[int]) -> int:
    """What a region holds beside its inputs, results that are `renewed` in the place of these."""
    program, region = usual.program, usual.region
    own = Held(program, region, float("inf"), "all")
    held = usual.profile()
    again = {v: s for s in region.steps if own.is_fused(s) for v in s.makes}
    order = [t for t, s in enumerate(region.steps) if not (own.is_fused(s) or hands_on(s))]
    most = 0
    for t in sorted(order, key=lambda t: -held[t])[:_STEPS]:
        step = region.steps[t]
        arrays = set() if own.computes_operands(step) else set(own.reads(step))
        if not own.writes_over(step):
            arrays |= set(step.makes)
        arrays -= {*region.inputs, *(own.root.get(v, v) for v in renewed)}
        inside = 0
        for inner in step.inner:
            body = Held(program, inner, float("inf"), "some")
            gone = inner.outputs if step.name == "cond" else usual.carried(step, inner)
            inside = max(inside, _beside(body, [v for v in gone if v >= 0]))
        late = {v for s in order if s > t for v in own.reads(region.steps[s])}
        late |= {own.root.get(v, v) for v in region.outputs if v >= 0}
        free = arrays | {own.root.get(v, v) for v in renewed}
        made = {v for s in region.steps[: t + 1] for v in s.makes}
        here = sum(program.bytes[v] for v in arrays)
        most = max(most, here + inside + _cut(own, again, late, made, free))
    return most


def _cut(own: Held, again: dict[int, Step], late: set[int], made: set[int], free: set[int]) -> int:
    """Bytes of the least values of which all that is needed `late` can be computed `again`, without
    what was `made` before; those that are `free` count nothing."""
    import numpy as np
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    number: dict[int, int] = {}
    edges: list[tuple[int, int, int]] = []
    endless = np.iinfo(np.int32).max // 4
    left = list(late)
    while left:
        v = left.pop()
        if v in number:
            continue
        k = number[v] = len(number)
        early = v in again and v not in made
        size = endless if early else 0 if v in free else own.program.bytes[v] // _UNIT
        edges.append((2 + 2 * k, 3 + 2 * k, min(size, endless)))
        if v in again:
            left += own.reads(again[v])
    for v, k in number.items():
        if v in made and v not in again:
            edges.append((0, 2 + 2 * k, endless))
        if v in late:
            edges.append((3 + 2 * k, 1, endless))
        for w in set(own.reads(again[v])) if v in again else ():
            edges.append((3 + 2 * number[w], 2 + 2 * k, endless))
    rows, columns, flows = np.array(edges, dtype=np.int32).reshape(-1, 3).T
    nodes = 2 + 2 * len(number)
    graph = csr_array((flows, (rows, columns)), shape=(nodes, nodes), dtype=np.int32)
    return int(maximum_flow(graph, 0, 1).flow_value) * _UNIT
