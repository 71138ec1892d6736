"""Even parts: dims that devices cannot share evenly, padded over a whole region of a program.

Six heads on four devices become eight. The region is what reads and makes rows along such a dim:
operations whose projections say that blocks of rows give blocks of what the whole gives (`cuts.py`)
run on more rows, each on its own, and the rows that were added hold whatever they hold. Before a
sum over rows they are overwritten with the monoid's neutral element. What enters the region is
padded with zeros, what leaves it is cut back. Every later stage sees extents that divide, and
prices the rows that were added like all others. Nothing is known of any kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.monoids.fold import zero
from tapestry_egg.tracing import constraints
from tapestry_egg.zspace import ZRange

from .cuts import Cut, Rows, major

# Of these numbers no measurement is kept.

#: Of the time that products take where all devices share them as evenly as they can, padding must
#: save this share: a program that devices can share is left alone.
_LEAST_GAIN = 0.2
#: Products that dims to pad are taken from, those first that take longest; and dims, one after
#: another.
_SEEDS, _ROUNDS = 3, 3


def with_even_parts(graph: BlockGraph, parts: int) -> BlockGraph:
    """The program, its loops and branches too, with dims padded that so many devices cannot share;
    the same graph where they can share most of the work as it is."""
    operations = []
    for op in graph.operations:
        regions = tuple([with_even_parts(r, parts) for r in op.regions])
        same = all(a is b for a, b in zip(regions, op.regions, strict=True))
        operations.append(op if same else replace(op, regions=regions))
    if any(a is not b for a, b in zip(operations, graph.operations, strict=True)):
        graph = replace(graph, operations=tuple(operations))
    for _ in range(_ROUNDS):
        found = _best(graph, parts)
        if found is None:
            break
        graph = found.graph_made()
    return graph


def padded_along(graph: BlockGraph, number: int, index: int, extent: int) -> BlockGraph | None:
    """The program with an index dim of one of its operations padded to an extent, and whatever
    reads and makes its rows; None where that operation cannot run on more of them."""
    op = graph.operations[number]
    if not may_grow(graph, op):
        return None
    region = _Region(graph, signature_in(graph, op).extents[index], extent)
    return region.graph_made() if region.grown(number, index) else None


def _best(graph: BlockGraph, parts: int) -> _Region | None:
    """The region that saves most, if one saves enough."""
    work = _Work(graph, parts)
    given = work.seconds(None)
    best: _Region | None = None
    least = (1.0 - _LEAST_GAIN) * given
    for k, index, extent in work.candidates():
        region = _Region(graph, work.signatures[k].extents[index], extent)
        if not region.grown(k, index):
            continue
        seconds = work.seconds(region)
        if seconds < least:
            best, least = region, seconds
    return best


class _Work:
    """What products of a program take, in flops of one device, when devices share them evenly."""

    def __init__(self, graph: BlockGraph, parts: int) -> None:
        self.graph, self.parts = graph, parts
        self.signatures = {
            k: sig
            for k, op in enumerate(graph.operations)
            if may_grow(graph, op) and (sig := signature_in(graph, op)).contracts
        }

    def seconds(self, region: _Region | None) -> float:
        """The flops of all products on the device that has most, some of them in a region."""
        total = 0.0
        for k, sig in self.signatures.items():
            extents = list(sig.extents)
            waste = 1.0
            if region is not None and k in region.inside:
                index = region.inside[k].index
                waste = region.extent / region.rows
                extents[index] = extents[index] // region.rows * region.extent
            total += sig.whole_flops * waste / shared(sig, extents, self.parts)
        return total

    def candidates(self) -> Iterator[tuple[int, int, int]]:
        """Products, an index dim of each, and the extent to which it may be padded."""

        def alone(k: int) -> float:
            sig = self.signatures[k]
            return sig.whole_flops / shared(sig, sig.extents, self.parts)

        uneven = [
            k for k, s in self.signatures.items() if shared(s, s.extents, self.parts) < self.parts
        ]
        for k in sorted(uneven, key=lambda k: (-alone(k), k))[:_SEEDS]:
            sig = self.signatures[k]
            for index, dim in enumerate(sig.index):
                if dim.size < 2 or dim.role not in ("map", "reduce"):
                    continue
                extent = self._padded(sig, index)
                if extent > dim.size:
                    yield k, index, extent

    def _padded(self, sig: OperationSignature, index: int) -> int:
        """The extent of an index dim with which a product takes least on every device."""
        size = sig.extents[index]
        best = size, 1.0 / shared(sig, sig.extents, self.parts)
        for n in range(2, self.parts + 1):
            if self.parts % n:
                continue
            extents = list(sig.extents)
            extents[index] = -(-size // n) * n
            took = extents[index] / size / shared(sig, extents, self.parts)
            if took < best[1]:
                best = extents[index], took
        return best[0]


def shared(sig: OperationSignature, extents: Sequence[int], parts: int) -> int:
    """How many of `parts` devices can share an operation in equal parts, whatever dims are cut."""
    left = parts
    for dim, extent in zip(sig.index, extents, strict=True):
        if dim.role in ("map", "reduce"):
            while (common := gcd(extent, left)) > 1:
                left //= common
                extent //= common
    return parts // left


def may_grow(graph: BlockGraph, op: Operation) -> bool:
    """Whether an operation is one that may run on more rows."""
    if op.regions or op.effectful or op.kernel == constraints.KERNEL or registry.runs_once(op):
        return False
    types = [graph.values[v].dtype for v in (*op.inputs, *op.outputs)]
    return not any(t.startswith("key<") or t == "float0" for t in types)


def signature_in(graph: BlockGraph, op: Operation) -> OperationSignature:
    values = graph.values
    types = tuple([values[v] for v in op.inputs]), tuple([values[v] for v in op.outputs])
    return registry.signature_of(op, *types)


@dataclass(frozen=True)
class _Grown:
    """An operation of the region: its rows, the index dim they are, and how it runs on them."""

    rows: Rows
    index: int
    boxes: tuple[ZRange, ...]  # per operand, what the whole operation reads of it
    params: dict[str, Any]


@dataclass
class _Region:
    """A region that has `rows` rows, and is to have `extent`."""

    graph: BlockGraph
    rows: int
    extent: int
    inside: dict[int, _Grown] = field(default_factory=dict)  # by number of operation

    def grown(self, seed: int, index: int) -> bool:
        """Take in an operation along an index dim, and whatever reads and makes rows of it."""
        graph = self.graph
        makers, readers = graph.producers(), graph.readers()
        seen: set[int] = set()
        rows: set[tuple[int, Cut]] = set()  # values, and where they have them
        stack: list[tuple[int, Cut]] = []

        def take(k: int, index: int, inner: int) -> bool:
            made = self._operation(graph.operations[k], index, inner)
            if made is None:
                return False
            self.inside[k] = made
            op = graph.operations[k]
            cuts = (*made.rows.inputs, *made.rows.outputs)
            for v, cut in zip((*op.inputs, *op.outputs), cuts, strict=True):
                if cut is not None and (v, cut) not in rows:
                    rows.add((v, cut))
                    stack.append((v, cut))
            return True

        if not take(seed, index, 1):
            return False
        while stack:
            v, cut = stack.pop()
            near = [*([makers[v]] if v in makers else ()), *readers[v]]
            for k in near:
                op = graph.operations[k]
                if k in self.inside or k in seen or not may_grow(graph, op):
                    continue
                found = _along(signature_in(graph, op), op, v, cut)
                if found is None or not take(k, *found):
                    seen.add(k)
        return True

    def _operation(self, op: Operation, index: int, inner: int) -> _Grown | None:
        """How an operation runs on more rows; None where it cannot, or need not."""
        sig = signature_in(self.graph, op)
        if sig.extents[index] != self.rows * inner:
            return None
        rows = Rows.along(sig, index, inner, any_monoid=True)
        if rows is None or (rows.summed and _neutral(sig, rows, index) is None):
            return None
        whole = ZRange.from_shape(sig.extents)
        boxes = tuple([sig.operand_box(p, whole) for p in range(len(sig.inputs))])
        local = [self.longer(b.shape, c) for b, c in zip(boxes, rows.inputs, strict=True)]
        made = [
            self.longer(t.shape, c) for t, c in zip(sig.output_types, rows.outputs, strict=True)
        ]
        dtypes = [t.dtype for t in sig.input_types]
        try:
            params = registry.localize(op.kernel, op.params, sig, local, made)
            types = tuple([TensorType(s, d) for s, d in zip(local, dtypes, strict=True)])
            outputs = registry.output_types(op.kernel, params, types)
        except TemplateError:
            return None
        if [t.shape for t in outputs] != made:
            return None
        return _Grown(rows, index, boxes, params)

    def longer(self, shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        """The shape with all rows."""
        if cut is None:
            return shape
        return (*shape[: cut.dim], self.extent * cut.inner, *shape[cut.dim + 1 :])

    def graph_made(self) -> BlockGraph:
        """The program with the region padded."""
        return _Padded(self).graph_made()


def _along(sig: OperationSignature, op: Operation, v: int, cut: Cut) -> tuple[int, int] | None:
    """The index dim of an operation that a value's rows are, and how many points each has."""
    ports = (*zip(op.inputs, sig.inputs, sig.input_types, strict=True),)
    ports += (*zip(op.outputs, sig.outputs, sig.output_types, strict=True),)
    for u, projection, type_ in ports:
        found = major(sig, projection, type_, cut.dim) if u == v else None
        if found is not None and cut.inner % found[1] == 0:
            return found[0], cut.inner // found[1]
    return None


def _neutral(sig: OperationSignature, rows: Rows, index: int) -> str | None:
    """The monoid whose zero, in all that a sum over rows reads of them, adds nothing to it; None
    where that is not known: it is of products, and of sums of one operand."""
    if sig.gemm is not None and index in sig.gemm.k and rows.monoid in (None, "sum"):
        return "sum"
    if sig.fusion == "reduce" and len(sig.inputs) == 1 and not sig.initial:
        return sig.index[index].monoid
    return None


class _Padded:
    """Makes the program with a region padded."""

    def __init__(self, region: _Region) -> None:
        self.region, self.given = region, region.graph
        self.values = list(self.given.values)
        self.constants = dict(self.given.constants)
        self.operations: list[Operation] = []
        self.known: dict[Any, int] = {}
        self.grown: dict[int, tuple[int, Cut]] = {}  # value -> the one with all rows
        self.zeros: set[int] = set()  # values whose rows that were added are zero
        self.like: Operation = self.given.operations[min(region.inside)]

    def graph_made(self) -> BlockGraph:
        given = self.given
        for k, op in enumerate(given.operations):
            self.like = op
            if k in self.region.inside:
                self._grown(op, self.region.inside[k])
            else:
                read = tuple([self._short(v) for v in op.inputs])
                self.operations.append(replace(op, inputs=read))
        outputs = tuple([self._short(v) for v in given.outputs])
        made = replace(
            given,
            values=tuple(self.values),
            operations=tuple(self.operations),
            outputs=outputs,
            constants=self.constants,
        )
        return without_unread(made)

    def _grown(self, op: Operation, how: _Grown) -> None:
        """An operation on all rows."""
        rows, sig = how.rows, how.rows.signature
        neutral = _neutral(sig, rows, how.index) if rows.summed else None
        inputs = []
        for v, cut, box in zip(op.inputs, rows.inputs, how.boxes, strict=True):
            at = self._short(v) if cut is None else self._long(v, cut)
            if cut is not None and neutral is not None:
                at = self._masked(at, cut, neutral)
            inputs.append(self._boxed(at, box, cut))
        outputs = []
        for v, cut in zip(op.outputs, rows.outputs, strict=True):
            if cut is None:
                outputs.append(v)
                continue
            type_ = self.given.values[v]
            made = self._value(replace(type_, shape=self.region.longer(type_.shape, cut)))
            self.grown[v] = made, cut
            outputs.append(made)
        self.operations.append(
            replace(op, inputs=tuple(inputs), outputs=tuple(outputs), params=how.params)
        )

    def _long(self, v: int, cut: Cut) -> int:
        """The value with all rows along a dim."""
        if v in self.grown and self.grown[v][1] == cut:
            return self.grown[v][0]
        type_ = self.given.values[v]
        shape = self.region.longer(type_.shape, cut)
        added = shape[cut.dim] - type_.shape[cut.dim]
        config = [[0, added if d == cut.dim else 0, 0] for d in range(len(shape))]
        filled = self._scalar(type_.dtype, "or" if type_.dtype == "bool" else "sum")
        made = self._new("pad", (self._short(v), filled), shape, type_, {"padding_config": config})
        self.zeros.add(made)
        return made

    def _short(self, v: int) -> int:
        """The value as the program has it."""
        if v not in self.grown:
            return v
        made, _ = self.grown[v]
        type_ = self.given.values[v]
        params = {
            "start_indices": [0] * len(type_.shape),
            "limit_indices": list(type_.shape),
            "strides": None,
        }
        return self._new("slice", (made,), type_.shape, type_, params)

    def _boxed(self, v: int, box: ZRange, cut: Cut | None) -> int:
        """Of dims without rows, what the operation reads of them."""
        type_ = self.values[v]
        start, end = list(box.start), list(box.end)
        if cut is not None:
            start[cut.dim], end[cut.dim] = 0, type_.shape[cut.dim]
        shape = tuple([b - a for a, b in zip(start, end, strict=True)])
        if shape == type_.shape:
            return v
        params = {"start_indices": start, "limit_indices": end, "strides": None}
        made = self._new("slice", (v,), shape, type_, params)
        if v in self.zeros:
            self.zeros.add(made)
        return made

    def _masked(self, v: int, cut: Cut, neutral: str) -> int:
        """The value with the neutral element in the rows that were added."""
        if v in self.zeros and neutral == "sum":
            return v
        type_ = self.values[v]
        extent = (type_.shape[cut.dim],)
        flags = TensorType((), "bool")
        places = self._new(
            "iota",
            (),
            extent,
            TensorType((), "int32"),
            {"dtype": {"$dtype": "int32"}, "shape": list(extent), "dimension": 0, "sharding": None},
        )
        end = self._constant(np.asarray(self.region.rows * cut.inner, np.int32), "int32")
        holds = self._new("lt", (places, self._spread(end, extent, ())), extent, flags, {})
        mask = self._spread(holds, type_.shape, (cut.dim,))
        filled = self._spread(self._scalar(type_.dtype, neutral), type_.shape, ())
        return self._new("select_n", (mask, filled, v), type_.shape, type_, {})

    def _spread(self, v: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
        if self.values[v].shape == shape:
            return v
        params = {"shape": list(shape), "broadcast_dimensions": list(dims), "sharding": None}
        return self._new("broadcast_in_dim", (v,), shape, self.values[v], params)

    def _scalar(self, dtype: str, neutral: str) -> int:
        (array,) = zero(monoid(neutral), decode_dtype(dtype)).values()
        return self._constant(np.asarray(array), dtype)

    def _constant(self, array: np.ndarray, dtype: str) -> int:
        key = "constant", dtype, array.tobytes()
        if key not in self.known:
            self.known[key] = self._value(TensorType((), dtype))
            self.constants[self.known[key]] = array
        return self.known[key]

    def _value(self, type_: TensorType) -> int:
        self.values.append(type_)
        return len(self.values) - 1

    def _new(
        self,
        kernel: str,
        inputs: tuple[int, ...],
        shape: tuple[int, ...],
        like: TensorType,
        params: dict[str, Any],
    ) -> int:
        """The result of one more operation, of the dtype of `like`; equal ones are made once."""
        key = kernel, inputs, repr(params)
        if key not in self.known:
            made = self.known[key] = self._value(TensorType(shape, like.dtype))
            own = self.like
            self.operations.append(
                Operation(kernel, inputs, (made,), params, source=own.source, scope=own.scope)
            )
        return self.known[key]
