"""Rows read by their own numbers: `x[arange(n), labels]` as `take_along_axis` writes it.

A column of a gather's indices that counts along one of their dims says that row i is read for i: a
batch dim of the gather. Then the rows need not be together to be read. Scatters are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.computed import Computed
from tapestry_egg.tracing.known_places import NAMES
from tapestry_egg.tracing.spelled import NOWHERE, Spelled


def with_batch_dims(graph: BlockGraph) -> BlockGraph:
    """The graph with batch dims wherever indices count rows; the same graph where none do."""
    if not any(registry.meaning(op.kernel) in NAMES for op in graph.operations):
        return graph
    return _Counts(graph).graph_made()


class _Counts(Spelled):
    """Finds what counts, and puts batch dims in its place."""

    def __init__(self, graph: BlockGraph) -> None:
        super().__init__(list(graph.values), once=False)
        self.graph = graph
        self.makers = graph.producers()
        self.computed = Computed.of(graph)

    def graph_made(self) -> BlockGraph:
        for op in self.graph.operations:
            batched = registry.meaning(op.kernel) in NAMES
            self.operations.append(self._batched(op) if batched else op)
        if len(self.values) == len(self.graph.values):
            return self.graph
        made = replace(self.graph, values=tuple(self.values), operations=tuple(self.operations))
        return without_unread(made)

    def _batched(self, op: Operation) -> Operation:
        numbered, batch, along, single, _ = NAMES[registry.meaning(op.kernel)]
        dims: dict[str, Any] = dict(op.params["dimension_numbers"])
        columns = self._columns(op.inputs[1])
        given = dims[numbered]
        if len(columns) < 2 or len(columns) != len(given):
            return op
        shape = self.values[op.inputs[0]].shape
        found: dict[int, tuple[int, int]] = {}  # column -> dim of the operand, dim of the indices
        taken = set(dims[along])
        for c, (v, d) in enumerate(zip(columns, given, strict=True)):
            j = self.counts(v)
            extent = self.values[v].shape
            if j is None or j == len(extent) - 1 or j in taken or d not in dims[single]:
                continue
            if extent[j] == shape[d] and len(found) + 1 < len(columns):
                found[c] = d, j
                taken.add(j)
        if not found:
            return op
        pairs = sorted([*zip(dims[batch], dims[along], strict=True), *found.values()])
        gone = {d for d, _ in found.values()}
        dims[batch], dims[along] = [d for d, _ in pairs], [j for _, j in pairs]
        dims[numbered] = [d for c, d in enumerate(given) if c not in found]
        dims[single] = [d for d in dims[single] if d not in gone]
        indices = self._joined([v for c, v in enumerate(columns) if c not in found], op)
        params = {**op.params, "dimension_numbers": dims}
        inputs = (op.inputs[0], indices, *op.inputs[2:])
        return replace(op, inputs=inputs, params=params)

    def _columns(self, v: int) -> Sequence[int]:
        """The columns that indices are put together of."""
        at = self.makers.get(v)
        if at is None:
            return ()
        op, last = self.graph.operations[at], len(self.values[v].shape) - 1
        joins = any(t.joins for t in registry.templates().get(op.kernel, ()))
        if not joins or registry.signature_in(self.graph, op).placed != (last,):
            return ()
        return op.inputs if all(self.values[u].shape[last] == 1 for u in op.inputs) else ()

    def _joined(self, columns: Sequence[int], op: Operation) -> int:
        self.like = replace(NOWHERE, source=op.source)
        first = self.values[columns[0]]
        if len(columns) > 1:
            return self.joined(columns, first.rank - 1)
        same = {"shape": [*first.shape], "broadcast_dimensions": [*range(first.rank)]}
        # A copy, so that the program is another.
        return self.new("broadcast_in_dim", columns, first, {**same, "sharding": None})

    def counts(self, v: int) -> int | None:
        """The dim along which a value counts from zero, alike along all others."""
        if kind(self.values[v].dtype) not in ("int", "uint"):
            return None
        array = self.computed(v)
        return None if array is None else _counts(array)


def _counts(array: np.ndarray) -> int | None:
    if array.dtype.kind not in "iu" or array.size < 2:
        return None
    for j, n in enumerate(array.shape):
        shape = [1] * array.ndim
        shape[j] = n
        if n > 1 and np.array_equal(
            array, np.broadcast_to(np.arange(n).reshape(shape), array.shape)
        ):
            return j
    return None
