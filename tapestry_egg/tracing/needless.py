"""Operations that need not be made: those of tensors without elements, those made before, and parts
of which other parts are taken.

A result without elements, as programs that halve their arrays end in, is a constant, and an operand
without elements adds nothing. Left in the graph, such operations would have no points to cut, and
keep their other operands whole. What a function computes twice (a mean, and the mean within a
variance; the forward pass in a rule for gradients) XLA computes once, and what that needs is sent
once. A plan that priced both would promise bytes that nothing moves.

The gradient of what puts holes between rows cuts edges off and takes every other row of what is
left; as one slice it reads what it keeps. XLA for GPUs computes both inside their reader, for TPUs
it stores what the second slice reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.parameters import exact

from .codec import encode_params

#: Along one dim the first element that is taken, and how many apart the next ones are.
Steps = tuple[tuple[int, int], ...]


def is_constant(outputs: Sequence[TensorType]) -> bool:
    """Whether an operation without effects computes nothing: no result has an element."""
    return bool(outputs) and all(t.size == 0 and not t.dtype.startswith("key<") for t in outputs)


def unchanged_operand(
    kernel: str, params: Mapping[str, Any], inputs: Sequence[TensorType], output: TensorType
) -> int | None:
    """The operand that an operation gives back as it is, since nothing is written into it or
    joined to it; None where it does more."""
    found: int | None = None
    if kernel == "dynamic_update_slice" or kernel.startswith("scatter"):
        written = inputs[1] if kernel == "dynamic_update_slice" else inputs[2]
        found = 0 if written.size == 0 else None
    elif kernel == "concatenate":
        kept = joined_operands(kernel, inputs)
        found = kept[0] if len(kept) == 1 else None
    return found if found is not None and inputs[found] == output else None


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
