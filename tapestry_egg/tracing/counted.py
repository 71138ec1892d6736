"""Loops that read and write at the number of their round, as scans of slices and stacks.

`lax.fori_loop(0, n, lambda i, c: f(c, w[i]), c)` is a scan that carries a counter, by which every
round takes its slice of `w`. Of a scan over `w` the places of all slices are known: as projections
see them, devices and compilers may share the rounds' slices out, and loops be written out. So a
constant of the loop of which each round takes the next part becomes an array that the loop goes
over. A carried array of which each round writes the next part, or adds to it, and that is read by
nothing else, becomes a stack of these parts. What numbers the rounds is known after the loop.

What would be copied for that stays as it is: XLA takes rows along another dim, or some of all rows,
out of the array where it lies, and adds rows to an array where that lies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, numbered, reached
from tapestry_egg.graph.loops import counts
from tapestry_egg.metakernels import registry
from tapestry_egg.reference.computed import Computed
from tapestry_egg.reference.kernels import prepared

from .known_places import NAMES
from .needless import Known, reshapes
from .spelled import Spelled, at

#: Loops of more rounds are not looked at.
_MOST = 1 << 16


@dataclass(frozen=True)
class Window:
    """The `part` of an array that each round reads or writes: so many `rows` along `dim`, those of
    all rounds from `start` on; of the last round first, if they come `backward`. Or it `adds`."""

    array: int
    part: int
    dim: int
    start: int
    rows: int
    backward: bool
    adds: bool


@dataclass
class Rounds:
    """What values of one element in a loop's body are in each round, which are computed of nothing
    but numbers. `computed` tells what the loop's operands are."""

    op: Operation
    computed: Computed
    numbers: dict[int, np.ndarray] = field(default_factory=dict)  # [rounds]
    ends: dict[int, np.ndarray] = field(default_factory=dict)  # what counters are in the end

    def __post_init__(self) -> None:
        (body,), (first, carried) = self.op.regions, counts(self.op)
        known = dict(body.constants)
        carries = dict[int, np.ndarray]()
        for p, (v, outside) in enumerate(zip(body.inputs, self.op.inputs, strict=True)):
            if body.values[v].size != 1 or (said := self.computed(outside)) is None:
                continue
            if p < first:
                known[v] = said
            elif p < first + carried:
                carries[p - first] = said
            else:
                self.numbers[v] = self.in_turn(said.reshape(self.length))
        for v, number in known.items():
            if number.size == 1:
                self.numbers[v] = np.full(self.length, number.reshape(()))
        for k, start in carries.items():
            self._count(k, body.inputs[first + k], start)
        for x in body.operations:
            self._compute(x)

    @property
    def length(self) -> int:
        """How often the loop runs."""
        return int(self.op.params["length"])

    def in_turn(self, stack: np.ndarray) -> np.ndarray:
        """What a stack has of each round, in the order of rounds; and the other way round."""
        return stack[::-1] if self.op.params["reverse"] else stack

    def _count(self, k: int, counter: int, start: np.ndarray) -> None:
        """A carry that changes by the same number in every round."""
        (body,) = self.op.regions
        made = next((x for x in body.operations if body.outputs[k] in x.outputs), None)
        if made is None or start.shape or start.dtype.kind not in "iu":
            return
        means = registry.meaning(made.kernel)
        value, by = made.inputs if means in ("sum", "difference") else (-1, -1)
        if value != counter and means == "sum":
            value, by = by, value
        steps = self.numbers.get(by)
        if value != counter or steps is None or (steps != steps[0]).any():
            return
        step = int(steps[0]) * (-1 if means == "difference" else 1)
        last = int(start) + step * self.length
        if np.iinfo(start.dtype).min <= last <= np.iinfo(start.dtype).max:
            each = int(start) + step * np.arange(self.length)
            self.numbers[counter] = each.astype(start.dtype)
            self.ends[k] = np.asarray(last, start.dtype)

    def _compute(self, x: Operation) -> None:
        (body,) = self.op.regions
        given = [self.numbers[v] for v in x.inputs if v in self.numbers]
        read, made = ([body.values[v] for v in vs] for vs in (x.inputs, x.outputs))
        small = len(given) == len(read) > 0 and all(t.size == 1 for t in (*read, *made))
        if not small or not registry.is_light(x, body.values):
            return
        if any(t.rank for t in (*read, *made)):
            kept = len(given) == 1 and registry.signature_in(body, x).elements == "kept"
            if kept and read[0].dtype == made[0].dtype:  # the same number in another shape
                self.numbers[x.outputs[0]] = given[0]
            return
        read, made = ([replace(t, shape=(self.length,)) for t in ts] for ts in (read, made))
        try:
            own = registry.signature_of(x, tuple(read), tuple(made))
            found = prepared(x.kernel, x.params, own)(given)[0]
        except TemplateError:  # NumPy has no word for it
            return
        if found.shape == (self.length,):
            self.numbers[x.outputs[0]] = found

    def window(self, x: Operation) -> Window | None:
        """What an operation reads or writes of an array, where the windows of all rounds follow one
        another along a dim; None for anything else."""
        (body,) = self.op.regions
        places = _places(body, x)
        if places is None:
            return None
        array, part, at = places
        whole, shape = body.values[array].shape, [*body.values[part].shape]
        starts = [np.zeros(self.length, int) if v is None else self.numbers.get(v) for v in at]
        known = [one.astype(np.int64) for one in starts if one is not None]
        if not whole or len(known) < len(whole):
            return None
        some = [d for d, v in enumerate(at) if v is not None]  # dims of which a part is taken
        d, *others = [d for d in some if known[d].any()] or [*some[:1], 0][:1]
        if len(shape) < len(whole):
            shape.insert(d, 1)
        start, rows = int(known[d].min()), shape[d]
        in_turn = start + rows * np.arange(self.length)
        backward = self.length > 1 and bool((known[d] == in_turn[::-1]).all())
        inside = start >= 0 and start + rows * self.length <= whole[d]
        full = all(n == m for e, (n, m) in enumerate(zip(whole, shape, strict=True)) if e != d)
        in_order = backward or bool((known[d] == in_turn).all())
        return (
            Window(array, part, d, start, rows, backward, registry.meaning(x.kernel) == "adding")
            if inside and full and in_order and not others
            else None
        )


def _places(body: BlockGraph, x: Operation) -> tuple[int, int, list[int | None]] | None:
    """The array of which an operation reads or writes a window, the window, and per dim of the
    array the value that says where it begins; None where that is 0."""
    found = registry.templates().get(x.kernel, ())
    if any(t.writes or t.read_at for t in found):
        own = registry.signature_in(body, x)
        if own.writes:
            array, window, *at = [x.inputs[p] for p in own.writes]
        elif own.read_at and len(own.moved) == 1:
            (array,), window = [x.inputs[p] for p in own.moved], x.outputs[0]
            at = [x.inputs[p] for p in own.read_at]
        else:
            return None
        whole, shape = body.values[array].shape, body.values[window].shape
        if not len(at) == len(whole) == len(shape):
            return None
        # Windows begin inside: what takes all of a dim, at its first element.
        each = zip(at, whole, shape, strict=True)
        return array, window, [None if n == m else v for v, n, m in each]
    if not _writes(body, x):
        return None
    numbered, batch, _, single, inside = NAMES["writing"]
    dims, (array, number, window, *_) = x.params["dimension_numbers"], x.inputs
    rows, at = [*range(body.values[window].rank)], dims[numbered]
    one = body.values[number].shape == (1,) and not dims[batch] and len(at) == 1
    one &= body.values[array].rank == len(rows) + 1
    if not one or [*dims[single]] != [*at] or [*dims[inside]] != rows:
        return None
    return array, window, [number if d == at[0] else None for d in range(len(rows) + 1)]


def _writes(body: BlockGraph, x: Operation) -> bool:
    """Whether an operation sets elements at places that an operand says, or adds to them."""
    means = registry.meaning(x.kernel)
    return means == "writing" or (means == "adding" and registry.signature_in(body, x).adds)


def with_stacks(
    operations: Sequence[Operation],
    outputs: Sequence[int],
    types: list[TensorType],
    constants: dict[int, np.ndarray],
    known: Known,
) -> tuple[list[Operation], list[int]]:
    """The operations with such loops written anew, and the outputs. `types` and `constants` are
    given those of new values."""
    w, computed = Spelled(types, constants, once=False), Computed(types, constants, known.makers)
    stands: dict[int, int] = {}
    for op in operations:
        op = replace(op, inputs=tuple([stands.get(v, v) for v in op.inputs]))
        found = Loop(op, Rounds(op, computed), w, known).written() if _counts(op) else None
        if found is None:
            w.operations.append(op)
        else:
            stands.update(zip(op.outputs, found, strict=True))
    return w.operations, [stands.get(v, v) for v in outputs]


def _counts(op: Operation) -> bool:
    return op.is_scan and 0 < int(op.params["length"]) <= _MOST


@dataclass
class Loop:
    """A loop, what is known of its rounds, and the program `around` it, in which it is written."""

    op: Operation
    rounds: Rounds
    around: Spelled
    known: Known
    # Per array of which each round reads so many rows: the stack outside, the part in the body.
    streams: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    # Per carry that becomes a stack: the part of each round, its window, and whether it is added.
    parts: dict[int, tuple[int, Window, bool]] = field(default_factory=dict)
    stands: dict[int, int] = field(default_factory=dict)  # in the body

    def __post_init__(self) -> None:
        (self.body,), (self.first, self.carried) = self.op.regions, counts(self.op)
        self.inside = Spelled([*self.body.values], dict(self.body.constants), once=False)
        self.around.like = at(self.op)
        makers = {v: x for x in self.body.operations for v in x.outputs}
        self.numbers = Known(self.body.values, self.body.constants, makers)
        self.readers: dict[int, list[Operation | None]] = {}  # None: it leaves the body
        for x in self.body.operations:
            for v in x.inputs:
                self.readers.setdefault(v, []).append(x)
        for v in self.body.outputs:
            self.readers.setdefault(v, []).append(None)
        # A loop that goes over nothing yet may do so in the order of its first window.
        stacks = len(self.op.inputs) - self.first, len(self.body.outputs)
        over = stacks != (self.carried, self.carried)
        self.backward: bool | None = bool(self.op.params["reverse"]) if over else None

    def written(self) -> list[int] | None:
        """The results of the loop as it is written; None where it stays."""
        gone, views = set[int](), dict[int, int]()
        for x in self.body.operations:
            self.inside.like = at(x)
            found = None if x.regions or x.effectful else self.rounds.window(x)
            made = x.outputs[0] if x.outputs else -1
            if found is not None and (k := self._written_by(x, found)) is not None:
                added = found.adds or self.body.outputs[k] != made
                part = self._in_shape(found.part, self._shape(found))
                self.parts[k] = part, found, added
                gone |= {made, self.body.outputs[k]}
            elif found is not None and (one := self._read_by(x, found)) is not None:
                shape = self.body.values[made].shape
                self.stands[made], views[made] = self.inside.reshaped(one, shape), one
            elif self._gives_back(x, views):
                self.stands[made] = views[made] = views[x.inputs[0]]
            elif made not in gone:
                inputs = tuple([self.stands.get(v, v) for v in x.inputs])
                self.inside.operations.append(replace(x, inputs=inputs))
        known = self._known_stacks()
        if not (self.streams or self.parts or known):
            return None
        outside = {part: v for v, part in self.streams.values()}
        for q in range(self.carried, len(self.body.outputs)):
            if (v := self.body.outputs[q]) in views:  # all slices of an array are the array
                shape = self.around.values[self.op.outputs[q]].shape
                known[q] = self.around.reshaped(outside[views[v]], shape)
        return self._written_with(known)

    def _in_shape(self, v: int, shape: tuple[int, ...]) -> int:
        """A value of the body in a shape; what it was given its own shape from, if that fits."""
        made = self.numbers.makers.get(v)
        if made is not None and reshapes(made, self.body.values):
            (before,) = made.inputs
            v = before if self.body.values[before].shape == shape else v
        return self.inside.reshaped(self.stands.get(v, v), shape)

    def _agrees(self, backward: bool) -> bool:
        """Whether the loop goes over its arrays in such an order."""
        if self.backward is None:
            self.backward = backward
        return backward == self.backward or self.rounds.length == 1

    def _shape(self, window: Window) -> tuple[int, ...]:
        """The shape of the part of an array that each round has."""
        shape = [*self.body.values[window.array].shape]
        shape[window.dim : window.dim + 1] = [window.rows] if window.rows > 1 else []
        return tuple(shape)

    def _written_by(self, x: Operation, window: Window) -> int | None:
        """The carry of which an operation writes the part of this round, or adds it; None if there
        is no such carry, anything else reads it, or a stack takes more."""
        if window.part in x.outputs:
            return None
        (made,), last, array = x.outputs, x, window.array
        if self._is_zero(array):
            (reader, *others) = self.readers.get(made, [None])
            if reader is None or others or registry.meaning(reader.kernel) != "sum":
                return None
            last = reader
            array = next((v for v in reader.inputs if v != made), array)
        carries = self.body.inputs[self.first : self.first + self.carried]
        if array not in carries or self.readers[array] != [last]:
            return None
        k, (result,) = carries.index(array), last.outputs
        alone = self.body.outputs[k] == result and self.readers[result] == [None]
        return k if alone and self._pays(window, last is not x, k) else None

    def _pays(self, window: Window, whole: bool, k: int) -> bool:
        """Whether a stack takes no more than what a loop writes: what it adds to the `whole` of a
        carry in each round takes more in any case. Else the stack must be all that becomes of the
        carry, as rows that are added to an array are where that lies."""
        if not self._agrees(window.backward):
            return False
        type_, n = self.body.values[window.array], self.rounds.length
        all_of_it = window.dim == 0 and window.rows * n == type_.shape[0]
        return whole or (all_of_it and (not window.adds or self._begins_with_zeros(k)))

    def _begins_with_zeros(self, k: int) -> bool:
        number = self.known.number(self.op.inputs[self.first + k])
        return number is not None and bool(number == 0)

    def _is_zero(self, array: int) -> bool:
        if array in self.body.inputs[: self.first]:
            number = self.known.number(self.op.inputs[self.body.inputs.index(array)])
        else:
            number = None if array in self.body.inputs else self.numbers.number(array)
        return number is not None and bool(number == 0)

    def _read_by(self, x: Operation, window: Window) -> int | None:
        """The part of a constant of the loop that each round has; None if an operation reads
        something else."""
        consts, array = self.body.inputs[: self.first], window.array
        if window.part not in x.outputs or array not in consts:
            return None
        whole, d, n = self.body.values[array].shape, window.dim, self.rounds.length
        # A stack of some of an array, or in another order, would be a copy.
        copied = window.rows * n < whole[d] or any(m > 1 for m in whole[:d])
        if copied or not self._agrees(window.backward):
            return None
        key = array, window.rows
        if key not in self.streams:
            shape = self._shape(window)
            stack = self.around.reshaped(self.op.inputs[consts.index(array)], (n, *shape))
            self.streams[key] = stack, self.inside.value(self.inside.typed(array, shape))
        return self.streams[key][1]

    def _gives_back(self, x: Operation, views: Mapping[int, int]) -> bool:
        """Whether an operation gives a part its own shape back."""
        if len(x.inputs) != 1 or x.inputs[0] not in views or not reshapes(x, self.body.values):
            return False
        return self.inside.values[views[x.inputs[0]]] == self.body.values[x.outputs[0]]

    def _known_stacks(self) -> dict[int, int]:
        """The results that are stacks of integers that are known, as constants."""
        found = {}
        for q in range(self.carried, len(self.body.outputs)):
            each = self.rounds.numbers.get(self.body.outputs[q])
            if each is not None and each.dtype.kind in "iub":
                found[q] = self._constant(q, self.rounds.in_turn(each))
        return found

    def _constant(self, q: int, array: np.ndarray) -> int:
        """A result of the loop that is a constant."""
        v = self.around.value(self.around.values[self.op.outputs[q]])
        self.around.constants[v] = array.reshape(self.around.values[v].shape)
        return v

    def _written_with(self, known: Mapping[int, int]) -> list[int]:
        """The results of the loop as it is written, of which some are known values."""
        op, body, n = self.op, self.body, self.rounds.length
        carries = range(self.carried)
        gone = {k for k in self.rounds.ends if k not in self.parts}
        while True:  # counters stay that something else reads
            kept = [k for k in carries if k not in self.parts and k not in gone]
            kept += [q for q in range(self.carried, len(body.outputs)) if q not in known]
            leaving = [body.outputs[q] for q in kept]
            leaving = [self.stands.get(v, v) for v in leaving]
            leaving += [part for part, *_ in self.parts.values()]
            live, needed = reached(self.inside.operations, leaving)
            read = {k for k in gone if body.inputs[self.first + k] in needed}
            if not read:
                break
            gone -= read
        here = [p for p, v in enumerate(body.inputs) if v in needed or p - self.first in kept]
        here = [p for p in here if p - self.first not in {*self.parts, *gone}]
        numbers = {
            **op.params,
            "reverse": bool(self.backward),
            "num_consts": sum(p < self.first for p in here),
            "num_carry": sum(q < self.carried for q in kept),
        }
        entering = [body.inputs[p] for p in here] + [v for _, v in self.streams.values()]
        inside = replace(
            body, values=tuple(self.inside.values), constants=self.inside.constants, operations=live
        )
        region = numbered(inside, entering, leaving)
        stacks = {
            k: self.around.value(replace(type_, shape=(n, *type_.shape)))
            for k, (part, *_) in self.parts.items()
            for type_ in [self.inside.values[part]]
        }
        self.around.operations.append(
            replace(
                op,
                inputs=(*(op.inputs[p] for p in here), *(v for v, _ in self.streams.values())),
                outputs=(*(op.outputs[q] for q in kept), *stacks.values()),
                params=numbers,
                regions=(region,),
            )
        )
        found = dict(zip(range(len(op.outputs)), op.outputs, strict=True))
        for k, stack in stacks.items():
            found[k] = self._whole(k, stack)
        found |= {k: self._constant(k, self.rounds.ends[k]) for k in gone}
        return [*{**found, **known}.values()]

    def _whole(self, k: int, stack: int) -> int:
        """What becomes of a carry by the parts of all rounds."""
        before, (_, window, added) = self.op.inputs[self.first + k], self.parts[k]
        type_, d = self.around.values[before], window.dim
        rank, rows = self.around.values[stack].rank, window.rows * self.rounds.length
        stack = self.around.transposed(stack, [*range(1, d + 1), 0, *range(d + 1, rank)])
        stack = self.around.reshaped(stack, (*type_.shape[:d], rows, *type_.shape[d + 1 :]))
        config = [[0, 0, 0] for _ in type_.shape]
        config[d] = [window.start, type_.shape[d] - window.start - rows, 0]
        if any(config[d]):
            zero = self.around.constant(np.zeros((), decode_dtype(type_.dtype)), type_.dtype)
            stack = self.around.padded(stack, zero, config)
        if not added or self._begins_with_zeros(k):
            return stack
        return self.around.new("add", (before, stack), type_, {})
