"""Regions of a program that can run one block of rows at a time, grown around a product.

Rows are one dim of the product's result. From there they are followed through the projections of
the templates: an operation belongs to the region if rows are an index dim of its own, which each of
its operands and results follows one to one or does not have, and if its result for some rows is a
function of those rows (or a sum over them) wherever they lie. Nothing is known of any kernel.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.rewrite.rows.cuts import Cut, Rows

#: What has this share of the product's elements is large as well: its rows but one, where tokens
#: predict the next ones, or a half of its columns.
_LARGE = 0.5


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
        self.extent, self.large = out.shape[self.dim], out.size * _LARGE
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
