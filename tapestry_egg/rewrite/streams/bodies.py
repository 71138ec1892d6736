"""Bodies of loops over blocks of rows, as they are being made: operations, each on such a block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.zspace import ZRange

from .batches import Batch, How, Inner


def conversion(dtype: str) -> dict[str, Any]:
    """The parameters of a conversion to a dtype."""
    return {"new_dtype": {"$dtype": dtype}, "weak_type": False, "sharding": None}


class Block:
    """A graph that runs on a block of rows, as it is being made."""

    def __init__(self, steps: int, read: Callable[[int, Cut | None], int]) -> None:
        self.steps, self.read = steps, read
        self.types: list[TensorType] = []
        self.operations: list[Operation] = []
        self.constants: dict[int, np.ndarray] = {}

    def value(self, type_: TensorType) -> int:
        """A new value."""
        self.types.append(type_)
        return len(self.types) - 1

    def part(self, type_: TensorType, cut: Cut | None) -> TensorType:
        """The type of a block of a value."""
        if cut is None:
            return type_
        shape = list(type_.shape)
        shape[cut.dim] //= self.steps
        return TensorType(tuple(shape), type_.dtype)

    def run(self, op: Operation, how: How | None, types: Sequence[TensorType]) -> tuple[int, ...]:
        """An operation on a block, or as it is; `types` are those of the whole results."""
        if isinstance(how, Rows):
            inputs = [self.operand(op, how, p) for p in range(len(op.inputs))]
            outputs = [
                self.value(self.part(t.strong, c)) for t, c in zip(types, how.outputs, strict=True)
            ]
            self.put(op, how.signature, inputs, outputs)
            return tuple(outputs)
        if isinstance(how, Inner):
            return self._loop(op, how.body, types)
        made = tuple([self.value(t) for t in types])
        read = tuple([self.read(v, None) for v in op.inputs])
        self.operations.append(replace(op, inputs=read, outputs=made))
        return made

    def _loop(self, op: Operation, body: Batch, types: Sequence[TensorType]) -> tuple[int, ...]:
        consts, carried = counts(op)
        labels = [body.label[v] for v in body.graph.inputs]
        cuts = [x if isinstance(x, Cut) else None for x in labels]
        for p in range(consts + carried, len(cuts)):
            c = cuts[p]
            cuts[p] = c and c.moved(1)
        read = tuple([self.read(v, c) for v, c in zip(op.inputs, cuts, strict=True)])
        outs: list[Cut | None] = cuts[consts : consts + carried]
        for v in body.graph.outputs[carried:]:
            y = body.label[v]
            outs.append(y.moved(1) if isinstance(y, Cut) else None)
        made = tuple([self.value(self.part(t, c)) for t, c in zip(types, outs, strict=True)])
        regions = (on_blocks(body, self.steps),)
        self.operations.append(replace(op, inputs=read, outputs=made, regions=regions))
        return made

    def put(
        self,
        op: Operation,
        sig: OperationSignature,
        inputs: Sequence[int],
        outputs: Sequence[int],
    ) -> None:
        """An operation on values that are here, with the parameters that blocks of these need."""
        local = [self.types[v].shape for v in inputs]
        made = [self.types[v].shape for v in outputs]
        params = registry.localize(op.kernel, op.params, sig, local, made)
        self.operations.append(
            replace(op, inputs=tuple(inputs), outputs=tuple(outputs), params=params)
        )

    def operand(self, op: Operation, rows: Rows, p: int) -> int:
        """An operand of a block: its rows, and of its other dims what the whole operation reads."""
        cut = rows.inputs[p]
        v = self.read(op.inputs[p], cut)
        sig, type_ = rows.signature, self.types[v]
        box = sig.operand_box(p, ZRange.from_shape(sig.extents))
        shape = list(box.shape)
        if cut is not None:
            shape[cut.dim] //= self.steps
        if tuple(shape) == type_.shape or 0 in sig.extents:  # of nothing there is no part
            return v
        params = {
            "start_indices": list(box.start),
            "limit_indices": [a + n for a, n in zip(box.start, shape, strict=True)],
            "strides": None,
        }
        return self.new("slice", (v,), TensorType(tuple(shape), type_.dtype), params)

    def new(
        self, kernel: str, inputs: tuple[int, ...], type_: TensorType, params: dict[str, Any]
    ) -> int:
        """The result of one more operation."""
        self.operations.append(Operation(kernel, inputs, (self.value(type_),), params))
        return self.operations[-1].outputs[0]

    def cast(self, v: int, dtype: str) -> int:
        """A value in another dtype."""
        type_ = self.types[v]
        if type_.dtype == dtype:
            return v
        made = TensorType(type_.shape, dtype)
        return self.new("convert_element_type", (v,), made, conversion(dtype))


def on_blocks(batch: Batch, steps: int) -> BlockGraph:
    """The body of a loop on blocks of rows."""
    graph = batch.graph
    here: dict[int, int] = {}
    block = Block(steps, lambda v, cut: here[v])

    def cut(v: int) -> Cut | None:
        label = batch.label[v]
        return label if isinstance(label, Cut) else None

    for v in graph.inputs:
        here[v] = block.value(block.part(graph.values[v], cut(v)))
    for v, array in graph.constants.items():
        here[v] = block.value(graph.values[v])
        block.constants[here[v]] = array
    for k, op in enumerate(graph.operations):
        types = [graph.values[v] for v in op.outputs]
        here.update(zip(op.outputs, block.run(op, batch.how.get(k), types), strict=True))
    return replace(
        graph,
        values=tuple(block.types),
        operations=tuple(block.operations),
        inputs=tuple([here[v] for v in graph.inputs]),
        outputs=tuple([here[v] for v in graph.outputs]),
        constants=block.constants,
    )
