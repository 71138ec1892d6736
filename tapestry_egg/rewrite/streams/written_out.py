"""Loops written out, round by round, whose products read slices of stacks.

XLA for GPUs copies the slice that a round of a loop takes of a stack before a product reads it: a
step that decodes one token so moves its weights and caches three times. Where the round is known,
products read the slice where it lies in the stack (`in_products: one_of_stack`). What a round
renews of a stack, as a decoder's loop over layers writes one token into each cache, is written into
the stack itself.

Where devices share the work, they may gather a whole stack. Products do not read slices of what is
gathered, so stacks that several loops read, as a gradient's, pass through a barrier first: slices
are stored.

A loop is written out if a device reads enough of such slices, and what comes of it is not too long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.schedule.lying import renewed_outputs
from tapestry_egg.tracing.spelled import at

from .written import Written

#: The names of this change in the rules of a plan; that for devices which share the work. Where
#: loops are left that are longer than `FEW`, `-few` is behind them.
RULE, SHARED = "loops-written-out", "shared-loops-written-out"

#: The most operations of all loops that are written out: up to so many, planning was measured.
MOST = 4096
#: The same where one plan is wanted soon and products read slices where they lie. XLA compiles
#: kernels anew for every place in a stack: a Llama-8B's step of 32 layers, 1200 operations, for 24
#: CPU seconds in place of 1.6. Where slices are stored, a ViT's of 12, 1967, took 5.2 for 4.3.
FEW = 512


#: Name -> the most operations, and whether devices share the work.
NAMES = {
    RULE: (MOST, False),
    SHARED: (MOST, True),
    f"{RULE}-few": (FEW, False),
    f"{SHARED}-few": (FEW, True),
}


#: Where an operation is: its place in the program, or in a region of the operation at another.
Place = tuple[int, ...]
# A loop there, and the bytes that products read of its stacks in all its runs.
_Loop = tuple[Place, Operation, int]


def with_loops_written_out(
    graph: BlockGraph, most: float = MOST, shared: bool = False
) -> BlockGraph:
    """The program with the loops written out that `sliced_bytes` names; itself without any. Where
    devices have `shared` work, slices of stacks that several loops read are stored."""
    return _Rounds(graph, frozenset(sliced_bytes(graph, most)), shared).written(graph)


class _Rounds:
    """Writes the chosen loops of a program out."""

    def __init__(self, graph: BlockGraph, chosen: Collection[Place], shared: bool) -> None:
        self._chosen, self._shared = chosen, shared
        most = max([op.remat for op in graph.walk() if op.remat is not None], default=-1)
        self._again = count(most + 1)  # numbers of what is computed again

    def written(self, graph: BlockGraph, within: Place = ()) -> BlockGraph:
        """A program, or the region of that place; itself where nothing in it is chosen."""
        if not any(place[: len(within)] == within for place in self._chosen):
            return graph
        w = Written(list(graph.values), dict(graph.constants), once=False)
        parts = dict[int, dict[int, int]]()  # a stack that a loop has made -> its slices
        several = _read_by_several(
            [op for k, op in enumerate(graph.operations) if (*within, k) in self._chosen]
        )
        for k, op in enumerate(graph.operations):
            if (*within, k) in self._chosen:
                self._write(w, op, parts, several)
                continue
            inside = (self.written(r, (*within, k, n)) for n, r in enumerate(op.regions))
            w.operations.append(replace(op, inputs=w.read(op.inputs), regions=tuple(inside)))
        return without_unread(w.program(graph))

    def _write(
        self, w: Written, op: Operation, parts: dict[int, dict[int, int]], several: Collection[int]
    ) -> None:
        """Write a loop out, each operation from its own line. What it reads of stacks that others
        have made are the `parts` of these; its own are added. Slices of what `several` loops read
        are stored where devices share the work, and those that something computed again reads."""
        (body,), (consts, carries) = op.regions, counts(op)
        n = int(op.params["length"])
        again = {x.remat for x in body.operations} - {None}
        given = list(w.read(op.inputs))
        renews = renewed_outputs(body, consts + carries, carries)
        same = dict(zip(body.inputs[:consts], given[:consts], strict=True))
        for v, array in body.constants.items():
            same[v] = w.constant(array, body.values[v].dtype)
        carried = given[consts : consts + carries]
        stacks = {p: given[p] for p in range(consts + carries, len(given))}
        for p, v in stacks.items():
            stored = again or (self._shared and op.inputs[p] in several)
            if stored and v not in parts:
                (stacks[p],) = w.apply(_apart, [v], op)
        made: dict[int, dict[int, int]] = {q: {} for q in range(carries, len(body.outputs))}
        writing = {body.outputs[q]: p for q, p in renews.items()}
        w.like = at(op)
        for t in reversed(range(n)) if op.params["reverse"] else range(n):
            old = dict(zip(body.inputs[consts : consts + carries], carried, strict=True))
            now = {**same, **old}
            for p, stack in stacks.items():
                if p not in renews.values():
                    one = parts[stack][t] if stack in parts else _one_of(w, stack, t)
                    now[body.inputs[p]] = one
            numbers = {r: next(self._again) for r in again}
            for x in body.operations:
                w.like = at(x)
                (v, *_) = x.outputs
                if v in writing:
                    p = writing[v]
                    stacks[p] = _renewed(w, body, x, stacks[p], now, t)
                    now[v] = _one_of(w, stacks[p], t)
                    continue
                inputs = tuple([now[u] for u in x.inputs])
                outputs = tuple([w.value(body.values[u]) for u in x.outputs])
                remat = None if x.remat is None else numbers[x.remat]
                w.operations.append(replace(x, inputs=inputs, outputs=outputs, remat=remat))
                now.update(zip(x.outputs, outputs, strict=True))
            w.like = at(op)
            carried = [now[v] for v in body.outputs[:carries]]
            for q, rounds in made.items():
                if q not in renews:
                    rounds[t] = now[body.outputs[q]]
        results = list(carried)
        for q, rounds in made.items():
            if q in renews:
                results.append(stacks[renews[q]])
                continue
            slices = [(rounds[t], (1, *w.values[rounds[t]].shape)) for t in sorted(rounds)]
            results.append(w.joined([w.reshaped(v, shape) for v, shape in slices], 0))
            parts[results[-1]] = rounds
        w.stands.update(zip(op.outputs, results, strict=True))


def sliced_bytes(graph: BlockGraph, most: float = MOST) -> dict[Place, int]:
    """The loops that may be written out, in other loops as well -> the bytes of stacks whose slices
    products read in them. Those of fewest operations come first, up to `most` in all."""
    found = {place: (op, amount) for place, op, amount in _loops(graph)}
    left, kept = most, dict[Place, int]()
    for place in sorted(found, key=lambda k: (_length(found[k][0]), k)):
        op, amount = found[place]
        left -= _length(op)
        if left >= 0:
            kept[place] = amount
    return kept


def stores_slices(graph: BlockGraph) -> bool:
    """Whether devices that share the work store slices of the stacks that loops read."""
    return bool(_read_by_several([op for place, op, _ in _loops(graph) if len(place) == 1]))


def _read_by_several(loops: Sequence[Operation]) -> set[int]:
    """The stacks that several of some loops read."""
    read = Counter(v for op in loops for v in set(op.inputs[sum(counts(op)) :]))
    return {v for v, n in read.items() if n > 1}


def renews(graph: BlockGraph) -> bool:
    """Whether a loop that may be written out renews a stack, as a decoder's its caches."""
    loops = (op for _, op, _ in _loops(graph))
    return any(renewed_outputs(op.regions[0], sum(counts(op)), counts(op)[1]) for op in loops)


def _loops(graph: BlockGraph, within: Place = (), runs: int = 1) -> Iterator[_Loop]:
    """The loops of a program, or of a region that runs so often, that may be written out."""
    for k, op in enumerate(graph.operations):
        place = (*within, k)
        amount = _bytes_for_products(op) if op.is_scan else 0
        if amount:
            yield place, op, runs * amount
        elif op.remat is None:
            for n, region in enumerate(op.regions):
                yield from _loops(region, (*place, n), runs * op.rounds)


def _length(op: Operation) -> int:
    return int(op.params["length"]) * len(op.regions[0].operations)


def _bytes_for_products(op: Operation) -> int:
    """The bytes of the stacks of which rounds of a loop read slices in products; 0 if it cannot be
    written out: what it does may be in some order with other effects, or all is computed again.
    """
    (body,), (consts, carries) = op.regions, counts(op)
    inside = any(x.effectful or x.regions for x in body.operations)
    again = any(x.remat is not None for x in body.operations)
    renews = again and renewed_outputs(body, consts + carries, carries)
    if op.effectful or op.remat is not None or inside or renews:
        return 0
    stands = {v: v for v in body.inputs[consts + carries :]}  # views, and what is renewed
    read = set[int]()
    for x in body.operations:
        own = _signature(body, x)
        if own.fusion == "view" and x.inputs[0] in stands:
            stands[x.outputs[0]] = stands[x.inputs[0]]
        elif own.writes and x.inputs[own.writes[0]] in stands:
            stands[x.outputs[0]] = stands[x.inputs[own.writes[0]]]
        elif own.is_product and not own.by_vector:
            read.update(stands[v] for v in x.inputs if v in stands)
    return int(op.params["length"]) * sum(body.values[v].nbytes for v in read)


def _signature(body: BlockGraph, op: Operation) -> OperationSignature:
    types = ([body.values[v] for v in vs] for vs in (op.inputs, op.outputs))
    return registry.signature_of(op, *(tuple(x) for x in types))


def _apart(stack: Any) -> Any:
    """A stack of which a compiler stores the slices that it takes."""
    from jax import lax

    return lax.optimization_barrier(stack)


def _one_of(w: Written, stack: int, t: int) -> int:
    """Slice t of a stack."""
    shape = w.values[stack].shape[1:]
    start, ends = [t, *(0 for _ in shape)], [t + 1, *shape]
    return w.reshaped(w.sliced(stack, start, ends), shape)


def _renewed(
    w: Written, body: BlockGraph, op: Operation, stack: int, now: dict[int, int], t: int
) -> int:
    """A stack in whose slice t an operation of the body has written its part, within that slice, as
    kernels keep within what they write into."""
    from jax import lax

    _, part, *starts = _signature(body, op).writes

    def run(whole: Any, rows: Any, *places: Any) -> Any:
        kept = [
            lax.clamp(np.zeros((), x.dtype), x, np.asarray(n - m, x.dtype)).astype(np.int32)
            for x, n, m in zip(places, whole.shape[1:], rows.shape, strict=True)
        ]
        return lax.dynamic_update_slice_p.bind(whole, rows[None], np.int32(t), *kept)

    reads = [stack, now[op.inputs[part]], *(now[op.inputs[p]] for p in starts)]
    (made,) = w.apply(run, reads, op)
    return made
