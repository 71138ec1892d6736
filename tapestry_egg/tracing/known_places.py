"""Reads and writes at places that a program knows before it runs, as slices, pads and joins.

`jnp.take(x, (jnp.arange(n) - 1) % n, 0)` reads rows by numbers that are made of nothing but
constants. Where these are a few runs, in each of which a number is a constant step from the one
before, the rows are slices. What is added there is padded, and what is set there is joined to what
stays. Which rows devices read is then seen in projections, and compilers read no numbers. The parts
of an array that is split are slices, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tapestry_egg.graph.arrays import decode_dtype, kind
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import Meaning, OperationSignature
from tapestry_egg.reference.computed import Computed

from .needless import Known
from .spelled import Spelled

_OF_WRITES = (
    "scatter_dims_to_operand_dims",
    "operand_batching_dims",
    "scatter_indices_batching_dims",
    "inserted_window_dims",
    "update_window_dims",
)
#: Per meaning of a kernel: the names, in its dimension numbers, of the dims that indices number, of
#: those of the operand that are batch dims, of the dims of the indices that these follow, of those
#: of the operand that a window has one element of, and of those of the result or of the updates
#: that a window has.
NAMES: Mapping[Meaning, tuple[str, str, str, str, str]] = {
    "reading": (
        "start_index_map",
        "operand_batching_dims",
        "start_indices_batching_dims",
        "collapsed_slice_dims",
        "offset_dims",
    ),
    "adding": _OF_WRITES,
    "writing": _OF_WRITES,
}

#: Numbers of more runs than these are left as they are.
_RUNS = 4
#: A window that is set is joined to what stays if that is no more than this part of the array: less
#: is written in place. What is added somewhere is padded if it is half of the array at least.
_BESIDE = 8

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """The numbers `first`, `first + step`, ...: so many, the first of them at place `at`."""

    at: int
    first: int
    step: int
    count: int

    @property
    def ends(self) -> tuple[int, int]:
        """The least and the greatest of the numbers."""
        last = self.first + self.step * (self.count - 1)
        return min(self.first, last), max(self.first, last)


def runs(numbers: np.ndarray) -> list[Run]:
    """The runs that a list of numbers is made of; none if there are too many."""
    values = numbers.astype(np.int64)
    steps = np.diff(values)
    changes = np.flatnonzero(steps[1:] != steps[:-1]) + 1
    if len(changes) > 2 * _RUNS or not len(values):
        return []
    starts = [0]  # places where runs begin
    groups = np.split(steps, changes)
    place = 0
    for k, group in enumerate(groups):
        # A step that differs from the one before and the one behind leads from one run to the next.
        if len(group) == 1 and len(groups) > 1:
            starts.append(place + 1)
        elif k and len(groups[k - 1]) > 1:  # the element between belongs to the run before
            starts.append(place + 1)
        place += len(group)
    bounds = [*dict.fromkeys(starts), len(values)]
    found = []
    for a, b in itertools.pairwise(bounds):
        found.append(Run(a, int(values[a]), int(steps[a]) if b - a > 1 else 1, b - a))
    return found if len(found) <= _RUNS else []


class KnownPlaces(Spelled):
    """Replaces such reads and writes. `types` and `constants` are given those of new values."""

    def __init__(
        self, types: list[TensorType], constants: dict[int, np.ndarray], known: Known
    ) -> None:
        super().__init__(types, constants, once=False)
        self.decided, self.computed = known, Computed(types, constants, known.makers)
        self.stands: dict[int, int] = {}  # value -> the one that is it

    def replaced(
        self, operations: Sequence[Operation], outputs: Sequence[int]
    ) -> tuple[list[Operation], list[int]]:
        """The operations with such reads and writes replaced, and the outputs."""
        for op in operations:
            inputs = tuple([self.stands.get(v, v) for v in op.inputs])
            self.like = op if inputs == op.inputs else replace(op, inputs=inputs)
            one = self._instead()
            found = self._parts() if one is None else [one]
            if found is None:
                self.operations.append(self.like)
            else:
                self.stands.update(zip(op.outputs, found, strict=True))
        return self.operations, [self.stands.get(v, v) for v in outputs]

    def _instead(self) -> int | None:
        """The value that the operation makes; None where it stays."""
        op = self.like
        means = self._meaning()
        if not means:
            return self._one_window()
        if means not in NAMES:
            return None
        numbered, batch, _, single, window = NAMES[means]
        dims, numbers = op.params["dimension_numbers"], self.computed(op.inputs[1])
        if numbers is None or dims[batch]:
            return None
        if numbers.ndim == 1:
            return self._window(numbers, dims[numbered], dims[single])
        # Rows along one dim, that stay along it.
        whole = self.values[op.inputs[0]].shape
        rows = self.values[op.inputs[2] if len(op.inputs) > 2 else op.outputs[0]].shape
        (*_, depth), (d, *_) = numbers.shape, dims[numbered]
        kept = [e for e in range(len(whole)) if e != d]
        apart = numbers.ndim == 2 and depth == 1 and list(dims[single]) == [d]
        if not apart or list(dims[window]) != kept or any(whole[e] != rows[e] for e in kept):
            return None
        found = runs(numbers[:, 0])
        if not found or any(r.ends[0] < 0 or r.ends[1] >= whole[d] for r in found):
            return None
        if means == "reading":
            return self._taken(d, found)
        return self._added_rows(d, found) if means == "adding" else None

    def _one_window(self) -> int | None:
        """What is read or written at scalars, one per dim."""
        if not any(t.writes or t.read_at for t in registry.templates().get(self.like.kernel, ())):
            return None
        own, inputs = self._signature(), self.like.inputs
        if own.writes:
            into, part, *at = [inputs[p] for p in own.writes]
            start = self._starts(into, at, self.values[part].shape)
            return None if start is None else self._joined(into, part, start)
        if not own.read_at:
            return None
        (source,), at = ([inputs[p] for p in ps] for ps in (own.moved, own.read_at))
        start = self._starts(source, at, self._shape())
        return None if start is None else self._box(source, start, self._shape())

    def _signature(self) -> OperationSignature:
        op = self.like
        read, made = (tuple([self.values[v] for v in vs]) for vs in (op.inputs, op.outputs))
        return registry.signature_of(op, read, made)

    def _meaning(self) -> Meaning:
        """What the operation does at places; nothing where it takes away what is written."""
        means = registry.meaning(self.like.kernel)
        return means if means != "adding" or self._signature().adds else ""

    def _parts(self) -> list[int] | None:
        """The parts that a value is taken apart into, as slices of it: what JAX lowers them to, and
        compilers compute inside the readers."""
        op = self.like
        read, made = ([self.values[v] for v in vs] for vs in (op.inputs, op.outputs))
        if len(made) < 2 or op.regions or op.effectful or kind(made[0].dtype) == "key":
            return None
        own = self._signature()
        if not own.parts:
            return None
        # All of a dim is read at once: each part keeps its own extent of it, or has one row.
        kept = read[0].rank == made[0].rank
        d = [any(row) for row in (own.outputs if kept else own.inputs)[0].matrix].index(False)
        if not kept and (found := self._equal_parts(d)) is not None:
            return found
        sizes = [t.shape[d] if kept else 1 for t in made]
        ends = itertools.accumulate(sizes)
        parts = [
            self._along(op.inputs[0], d, e - n, e, 1) for n, e in zip(sizes, ends, strict=True)
        ]
        return [self.reshaped(v, t.shape) for v, t in zip(parts, made, strict=True)]

    def _equal_parts(self, d: int) -> list[int] | None:
        """The parts of a value that is stretched along the dim along which it is taken apart."""
        op, maker = self.like, self.decided.makers.get(self.like.inputs[0])
        if maker is None or maker.kernel != "broadcast_in_dim":
            return None
        dims = maker.params["broadcast_dimensions"]
        if d in dims:
            return None
        source = self.stands.get(maker.inputs[0], maker.inputs[0])
        kept = [e - (e > d) for e in dims]
        return [self.spread(source, self._shape(), kept)] * len(op.outputs)

    def _starts(self, source: int, at: Sequence[int], sizes: Sequence[int]) -> Ints | None:
        """Where a window begins, moved inside as dynamic slices are."""
        numbers = [int(x) for v in at if (x := self.computed(v)) is not None]
        whole = self.values[source].shape
        if len(numbers) != len(whole):
            return None
        each = zip(numbers, sizes, whole, strict=True)
        return tuple([min(max(s, 0), n - m) for s, m, n in each])

    def _window(
        self, numbers: np.ndarray, dims: Sequence[int], single: Sequence[int]
    ) -> int | None:
        """One window, read or written."""
        op, whole = self.like, self.values[self.like.inputs[0]].shape
        means = self._meaning()
        part = op.outputs[0] if means == "reading" else op.inputs[2]
        sizes = iter(self.values[part].shape)
        shape = tuple([1 if d in single else next(sizes) for d in range(len(whole))])
        start = [0] * len(whole)
        for d, number in zip(dims, numbers, strict=True):
            start[d] = int(number)
        each = zip(start, shape, whole, strict=True)
        if any(not 0 <= a <= n - m for a, m, n in each):
            return None
        if means == "reading":
            return self._box(op.inputs[0], tuple(start), shape)
        part = self.reshaped(part, shape)
        if means == "adding":
            config = [[a, n - a - m, 0] for a, m, n in zip(start, shape, whole, strict=True)]
            return self._added([(part, config)])
        joined = self._joined(op.inputs[0], part, tuple(start))
        if joined is not None:
            return joined
        at = [self.constant(np.asarray(a, np.int32), "int32") for a in start]
        into = self.values[op.inputs[0]]
        return self.new("dynamic_update_slice", (op.inputs[0], part, *at), into, {})

    def _box(self, source: int, start: Ints, shape: Sequence[int]) -> int:
        """A box of a value, in the shape of the result."""
        type_ = self.values[source]
        if tuple(shape) != type_.shape:
            ends = [a + n for a, n in zip(start, shape, strict=True)]
            source = self.sliced(source, start, ends, [1] * len(ends))
        return self.reshaped(source, self._shape())

    def _joined(self, into: int, part: int, start: Ints) -> int | None:
        """A value with a window written over, where little of it stays: joined to that, dim by
        dim."""
        whole, shape = self.values[into].shape, list(self.values[part].shape)
        if _BESIDE * (prod(whole) - prod(shape)) > prod(whole):
            return None
        for d in reversed(range(len(whole))):
            if shape[d] == whole[d]:
                continue
            ends = [a + n for a, n in zip(start, shape, strict=True)]
            sides = []
            for a, b in ((0, start[d]), (ends[d], whole[d])):
                first = [*start[:d], a, *[0] * len(start[d + 1 :])]
                last = [*ends[:d], b, *whole[d + 1 :]]
                sides.append([self.sliced(into, first, last, [1] * len(last))] if a < b else [])
            part = self.joined([*sides[0], part, *sides[1]], d)
            shape[d] = whole[d]
        return part

    def _taken(self, d: int, found: Sequence[Run]) -> int:
        """Rows along a dim, run by run."""
        return self.joined([self._of_run(d, r) for r in found], d)

    def _of_run(self, d: int, run: Run) -> int:
        source = self.like.inputs[0]
        whole, (low, high) = self.values[source].shape, run.ends
        if run.step:
            source = self._along(source, d, low, high + 1, abs(run.step))
            return self._turned(source, d) if run.step < 0 else source
        one = self._along(source, d, low, low + 1, 1)
        shape = [*whole[:d], run.count, *whole[d + 1 :]]
        return self.spread(one, shape, range(len(whole)))

    def _added_rows(self, d: int, found: Sequence[Run]) -> int | None:
        """What is added to rows along a dim, run by run."""
        whole, part = self.values[self.like.inputs[0]].shape, self.like.inputs[2]
        terms = []
        for run in found:
            low, high = run.ends
            rows = self._along(part, d, run.at, run.at + run.count, 1)
            if run.step < 0:
                rows = self._turned(rows, d)
            elif not run.step:
                shape = [n for e, n in enumerate(self.values[rows].shape) if e != d]
                params = {"axes": [d], "out_sharding": None}
                rows = self.new("reduce_sum", (rows,), self.typed(rows, shape), params)
                rows = self.reshaped(rows, [*whole[:d], 1, *whole[d + 1 :]])
            config = [[0, 0, 0] for _ in whole]
            config[d] = [low, whole[d] - 1 - high, max(1, abs(run.step)) - 1]
            terms.append((rows, config))
        return self._added(terms)

    def _added(self, terms: Sequence[tuple[int, list[list[int]]]]) -> int | None:
        """The sum of the operand and of values that are padded; None where it is a small part."""
        into = self.like.inputs[0]
        type_ = self.values[into]
        number = self.decided.number(into)
        empty = number is not None and number == 0
        if kind(type_.dtype) in ("bool", "key"):
            return None
        if not empty and 2 * sum(self.values[v].size for v, _ in terms) < type_.size:
            return None
        zero = self._zero(type_.dtype)
        total = None if empty else into
        for v, config in terms:
            if any(map(any, config)):
                v = self.padded(v, zero, config)
            total = v if total is None else self.new("add", (total, v), type_, {})
        return total

    # ---- operations ----------------------------------------------------------------------------

    def _shape(self) -> Ints:
        return self.values[self.like.outputs[0]].shape

    def _zero(self, dtype: str) -> int:
        return self.constant(np.zeros((), decode_dtype(dtype)), dtype)

    def _along(self, v: int, d: int, first: int, last: int, step: int) -> int:
        """The rows [first, last) of a value along a dim, so many apart."""
        whole = self.values[v].shape
        start = [0] * len(whole)
        ends, strides = [*whole], [1] * len(whole)
        start[d], ends[d], strides[d] = first, last, step
        return self.sliced(v, start, ends, strides)

    def _turned(self, v: int, d: int) -> int:
        if self.values[v].shape[d] == 1:
            return v
        return self.new("rev", (v,), self.values[v], {"dimensions": [d]})
