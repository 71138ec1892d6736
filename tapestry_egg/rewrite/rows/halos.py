"""Halos: windows over a dim that devices share read only the rows beside their own block.

An operation whose window slides along a dim reads, for each block of its results, the block of its
operand that stands at the same place, and margins of constant width on either side: that says its
projection. The dim is split in as many blocks as there are devices, which become rows of another
dim along which the operation maps; before it every block gets the edge rows of its neighbours, and
at the ends of the dim what the template says lies outside. So a device that has a block of the dim
sends its edges, not the block. Nothing is known of any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.monoids.fold import zero
from tapestry_egg.zspace import Projection, ZRange

from .cuts import each_of
from .even_parts import may_grow, signature_in


@dataclass(frozen=True)
class _Window:
    """An operand that is read with margins: along `dim`, `low` rows before a block and `high`
    after it; `rows` is the dim that the blocks become rows of. Outside is `monoid`'s zero."""

    dim: int
    low: int
    high: int
    rows: int
    monoid: str | None


@dataclass(frozen=True)
class _Blocks:
    """How an operation runs on blocks: per operand its window, if it has one, and per result the
    dims of blocks and of rows."""

    operands: tuple[_Window | None, ...]
    outputs: tuple[tuple[int, int], ...]
    params: dict[str, Any]


def with_halos(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program, its loops and branches too, with windows over blocks and their margins wherever
    a batch cannot be shared by so many devices, and what a window slides along can; the same graph
    where there is none."""
    operations = []
    for op in graph.operations:
        regions = tuple([with_halos(r, parts) for r in op.regions])
        same = all(a is b for a, b in zip(regions, op.regions, strict=True))
        operations.append(op if same else replace(op, regions=regions))
    if any(a is not b for a, b in zip(operations, graph.operations, strict=True)):
        graph = replace(graph, operations=tuple(operations))
    found = {}
    for k, op in enumerate(graph.operations):
        how = _blocks(graph, op, parts) if may_grow(graph, op) else None
        if how is not None:
            found[k] = how
    return _Made(graph, found, parts).graph_made() if found else graph


def found_in(graph: BlockGraph, parts: int) -> list[tuple[OperationSignature, int]]:
    """The signatures of the operations that `with_halos` runs on blocks, and how often each runs
    as loops do."""
    found = []
    for op in graph.operations:
        times = int(op.params["length"]) if op.kernel == "scan" else 1
        found += [(sig, n * times) for r in op.regions for sig, n in found_in(r, parts)]
        if may_grow(graph, op) and _blocks(graph, op, parts) is not None:
            found.append((signature_in(graph, op), 1))
    return found


def _blocks(graph: BlockGraph, op: Operation, parts: int) -> _Blocks | None:
    sig = signature_in(graph, op)
    for d in _dims(sig):
        if sig.extents[d] % parts or not _slides(sig, d):
            continue
        for b in _dims(sig):
            found = _along(op, sig, d, b, parts) if b != d else None
            if found is not None and sig.extents[b] % parts == 0:
                return None  # Its rows can be shared, and need no margins.
            if found is not None:
                return found
    return None


def _slides(sig: OperationSignature, d: int) -> bool:
    """Whether what one point of an index dim reads of an operand is more than a step along it."""
    return any(
        row[d] and size > row[d]
        for projection in sig.inputs
        for row, size in zip(projection.matrix, projection.shape, strict=True)
    )


def _dims(sig: OperationSignature) -> Iterator[int]:
    if sig.opaque or sig.once:
        return
    for d, dim in enumerate(sig.index):
        if dim.role == "map" and d not in sig.placed:
            yield d


def _along(op: Operation, sig: OperationSignature, d: int, b: int, parts: int) -> _Blocks | None:
    """The operation with index dim `d` in blocks that are rows of index dim `b`."""
    windows: list[_Window | None] = []
    local: list[tuple[int, ...]] = []
    everywhere = ZRange.from_shape(sig.extents)
    for p, (projection, type_) in enumerate(zip(sig.inputs, sig.input_types, strict=True)):
        if not _read_whole(projection.image(everywhere), type_.shape, d, projection):
            return None
        if not any(row[d] for row in projection.matrix):
            if any(row[b] for row in projection.matrix):
                return None
            windows.append(None)
            local.append(type_.shape)
            continue
        found = _window(sig, p, d, b, parts)
        if found is None:
            return None
        windows.append(found)
        shape = list(type_.shape)
        shape[found.dim] = shape[found.dim] // parts + found.low + found.high
        shape[found.rows] *= parts
        local.append(tuple(shape))
    if not any(w and (w.low or w.high) for w in windows):
        return None
    outputs: list[tuple[int, int]] = []
    made: list[tuple[int, ...]] = []
    for projection, type_ in zip(sig.outputs, sig.output_types, strict=True):
        places = [_clean(sig, projection, type_, x) for x in (d, b)]
        if places[0] is None or places[1] is None:
            return None
        outputs.append((places[0], places[1]))
        shape = list(type_.shape)
        shape[places[0]] //= parts
        shape[places[1]] *= parts
        made.append(tuple(shape))
    try:
        params = registry.localize(op.kernel, op.params, sig, local, made)
        dtypes = [t.dtype for t in sig.input_types]
        types = tuple([TensorType(s, t) for s, t in zip(local, dtypes, strict=True)])
        shapes = [t.shape for t in registry.output_types(op.kernel, params, types)]
    except TemplateError:
        return None
    return _Blocks(tuple(windows), tuple(outputs), params) if shapes == made else None


def _read_whole(image: ZRange, shape: tuple[int, ...], d: int, projection: Projection) -> bool:
    """Whether all of an operand is read along the dims that stay as they are: what lies outside is
    then filled in by the kernel itself, else by whoever runs it (`OperationSignature.margins`)."""
    return all(
        projection.matrix[k][d] or (image.start[k] <= 0 and n <= image.end[k])
        for k, n in enumerate(shape)
    )


def _window(sig: OperationSignature, p: int, d: int, b: int, parts: int) -> _Window | None:
    """The margins with which an operand is read."""
    projection, type_ = sig.inputs[p], sig.input_types[p]
    dims = [k for k, row in enumerate(projection.matrix) if row[d]]
    rows = _clean(sig, projection, type_, b)
    if len(dims) != 1 or rows is None or rows == dims[0]:
        return None
    (k,) = dims
    row, step = projection.matrix[k], projection.matrix[k][d]
    if step < 1 or any(a for e, a in enumerate(row) if e != d):
        return None
    if step * sig.extents[d] != type_.shape[k]:
        return None
    low, high = -projection.offset[k], projection.offset[k] + projection.shape[k] - step
    most = type_.shape[k] // parts
    beyond = sig.beyond(p)
    if not (0 <= low <= most and 0 <= high <= most):
        return None
    if (low or high) and not isinstance(beyond, str):
        return None
    return _Window(k, low, high, rows, beyond if isinstance(beyond, str) else None)


def _clean(
    sig: OperationSignature, projection: Projection, type_: TensorType, index: int
) -> int | None:
    """The dim of a tensor that falls into blocks as an index dim does, and into nothing else."""
    dims = [k for k, row in enumerate(projection.matrix) if row[index]]
    if len(dims) != 1 or each_of(sig, projection, type_, dims[0], index) is None:
        return None
    return dims[0]


class _Made:
    """Makes the program with some operations on blocks."""

    def __init__(self, graph: BlockGraph, found: dict[int, _Blocks], parts: int) -> None:
        self.given, self.found, self.parts = graph, found, parts
        self.values = list(graph.values)
        self.constants = dict(graph.constants)
        self.operations: list[Operation] = []
        self.known: dict[Any, int] = {}
        self.like = graph.operations[0]

    def graph_made(self) -> BlockGraph:
        for k, op in enumerate(self.given.operations):
            self.like = op
            if k not in self.found:
                self.operations.append(op)
                continue
            how = self.found[k]
            inputs = tuple(
                [
                    v if w is None else self._with_margins(v, w)
                    for v, w in zip(op.inputs, how.operands, strict=True)
                ]
            )
            made = []
            for v, (dim, rows) in zip(op.outputs, how.outputs, strict=True):
                type_ = self.given.values[v].strong
                shape = list(type_.shape)
                shape[dim] //= self.parts
                shape[rows] *= self.parts
                made.append(self._value(TensorType(tuple(shape), type_.dtype)))
            own = replace(op, inputs=inputs, outputs=tuple(made), params=how.params)
            self.operations.append(own)
            for v, u, (dim, rows) in zip(op.outputs, made, how.outputs, strict=True):
                self._joined(u, v, dim, rows)
        made_graph = replace(
            self.given,
            values=tuple(self.values),
            operations=tuple(self.operations),
            constants=self.constants,
        )
        return without_unread(made_graph)

    def _with_margins(self, v: int, window: _Window) -> int:
        """The operand in blocks, which are rows of another dim, each with its margins."""
        shape, dim, rows, n = self.values[v].shape, window.dim, window.rows, self.parts
        block = shape[dim] // n
        at = self._reshaped(v, (*shape[:dim], n, block, *shape[dim + 1 :]))
        # Where the dims of the operand are now, and those of blocks before those of rows.
        place = [k if k < dim else k + 1 for k in range(len(shape))]
        order: list[int] = []
        for k in range(len(shape)):
            order += [dim, place[k]] if k == rows else [place[k]]
        at = self._turned(at, order)
        blocks, inside = order.index(dim), order.index(place[dim])
        low = self._cut(at, inside, block - window.low, block) if window.low else None
        high = self._cut(at, inside, 0, window.high) if window.high else None
        pieces = [at]
        if low is not None or high is not None:
            low, high = self._stored(low, high)
        if window.low and low is not None:
            pieces.insert(0, self._moved(low, blocks, 1, window))
        if window.high and high is not None:
            pieces.append(self._moved(high, blocks, -1, window))
        if len(pieces) > 1:
            length = sum(self.values[u].shape[inside] for u in pieces)
            whole = list(self.values[at].shape)
            whole[inside] = length
            at = self._new("concatenate", tuple(pieces), tuple(whole), {"dimension": inside})
        joined = list(self.values[at].shape)
        joined[blocks : blocks + 2] = [joined[blocks] * joined[blocks + 1]]
        return self._reshaped(at, tuple(joined))

    def _joined(self, u: int, v: int, dim: int, rows: int) -> None:
        """Make a result of the program of the one on blocks."""
        shape, n = self.values[u].shape, self.parts
        at = self._reshaped(u, (*shape[:rows], n, shape[rows] // n, *shape[rows + 1 :]))
        place = [k if k < rows else k + 1 for k in range(len(shape))]
        order: list[int] = []
        for k in range(len(shape)):
            order += [rows, place[k]] if k == dim else [place[k]]
        at = self._turned(at, order)
        params = {"new_sizes": list(self.given.values[v].shape), "dimensions": None}
        own = self.like
        self.operations.append(
            Operation(
                "reshape",
                (at,),
                (v,),
                {**params, "sharding": None},
                source=own.source,
                scope=own.scope,
            )
        )

    def _stored(self, low: int | None, high: int | None) -> tuple[int, int]:
        """Both edges, or the one twice: kept as they are, since what is stored can be sent."""
        first = high if low is None else low
        second = low if high is None else high
        assert first is not None and second is not None
        made = tuple([self._value(self.values[v].strong) for v in (first, second)])
        own = self.like
        self.operations.append(
            Operation(
                "optimization_barrier",
                (first, second),
                made,
                {},
                source=own.source,
                scope=own.scope,
            )
        )
        return made[0], made[1]

    def _moved(self, v: int, dim: int, by: int, window: _Window) -> int:
        """Every block's neighbour; at the end what lies outside."""
        assert window.monoid is not None
        dtype = self.values[v].dtype
        (array,) = zero(monoid(window.monoid), decode_dtype(dtype)).values()
        key = "constant", dtype, window.monoid
        if key not in self.known:
            self.known[key] = self._value(TensorType((), dtype))
            self.constants[self.known[key]] = np.asarray(array)
        shape = self.values[v].shape
        config = [[by, -by, 0] if k == dim else [0, 0, 0] for k in range(len(shape))]
        return self._new("pad", (v, self.known[key]), shape, {"padding_config": config})

    def _cut(self, v: int, dim: int, start: int, end: int) -> int:
        shape = list(self.values[v].shape)
        first, last = [0] * len(shape), list(shape)
        first[dim], last[dim], shape[dim] = start, end, end - start
        params = {"start_indices": first, "limit_indices": last, "strides": None}
        return self._new("slice", (v,), tuple(shape), params)

    def _reshaped(self, v: int, shape: tuple[int, ...]) -> int:
        if shape == self.values[v].shape:
            return v
        params = {"new_sizes": list(shape), "dimensions": None, "sharding": None}
        return self._new("reshape", (v,), shape, params)

    def _turned(self, v: int, order: list[int]) -> int:
        if order == sorted(order):
            return v
        shape = tuple([self.values[v].shape[k] for k in order])
        return self._new("transpose", (v,), shape, {"permutation": order})

    def _value(self, type_: TensorType) -> int:
        self.values.append(type_)
        return len(self.values) - 1

    def _new(
        self, kernel: str, inputs: tuple[int, ...], shape: tuple[int, ...], params: dict[str, Any]
    ) -> int:
        """The result of one more operation; equal ones are made once."""
        key = kernel, inputs, repr(params)
        if key not in self.known:
            type_ = TensorType(shape, self.values[inputs[0]].dtype)
            made = self.known[key] = self._value(type_)
            own = self.like
            self.operations.append(
                Operation(kernel, inputs, (made,), params, source=own.source, scope=own.scope)
            )
        return self.known[key]
