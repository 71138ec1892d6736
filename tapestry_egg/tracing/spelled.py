"""Operations that are added to a program: JAX's primitives, whose parameters are spelled here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType

#: An operation from no line of the source.
NOWHERE = Operation("", (), ())


def at(op: Operation) -> Operation:
    """An operation from the line of another one, of which nothing else is kept."""
    return replace(NOWHERE, source=op.source, scope=op.scope)


@dataclass
class Spelled:
    """Operations on `values`, which become more, from the line of `like`; equal ones `once`."""

    values: list[TensorType]
    constants: dict[int, np.ndarray] = field(default_factory=dict)
    operations: list[Operation] = field(default_factory=list)
    like: Operation = NOWHERE
    once: bool = True
    known: dict[Any, int] = field(default_factory=dict)

    def value(self, type_: TensorType) -> int:
        """A new value."""
        self.values.append(type_)
        return len(self.values) - 1

    def constant(self, array: np.ndarray, dtype: str) -> int:
        """A constant, equal ones once."""
        key = dtype, array.shape, array.tobytes()
        if key not in self.known:
            self.known[key] = self.value(TensorType(array.shape, dtype))
            self.constants[self.known[key]] = array
        return self.known[key]

    def several(
        self, kernel: str, inputs: Sequence[int], types: Sequence[TensorType], params: Any
    ) -> list[int]:
        """The values of one operation."""
        made = tuple([self.value(t) for t in types])
        op = replace(self.like, kernel=kernel, inputs=tuple(inputs), outputs=made, params=params)
        self.operations.append(op)
        return list(made)

    def new(
        self, kernel: str, inputs: Sequence[int], type_: TensorType, params: Mapping[str, Any]
    ) -> int:
        """The value of an operation with one result."""
        key = kernel, tuple(inputs), type_, repr(params)
        if key not in self.known or not self.once:
            (self.known[key],) = self.several(kernel, inputs, [type_], params)
        return self.known[key]

    def anew(
        self, graph: BlockGraph, operations: Iterable[Operation], stands: Mapping[int, int]
    ) -> BlockGraph:
        """The graph with these values and constants and some operations, where values are read as
        those that stand for them."""

        def read(values: Sequence[int]) -> tuple[int, ...]:
            return tuple([stands.get(v, v) for v in values])

        return replace(
            graph,
            values=tuple(self.values),
            operations=tuple([replace(op, inputs=read(op.inputs)) for op in operations]),
            outputs=read(graph.outputs),
            constants=self.constants,
        )

    def typed(self, v: int, shape: Sequence[int]) -> TensorType:
        """The type of a value in another shape."""
        return replace(self.values[v], shape=tuple(shape))

    def cast(self, v: int, dtype: str) -> int:
        """The value in a dtype."""
        if self.values[v].dtype == dtype:
            return v
        params = {"new_dtype": {"$dtype": dtype}, "weak_type": False, "sharding": None}
        type_ = TensorType(self.values[v].shape, dtype)
        return self.new("convert_element_type", (v,), type_, params)

    def reshaped(self, v: int, shape: Sequence[int]) -> int:
        """The value with its elements, in their order, in another shape."""
        if self.values[v].shape == tuple(shape):
            return v
        params = {"new_sizes": [*shape], "dimensions": None, "sharding": None}
        return self.new("reshape", (v,), self.typed(v, shape), params)

    def transposed(self, v: int, order: Sequence[int]) -> int:
        """The value with its dims in another order."""
        if list(order) == sorted(order):
            return v
        type_ = self.typed(v, [self.values[v].shape[d] for d in order])
        return self.new("transpose", (v,), type_, {"permutation": [*order]})

    def spread(self, v: int, shape: Sequence[int], dims: Sequence[int] = ()) -> int:
        """The value repeated to a shape, in which its dims are `dims`."""
        if self.values[v].shape == tuple(shape):
            return v
        params = {"shape": [*shape], "broadcast_dimensions": [*dims], "sharding": None}
        return self.new("broadcast_in_dim", (v,), self.typed(v, shape), params)

    def sliced(
        self,
        v: int,
        start: Sequence[int],
        ends: Sequence[int],
        strides: Sequence[int] | None = None,
    ) -> int:
        """The part of a value from `start` to `ends`, in steps."""
        each = zip(start, ends, strides or [1] * len(start), strict=True)
        type_ = self.typed(v, [-((a - b) // s) for a, b, s in each])
        if type_.shape == self.values[v].shape:
            return v
        steps = None if strides is None or {*strides} == {1} else [*strides]
        params = {"start_indices": [*start], "limit_indices": [*ends], "strides": steps}
        return self.new("slice", (v,), type_, params)

    def padded(self, v: int, fill: int, config: Sequence[Sequence[int]]) -> int:
        """The value with a scalar around and between its elements: per dim how many before, behind
        and between."""
        each = zip(self.values[v].shape, config, strict=True)
        shape = [n + low + high + max(0, n - 1) * inner for n, (low, high, inner) in each]
        params = {"padding_config": [[*row] for row in config]}
        return self.new("pad", (v, fill), self.typed(v, shape), params)

    def joined(self, parts: Sequence[int], d: int) -> int:
        """Values one after another along a dim."""
        if len(parts) == 1:
            return parts[0]
        shape = list(self.values[parts[0]].shape)
        shape[d] = sum(self.values[v].shape[d] for v in parts)
        return self.new("concatenate", parts, self.typed(parts[0], shape), {"dimension": d})

    def counted(self, n: int) -> int:
        """The numbers from 0 to n - 1: int32[n]."""
        params = {"dtype": {"$dtype": "int32"}, "shape": [n], "dimension": 0, "sharding": None}
        return self.new("iota", (), TensorType((n,), "int32"), params)
