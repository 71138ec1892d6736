"""Batches: which part of a program runs row by row, once one dim of one input is its rows.

Every value gets a label, in program order. From values with rows, operations make values with rows
or sums over rows; sums pass through what is linear in them. What needs a whole sum, or all rows,
comes after the loop, and whatever reads that. Loops are taken in as they are: their bodies are
labelled too, to a fixpoint over what they carry. Where an operation with rows needs what comes
after, and that is a sum over rows of cheap things (the count of a masked mean), the sum is taken
before the loop, over all rows. What is found out on the way changes few labels, and only what reads
these is labelled anew. Nothing is known of any kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Literal

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import KEY, numpy_dtype
from tapestry_egg.reference.kernels import reference
from tapestry_egg.rewrite.rows.cuts import Cut, Rows
from tapestry_egg.zspace import ZRange

#: Of a value: where it has rows; `sum`: a sum over rows; `free`: made without the rows, `zero` if
#: it is nothing but zeros; `same`: made in the loop, the same by every step; `late`: made after it.
Label = Cut | Literal["sum", "free", "zero", "same", "late"]
Labels = tuple[Label, ...]


@dataclass(frozen=True)
class Linear:
    """An operation on whole values and sums over rows that is linear in the sums."""

    sums: tuple[int, ...]  # positions of the operands that are sums


@dataclass(frozen=True)
class Same:
    """An operation that every step runs alike."""


@dataclass(frozen=True)
class Inner:
    """A loop that runs on blocks of rows; its body with its labels."""

    body: Batch


#: How an operation of the region runs.
How = Rows | Linear | Same | Inner


class Whole(Exception):
    """An operation needs all rows at once, in a place where that cannot be."""


@dataclass
class Batch:
    """The labels of a graph some of whose inputs have `extent` rows."""

    graph: BlockGraph
    extent: int
    given: Mapping[int, Label]
    nested: bool = False
    wanted: dict[int, Cut] = field(default_factory=dict)  # values that are made with rows
    label: dict[int, Label] = field(default_factory=dict)
    how: dict[int, How] = field(default_factory=dict)  # number of an operation -> how it runs
    before: set[int] = field(default_factory=set)  # operations on all rows, before the loop
    # Values that have no rows where operations want them -> the rows wanted -> by whom.
    demands: dict[int, dict[Cut, set[int]]] = field(default_factory=dict)
    late: set[int] = field(default_factory=set)  # operations with rows that need what is late

    def __post_init__(self) -> None:
        graph = self.graph
        self.makers, self.readers = graph.producers(), graph.readers()
        self.leaving = set(graph.outputs)
        self.rejected: set[int] = set()  # values that are not made with rows
        self.costly: set[int] = set()  # operations that are not run before the loop
        self.asked: dict[int, list[tuple[int, Cut]]] = {}  # what an operation demands
        self.changed = set(range(len(graph.operations)))  # what is to be labelled
        self.label = {v: self.given.get(v, "free") for v in graph.inputs}
        for v, array in graph.constants.items():
            single = array.size == 1 and array.dtype == numpy_dtype(graph.values[v].dtype)
            self.label[v] = "zero" if single and _is_zero(array) else "free"

    def labelled(self) -> Batch:
        """Label everything. Raises Whole where the graph is the body of a loop and something in it
        needs all rows at once."""
        # This ends: what was wanted with rows, and what is too costly before the loop, only grows;
        # in between, what runs before the loop does.
        while True:
            self._pass()
            if not (self._want() or self._sum_before() or self._take_back()):
                return self

    def has_rows(self, v: int) -> bool:
        """Whether a value has rows."""
        return isinstance(self.label[v], Cut)

    def _pass(self) -> None:
        """Label what has changed, in the program's order, and what reads values of new labels."""
        ops, queued = self.graph.operations, self.changed
        waiting, self.changed = list(queued), set()
        heapify(waiting)
        while waiting:
            k = heappop(waiting)
            op = ops[k]
            self._forget(k)
            made = self._labels(k, op)
            if made is None:
                if self.nested:
                    raise Whole
                made = _all("late") * len(op.outputs)
                self.how.pop(k, None)
            for v, label in zip(op.outputs, made, strict=True):
                if self.label.get(v) != label:
                    self.label[v] = label
                    for r in self.readers[v]:
                        if r not in queued:
                            queued.add(r)
                            heappush(waiting, r)

    def _forget(self, k: int) -> None:
        """Take back what was found of an operation."""
        self.how.pop(k, None)
        self.late.discard(k)
        for v, cut in self.asked.pop(k, ()):
            self.demands[v][cut].discard(k)
            if not self.demands[v][cut]:
                del self.demands[v][cut]

    def _demand(self, k: int, v: int, cut: Cut) -> None:
        """Note that an operation wants a value with rows."""
        self.demands.setdefault(v, {}).setdefault(cut, set()).add(k)
        self.asked.setdefault(k, []).append((v, cut))

    # One operation

    def _labels(self, k: int, op: Operation) -> Labels | None:
        """The labels of what an operation makes; None where it needs all rows at once."""
        ins = [self.label[v] for v in op.inputs]
        if k in self.before:
            return _all("free") * len(op.outputs)
        cut = any(isinstance(x, Cut) for x in ins)
        if "late" in ins:
            if cut:
                self.late.add(k)
            return None
        if not cut and "sum" not in ins and "same" not in ins:
            return self._free(k, op, ins)
        if registry.runs_once(op) or registry.meaning(op.kernel) == "layout":
            return None  # A layout that is asked for is that of the whole.
        if op.regions:
            return self._loop(k, op, ins) if op.is_scan else None
        sig = self._signature(op)
        made: Labels | None
        if cut:
            made = self._on_rows(k, op, sig, ins)
            if made is None and "sum" in ins:
                self.late.add(k)
            return made
        if "sum" in ins:
            return self._linear(k, sig, ins)
        self.how[k] = Same()
        return _all("same") * len(op.outputs)

    def _signature(self, op: Operation) -> OperationSignature:
        return registry.signature_in(self.graph, op)

    def _keeps_zeros(self, op: Operation) -> bool:
        """Whether an operation makes zeros of zeros: where index points are alike, the first of
        them shows it."""
        sig = self._signature(op)
        if not sig.keeps_fills or sig.reduces or 0 in sig.extents:
            return False
        first = ZRange((0,) * len(sig.index), (1,) * len(sig.index))
        zeros = [
            np.zeros(sig.operand_box(p, first).shape, numpy_dtype(t.dtype))
            for p, t in enumerate(sig.input_types)
        ]
        try:
            return all(map(_is_zero, reference(op.kernel, op.params, sig, zeros, first)))
        except TemplateError:  # it has no reference
            return False

    def _free(self, k: int, op: Operation, ins: list[Label]) -> Labels | None:
        """What is made without rows; with rows, where that is wanted."""
        wanted = next((q for q, v in enumerate(op.outputs) if v in self.wanted), None)
        if wanted is None:
            zeros = not op.regions and set(ins) == {"zero"} and self._keeps_zeros(op)
            return _all("zero" if zeros else "free") * len(op.outputs)
        if not op.regions and not registry.runs_once(op):
            sig, v = self._signature(op), op.outputs[wanted]
            rows = Rows.of(sig, sig.outputs[wanted], sig.output_types[wanted], self.wanted[v])
            if rows is not None and not rows.summed and self._take(k, op, rows, ins):
                return tuple([c for c in rows.outputs if c is not None])
        if self.nested:
            return None
        self.rejected.update(op.outputs)
        self.changed.add(k)
        for v in op.outputs:
            self.wanted.pop(v, None)
        return _all("free") * len(op.outputs)

    def _take(self, k: int, op: Operation, rows: Rows, ins: list[Label]) -> bool:
        """Take in an operation with rows, if its operands have them where it wants them, or can."""
        for p, (x, c) in enumerate(zip(ins, rows.inputs, strict=True)):
            if (c is not None and x in ("sum", "same")) or (isinstance(x, Cut) and x != c):
                return False
            if x == "sum" and not (rows.summed and rows.started == p):
                return False
        for v, x, c in zip(op.inputs, ins, rows.inputs, strict=True):
            if c is not None and not isinstance(x, Cut):
                self._demand(k, v, c)
        self.how[k] = rows
        return True

    def _on_rows(
        self, k: int, op: Operation, sig: OperationSignature, ins: list[Label]
    ) -> Labels | None:
        p, cut = next((p, x) for p, x in enumerate(ins) if isinstance(x, Cut))
        rows = Rows.of(sig, sig.inputs[p], sig.input_types[p], cut)
        if rows is None:
            return None
        if rows.summed and rows.monoid != "sum":
            return None
        if rows.started is not None and ins[rows.started] not in ("sum", "zero"):
            return None  # What it starts from would count once for every step.
        if not self._take(k, op, rows, ins):
            return None
        return tuple(["sum" if c is None else c for c in rows.outputs])

    def _linear(self, k: int, sig: OperationSignature, ins: list[Label]) -> Labels | None:
        sums = tuple([p for p, x in enumerate(ins) if x == "sum"])
        for passage in sig.passages:
            group = set(passage.inputs)
            if (passage.monoid_in, passage.monoid_out) != ("sum", "sum") or not group >= set(sums):
                continue
            if all(ins[p] in ("sum", "zero") for p in group):
                self.how[k] = Linear(sums)
                return _all("sum") * len(sig.outputs)
        return None

    # Loops

    def _loop(self, k: int, op: Operation, ins: list[Label]) -> Labels | None:
        """A scan, once the labels of its body agree with those of what it carries."""
        consts, carried = counts(op)
        first, (body,) = consts + carried, op.regions
        given: list[Label] = []
        for p, x in enumerate(ins):
            if p >= first and isinstance(x, Cut):
                if not x.dim:
                    return None  # Rows one after another.
                x = x.moved(-1)
            given.append("free" if x == "zero" and consts <= p < first else x)
        wanted: dict[int, Cut] = {}
        while True:  # each turn gives an operand or a wanted value its only rows
            inner = Batch(
                body, self.extent, dict(zip(body.inputs, given, strict=True)), True, dict(wanted)
            )
            try:
                inner.labelled()
            except Whole:
                return None
            before = list(given), dict(wanted)
            for v, cut in ((v, cut) for v, cuts in inner.demands.items() for cut in cuts):
                p = body.inputs.index(v)
                if given[p] not in ("free", "zero"):
                    return None
                given[p] = cut
            for j in range(carried):
                if not self._carry(inner, j, consts + j, ins, given, wanted):
                    return None
            if before == (given, wanted):
                break
        return self._around(k, op, ins, given, inner)

    def _carry(
        self,
        inner: Batch,
        j: int,
        p: int,
        ins: list[Label],
        given: list[Label],
        wanted: dict[int, Cut],
    ) -> bool:
        """Let what is carried in have the label of what is carried out, if that can be."""
        v = inner.graph.outputs[j]
        here, out = given[p], inner.label[v]
        free = ("free", "zero", "same")
        if here == out or (here in free and out in free):
            return True
        if isinstance(out, Cut) and here == "free":
            given[p] = out
        elif out == "sum" and here == "free" and ins[p] == "zero":
            given[p] = "sum"
        elif isinstance(here, Cut) and out in ("free", "zero") and v not in wanted:
            wanted[v] = here
        elif not (here == "sum" and out == "zero"):
            return False
        return True

    def _around(
        self, k: int, op: Operation, ins: list[Label], given: list[Label], inner: Batch
    ) -> Labels | None:
        consts, carried = counts(op)
        first = consts + carried
        for p, (x, y) in enumerate(zip(ins, given, strict=True)):
            if isinstance(y, Cut) and not isinstance(x, Cut):
                if x not in ("free", "zero"):
                    return None
                cut = y if p < first else y.moved(1)
                self._demand(k, op.inputs[p], cut)
        out: list[Label] = list(given[consts:first])
        for v in inner.graph.outputs[carried:]:
            y = inner.label[v]
            out.append(y.moved(1) if isinstance(y, Cut) else y)
        self.how[k] = Inner(inner)
        return tuple(["same" if y in ("free", "zero") else y for y in out])

    # What the next pass follows

    def _want(self) -> bool:
        """Note what else is to be made with rows; whether there is something new."""
        new = False
        for v, cut in ((v, cut) for v, cuts in self.demands.items() for cut in cuts):
            k = self.makers.get(v)
            if k is None:
                if v in self.graph.inputs and self.nested:
                    continue
                if self.nested:
                    raise Whole  # A constant with rows.
                continue
            if v in self.wanted:
                if self.wanted[v] != cut and self.nested:
                    raise Whole
                continue
            if not self.nested and (v in self.rejected or not self._only(v, cut)):
                continue
            self.wanted[v] = cut
            self.changed.add(k)
            new = True
        return new

    def _only(self, v: int, cut: Cut) -> bool:
        """Whether all that reads a value reads it with these rows, and making it is cheap."""
        if v in self.leaving or len(self.demands[v]) > 1:
            return False
        return all(
            isinstance(how := self.how.get(k), Rows)
            and all(
                c == cut
                for u, c in zip(self.graph.operations[k].inputs, how.inputs, strict=True)
                if u == v
            )
            for k in self.readers[v]
        )

    def _sum_before(self) -> bool:
        """Take sums before the loop that operations with rows wait for, if that is cheap; whether
        there are any."""
        new: set[int] = set()
        for k in () if self.nested else sorted(self.late):
            sources = self._sources(k)
            if all(s not in self.costly and self._chain(s) is not None for s in sources):
                new |= sources
        new -= self.before | self.costly
        self.before |= new
        self.changed |= new
        return bool(new)

    def _take_back(self) -> bool:
        """Leave sums for later that have become too much to run twice; whether there are any."""
        lost = {k for k in self.before if self._chain(k) is None}
        self.before -= lost
        self.costly |= lost
        self.changed |= lost
        return bool(lost)

    def _sources(self, k: int) -> set[int]:
        """The operations with rows that make what an operation waits for."""
        found: set[int] = set()
        ops = self.graph.operations
        stack = [v for v in ops[k].inputs if self.label[v] in ("late", "sum")]
        seen = set(stack)
        while stack:
            at = self.makers[stack.pop()]
            op = ops[at]
            if any(self.has_rows(v) for v in op.inputs):
                found.add(at)
            for v in op.inputs:
                if self.label[v] in ("late", "sum") and v not in seen:
                    seen.add(v)
                    stack.append(v)
        return found

    def _chain(self, k: int) -> set[int] | None:
        """The operations with rows that an operation needs, itself too; None where some of them
        are products or loops, which are too much to run twice."""
        chain: set[int] = set()
        stack = [k]
        while stack:
            at = stack.pop()
            op = self.graph.operations[at]
            if at in chain:
                continue
            if op.regions or registry.runs_once(op) or self._signature(op).contracts:
                return None
            if any(self.label[v] == "late" for v in op.inputs):
                return None
            chain.add(at)
            stack += [
                self.makers[v]
                for v in op.inputs
                if v in self.makers and self.label[v] not in ("free", "zero")
            ]
        return chain

    @property
    def outside(self) -> set[int]:
        """The operations on all rows that run before the loop."""
        found: set[int] = set()
        for k in self.before:
            found |= self._chain(k) or set()
        return found


def _all(label: Label) -> Labels:
    return (label,)


def _is_zero(array: np.ndarray) -> bool:
    return array.dtype != KEY and not np.any(array)
