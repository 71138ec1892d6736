"""Operations that need not be made: those of tensors without elements, those made before, parts of
which other parts are taken, what nothing reads, and what is settled before a program runs.

A result without elements, as programs that halve their arrays end in, is a constant, and an operand
without elements adds nothing. Left in the graph, such operations would have no points to cut, and
keep their other operands whole. What a function computes twice (a mean, and the mean within a
variance; the forward pass in a rule for gradients) XLA computes once, and what that needs is sent
once. A plan that priced both would promise bytes that nothing moves.

The gradient of what puts holes between rows cuts edges off and takes every other row of what is
left; as one slice it reads what it keeps. XLA for GPUs computes both inside their reader, for TPUs
it stores what the second slice reads.

XLA takes the branch that a constant chooses and drops the other, and makes constants of results
that an operand cannot change (its AlgebraicSimplifier: `and` with nothing but zeros, an integer
times 0, what is unsigned compared with 0, an integer compared with itself). What only the dropped
operand needed is not computed then, nor sent. Floats are left alone where a NaN or an infinity
would show: 0 times x, and x minus x.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapestry_egg.graph.arrays import decode_dtype
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import exact

from .codec import encode_params
from .constants import compute, may_prepare
from .control_flow import branch_everywhere
from .plain import handles_in

# Values that are one number over and over if their operand is.
_REPEATING = {"broadcast_in_dim", "copy", "reshape", "squeeze", "transpose"}
# What decides is computed of constants where these are no more, and none is larger: a verdict, the
# ends of a sorted list.
_STEPS, _ELEMENTS = 32, 1 << 12

_SAME = {"eq": True, "ge": True, "le": True, "ne": False, "gt": False, "lt": False}
#: What operations give where they go over no elements.
_OF_NOTHING = {
    "conv_general_dilated": 0,
    "dot_general": 0,
    "reduce_and": -1,
    "reduce_or": 0,
    "reduce_prod": 1,
    "reduce_sum": 0,
}
#: Comparisons of what is not negative with 0, by kernel and by the operand that is 0.
_UNSIGNED = {("lt", 1): False, ("ge", 1): True, ("gt", 0): False, ("le", 0): True}

#: Along one dim the first element that is taken, and how many apart the next ones are.
Steps = tuple[tuple[int, int], ...]


def is_constant(outputs: Sequence[TensorType]) -> bool:
    """Whether an operation without effects computes nothing: no result has an element."""
    return bool(outputs) and all(t.size == 0 and not t.dtype.startswith("key<") for t in outputs)


def unchanged_operand(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType
) -> int | None:
    """The operand that an operation gives back as it is, since nothing is written into it or
    joined to it, or since it is written over all of another; None where it does more."""
    found: int | None = None
    if kernel == "dynamic_update_slice" or kernel.startswith("scatter"):
        new = 1 if kernel == "dynamic_update_slice" else 2
        found = 0 if inputs[new].size == 0 else new if _fills(kernel, params, inputs) else None
    elif kernel == "concatenate":
        kept = joined_operands(kernel, inputs)
        found = kept[0] if len(kept) == 1 else None
    return found if found is not None and inputs[found] == output else None


def _fills(kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType]) -> bool:
    """Whether all of an array is written over, wherever the write begins: `x.at[:].set(y)`."""
    if kernel == "dynamic_update_slice":  # what begins too late is moved to the front
        return inputs[0].shape == inputs[1].shape
    if kernel != "scatter" or inputs[0].shape != inputs[2].shape:
        return False
    dims = params["dimension_numbers"]
    if tuple(dims.update_window_dims) != tuple(range(inputs[0].rank)):
        return False
    # Where a place is data, a write that does not fit there is dropped, unless it is moved.
    return not dims.scatter_dims_to_operand_dims or params["mode"].name == "CLIP"


def joined_operands(kernel: str, inputs: Sequence[TensorType]) -> tuple[int, ...]:
    """The operands that an operation needs: of those that are joined, the ones with elements."""
    everything = tuple(range(len(inputs)))
    if kernel != "concatenate":
        return everything
    return tuple(p for p in everything if inputs[p].size) or everything[:1]


def made_once(
    operations: Iterable[Operation],
    types: Sequence[TensorType],
    outputs: Iterable[int],
    constants: Iterable[int] = (),
) -> tuple[list[Operation], list[int]]:
    """The operations without those that do what one before them does on the same operands, and the
    outputs as these make them. Those that stay know the lines of all.

    Left as they are: operations with regions, effects, or calls into Python; what draws numbers;
    those of different `jax.checkpoint` regions, which XLA keeps apart, too; what is made of
    `constants` alone, which each reader fills in when it wants it (readers of equal ones are equal
    for all that); and those of several outputs, each of which may be asked to lie in its own way.
    """
    outputs, operations = list(outputs), list(operations)
    elsewhere = _read_elsewhere(operations, outputs)
    written: dict[tuple[int, ...], list[Operation]] = {}  # by what the one that stays makes
    leaving = set(outputs)
    stands: dict[int, int] = {}  # value -> the equal one before it
    known: dict[Any, tuple[int, ...]] = {}
    filled = {v: v for v in constants}  # value -> the equal one that was filled in first
    kept: list[Operation] = []
    for op in operations:
        inputs = tuple([stands.get(v, v) for v in op.inputs])
        fills = filled.keys() >= set(inputs)
        repeatable = registry.is_repeatable(op)
        first = op.outputs
        if repeatable:
            made = tuple([types[v] for v in op.outputs])
            numbers = tuple([filled.get(v, v) for v in inputs])
            key = op.kernel, numbers, made, op.remat, exact(op.params)
            first = known.setdefault(key, op.outputs)
        if fills:
            filled.update(zip(op.outputs, first, strict=True))
        elif repeatable:
            apart = not leaving.isdisjoint(first) and not leaving.isdisjoint(op.outputs)
            if first is not op.outputs and not apart:
                same = dict(zip(op.outputs, first, strict=True))
                leaving.update(same[v] for v in op.outputs if v in leaving)
                stands.update(same)
                written.setdefault(first, []).append(op)
                continue
        kept.append(op if inputs == op.inputs else replace(op, inputs=inputs))
    for k, op in enumerate(kept):
        if again := written.get(op.outputs):
            places = [w.source for w in (op, *again) if not elsewhere.isdisjoint(w.outputs)]
            named = dict.fromkeys(place for place in places if place.file)
            kept[k] = replace(op, places=tuple(named))
    return kept, [stands.get(v, v) for v in outputs]


def _read_elsewhere(operations: Sequence[Operation], outputs: Sequence[int]) -> frozenset[int]:
    """Values that another line reads than makes them, or that leave."""
    line = {v: (op.source.file, op.source.line) for op in operations for v in op.outputs}
    return frozenset(outputs).union(
        v
        for op in operations
        for v in op.inputs
        if v in line and line[v] != (op.source.file, op.source.line)
    )


def without_unread(operations: Sequence[Operation], outputs: Iterable[int]) -> list[Operation]:
    """The operations without operands of which nothing is read: of a barrier, and those that a sort
    carries along."""
    read = set(outputs)
    found: list[Operation] = []
    for op in reversed(operations):
        keys = {"optimization_barrier": 0, "sort": op.params.get("num_keys")}.get(op.kernel)
        kept = [p for p, v in enumerate(op.outputs) if v in read]
        if keys is not None and kept and len(kept) < len(op.outputs):
            kept = [p for p in range(len(op.outputs)) if p < int(keys) or p in kept]
            inputs, made = (tuple(of[p] for p in kept) for of in (op.inputs, op.outputs))
            op = replace(op, inputs=inputs, outputs=made)
        if op.effectful or not read.isdisjoint(op.outputs):
            read.update(op.inputs)
        found.append(op)
    return found[::-1]


def parts_at_once(operations: Iterable[Operation], types: Sequence[TensorType]) -> list[Operation]:
    """The operations, where slices of parts are slices of what these are parts of.

    Parts of different `jax.checkpoint` regions stay, as XLA keeps these apart.
    """
    made: dict[int, tuple[Operation, int, Steps]] = {}  # a part -> its maker, of what, and where
    found: list[Operation] = []
    for op in operations:
        steps = _steps(op, types)
        if steps is not None:
            before = made.get(op.inputs[0])
            source = op.inputs[0]
            if before is not None and before[0].remat == op.remat:
                _, source, outer = before
                steps = tuple(
                    (a + s * first, s * step)
                    for (a, s), (first, step) in zip(outer, steps, strict=True)
                )
                op = _slice(op, source, steps, types)
            made[op.outputs[0]] = op, source, steps
        found.append(op)
    return found


def _steps(op: Operation, types: Sequence[TensorType]) -> Steps | None:
    """Where an operation takes its part of what it reads first; None for one that takes none."""
    if op.kernel == "slice":
        strides = op.params["strides"] or (1,) * len(op.params["start_indices"])
        return tuple(zip(map(int, op.params["start_indices"]), map(int, strides), strict=True))
    if op.kernel == "pad" and types[op.outputs[0]].size:
        config = op.params["padding_config"]
        if all(low <= 0 and high <= 0 and not inner for low, high, inner in config):
            return tuple((-int(low), 1) for low, _, _ in config)
    return None


def _slice(op: Operation, source: int, steps: Steps, types: Sequence[TensorType]) -> Operation:
    """An operation that takes its part of `source`."""
    shape = types[op.outputs[0]].shape
    ends = tuple(a + s * (n - 1) + 1 if n else a for (a, s), n in zip(steps, shape, strict=True))
    params = {
        "start_indices": tuple(a for a, _ in steps),
        "limit_indices": ends,
        "strides": tuple(s for _, s in steps),
    }
    encoded = encode_params(params, kernel="slice")
    return replace(op, kernel="slice", inputs=(source,), params=encoded)


@dataclass(frozen=True)
class Known:
    """What is known of values while a program is traced: their types, those that are constants, and
    the operations that make others."""

    types: Sequence[TensorType]
    constants: Mapping[int, np.ndarray]
    makers: Mapping[int, Operation]

    def number(self, v: int) -> Any | None:
        """The number that every element of a value is; None where they differ, or nothing says."""
        op = self.makers.get(v)
        while v not in self.constants and op is not None and op.kernel in _REPEATING:
            v = op.inputs[0]
            op = self.makers.get(v)
        if v in self.constants:
            every = self.constants[v].reshape(-1)
            first, some = every[:1], every[:_ELEMENTS]  # most masks differ early
            same = first.size and (some == first).all() and (every == first).all()
            return first[0] if same else None
        return self._computed(v) if self.types[v].size == 1 else None

    def _computed(self, v: int) -> Any | None:
        """The one element of a value that a few operations make of small constants."""
        steps: dict[int, Operation] = {}  # by the first value that each makes
        wanted = [v]
        while wanted:
            u = wanted.pop()
            if self.types[u].size > _ELEMENTS:
                return None
            if u in self.constants:
                continue
            op = self.makers.get(u)
            if op is None or not self._may_run(op) or len(steps) == _STEPS:
                return None
            if op.outputs[0] not in steps:
                steps[op.outputs[0]] = op
                wanted += op.inputs
        # Values are numbered in the order in which they are made.
        in_order = [steps[u] for u in sorted(steps)]
        graph = BlockGraph("what decides", tuple(self.types), (), (), ())
        return compute(graph, in_order, self.constants, [v])[v].reshape(-1)[0]

    def _may_run(self, op: Operation) -> bool:
        types = [self.types[u] for u in op.inputs], [self.types[u] for u in op.outputs]
        return (
            not (op.effectful or op.regions or handles_in(op.params))
            and may_prepare(op.kernel, *types)
            and not registry.calls_python(op.kernel)
        )


def branch_taken(params: Mapping[str, Any], inputs: Sequence[int], known: Known) -> Any | None:
    """The branch of a conditional that runs on every platform, or that its first operand chooses
    where that is known: where there is no such branch XLA takes the last."""
    everywhere = branch_everywhere(params)
    number = None if "branches_platforms" in params else known.number(inputs[0])
    if everywhere is not None or number is None:
        return everywhere
    branches = params["branches"]
    return branches[int(number) if 0 <= int(number) < len(branches) else -1]


def selected(inputs: Sequence[int], known: Known) -> int | None:
    """What a `select_n` gives: the case that is always chosen, or that all cases are."""
    if len(set(inputs[1:])) == 1:
        return inputs[1]
    number = known.number(inputs[0])
    if number is None or not 0 <= int(number) < len(inputs) - 1:
        return None
    return inputs[1 + int(number)]


def settled(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[int], known: Known
) -> Any | None:
    """The number that every element of a result is, whatever an operand is; None where operands
    matter."""
    if kernel == "integer_pow" and params["y"] == 0:
        return 1
    if kernel in _OF_NOTHING and any(known.types[v].size == 0 for v in inputs):
        return _OF_NOTHING[kernel]
    law = _LAWS.get(kernel)
    return law(kernel, inputs, known) if law is not None and len(inputs) == 2 else None


def _has(number: int, inputs: Sequence[int], known: Known) -> bool:
    """Whether one of the operands is this number, everywhere. -1 has all bits set."""
    found = [known.number(v) for v in inputs]
    wanted = np.array(number).astype(decode_dtype(known.types[inputs[0]].dtype))
    return any(x is not None and x == wanted for x in found)


def _and(_: str, inputs: Sequence[int], known: Known) -> int | None:
    return 0 if _has(0, inputs, known) else None


def _or(_: str, inputs: Sequence[int], known: Known) -> int | None:
    return -1 if _has(-1, inputs, known) else None


def _times(_: str, inputs: Sequence[int], known: Known) -> int | None:
    return 0 if _is_integer(known.types[inputs[0]]) and _has(0, inputs, known) else None


def _less_itself(_: str, inputs: Sequence[int], known: Known) -> int | None:
    same = inputs[0] == inputs[1] and _is_integer(known.types[inputs[0]])
    return 0 if same else None


def _power(_: str, inputs: Sequence[int], known: Known) -> int | None:
    number = known.number(inputs[1])
    return 1 if number is not None and number == 0 else None


def _compared(kernel: str, inputs: Sequence[int], known: Known) -> bool | None:
    type_ = known.types[inputs[0]]
    if not _is_integer(type_):
        return None
    if inputs[0] == inputs[1]:
        return _SAME[kernel]
    if type_.dtype.startswith(("uint", "bool")):
        for p, v in enumerate(inputs):
            if (kernel, p) in _UNSIGNED and known.number(v) == 0:
                return _UNSIGNED[kernel, p]
    return None


def _is_integer(type_: TensorType) -> bool:
    return type_.dtype.startswith(("int", "uint", "bool"))


_LAWS: dict[str, Callable[[str, Sequence[int], Known], Any | None]] = {
    "and": _and,
    "or": _or,
    "mul": _times,
    "sub": _less_itself,
    "xor": _less_itself,
    "pow": _power,
    **dict.fromkeys(_SAME, _compared),
}
