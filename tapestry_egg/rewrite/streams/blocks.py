"""Blocks of tokens: what is made of the largest product of a program, one block of rows at a time.

A temporal split: the product's operations, those that read what it makes down to where its columns
are summed or multiplied away, and those that make what these need of the same size
(`blocks.py`), become the body of a scan. One dim of rows is cut; what has it is streamed, what
sums over it is carried, in float32 at least where it starts from zero, and all else stands still.
So the logits of a loss and their derivative are never there as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, without_unread
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import hashable
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.rewrite.rows.rows_by_number import with_batch_dims

from .large_inside import with_large_inside
from .temporal import Split, with_loop

#: The names of these changes of a program in the rules and steps of plans: of products much larger
#: than their operands, and of the program's largest as well.
RULE, OF_LARGEST = "blocks-of-rows", "blocks-of-largest"
#: Blocks that a dim is cut into, at most. No measurement of it is kept.
_BLOCKS = 16
#: A product is worth it if it is so many times as large as its operands: logits of narrow models
#: are ten times and more. README's hidden layer is 2.7 times as large, as are 16 384 rows of logits
#: over 32 000 words at a width of 4096: its front on eight devices takes three times as long with
#: blocks, so that those of such products are another change (`with_blocks_of_largest`).
_LARGE = 4
#: There a product also is worth it that is no smaller than its operands, nor than this share of the
#: largest such product of the program.
_OF_LARGEST = 0.5
#: Products that are computed again and get loops, too, one after another.
_AGAIN = 2


def with_blocks(graph: BlockGraph) -> BlockGraph:
    """The graph with its largest product, and what reads it, in a loop over blocks of rows, in
    bodies of loops too; the same graph where there is none, or where something needs all rows at
    once. Large products that are computed once more, for the backward pass, get loops of their own.
    """
    return _with_blocks(graph, math.inf)


def with_blocks_of_largest(graph: BlockGraph) -> BlockGraph:
    """The same, where the program's largest product need only be larger than its operands."""
    return _with_blocks(graph, _OF_LARGEST * _size_of_largest(graph))


def _with_blocks(graph: BlockGraph, least: float) -> BlockGraph:
    """The graph with blocks of products that are much larger than their operands, or that have
    `least` elements and no fewer than these."""

    def largest(body: BlockGraph) -> Operation | None:
        return next(_products(body, least, again=False), None)

    def in_blocks(body: BlockGraph) -> bool:
        return _with_blocks(body, least) is not body

    inside = with_large_inside(graph, largest, in_blocks)
    made = inside.map_regions(lambda region: _with_blocks(region, least))
    graph = graph if made is inside else made
    graph = _once(graph, least)
    for _ in range(_AGAIN):
        made = _once(graph, least, again=True)
        if made is graph:
            break
        graph = _each_once(made)
    return graph


def _size_of_largest(graph: BlockGraph) -> int:
    """Elements of the largest product that is no smaller than its operands, also in bodies."""
    own = next(_products(graph, 0.0, again=False), None)
    inner = [_size_of_largest(r) for op in graph.operations for r in op.regions]
    return max([graph.values[own.outputs[0]].size if own else 0, *inner])


def _each_once(graph: BlockGraph) -> BlockGraph:
    """The graph in which equal operations are one: both loops read the same views of what enters
    them, and what these are made of moves once, as where a compiler sees that they are equal."""
    known: dict[Any, tuple[int, ...]] = {}
    to: dict[int, int] = {}
    operations = []
    for op in graph.operations:
        inputs = tuple([to.get(v, v) for v in op.inputs])
        op = op if inputs == op.inputs else replace(op, inputs=inputs)
        if op.remat is None and registry.is_repeatable(op):
            key = op.kernel, hashable(op.params), inputs
            if key in known:
                to.update(zip(op.outputs, known[key], strict=True))
                continue
            known[key] = op.outputs
        operations.append(op)
    outputs = tuple([to.get(v, v) for v in graph.outputs])
    return without_unread(replace(graph, operations=tuple(operations), outputs=outputs))


def _once(graph: BlockGraph, least: float, again: bool = False) -> BlockGraph:
    """The same of the largest product; `again`: of those that are computed again."""
    counted = with_batch_dims(graph)
    if counted is not graph:
        counted = _each_once(counted)  # what gathers and scatters count rows by is then one
    for op in _products(counted, least, again):
        for dim in _dims(counted, op):
            region = Region(counted, op, dim)
            if region.grown() and region.is_worth_it:
                try:
                    return with_loop(_split(region))
                except TemplateError:
                    continue  # A kernel cannot run on such blocks.
    return graph


def _products(graph: BlockGraph, least: float, again: bool) -> Iterator[Operation]:
    """The two largest products that are worth blocks, where there are so many."""
    found: list[tuple[int, int, Operation]] = []
    for op in graph.operations:
        if op.regions or len(op.outputs) != 1 or (again and op.remat is None):
            continue
        size = graph.values[op.outputs[0]].size
        read = sum(graph.values[v].size for v in op.inputs)
        if size < min(_LARGE * read, max(least, read)):
            continue
        if registry.signature_in(graph, op).is_product:
            found.append((-size, len(found), op))
    yield from (op for _, _, op in sorted(found, key=lambda f: f[:2])[:2])


def _dims(graph: BlockGraph, op: Operation) -> list[int]:
    """The dims of a product's result that have blocks, those of the first operand first, from the
    last one on: a batch stays whole where there is something else to cut."""
    shape = graph.values[op.outputs[0]].shape
    return [d for d in reversed(range(len(shape))) if _steps(shape[d]) > 1]


def _steps(extent: int) -> int:
    return max(k for k in range(1, _BLOCKS + 1) if extent % k == 0)


def _split(region: Region) -> Split:
    return Split(
        graph=region.graph,
        how=region.inside,
        cut=region.cut,
        stacked=region.stacked,
        summed=region.summed,
        steps=_steps(region.extent),
        source=region.product.source,
        name="blocks",
    )


# Regions of a program that can run one block of rows at a time, grown around a product.
#
# Rows are one dim of the product's result. From there they are followed through the projections of
# the templates: an operation belongs to the region if rows are an index dim of its own, which each
# of its operands and results follows one to one or does not have, and if its result for some rows
# is a function of those rows (or a sum over them) wherever they lie. Nothing is known of any
# kernel.


#: What has this share of the product's elements is large as well: its rows but one, where tokens
#: predict the next ones, or a half of its columns.
_LARGE_VALUE = 0.5


@dataclass
class Region:
    """A set of operations that a loop over rows can be made of: dim `dim` of a product's result."""

    graph: BlockGraph
    product: Operation
    dim: int
    cut: dict[int, Cut] = field(default_factory=dict)  # value -> where it has the rows
    partial: set[int] = field(default_factory=set)  # values that are summed over rows
    inside: dict[int, Rows] = field(default_factory=dict)  # number of an operation -> its rows

    def __post_init__(self) -> None:
        out = self.graph.values[self.product.outputs[0]]
        self.extent, self.large = out.shape[self.dim], out.size * _LARGE_VALUE
        self.makers = self.graph.producers()

    def grown(self) -> bool:
        """Collect the operations; whether they make a loop."""
        start = self.makers[self.product.outputs[0]]
        if not self._from_result(start, 0, Cut(self.dim)):
            return False
        count = 0
        while count != len(self.inside):
            count = len(self.inside)
            for k, op in enumerate(self.graph.operations):
                if k not in self.inside and any(v in self.cut for v in op.inputs):
                    self._from_operands(k)
            self._with_makers()
        self._keep_core()
        return self._agrees() and self._is_convex()

    @property
    def summed(self) -> list[int]:
        """The sums over rows that something outside reads."""
        return [v for v in self._made_for_outside() if v in self.partial]

    @property
    def stacked(self) -> list[int]:
        """The values with rows that something outside reads."""
        return [v for v in self._made_for_outside() if v in self.cut]

    @property
    def is_worth_it(self) -> bool:
        """Whether something leaves the loop, and nothing large enters it or leaves it."""
        values = self.graph.values
        if any(values[v].size >= self.large for v in self.stacked):
            return False
        inner = {v for k in self.inside for v in self.graph.operations[k].outputs}
        read = {v for k in self.inside for v in self.graph.operations[k].inputs}
        if any(values[v].size >= self.large and v in self.makers for v in read - inner):
            return False
        return bool(self.stacked or self.summed)

    def _made_for_outside(self) -> list[int]:
        operations = self.graph.operations
        outside = {v for k, op in enumerate(operations) if k not in self.inside for v in op.inputs}
        outside |= set(self.graph.outputs)
        made = (v for k in sorted(self.inside) for v in operations[k].outputs)
        return [v for v in made if v in outside]

    # How it grows

    def _signature(self, k: int) -> OperationSignature | None:
        op = self.graph.operations[k]
        if op.regions or registry.runs_once(op):
            return None
        if registry.meaning(op.kernel) == "layout":
            return None  # A layout that is asked for is that of the whole.
        return registry.signature_in(self.graph, op)

    def _from_result(self, k: int, output: int, cut: Cut) -> bool:
        """Take in the operation whose result is cut somewhere."""
        sig = self._signature(k)
        if sig is None:
            return False
        return self._take(k, Rows.anywhere(sig, sig.outputs[output], sig.output_types[output], cut))

    def _from_operands(self, k: int) -> bool:
        """Take in an operation some of whose operands are cut."""
        sig = self._signature(k)
        if sig is None:
            return False
        p, v = next((p, v) for p, v in enumerate(self.graph.operations[k].inputs) if v in self.cut)
        return self._take(k, Rows.anywhere(sig, sig.inputs[p], sig.input_types[p], self.cut[v]))

    def _take(self, k: int, rows: Rows | None) -> bool:
        if rows is None:
            return False
        op = self.graph.operations[k]
        if any(
            v in self.cut and self.cut[v] != d for v, d in zip(op.inputs, rows.inputs, strict=True)
        ):
            return False
        for v, d in zip(op.outputs, rows.outputs, strict=True):
            if d is None:
                self.partial.add(v)
            else:
                self.cut[v] = d
        self.inside[k] = rows
        return True

    def _with_makers(self) -> None:
        """Take in what makes large operands."""
        waiting = list(self.inside)
        while waiting:
            k = waiting.pop()
            for v, cut in zip(self.graph.operations[k].inputs, self.inside[k].inputs, strict=True):
                maker = self.makers.get(v)
                if cut is None or v in self.cut or maker is None or maker in self.inside:
                    continue
                if self.graph.values[v].size < self.large:
                    continue
                at = self.graph.operations[maker].outputs.index(v)
                if self._from_result(maker, at, cut):
                    waiting.append(maker)

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

    def _agrees(self) -> bool:
        """Whether what is made inside is read inside along the dim that it is cut along, and no sum
        before it is whole."""
        inner = {v for k in self.inside for v in self.graph.operations[k].outputs}
        for k, rows in self.inside.items():
            for v, d in zip(self.graph.operations[k].inputs, rows.inputs, strict=True):
                if v in inner and (v in self.partial or self.cut[v] != d):
                    return False
        return True

    def _is_convex(self) -> bool:
        """Whether nothing inside needs what is made outside of what is inside."""
        after: set[int] = set()
        for k, op in enumerate(self.graph.operations):
            if k in self.inside:
                if not after.isdisjoint(op.inputs):
                    return False
            elif any(v in self.cut or v in self.partial or v in after for v in op.inputs):
                after.update(op.outputs)
        return True
