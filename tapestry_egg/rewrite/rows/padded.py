"""A region of a program on more rows: what enters it is padded with zeros, what leaves is cut back.

Before a sum reads rows that were added they are overwritten with its neutral element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, without_unread
from tapestry_egg.monoids import monoid
from tapestry_egg.monoids.fold import zero
from tapestry_egg.zspace import ZRange

from .cuts import Cut
from .regions import Grown, Long, Region, neutral_of


def padded(region: Region) -> BlockGraph:
    """The program with the region on its rows."""
    return Padded(region).graph_made()


class Padded:
    """Makes the program with a region padded."""

    def __init__(self, region: Region) -> None:
        self.region, self.given = region, region.graph
        self.values = list(self.given.values)
        self.constants = dict(self.given.constants)
        self.operations: list[Operation] = []
        self.known: dict[Any, int] = {}
        self.grown: dict[int, tuple[int, Long]] = {}  # value -> the one with all rows
        self.zeros: set[int] = set()  # values whose rows that were added are zero
        self.like: Operation = self.given.operations[min(region.inside, default=0)]

    def graph_made(self) -> BlockGraph:
        given = self.given
        for k, op in enumerate(given.operations):
            self.like = op
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
            at = self.longer(v, long)
            outside = sig.beyond(p) if p in how.windows else neutral
            if isinstance(outside, str):
                at = self._masked(at, long, self.given.values[v].shape[cut.dim], outside)
            inputs.append(self._boxed(at, box, cut))
        outputs = []
        for v, cut in zip(op.outputs, rows.outputs, strict=True):
            if cut is None:
                outputs.append(v)
                continue
            type_ = self.given.values[v]
            shape = how.longer(type_.shape, cut)
            made = self._value(replace(type_, shape=shape))
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
        shape = (*type_.shape[: long.dim], long.extent, *type_.shape[long.dim + 1 :])
        config = [[0, 0, 0] for _ in shape]
        config[long.dim] = [long.low, added - long.low, 0]
        filled = self.scalar(type_.dtype, "or" if type_.dtype == "bool" else "sum")
        made = self.new("pad", (self.short(v), filled), shape, type_, {"padding_config": config})
        self.zeros.add(made)
        return made

    def short(self, v: int) -> int:
        """The value as the program has it."""
        if v not in self.grown:
            return v
        made, long = self.grown[v]
        type_ = self.given.values[v]
        start = [long.low if d == long.dim else 0 for d in range(len(type_.shape))]
        params = {
            "start_indices": start,
            "limit_indices": [a + n for a, n in zip(start, type_.shape, strict=True)],
            "strides": None,
        }
        return self.new("slice", (made,), type_.shape, type_, params)

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
        made = self.new("slice", (v,), shape, type_, params)
        if v in self.zeros:
            self.zeros.add(made)
        return made

    def _masked(self, v: int, long: Long, rows: int, neutral: str) -> int:
        """The value with the neutral element in the rows that were added to so many."""
        type_ = self.values[v]
        if type_.shape[long.dim] == rows or (v in self.zeros and neutral == "sum"):
            return v
        filled = self.spread(self.scalar(type_.dtype, neutral), type_.shape, ())
        return self.between(long.dim, long.low, long.low + rows, v, filled)

    def between(self, dim: int, start: int, end: int, inside: int, outside: int) -> int:
        """One value where places along a dim are from `start` to `end`, another one elsewhere."""
        type_ = self.values[inside]
        n, flags = type_.shape[dim], TensorType((), "bool")
        held = []
        for kernel, at in (("ge", start), ("lt", end)):
            if 0 < at < n:
                number = self.spread(self.constant(np.asarray(at, np.int32), "int32"), (n,), ())
                held.append(self.new(kernel, (self._places(n), number), (n,), flags, {}))
        if not held:
            return inside
        both = held[0] if len(held) == 1 else self.new("and", tuple(held), (n,), flags, {})
        mask = self.spread(both, type_.shape, (dim,))
        return self.new("select_n", (mask, outside, inside), type_.shape, type_, {})

    def _places(self, n: int) -> int:
        """The numbers from 0 to n - 1: int32[n]."""
        whole = {"$dtype": "int32"}
        params = {"dtype": whole, "shape": [n], "dimension": 0, "sharding": None}
        return self.new("iota", (), (n,), TensorType((), "int32"), params)

    def spread(self, v: int, shape: tuple[int, ...], dims: tuple[int, ...]) -> int:
        if self.values[v].shape == shape:
            return v
        params = {"shape": list(shape), "broadcast_dimensions": list(dims), "sharding": None}
        return self.new("broadcast_in_dim", (v,), shape, self.values[v], params)

    def scalar(self, dtype: str, neutral: str) -> int:
        (array,) = zero(monoid(neutral), decode_dtype(dtype)).values()
        return self.constant(np.asarray(array), dtype)

    def constant(self, array: np.ndarray, dtype: str) -> int:
        key = "constant", dtype, array.tobytes()
        if key not in self.known:
            self.known[key] = self._value(TensorType((), dtype))
            self.constants[self.known[key]] = array
        return self.known[key]

    def _value(self, type_: TensorType) -> int:
        self.values.append(type_)
        return len(self.values) - 1

    def new(
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
