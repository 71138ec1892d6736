"""Blocks of tokens: what is made of the largest product of a program, one block of rows at a time.

A temporal split: the product's operations, those that read what it makes down to where its columns
are summed or multiplied away, and those that make what these need of the same size, become the body
of a scan. One dim of rows is cut; what has it is streamed, what sums over it is carried in float32
at least, and all else stands still. Which dim of which operand is cut follows from the projections
of the templates alone. So the logits of a loss and their derivative are never there as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry

from .attention import in_order, without_unread

#: The name of this change of a program in the rules and steps of plans.
RULE = "blocks-of-rows"
#: Blocks that a dim is cut into, at most. No measurement of it is kept.
_BLOCKS = 16
#: A product is worth it if it is so many times as large as its operands: logits are ten times and
#: more. README's hidden layer is 2.7 times as large; a loop there halves the peak, takes five times
#: as long, and ten times as long to search.
_LARGE = 4
#: Kernels whose result for some rows depends on those rows alone.
_BY_ROW = {
    *("mul", "div", "add", "add_any", "sub", "neg", "exp", "log", "log1p", "max", "min", "abs"),
    *("select_n", "integer_pow", "square", "convert_element_type", "stop_gradient", "is_finite"),
    *("eq", "ne", "lt", "le", "gt", "ge", "and", "or", "not", "sign", "tanh", "logistic", "rsqrt"),
    *("broadcast_in_dim", "reshape", "transpose", "squeeze", "expand_dims", "copy", "sqrt", "pow"),
    *("reduce_sum", "reduce_max", "reduce_min", "dot_general", "gather", "scatter-add", "iota"),
}
_HALF = ("bfloat16", "float16")


def with_blocks(graph: BlockGraph) -> BlockGraph:
    """The graph with its largest product, and what reads it, in a loop over blocks of rows; the
    same graph where there is none, or where something needs all rows at once."""
    for op in _products(graph):
        for dim in _dims(graph, op):
            region = _Region(graph, op, dim)
            if region.grown():
                made = region.looped()
                if made is not None:
                    return made
    return graph


def _products(graph: BlockGraph) -> Iterator[Operation]:
    found: list[tuple[int, int, Operation]] = []
    for op in graph.operations:
        if op.kernel == "dot_general":
            size = graph.values[op.outputs[0]].size
            if size >= _LARGE * sum(graph.values[v].size for v in op.inputs):
                found.append((-size, len(found), op))
    yield from (op for _, _, op in sorted(found, key=lambda f: f[:2])[:2])


def _dims(graph: BlockGraph, op: Operation) -> list[int]:
    """The dims of a product's result that have blocks, those of the first operand first, from the
    last one on: a batch stays whole where there is something else to cut."""
    shape = graph.values[op.outputs[0]].shape
    return [d for d in reversed(range(len(shape))) if _steps(shape[d]) > 1]


def _steps(extent: int) -> int:
    return max(k for k in range(1, _BLOCKS + 1) if extent % k == 0)


@dataclass
class _Region:
    """A set of operations that a loop is made of."""

    graph: BlockGraph
    product: Operation
    dim: int
    cut: dict[int, int] = field(default_factory=dict)  # value -> its dim of rows
    partial: set[int] = field(default_factory=set)  # values that are summed over rows
    inside: dict[int, int] = field(default_factory=dict)  # operation -> its index dim of rows

    def __post_init__(self) -> None:
        out = self.graph.values[self.product.outputs[0]]
        self.extent, self.large = out.shape[self.dim], out.size
        self.makers = self.graph.producers()

    def grown(self) -> bool:
        """Collect the operations; whether they make a loop."""
        graph = self.graph
        start = self.makers[self.product.outputs[0]]
        if not self._from_result(start, 0, self.dim):
            return False
        count = 0
        while count != len(self.inside):
            count = len(self.inside)
            for k, op in enumerate(graph.operations):
                if k not in self.inside and any(v in self.cut for v in op.inputs):
                    self._from_operands(k)
            self._with_makers()
        self._keep_core()
        return self._is_convex()

    def _signature(self, k: int) -> Any:
        op, values = self.graph.operations[k], self.graph.values
        if op.kernel not in _BY_ROW or op.regions or op.effectful or op.remat is not None:
            return None
        types = tuple(values[v] for v in op.inputs), tuple(values[v] for v in op.outputs)
        found = registry.signature_of(op, *types)
        return None if found.opaque else found

    def _from_result(self, k: int, output: int, dim: int) -> bool:
        """Take in the operation whose result is cut along a dim."""
        sig = self._signature(k)
        if sig is None:
            return False
        op = self.graph.operations[k]
        if op.kernel == "iota" and int(op.params["dimension"]) == dim:
            return False
        return self._take(k, sig, _followed(sig.outputs[output], dim))

    def _from_operands(self, k: int) -> bool:
        """Take in an operation some of whose operands are cut."""
        sig = self._signature(k)
        if sig is None:
            return False
        found = {
            _followed(sig.inputs[p], self.cut[v])
            for p, v in enumerate(self.graph.operations[k].inputs)
            if v in self.cut
        }
        return len(found) == 1 and self._take(k, sig, found.pop())

    def _take(self, k: int, sig: Any, index: int | None) -> bool:
        if index is None or sig.index[index].size != self.extent:
            return False
        role, op = sig.index[index], self.graph.operations[k]
        if role.role == "map":
            dims = [_dim_of(p, index) for p in sig.outputs]
            if any(d is None for d in dims):
                return False
            self.cut.update((v, int(d or 0)) for v, d in zip(op.outputs, dims, strict=True))
        elif role.role == "reduce" and role.monoid == "sum" and len(op.outputs) == 1:
            self.partial.add(op.outputs[0])
        else:
            return False
        for p, v in enumerate(op.inputs):
            there = _dim_of(sig.inputs[p], index)
            if v in self.cut and self.cut[v] != there:
                return False
        self.inside[k] = index
        return True

    def _keep_core(self) -> None:
        """Leave out what neither touches a large value nor leads to what does."""
        ops = self.graph.operations
        needed: set[int] = set()
        for k in sorted(self.inside, reverse=True):
            op = ops[k]
            touched = [v for v in (*op.inputs, *op.outputs) if v in self.cut]
            large = any(self.graph.values[v].size >= self.large for v in touched)
            if large or not needed.isdisjoint(op.outputs):
                needed.update(op.inputs)
                continue
            del self.inside[k]
            for v in op.outputs:
                self.cut.pop(v, None)
                self.partial.discard(v)

    def _with_makers(self) -> None:
        """Take in what makes large operands."""
        waiting = list(self.inside)
        while waiting:
            k = waiting.pop()
            op, sig = self.graph.operations[k], self._signature(k)
            for p, v in enumerate(op.inputs):
                dim = _dim_of(sig.inputs[p], self.inside[k])
                maker = self.makers.get(v)
                if dim is None or v in self.cut or maker is None:
                    continue
                if self.graph.values[v].size < self.large:
                    continue
                at = self.graph.operations[maker].outputs.index(v)
                if maker not in self.inside and self._from_result(maker, at, dim):
                    waiting.append(maker)

    def _is_convex(self) -> bool:
        """Whether nothing inside needs what is made outside of what is inside."""
        after: set[int] = set()
        for k, op in enumerate(self.graph.operations):
            if k in self.inside:
                if not after.isdisjoint(op.inputs) or not self.partial.isdisjoint(op.inputs):
                    return False
            elif any(v in self.cut or v in self.partial or v in after for v in op.inputs):
                after.update(op.outputs)
        return True

    def _streams_large(self, k: int) -> bool:
        """Whether an operation reads a large value that something outside makes."""
        inner = {v for k in self.inside for v in self.graph.operations[k].outputs}
        return any(
            v not in inner and self.graph.values[v].size >= self.large and v in self.makers
            for v in self.graph.operations[k].inputs
        )

    # The loop

    def looped(self) -> BlockGraph | None:
        """The program with the loop; None where a kernel cannot run on blocks, or what is large
        leaves the loop."""
        graph = self.graph
        outside = {
            v for k, op in enumerate(graph.operations) if k not in self.inside for v in op.inputs
        } | set(graph.outputs)
        inner = [v for k in sorted(self.inside) for v in graph.operations[k].outputs]
        stacked = [v for v in inner if v in outside and v in self.cut]
        summed = [v for v in inner if v in outside and v in self.partial]
        if any(graph.values[v].size >= self.large for v in stacked) or not (stacked or summed):
            return None
        if any(self._streams_large(k) for k in self.inside):
            return None
        try:
            return _Loop(self, stacked, summed).graph_made()
        except TemplateError:
            return None


def _followed(projection: Any, dim: int) -> int | None:
    """The index dim that a dim of a tensor follows one to one, None if it follows none or more."""
    row = projection.matrix[dim]
    found = [d for d, a in enumerate(row) if a]
    simple = len(found) == 1 and row[found[0]] == 1 and projection.shape[dim] == 1
    return found[0] if simple and not projection.offset[dim] else None


def _dim_of(projection: Any, index: int) -> int | None:
    """The dim of a tensor that follows an index dim one to one; None if none or several do."""
    found = [k for k, row in enumerate(projection.matrix) if row[index]]
    return found[0] if len(found) == 1 and _followed(projection, found[0]) == index else None


class _Loop:
    """Puts a region into a scan."""

    def __init__(self, region: _Region, stacked: list[int], summed: list[int]) -> None:
        self.region, self.given = region, region.graph
        self.stacked, self.summed = stacked, summed
        self.steps = _steps(region.extent)
        self.values = list(self.given.values)
        self.constants = dict(self.given.constants)
        self.around: list[Operation] = []
        self.body: list[Operation] = []
        self.types: list[TensorType] = []
        self.inner_constants: dict[int, np.ndarray] = {}
        self.fixed: dict[int, int] = {}  # value outside -> value in the body
        self.streams: dict[tuple[int, int], int] = {}
        self.inside: dict[int, int] = {}

    def _value(self, type_: TensorType) -> int:
        self.types.append(type_)
        return len(self.types) - 1

    def _outer(
        self, kernel: str, inputs: tuple[int, ...], type_: TensorType, params: dict[str, Any]
    ) -> int:
        self.values.append(type_)
        op = Operation(kernel, inputs, (len(self.values) - 1,), params)
        self.around.append(replace(op, source=self.region.product.source))
        return len(self.values) - 1

    def _block(self, type_: TensorType, dim: int) -> TensorType:
        shape = list(type_.shape)
        shape[dim] //= self.steps
        return TensorType(tuple(shape), type_.dtype)

    def _read(self, v: int, dim: int | None) -> int:
        """The value of the body for one that is made outside."""
        if v in self.inside:
            return self.inside[v]
        type_ = self.given.values[v].strong
        if v in self.given.constants and type_.size == 1:
            if v not in self.fixed:
                self.fixed[v] = self._value(self.given.values[v])
                self.inner_constants[self.fixed[v]] = self.given.constants[v]
            return self.fixed[v]
        if dim is None:
            if v not in self.fixed:
                self.fixed[v] = self._value(type_)
            return self.fixed[v]
        if (v, dim) not in self.streams:
            self.streams[v, dim] = self._value(self._block(type_, dim))
        return self.streams[v, dim]

    def graph_made(self) -> BlockGraph:
        region, given = self.region, self.given
        for k in sorted(region.inside):
            self._run(given.operations[k], region._signature(k), region.inside[k])
        carries = [self._carried(v) for v in self.summed]
        consts = [v for v in self.fixed if self.fixed[v] not in self.inner_constants]
        body = BlockGraph(
            name="blocks",
            values=tuple(self.types),
            operations=tuple(self.body),
            inputs=(
                *(self.fixed[v] for v in consts),
                *(c[0] for c in carries),
                *self.streams.values(),
            ),
            outputs=(*(c[1] for c in carries), *(self.inside[v] for v in self.stacked)),
            constants=self.inner_constants,
        )
        starts = [self._zeros(self.types[c[0]]) for c in carries]
        streams = [self._streamed(v, dim) for v, dim in self.streams]
        outputs = []
        for type_ in [self.types[v] for v in body.outputs[: len(carries)]]:
            self.values.append(type_)
            outputs.append(len(self.values) - 1)
        for v in self.stacked:
            type_ = self.types[self.inside[v]]
            self.values.append(TensorType((self.steps, *type_.shape), type_.dtype))
            outputs.append(len(self.values) - 1)
        loop = Operation(
            "scan",
            (*consts, *starts, *streams),
            tuple(outputs),
            {
                "reverse": False,
                "length": self.steps,
                "num_consts": len(consts),
                "num_carry": len(carries),
                "unroll": 1,
            },
            regions=(body,),
            source=region.product.source,
        )
        self.around.append(loop)
        replaced = {}
        for v, made in zip(self.summed, outputs, strict=False):
            replaced[v] = self._cast(made, given.values[v].dtype)
        for v, made in zip(self.stacked, outputs[len(carries) :], strict=True):
            replaced[v] = self._joined(v, made)
        kept = [op for k, op in enumerate(given.operations) if k not in region.inside]
        operations = [
            replace(op, inputs=tuple(replaced.get(v, v) for v in op.inputs))
            for op in (*kept, *self.around)
        ]
        made_graph = replace(
            given,
            values=tuple(self.values),
            operations=tuple(operations),
            outputs=tuple(replaced.get(v, v) for v in given.outputs),
            constants=self.constants,
        )
        return without_unread(in_order(made_graph))

    def _run(self, op: Operation, sig: Any, index: int) -> None:
        dims = [_dim_of(p, index) for p in sig.inputs]
        inputs = tuple(self._read(v, d) for v, d in zip(op.inputs, dims, strict=True))
        outputs, shapes = [], []
        for q, v in enumerate(op.outputs):
            type_ = self.given.values[v]
            dim = _dim_of(sig.outputs[q], index)
            block = TensorType(type_.shape, type_.dtype) if dim is None else self._block(type_, dim)
            if dim is None and op.kernel == "dot_general" and type_.dtype in _HALF:
                block = TensorType(block.shape, "float32")
            shapes.append(block.shape)
            outputs.append(self._value(block))
            self.inside[v] = outputs[-1]
        local = [self.types[v].shape for v in inputs]
        params = registry.localize(op.kernel, op.params, sig, local, shapes)
        if op.kernel == "dot_general" and self.types[outputs[0]].dtype == "float32":
            params = {**params, "preferred_element_type": {"$dtype": "float32"}}
        self.body.append(
            replace(op, inputs=inputs, outputs=tuple(outputs), params=params, scope=op.scope)
        )

    def _carried(self, v: int) -> tuple[int, int]:
        """What is carried of a sum over rows: before and after a step."""
        part = self.inside[v]
        type_ = self.types[part]
        wide = TensorType(type_.shape, "float32" if type_.dtype in _HALF else type_.dtype)
        if wide != type_:
            made = self._value(wide)
            params = {"new_dtype": {"$dtype": "float32"}, "weak_type": False, "sharding": None}
            self.body.append(Operation("convert_element_type", (part,), (made,), params))
            part = made
        before, after = self._value(wide), self._value(wide)
        self.body.append(Operation("add", (before, part), (after,), {}))
        return before, after

    def _zeros(self, type_: TensorType) -> int:
        self.values.append(TensorType((), type_.dtype))
        zero = len(self.values) - 1
        self.constants[zero] = np.zeros((), type_.dtype)
        params = {"shape": list(type_.shape), "broadcast_dimensions": [], "sharding": None}
        return self._outer("broadcast_in_dim", (zero,), type_, params)

    def _cast(self, v: int, dtype: str) -> int:
        type_ = self.values[v]
        if type_.dtype == dtype:
            return v
        params = {"new_dtype": {"$dtype": dtype}, "weak_type": False, "sharding": None}
        return self._outer("convert_element_type", (v,), TensorType(type_.shape, dtype), params)

    def _reshaped(self, v: int, shape: tuple[int, ...]) -> int:
        params = {"new_sizes": list(shape), "dimensions": None, "sharding": None}
        return self._outer("reshape", (v,), TensorType(shape, self.values[v].dtype), params)

    def _turned(self, v: int, order: list[int]) -> int:
        shape = tuple(self.values[v].shape[d] for d in order)
        type_ = TensorType(shape, self.values[v].dtype)
        return self._outer("transpose", (v,), type_, {"permutation": order})

    def _streamed(self, v: int, dim: int) -> int:
        """The value [steps, block]: a step takes every so many-th row, so that devices that share
        the dim have rows of every block."""
        shape = self.given.values[v].shape
        split = (*shape[:dim], shape[dim] // self.steps, self.steps, *shape[dim + 1 :])
        order = [dim + 1, *(d for d in range(len(split)) if d != dim + 1)]
        return self._turned(self._reshaped(v, split), order)

    def _joined(self, v: int, made: int) -> int:
        dim = self.region.cut[v]
        rank = len(self.values[made].shape)
        order = [*range(1, dim + 2), 0, *range(dim + 2, rank)]
        assert prod(self.values[made].shape) == self.given.values[v].size
        return self._reshaped(self._turned(made, order), self.given.values[v].shape)
