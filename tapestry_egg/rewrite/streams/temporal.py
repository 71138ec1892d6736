"""Temporal splits: a part of a program as a scan over blocks of its rows.

What has rows is streamed in and stacked on the way out, a block of rows at a time; what is summed
over rows is carried, in float32 at least where it starts from zero; all else stands still. Loops
inside run on the block, with bodies to match.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isqrt, prod

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import kind
from tapestry_egg.graph.blockgraph import (
    SCAN,
    BlockGraph,
    Operation,
    Source,
    TensorType,
    without_unread,
)
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.rewrite.rows.ordered import in_order
from tapestry_egg.tracing.plain import with_scalars
from tapestry_egg.tracing.spelled import NOWHERE, Spelled
from tapestry_egg.zspace import ZRange

from .batches import Batch, How, Inner


@dataclass(frozen=True)
class Split:
    """A part of a program that runs in so many `steps`, a block of its rows in each.

    `how` says which operations belong to it, by their numbers, and how they run; `cut` where their
    values have rows. Of these, what is read outside is `stacked`; `summed` are the sums over rows
    that are, and `same` what every step makes alike. Operations `outside` run on all rows, too.
    With `in_place` a step takes its rows out of whole operands, else these are brought into the
    order of the steps before the loop, and are then there twice.
    """

    graph: BlockGraph
    how: Mapping[int, How]
    cut: Mapping[int, Cut]
    stacked: Sequence[int]
    summed: Sequence[int]
    steps: int
    source: Source
    name: str
    same: Sequence[int] = ()
    outside: frozenset[int] = frozenset()
    in_place: bool = False


def with_loop(split: Split) -> BlockGraph:
    """The program with that part of it in a loop.

    Raises TemplateError where a kernel cannot run on such blocks.
    """
    return _Loop(split).graph_made()


def _wide(type_: TensorType) -> TensorType:
    """The type in which sums are carried: of floats float32 at least."""
    narrow = kind(type_.dtype) == "float" and type_.itemsize < 4
    return TensorType(type_.shape, "float32" if narrow else type_.dtype)


@dataclass(frozen=True)
class _Carried:
    """What is carried through the loop, before and after a step, and the value outside that it
    starts from, if it is not zero."""

    before: int
    after: int
    start: int | None


class _Loop:
    """Puts a part of a program into a scan."""

    def __init__(self, split: Split) -> None:
        self.split, self.given, self.steps = split, split.graph, split.steps
        like = replace(NOWHERE, source=split.source)
        values, constants = list(self.given.values), dict(self.given.constants)
        self.around = Spelled(values, constants, like=like, once=False)
        self.body = Block(split.steps, self._read)
        self.fixed: dict[int, int] = {}  # value outside -> value in the body
        self.streams: dict[tuple[int, Cut], int] = {}
        self.taken: dict[tuple[int, Cut], int] = {}  # the same, in place
        self.step: int | None = None  # the number of the step, in the body
        self.inside: dict[int, int] = {}
        self.carried: dict[int, _Carried] = {}
        self.read_inside = {v for k in split.how for v in self.given.operations[k].inputs}
        # Numbers that a file says how to compute, as another machine may round them otherwise.
        before = self.given.prepared
        self.computed = (
            {v for op in before.operations for v in op.outputs} if before else set[int]()
        )

    def _read(self, v: int, cut: Cut | None) -> int:
        """The value of the body for one of the program."""
        if v in self.inside:
            return self.inside[v]
        given = self.given.values[v]
        type_, body = given.strong, self.body
        single = v in self.given.constants and type_.size == 1
        if single and v not in self.computed and cut is None:
            if v not in self.fixed:
                self.fixed[v] = body.value(given)
                body.constants[self.fixed[v]] = self.given.constants[v]
            return self.fixed[v]
        if cut is None:
            if v not in self.fixed:
                self.fixed[v] = body.value(type_)
            return self.fixed[v]
        if self.split.in_place:
            if (v, cut) not in self.taken:
                self.taken[v, cut] = self._taken(v, cut)
            return self.taken[v, cut]
        if (v, cut) not in self.streams:
            self.streams[v, cut] = body.value(body.part(type_, cut))
        return self.streams[v, cut]

    def graph_made(self) -> BlockGraph:
        split, given, body = self.split, self.given, self.body
        leaving = set(split.summed)
        for k in sorted(split.how):
            op, how = given.operations[k], split.how[k]
            if isinstance(how, Rows) and how.summed and op.outputs[0] not in self.read_inside:
                if op.outputs[0] in leaving:
                    self._sum(op, how)
                continue
            types = [given.values[v] for v in op.outputs]
            self.inside.update(zip(op.outputs, body.run(op, how, types), strict=True))
            for v in leaving.intersection(op.outputs):
                self.carried[v] = self._add(self.inside[v])
        for v in split.same:
            before = body.value(body.values[self.inside[v]])
            self.carried[v] = _Carried(before, self.inside[v], None)
        ends = (*split.summed, *split.same)
        carries = [self.carried[v] for v in ends]
        consts = [v for v in self.fixed if self.fixed[v] not in body.constants]
        region = BlockGraph(
            name=split.name,
            values=tuple(body.values),
            operations=tuple(body.operations),
            inputs=(
                *(self.fixed[v] for v in consts),
                *(c.before for c in carries),
                *self.streams.values(),
                *((self.step,) if self.step is not None else ()),
            ),
            outputs=(*(c.after for c in carries), *(self.inside[v] for v in split.stacked)),
            constants=body.constants,
        )
        starts = [self._start(c) for c in carries]
        streams = [self._streamed(v, cut) for v, cut in self.streams]
        if self.step is not None:
            streams.append(self.around.counted(self.steps))
        types = [body.values[v] for v in region.outputs[: len(carries)]]
        for v in split.stacked:
            type_ = body.values[self.inside[v]]
            types.append(TensorType((self.steps, *type_.shape), type_.dtype))
        params = {
            "reverse": False,
            "length": self.steps,
            "num_consts": len(consts),
            "num_carry": len(carries),
            "unroll": 1,
        }
        outputs = self.around.several(SCAN, (*consts, *starts, *streams), types, params)
        self.around.operations[-1] = replace(self.around.operations[-1], regions=(region,))
        replaced = {}
        for v, made in zip(ends, outputs, strict=False):
            replaced[v] = self.around.cast(made, given.values[v].dtype)
        for v, made in zip(split.stacked, outputs[len(carries) :], strict=True):
            replaced[v] = self._joined(v, made)
        gone = split.how.keys() - split.outside
        kept = [(k, op) for k, op in enumerate(given.operations) if k not in gone]
        # The loop stands where the last of what runs in it stood: what comes later needs not be
        # there before it, as zeros into which rows are scattered.
        at = max(gone)
        sooner, later = ([op for k, op in kept if (k > at) == after] for after in (False, True))
        operations = (*sooner, *self.around.operations, *later)
        made_graph = self.around.anew(given, operations, replaced)
        made_graph = without_unread(in_order(made_graph))
        read = {v for op in made_graph.operations for v in op.inputs} | {*made_graph.outputs}
        # Numbers that stand inside now are read nowhere else.
        constants = {v: array for v, array in self.around.constants.items() if v in read}
        return replace(made_graph, constants=constants)

    def _sum(self, op: Operation, rows: Rows) -> None:
        """A sum over rows: that of a block is added to what is carried, or goes on from it."""
        (v,), body = op.outputs, self.body
        op, sig, types = self._widened(op, rows.signature)
        if rows.started is not None:
            before = body.value(sig.output_types[0].strong)
            inputs = [
                before
                if p == rows.started
                else body.cast(body.operand(op, rows, p), types[p].dtype)
                for p in range(len(op.inputs))
            ]
            after = body.value(body.values[before])
            body.put(op, sig, inputs, [after])
            self.carried[v] = _Carried(before, after, op.inputs[rows.started])
            return
        inputs = [body.cast(body.operand(op, rows, p), t.dtype) for p, t in enumerate(types)]
        part = body.value(sig.output_types[0].strong)
        body.put(op, sig, inputs, [part])
        self.carried[v] = self._add(part)

    def _add(self, part: int) -> _Carried:
        """What is carried, and the part of a step added to it."""
        body = self.body
        part = body.cast(part, _wide(body.values[part]).dtype)
        before = body.value(body.values[part])
        (after,) = body.several("add", (before, part), [body.values[part]], {})
        body.operations[-1] = replace(body.operations[-1], source=self.split.source)
        return _Carried(before, after, None)

    def _widened(
        self, op: Operation, sig: OperationSignature
    ) -> tuple[Operation, OperationSignature, Sequence[TensorType]]:
        """The operation with its sum in float32 at least, where it can be, its signature, and the
        types of its operands: they are wider where no parameter gives the result another type. A
        product by an algorithm that the user names (`F16_F16_F16`) keeps it: JAX converts what it
        gives, so that blocks are summed as asked, and their sums are carried in float32."""
        own, wide = sig.output_types[0].dtype, _wide(sig.output_types[0]).dtype
        given = sig.input_types
        if own == wide:
            return op, sig, given
        ways = (
            ({**op.params, "preferred_element_type": {"$dtype": wide}}, given),
            (with_scalars(op.params, own, wide), tuple(_wide(t) for t in given)),
        )
        for params, types in ways:
            if params.keys() != op.params.keys():
                continue
            made = registry.signature(op.kernel, params, types)
            if made.output_types[0].dtype == wide:
                return replace(op, params=params), made, types
        return op, sig, given

    # Outside

    def _start(self, carried: _Carried) -> int:
        """What is carried into the first step."""
        type_ = self.body.values[carried.before]
        if carried.start is not None:
            return self.around.cast(carried.start, type_.dtype)
        zero = self.around.constant(np.zeros((), numpy_dtype(type_.dtype)), type_.dtype)
        return self.around.spread(zero, type_.shape)

    def _in_steps(self, v: int, cut: Cut) -> tuple[int, ...]:
        """The shape with the dim of rows as two, [rows, steps]: a step takes every so many-th row,
        so that devices that share the dim have rows of every block. What stands around rows in the
        dim has dims of its own."""
        shape, dim = self.given.values[v].shape, cut.dim
        outer, inner = ((n,) if n > 1 else () for n in (cut.outer, cut.inner))
        rows = shape[dim] // cut.outer // cut.inner // self.steps
        return (*shape[:dim], *outer, rows, self.steps, *inner, *shape[dim + 1 :])

    @staticmethod
    def _step_dim(cut: Cut) -> int:
        """Which dim of `_in_steps` numbers the steps."""
        return cut.dim + 1 + (cut.outer > 1)

    def _taken(self, v: int, cut: Cut) -> int:
        """A step's rows of a value, taken out of it in the body."""
        body, given = self.body, self.given.values[v]
        whole = self.around.reshaped(v, self._in_steps(v, cut))
        if whole not in self.fixed:
            self.fixed[whole] = body.value(self.around.values[whole].strong)
        zero = body.constant(np.zeros((), np.int32), "int32")
        if self.step is None:
            self.step = body.value(TensorType((), "int32"))
        shape = self.around.values[whole].shape
        at = self._step_dim(cut)
        sizes = [1 if d == at else n for d, n in enumerate(shape)]
        starts = [self.step if d == at else zero for d in range(len(shape))]
        type_ = TensorType(tuple(sizes), given.dtype)
        read = (self.fixed[whole], *starts)
        made = body.new("dynamic_slice", read, type_, {"slice_sizes": sizes})
        return body.reshaped(made, body.part(given, cut).shape)

    def _streamed(self, v: int, cut: Cut) -> int:
        """The value [steps, block]."""
        shape, dim, split = self.given.values[v].shape, cut.dim, self._in_steps(v, cut)
        at = self._step_dim(cut)
        order = [at, *(d for d in range(len(split)) if d != at)]
        made = self.around.transposed(self.around.reshaped(v, split), order)
        block = (self.steps, *shape[:dim], shape[dim] // self.steps, *shape[dim + 1 :])
        return self.around.reshaped(made, block)

    def _joined(self, v: int, made: int) -> int:
        cut = self.split.cut[v]
        shape, dim = self.around.values[made].shape, cut.dim + 1
        assert prod(shape) == self.given.values[v].size
        rows = shape[dim] // cut.outer // cut.inner
        around = [*((cut.outer,) if cut.outer > 1 else ()), rows]
        around += [cut.inner] if cut.inner > 1 else []
        made = self.around.reshaped(made, (*shape[:dim], *around, *shape[dim + 1 :]))
        rank, after = len(self.around.values[made].shape), self._step_dim(cut) + 1
        made = self.around.transposed(made, [*range(1, after), 0, *range(after, rank)])
        return self.around.reshaped(made, self.given.values[v].shape)


# Bodies of loops over blocks of rows, as they are being made: operations, each on such a block.


class Block(Spelled):
    """A graph that runs on a block of rows, as it is being made."""

    def __init__(self, steps: int, read: Callable[[int, Cut | None], int]) -> None:
        super().__init__([], once=False)
        self.steps, self.read = steps, read

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
        local = [self.values[v].shape for v in inputs]
        made = [self.values[v].shape for v in outputs]
        params = registry.localize(op.kernel, op.params, sig, local, made)
        self.operations.append(
            replace(op, inputs=tuple(inputs), outputs=tuple(outputs), params=params)
        )

    def operand(self, op: Operation, rows: Rows, p: int) -> int:
        """An operand of a block: its rows, and of its other dims what the whole operation reads."""
        cut = rows.inputs[p]
        v = self.read(op.inputs[p], cut)
        sig = rows.signature
        box = sig.operand_box(p, ZRange.from_shape(sig.extents))
        shape = list(box.shape)
        if cut is not None:
            shape[cut.dim] //= self.steps
        if 0 in sig.extents:  # of nothing there is no part
            return v
        return self.sliced(v, box.start, [a + n for a, n in zip(box.start, shape, strict=True)])


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
        values=tuple(block.values),
        operations=tuple(block.operations),
        inputs=tuple([here[v] for v in graph.inputs]),
        outputs=tuple([here[v] for v in graph.outputs]),
        constants=block.constants,
    )


# A product over blocks of what it sums: the temporal split of its contracted dim.
#
# Where devices share operands in blocks, a product gathers what it reads of them. In a loop over
# blocks of the sum a step gathers one block of each, and adds to a result that is carried: operands
# are never there as a whole.


#: The name of this change of a program in the rules and steps of plans.
RULE = "blocks-of-sums"
# Of these numbers no measurement is kept.

#: Blocks that a sum is cut into, at most.
_BLOCKS = 16
#: Products that are cut so, at most: those that read this share of what the largest reads.
_PRODUCTS, _SHARE = 4, 0.5


def with_blocks_of_sums(graph: BlockGraph) -> BlockGraph:
    """The graph with the products that read most in loops over blocks of their sums; the same graph
    where there is none that can be cut so."""
    products = largest_products(graph)
    least = max((_read(graph, op) for _, op in products), default=0) * _SHARE
    for _ in range(_PRODUCTS):
        made = _with_one(graph, least)
        if made is None:
            break
        graph = made
    return graph


def _with_one(graph: BlockGraph, least: float) -> BlockGraph | None:
    for k, op in largest_products(graph):
        if _read(graph, op) < least:
            break
        for rows in _sums(graph, op):
            try:
                return with_loop(_split(graph, k, op, rows))
            except TemplateError:
                continue  # A kernel cannot run on such blocks.
    return None


def _read(graph: BlockGraph, op: Operation) -> int:
    """Bytes of the operands."""
    return sum(graph.values[v].nbytes for v in op.inputs)


def largest_products(graph: BlockGraph) -> list[tuple[int, Operation]]:
    """The plain products of a program, not those of its loops, by the bytes that they read."""
    found: list[tuple[int, int]] = []
    for k, op in enumerate(graph.operations):
        if op.regions or op.remat is not None or len(op.outputs) != 1:
            continue
        if registry.signature_in(graph, op).is_product:
            found.append((-_read(graph, op), k))
    return [(k, graph.operations[k]) for _, k in sorted(found)]


def _sums(graph: BlockGraph, op: Operation) -> Iterator[Rows]:
    """How a product has as its rows what it sums over, the longest dims first."""
    sig = registry.signature_in(graph, op)
    assert sig.gemm is not None
    for index in sorted(sig.gemm.k, key=lambda d: -sig.extents[d]):
        rows = Rows.along(sig, index)
        if rows is not None and rows.summed and _steps(sig.extents[index]) > 1:
            yield rows


def _steps(extent: int) -> int:
    """No more blocks than each has rows: devices share these."""
    return max(k for k in range(1, min(_BLOCKS, isqrt(extent)) + 1) if extent % k == 0)


def _split(graph: BlockGraph, k: int, op: Operation, rows: Rows) -> Split:
    cut: dict[int, Cut] = {}
    extent = 0
    for v, at in zip(op.inputs, rows.inputs, strict=True):
        if at is not None:
            cut[v] = at
            extent = graph.values[v].shape[at.dim] // at.inner
    return Split(
        graph=graph,
        how={k: rows},
        cut=cut,
        stacked=(),
        summed=op.outputs,
        steps=_steps(extent),
        source=op.source,
        name="sums",
        in_place=True,
    )
