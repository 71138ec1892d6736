"""Even parts: dims that devices cannot share evenly, padded over a whole region of a program.

Six heads on four devices become eight. The region is what reads and makes rows along such a dim:
operations whose projections say that blocks of rows give blocks of what the whole gives (`cuts.py`)
run on more rows, each on its own, and the rows that were added hold whatever they hold. Before a
sum over rows they are overwritten with the monoid's neutral element. Windows that slide along rows
are of the region, too: where their steps do not make up the operand (254 rows of 256), they get as
many as make it up, and an operand whose rows were added is overwritten there with what lies outside
of it. What enters the region is padded with zeros, what leaves it is cut back. Every later stage
sees extents that divide, and prices the rows that were added like all others. Nothing is known of
any kernel.
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
        found = _best(graph, parts) or _best(graph, parts, in_all=True)
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
    region = _Region(graph)
    return region.graph_made() if region.grown(number, index, extent) else None


def _best(graph: BlockGraph, parts: int, in_all: bool = False) -> _Region | None:
    """The region that saves most, if one saves enough; `in_all` as for `shared`."""
    work = _Work(graph, parts, in_all)
    if in_all and not any(s.gemm and not s.is_product for s in work.signatures.values()):
        return None  # the same again
    given = work.seconds(None)
    best: _Region | None = None
    least = (1.0 - _LEAST_GAIN) * given
    for k, index, extent in work.candidates():
        region = _Region(graph)
        if not region.grown(k, index, extent):
            continue
        seconds = work.seconds(region)
        if seconds < least:
            best, least = region, seconds
    return best


class _Work:
    """What products of a program take, in flops of one device, when devices share them evenly."""

    def __init__(self, graph: BlockGraph, parts: int, in_all: bool = False) -> None:
        self.graph, self.parts, self.in_all = graph, parts, in_all
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
                index, size = region.inside[k].index, region.inside[k].size
                waste = size / extents[index]
                extents[index] = size
            total += sig.whole_flops * waste / self._shared(sig, extents)
        return total

    def _shared(self, sig: OperationSignature, extents: Sequence[int]) -> int:
        return shared(sig, extents, self.parts, self.in_all)

    def candidates(self) -> Iterator[tuple[int, int, int]]:
        """Products, an index dim of each, and the extent to which it may be padded."""

        def alone(k: int) -> float:
            sig = self.signatures[k]
            return sig.whole_flops / self._shared(sig, sig.extents)

        uneven = [k for k, s in self.signatures.items() if self._shared(s, s.extents) < self.parts]
        for k in sorted(uneven, key=lambda k: (-alone(k), k))[:_SEEDS]:
            sig = self.signatures[k]
            for index, dim in enumerate(sig.index):
                if dim.size < 2 or dim.role not in ("map", "reduce"):
                    continue
                extent = self._padded(sig, index)
                if extent > dim.size:
                    yield k, index, extent

    def _padded(self, sig: OperationSignature, index: int) -> int:
        """The extent of an index dim with which a product takes least on every device: with it a
        window's steps make up the operand."""
        size = sig.extents[index]
        least = max([size, *_steps(sig, index)])
        best = size, 1.0 / self._shared(sig, sig.extents)
        for n in range(2, self.parts + 1):
            if self.parts % n:
                continue
            extents = list(sig.extents)
            extents[index] = -(-least // n) * n
            took = extents[index] / size / self._shared(sig, extents)
            if took < best[1]:
                best = extents[index], took
        return best[0]


def _steps(sig: OperationSignature, index: int) -> Iterator[int]:
    """How many steps along an index dim make up the dims of operands that it moves along."""
    for projection, type_ in zip(sig.inputs, sig.input_types, strict=True):
        for row, extent in zip(projection.matrix, type_.shape, strict=True):
            if row[index] > 0:
                yield -(-extent // row[index])


def shared(
    sig: OperationSignature, extents: Sequence[int], parts: int, in_all: bool = False
) -> int:
    """How many of `parts` devices can share an operation in equal parts, whatever dims are cut.

    With `in_all`, of a product with windows dims of all its large tensors alone are cut: by others
    every device would hold one of them whole.
    """
    left = parts
    own = _of_large_tensors(sig) if in_all else range(len(sig.index))
    for d, (dim, extent) in enumerate(zip(sig.index, extents, strict=True)):
        if dim.role in ("map", "reduce") and d in own:
            while (common := gcd(extent, left)) > 1:
                left //= common
                extent //= common
    return parts // left


def _of_large_tensors(sig: OperationSignature) -> set[int]:
    """The index dims of an operation that all its large tensors have."""
    own = set(range(len(sig.index)))
    if sig.gemm is None or sig.is_product:
        return own
    projections = (*sig.inputs, *sig.outputs)
    sizes = [t.nbytes for t in (*sig.input_types, *sig.output_types)]
    for projection, size in zip(projections, sizes, strict=True):
        if 2 * size >= max(sizes):
            own &= {d for row in projection.matrix for d, a in enumerate(row) if a}
    return own


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
    """An operation of the region: its rows, the index dim they are and the extent it gets, and how
    it runs on them. Operands in `windows` are read beyond a row's own part of them."""

    rows: Rows
    index: int
    size: int
    boxes: tuple[ZRange, ...]  # per operand, what the whole operation reads of it
    params: dict[str, Any]
    windows: tuple[int, ...] = ()

    def longer(self, shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        """The shape with all rows."""
        if cut is None:
            return shape
        return (*shape[: cut.dim], self.size * cut.inner, *shape[cut.dim + 1 :])


@dataclass(frozen=True, slots=True)
class _Long:
    """A value is to have so many elements along one of its dims."""

    dim: int
    extent: int


@dataclass
class _Region:
    """A region of a program that has more rows."""

    graph: BlockGraph
    inside: dict[int, _Grown] = field(default_factory=dict)  # by number of operation

    def grown(self, seed: int, index: int, size: int) -> bool:
        """Take in an operation along an index dim that gets the extent `size`, and whatever reads
        and makes rows of it."""
        graph = self.graph
        makers, readers = graph.producers(), graph.readers()
        seen: set[int] = set()
        rows: set[tuple[int, _Long]] = set()  # values, and how they have them
        stack: list[tuple[int, _Long]] = []

        def take(k: int, index: int, size: int) -> bool:
            made = self._operation(graph.operations[k], index, size)
            if made is None:
                return False
            self.inside[k] = made
            op = graph.operations[k]
            cuts = (*made.rows.inputs, *made.rows.outputs)
            for v, cut in zip((*op.inputs, *op.outputs), cuts, strict=True):
                if cut is None or graph.values[v].shape[cut.dim] == size * cut.inner:
                    continue
                long = _Long(cut.dim, size * cut.inner)
                if (v, long) not in rows:
                    rows.add((v, long))
                    stack.append((v, long))
            return True

        if not take(seed, index, size):
            return False
        while stack:
            v, long = stack.pop()
            near = [*([makers[v]] if v in makers else ()), *readers[v]]
            for k in near:
                op = graph.operations[k]
                if k in self.inside or k in seen or not may_grow(graph, op):
                    continue
                found = _along(signature_in(graph, op), op, v, long)
                if found is None or not take(k, *found):
                    seen.add(k)
        return True

    def _operation(self, op: Operation, index: int, size: int) -> _Grown | None:
        """How an operation runs on more rows; None where it cannot, or need not."""
        sig = signature_in(self.graph, op)
        rows = Rows.along(sig, index, any_monoid=True)
        windows: tuple[int, ...] = ()
        if rows is None:
            rows = Rows.windows(sig, index)
            if rows is not None:
                windows = tuple([p for p, cut in enumerate(rows.inputs) if cut is not None])
        if rows is None or (rows.summed and _neutral(sig, rows, index) is None):
            return None
        for cut, type_ in zip(rows.inputs, sig.input_types, strict=True):
            if cut is not None and type_.shape[cut.dim] > size * cut.inner:
                return None
        if size < sig.extents[index]:
            return None
        whole = ZRange.from_shape(sig.extents)
        boxes = tuple([sig.operand_box(p, whole) for p in range(len(sig.inputs))])
        made = _Grown(rows, index, size, boxes, {}, windows)
        local = [made.longer(b.shape, c) for b, c in zip(boxes, rows.inputs, strict=True)]
        results = [
            made.longer(t.shape, c) for t, c in zip(sig.output_types, rows.outputs, strict=True)
        ]
        dtypes = [t.dtype for t in sig.input_types]
        try:
            params = registry.localize(op.kernel, op.params, sig, local, results)
            types = tuple([TensorType(s, d) for s, d in zip(local, dtypes, strict=True)])
            outputs = registry.output_types(op.kernel, params, types)
            if [t.shape for t in outputs] != results:
                return None
            if windows and not _slides_alike(
                sig, registry.signature(op.kernel, params, types, outputs), index, size
            ):
                return None
        except TemplateError:
            return None
        return replace(made, params=params)

    def graph_made(self) -> BlockGraph:
        """The program with the region padded."""
        return _Padded(self).graph_made()


def _slides_alike(sig: OperationSignature, long: OperationSignature, index: int, size: int) -> bool:
    """Whether an operation on more rows reads for each what the one that is given reads."""
    extents = [size if d == index else n for d, n in enumerate(sig.extents)]
    ports = (
        *zip(sig.inputs, long.inputs, strict=True),
        *zip(sig.outputs, long.outputs, strict=True),
    )
    return list(long.extents) == extents and all(a == b for a, b in ports)


def _along(sig: OperationSignature, op: Operation, v: int, long: _Long) -> tuple[int, int] | None:
    """The index dim of an operation that a value's rows are, and the extent that it gets."""
    ports = (*zip(op.inputs, sig.inputs, sig.input_types, strict=True),)
    ports += (*zip(op.outputs, sig.outputs, sig.output_types, strict=True),)
    for p, (u, projection, type_) in enumerate(ports):
        if u != v:
            continue
        row = projection.matrix[long.dim]
        found = major(sig, projection, type_, long.dim)
        if found is None and p < len(op.inputs):
            found = _sliding(sig, row)
        if found is not None and long.extent % found[1] == 0:
            return found[0], long.extent // found[1]
    return None


def _sliding(sig: OperationSignature, row: tuple[int, ...]) -> tuple[int, int] | None:
    """The index dim along which a window moves, of those that move along a dim the one that moves
    furthest, and its step."""
    if min(row) < 0 or not any(row):
        return None
    index = max(range(len(row)), key=lambda d: row[d] * (sig.index[d].size - 1))
    return (index, row[index]) if row[index] else None


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
        self.grown: dict[int, tuple[int, _Long]] = {}  # value -> the one with all rows
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
        for p, (v, cut, box) in enumerate(zip(op.inputs, rows.inputs, how.boxes, strict=True)):
            if cut is None:
                inputs.append(self._boxed(self._short(v), box, None))
                continue
            at = self._long(v, _Long(cut.dim, how.size * cut.inner))
            outside = sig.beyond(p) if p in how.windows else neutral
            if isinstance(outside, str):
                at = self._masked(at, cut.dim, self.given.values[v].shape[cut.dim], outside)
            inputs.append(self._boxed(at, box, cut))
        outputs = []
        for v, cut in zip(op.outputs, rows.outputs, strict=True):
            if cut is None:
                outputs.append(v)
                continue
            type_ = self.given.values[v]
            shape = how.longer(type_.shape, cut)
            made = self._value(replace(type_, shape=shape))
            self.grown[v] = made, _Long(cut.dim, shape[cut.dim])
            outputs.append(made)
        self.operations.append(
            replace(op, inputs=tuple(inputs), outputs=tuple(outputs), params=how.params)
        )

    def _long(self, v: int, long: _Long) -> int:
        """The value with all rows along a dim."""
        if v in self.grown and self.grown[v][1] == long:
            return self.grown[v][0]
        type_ = self.given.values[v]
        added = long.extent - type_.shape[long.dim]
        if not added:
            return self._short(v)
        shape = (*type_.shape[: long.dim], long.extent, *type_.shape[long.dim + 1 :])
        config = [[0, added if d == long.dim else 0, 0] for d in range(len(shape))]
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

    def _masked(self, v: int, dim: int, rows: int, neutral: str) -> int:
        """The value with the neutral element in the rows that were added to so many."""
        type_ = self.values[v]
        if type_.shape[dim] == rows or (v in self.zeros and neutral == "sum"):
            return v
        extent = (type_.shape[dim],)
        flags = TensorType((), "bool")
        places = self._new(
            "iota",
            (),
            extent,
            TensorType((), "int32"),
            {"dtype": {"$dtype": "int32"}, "shape": list(extent), "dimension": 0, "sharding": None},
        )
        end = self._constant(np.asarray(rows, np.int32), "int32")
        holds = self._new("lt", (places, self._spread(end, extent, ())), extent, flags, {})
        mask = self._spread(holds, type_.shape, (dim,))
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
