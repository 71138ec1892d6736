"""A region of a program on more rows: what enters it is padded with zeros, what leaves is cut back.

Before a sum reads rows that were added they are overwritten with its neutral element.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import exact_of
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.monoids import monoid
from tapestry_egg.monoids.fold import zero
from tapestry_egg.tracing.spelled import Spelled, at
from tapestry_egg.zspace import ZRange

from .cuts import Cut, Rows, major


def padded(region: Region) -> BlockGraph:
    """The program with the region on its rows."""
    return Padded(region).graph_made()


class Padded(Spelled):
    """Makes the program with a region padded."""

    def __init__(self, region: Region) -> None:
        self.region, self.given = region, region.graph
        super().__init__(list(self.given.values), dict(self.given.constants))
        self.grown: dict[int, tuple[int, Long]] = {}  # value -> the one with all rows
        self.zeros: set[int] = set()  # values whose rows that were added are zero

    def graph_made(self) -> BlockGraph:
        given = self.given
        for k, op in enumerate(given.operations):
            self.like = at(op)
            if k in self.region.inside:
                self._grown(op, self.region.inside[k])
            else:
                self.beside(op)
        outputs = tuple([self.short(v) for v in given.outputs])
        made = replace(
            given,
            values=tuple(self.values),
            operations=tuple(self.operations),
            outputs=outputs,
            constants=self.constants,
        )
        return without_unread(made)

    def beside(self, op: Operation) -> None:
        """An operation that is not of the region."""
        read = tuple([self.short(v) for v in op.inputs])
        self.operations.append(replace(op, inputs=read))

    def _grown(self, op: Operation, how: Grown) -> None:
        """An operation on all rows."""
        rows, sig = how.rows, how.rows.signature
        neutral = neutral_of(sig, rows, how.index) if rows.summed else None
        inputs = []
        for p, (v, cut, box) in enumerate(zip(op.inputs, rows.inputs, how.boxes, strict=True)):
            if cut is None:
                inputs.append(self._boxed(self.short(v), box, None))
                continue
            long = Long(cut.dim, how.size * cut.inner, how.low * cut.inner)
            found = self.longer(v, long)
            outside = sig.beyond(p) if p in how.windows else neutral
            if isinstance(outside, str):
                found = self._masked(found, long, self.given.values[v].shape[cut.dim], outside)
            inputs.append(self._boxed(found, box, cut))
        outputs = []
        for v, cut in zip(op.outputs, rows.outputs, strict=True):
            if cut is None:
                outputs.append(v)
                continue
            type_ = self.given.values[v]
            shape = how.longer(type_.shape, cut)
            made = self.value(replace(type_, shape=shape))
            self.grown[v] = made, Long(cut.dim, shape[cut.dim], how.low * cut.inner)
            outputs.append(made)
        self.operations.append(
            replace(op, inputs=tuple(inputs), outputs=tuple(outputs), params=how.params)
        )

    def longer(self, v: int, long: Long) -> int:
        """The value with all rows along a dim."""
        if v in self.grown and self.grown[v][1] == long:
            return self.grown[v][0]
        type_ = self.given.values[v]
        added = long.extent - type_.shape[long.dim]
        if not added:
            return self.short(v)
        config = [[0, 0, 0] for _ in type_.shape]
        config[long.dim] = [long.low, added - long.low, 0]
        filled = self.scalar(type_.dtype, "or" if type_.dtype == "bool" else "sum")
        made = self.padded(self.short(v), filled, config)
        self.zeros.add(made)
        return made

    def short(self, v: int) -> int:
        """The value as the program has it."""
        if v not in self.grown:
            return v
        made, long = self.grown[v]
        shape = self.given.values[v].shape
        start = [long.low if d == long.dim else 0 for d in range(len(shape))]
        return self.sliced(made, start, [a + n for a, n in zip(start, shape, strict=True)])

    def _boxed(self, v: int, box: ZRange, cut: Cut | None) -> int:
        """Of dims without rows, what the operation reads of them."""
        type_ = self.values[v]
        start, end = list(box.start), list(box.end)
        if cut is not None:
            start[cut.dim], end[cut.dim] = 0, type_.shape[cut.dim]
        made = self.sliced(v, start, end)
        if v in self.zeros:
            self.zeros.add(made)
        return made

    def _masked(self, v: int, long: Long, rows: int, neutral: str) -> int:
        """The value with the neutral element in the rows that were added to so many."""
        type_ = self.values[v]
        if type_.shape[long.dim] == rows or (v in self.zeros and neutral == "sum"):
            return v
        filled = self.spread(self.scalar(type_.dtype, neutral), type_.shape)
        return self.between(long.dim, long.low, long.low + rows, v, filled)

    def between(self, dim: int, start: int, end: int, inside: int, outside: int) -> int:
        """One value where places along a dim are from `start` to `end`, another one elsewhere."""
        type_ = self.values[inside]
        n = type_.shape[dim]
        flags, held = TensorType((n,), "bool"), []
        for kernel, edge in (("ge", start), ("lt", end)):
            if 0 < edge < n:
                number = self.spread(self.constant(np.asarray(edge, np.int32), "int32"), (n,))
                held.append(self.new(kernel, (self.counted(n), number), flags, {}))
        if not held:
            return inside
        both = held[0] if len(held) == 1 else self.new("and", held, flags, {})
        mask = self.spread(both, type_.shape, (dim,))
        return self.new("select_n", (mask, outside, inside), type_, {})

    def scalar(self, dtype: str, neutral: str) -> int:
        (array,) = zero(monoid(neutral), decode_dtype(dtype)).values()
        return self.constant(np.asarray(array), dtype)


# Regions of a program that can have more rows: what reads and makes rows along a dim, taken in
# from one operation on, by projections alone.


def may_grow(graph: BlockGraph, op: Operation) -> bool:
    """Whether an operation is one that may run on more rows."""
    if (
        op.regions
        or op.effectful
        or registry.meaning(op.kernel) == "layout"
        or registry.runs_once(op)
    ):
        return False
    types = [graph.values[v].dtype for v in (*op.inputs, *op.outputs)]
    return not any(t.startswith("key<") or t == "float0" for t in types)


@dataclass(frozen=True)
class Grown:
    """An operation of the region: its rows, the index dim they are and the extent it gets, and how
    it runs on them; the first `low` rows are added ones. Operands in `windows` are read beyond a
    row's own part of them."""

    rows: Rows
    index: int
    size: int
    boxes: tuple[ZRange, ...]  # per operand, what the whole operation reads of it
    params: dict[str, Any]
    windows: tuple[int, ...] = ()
    low: int = 0

    def longer(self, shape: tuple[int, ...], cut: Cut | None) -> tuple[int, ...]:
        """The shape with all rows."""
        if cut is None:
            return shape
        return (*shape[: cut.dim], self.size * cut.inner, *shape[cut.dim + 1 :])


@dataclass(frozen=True, slots=True)
class Long:
    """A value is to have so many elements along one of its dims, its own ones from `low` on."""

    dim: int
    extent: int
    low: int = 0


@dataclass
class Region:
    """A region of a program that has more rows, or, with `fewer`, some of them only."""

    graph: BlockGraph
    fewer: bool = False
    inside: dict[int, Grown] = field(default_factory=dict)  # by number of operation
    reached: dict[int, Long] = field(default_factory=dict)  # values of it, and how they have rows

    def grown(self, seed: int, index: int, size: int, low: int = 0) -> bool:
        """Take in an operation along an index dim that gets the extent `size`, of which the first
        `low` points are added ones (where it is negative, so many are left out), and whatever reads
        and makes rows of it."""
        graph = self.graph
        makers, readers = graph.producers(), graph.readers()
        seen: set[int] = set()
        rows: set[tuple[int, Long]] = set()  # values, and how they have them
        stack: list[tuple[int, Long]] = []

        def take(k: int, index: int, size: int, low: int) -> bool:
            made = self._operation(graph.operations[k], index, size)
            if made is None or not self._serves(made):
                return False
            self.inside[k] = made = replace(made, low=low)
            op = graph.operations[k]
            cuts = (*made.rows.inputs, *made.rows.outputs)
            for v, cut in zip((*op.inputs, *op.outputs), cuts, strict=True):
                if cut is None or graph.values[v].shape[cut.dim] == size * cut.inner:
                    continue
                long = Long(cut.dim, size * cut.inner, low * cut.inner)
                self.reached.setdefault(v, long)
                if (v, long) not in rows:
                    rows.add((v, long))
                    stack.append((v, long))
            return True

        if not take(seed, index, size, low):
            return False
        while stack:
            v, long = stack.pop()
            near = [*([makers[v]] if v in makers else ()), *readers[v]]
            for k in near:
                op = graph.operations[k]
                if k in self.inside or k in seen or not may_grow(graph, op):
                    continue
                found = along(registry.signature_in(graph, op), op, v, long)
                if found is None or not take(k, *found):
                    seen.add(k)
        return True

    def _serves(self, made: Grown) -> bool:
        """Whether an operation has as many rows as is wanted."""
        sig, size = made.rows.signature, made.size
        if self.fewer:
            return size <= sig.extents[made.index] and not (made.rows.summed or made.windows)
        ports = zip(made.rows.inputs, sig.input_types, strict=True)
        fits = [t.shape[c.dim] <= size * c.inner for c, t in ports if c is not None]
        return size >= sig.extents[made.index] and all(fits)

    def _operation(self, op: Operation, index: int, size: int) -> Grown | None:
        """How an operation runs on more rows; None where it cannot, or need not. Its signature
        remembers it, as equal operations have the same one."""
        sig = registry.signature_in(self.graph, op)
        known: dict[Any, Grown | None] = sig.__dict__.setdefault("_on_more_rows", {})
        key = exact_of(op), index, size
        if key not in known:
            known[key] = self._on_more_rows(op, sig, index, size)
        return known[key]

    def _on_more_rows(
        self, op: Operation, sig: OperationSignature, index: int, size: int
    ) -> Grown | None:
        rows = Rows.along(sig, index, any_monoid=True)
        windows: tuple[int, ...] = ()
        if rows is None:
            rows = Rows.windows(sig, index)
            if rows is not None:
                windows = tuple([p for p, cut in enumerate(rows.inputs) if cut is not None])
        if rows is None or (rows.summed and neutral_of(sig, rows, index) is None):
            return None
        whole = ZRange.from_shape(sig.extents)
        boxes = tuple([sig.operand_box(p, whole) for p in range(len(sig.inputs))])
        made = Grown(rows, index, size, boxes, {}, windows)
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


def _slides_alike(sig: OperationSignature, long: OperationSignature, index: int, size: int) -> bool:
    """Whether an operation on more rows reads for each what the one that is given reads."""
    extents = [size if d == index else n for d, n in enumerate(sig.extents)]
    ports = (
        *zip(sig.inputs, long.inputs, strict=True),
        *zip(sig.outputs, long.outputs, strict=True),
    )
    return list(long.extents) == extents and all(a == b for a, b in ports)


def along(
    sig: OperationSignature, op: Operation, v: int, long: Long
) -> tuple[int, int, int] | None:
    """The index dim of an operation that a value's rows are, the extent that it gets, and how many
    of its first points are added ones."""
    ports = (*zip(op.inputs, sig.inputs, sig.input_types, strict=True),)
    ports += (*zip(op.outputs, sig.outputs, sig.output_types, strict=True),)
    for p, (u, projection, type_) in enumerate(ports):
        if u != v:
            continue
        row = projection.matrix[long.dim]
        found = major(sig, projection, type_, long.dim)
        if found is None and p < len(op.inputs):
            found = _sliding(sig, row)
        if found is not None and long.extent % found[1] == long.low % found[1] == 0:
            return found[0], long.extent // found[1], long.low // found[1]
    return None


def _sliding(sig: OperationSignature, row: tuple[int, ...]) -> tuple[int, int] | None:
    """The index dim along which a window moves, of those that move along a dim the one that moves
    furthest, and its step."""
    if not any(row) or min(row) < 0:
        return None
    index = max(range(len(row)), key=lambda d: row[d] * (sig.index[d].size - 1))
    return (index, row[index]) if row[index] else None


def neutral_of(sig: OperationSignature, rows: Rows, index: int) -> str | None:
    """The monoid whose zero, in all that a sum over rows reads of them, adds nothing to it; None
    where that is not known: it is of products, and of sums of one operand."""
    if sig.gemm is not None and index in sig.gemm.k and rows.monoid in (None, "sum"):
        return "sum"
    if sig.fusion == "reduce" and len(sig.inputs) == 1 and not sig.initial:
        return sig.index[index].monoid
    return None
