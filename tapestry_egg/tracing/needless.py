"""Operations that need not be made: those of tensors without elements, those made before, parts of
which other parts are taken, what nothing reads, and what is settled before a program runs. Loops
stack a value once.

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

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np

from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.decided import KnownTensor
from tapestry_egg.metakernels.signatures.parameters import exact
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.zspace import Projection

from .codec import encode_params
from .constants import compute, may_prepare
from .control_flow import branch_everywhere
from .plain import handles_in

# What decides is computed of constants where these are no more, and none is larger: a verdict, the
# ends of a sorted list.
_STEPS, _ELEMENTS = 32, 1 << 12

#: Along one dim the first element that is taken, and how many apart the next ones are.
Steps = tuple[tuple[int, int], ...]


def is_constant(outputs: Sequence[TensorType]) -> bool:
    """Whether an operation without effects computes nothing: no result has an element."""
    return bool(outputs) and all(t.size == 0 and not t.dtype.startswith("key<") for t in outputs)


def count(jaxpr: Any) -> int:
    """How many equations a jaxpr has, those of the calls and loops inside it included."""
    total = 0
    for eqn in jaxpr.eqns:
        inside = (x for value in eqn.params.values() for x in _listed(value))
        found = [count(getattr(x, "jaxpr", x)) for x in inside if hasattr(x, "eqns")]
        total += sum(found) if found else 1
    return total


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, tuple | list) else (value,)


def without_dead_code(jaxpr: Any, consts: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """JAX's own removal of dead code, which also prunes inside loops and branches."""
    from jax.interpreters import partial_eval as pe

    if any(not hasattr(v.aval, "shape") or hasattr(v.aval, "inner_aval") for v in jaxpr.invars):
        return jaxpr, consts
    kept = [False] * len(jaxpr.constvars) + [True] * len(jaxpr.invars)
    live, used, _ = pe.dce_jaxpr_consts(jaxpr, [True] * len(jaxpr.outvars), kept)
    return live, [c for c, u in zip(consts, used, strict=True) if u]


def made_once(
    operations: Iterable[Operation],
    types: Sequence[TensorType],
    outputs: Iterable[int],
    constants: Iterable[int] = (),
) -> tuple[list[Operation], list[int]]:
    """The operations without those that do what one before them does on the same operands, and the
    outputs as these make them. Those that stay know the lines of all. What has a name for
    `jax.checkpoint` is what it names: a compiler is told of no name. What gives the elements of a
    value its shape back, after others gave them another one, is the value.

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
    named: dict[int, int] = {}  # value -> what it names
    # By value and checkpoint: the values before it that have its elements in other shapes.
    shapes: dict[tuple[int, int | None], tuple[int, ...]] = {}
    kept: list[Operation] = []
    for op in operations:
        inputs = tuple([stands.get(v, v) for v in op.inputs])
        fills = filled.keys() >= set(inputs)
        repeatable = registry.is_repeatable(op)
        first = op.outputs
        if repeatable:
            made = tuple([types[v] for v in op.outputs])
            numbers = tuple([filled.get(w, w) for w in (named.get(v, v) for v in inputs)])
            key = op.kernel, numbers, made, op.remat, exact(op.params)
            first = known.setdefault(key, op.outputs)
            if first is op.outputs and not fills and reshapes(op, types):
                before = shapes.get((inputs[0], op.remat), (inputs[0],))
                first = next(((v,) for v in before if (types[v],) == made), first)
                known[key] = first
                shapes[op.outputs[0], op.remat] = (*before, op.outputs[0])
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
        if registry.meaning(op.kernel) == "name":
            named[op.outputs[0]] = named.get(inputs[0], inputs[0])
        kept.append(op if inputs == op.inputs else replace(op, inputs=inputs))
    for k, op in enumerate(kept):
        if again := written.get(op.outputs):
            places = [w.source for w in (op, *again) if not elsewhere.isdisjoint(w.outputs)]
            in_files = dict.fromkeys(place for place in places if place.file)
            kept[k] = replace(op, places=tuple(in_files))
    return kept, [stands.get(v, v) for v in outputs]


def reshapes(op: Operation, types: Sequence[TensorType]) -> bool:
    """Whether an operation gives the elements of its operand, in their row-major order, another
    shape."""
    if len(op.inputs) != 1 or len(op.outputs) != 1 or registry.meaning(op.kernel) == "layout":
        return False
    given, made = types[op.inputs[0]], types[op.outputs[0]]
    if given.shape == made.shape or (given.size, given.dtype) != (made.size, made.dtype):
        return False
    own = _signature(op, types)
    if own.elements != "kept" or own.stored or prod(own.extents) != made.size:
        return False
    read, written = own.inputs[0], own.outputs[0]
    each = zip(_order(read, given.shape), _order(written, made.shape), own.extents, strict=True)
    return not any(read.offset) and all(a == b for a, b, n in each if n > 1)


def _order(projection: Projection, shape: Sequence[int]) -> list[int]:
    """By how many elements of a tensor, in row-major order, each index dim moves."""
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    return [
        sum(stride * row[e] for stride, row in zip(strides, projection.matrix, strict=True))
        for e in range(projection.index_rank)
    ]


def _read_elsewhere(operations: Sequence[Operation], outputs: Sequence[int]) -> frozenset[int]:
    """Values that another line reads than makes them, or that leave."""
    line = {v: (op.source.file, op.source.line) for op in operations for v in op.outputs}
    return frozenset(outputs).union(
        v
        for op in operations
        for v in op.inputs
        if v in line and line[v] != (op.source.file, op.source.line)
    )


def without_unread(
    operations: Sequence[Operation], types: Sequence[TensorType], outputs: Iterable[int]
) -> list[Operation]:
    """The operations without operands that they only carry along to results that nothing reads: of
    a barrier, and those that a sort carries along."""
    read = set(outputs)
    found: list[Operation] = []
    for op in reversed(operations):
        kept = [p for p, v in enumerate(op.outputs) if v in read]
        if 0 < len(kept) < len(op.outputs) and not (op.regions or op.effectful):
            carried = _signature(op, types).carried
            if carried:
                kept = [p for p in range(len(op.outputs)) if p not in carried or p in kept]
                inputs, made = (tuple(of[p] for p in kept) for of in (op.inputs, op.outputs))
                op = replace(op, inputs=inputs, outputs=made)
        if op.effectful or not read.isdisjoint(op.outputs):
            read.update(op.inputs)
        found.append(op)
    return found[::-1]


def _signature(op: Operation, types: Sequence[TensorType]) -> OperationSignature:
    read, made = (tuple([types[v] for v in vs]) for vs in (op.inputs, op.outputs))
    return registry.signature_of(op, read, made)


def stacked_once(
    body: BlockGraph, types: Sequence[TensorType], carried: int
) -> tuple[BlockGraph, list[int]]:
    """The body of a scan that stacks each value once, and per result of the scan the place of the
    one that it is. `types` are those of the results, of which the first so many are `carried`.

    What a step returns and its gradient needs is stacked twice; XLA makes one stack of both
    (WhileLoopSimplifier: repeated tuple indices), which is sent once.
    """
    kept: list[int] = []
    first: dict[tuple[int, TensorType], int] = {}
    stands: list[int] = []
    for q, v in enumerate(body.outputs):
        place = len(kept) if q < carried else first.setdefault((v, types[q]), len(kept))
        if place == len(kept):
            kept.append(v)
        stands.append(place)
    return replace(body, outputs=tuple(kept)), stands


def parts_at_once(operations: Iterable[Operation], types: Sequence[TensorType]) -> list[Operation]:
    """The operations, where slices of parts are slices of what these are parts of.

    Parts of different `jax.checkpoint` regions stay, as XLA keeps these apart.
    """
    made: dict[int, tuple[Operation, int, Steps]] = {}  # a part -> its maker, of what, and where
    found: list[Operation] = []
    for op in operations:
        taken = steps_of(op, types)
        if taken is not None:
            p, steps = taken
            source = op.inputs[p]
            before = made.get(source)
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


def steps_of(op: Operation, types: Sequence[TensorType]) -> tuple[int, Steps] | None:
    """Where an operation takes its part of which operand first, as its projections say; None for
    one that takes none: a slice, what cuts edges off."""
    if not any(t.moves for t in registry.templates().get(op.kernel, ())):
        return None
    if op.regions or op.effectful or len(op.outputs) != 1 or not types[op.outputs[0]].size:
        return None
    own = _signature(op, types)
    if len(own.moved) != 1 or own.elements != "kept" or own.placed:
        return None
    (p,) = own.moved
    # All other operands say what lies outside, and are no data that places are read from.
    if any(own.beyond(p) != q for q in range(len(op.inputs)) if q != p):
        return None
    source, made = own.inputs[p], own.outputs[0]
    rank = types[op.outputs[0]].rank
    if made != Projection.identity(rank) or types[op.inputs[p]].rank != rank:
        return None
    found = []
    for d, row in enumerate(source.matrix):
        first, step, last = source.offset[d], row[d], types[op.outputs[0]].shape[d] - 1
        alone = source.shape[d] == 1 and not any(a for e, a in enumerate(row) if e != d)
        inside = first >= 0 and first + step * last < types[op.inputs[p]].shape[d]
        if not alone or step < 1 or not inside:
            return None
        found.append((int(first), int(step)))
    return p, tuple(found)


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
        while v not in self.constants and op is not None and self._keeps(op, v):
            v = op.inputs[0]
            op = self.makers.get(v)
        if v in self.constants:
            every = self.constants[v].reshape(-1)
            first, some = every[:1], every[:_ELEMENTS]  # most masks differ early
            same = first.size and (some == first).all() and (every == first).all()
            return first[0] if same else None
        return self._computed(v) if self.types[v].size == 1 else None

    def _keeps(self, op: Operation, v: int) -> bool:
        """Whether all elements of what an operation makes are elements of its one operand."""
        if (
            len(op.inputs) != 1
            or op.regions
            or op.effectful
            or registry.meaning(op.kernel) == "layout"
        ):
            return False
        own = _signature(op, self.types)
        same = self.types[op.inputs[0]].dtype == self.types[v].dtype
        return own.elements == "kept" and not own.stored and same

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


def known_operands(inputs: Sequence[int], known: Known) -> tuple[KnownTensor, ...]:
    """What is known of the operands of an operation."""
    types = [known.types[v] for v in inputs]
    return tuple(
        KnownTensor(t.shape, t.dtype, t.weak, v, known.number)
        for v, t in zip(inputs, types, strict=True)
    )
