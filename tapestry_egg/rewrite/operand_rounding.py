"""Operands of contractions in the dtype in which a target's matrix units read them.

Where a target multiplies float32 matrices in one bfloat16 pass, as TPUs do at JAX's default
precision, its compiler rounds the operands first, and moves that rounding before collectives and
into what is kept for later. Said in the program, a plan moves and holds what will be moved and
held, with the numbers that the user's own `jax.jit` gives on that target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.loops import stacked, taken
from tapestry_egg.metakernels import registry
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.tracing.spelled import at

_DEFAULT = (None, "DEFAULT", "default")
# Contractions that JAX lets say nothing of their result's dtype.
_SILENT = ("conv_general_dilated", "ragged_dot_general")


def rounded(graph: BlockGraph, reads: Mapping[str, str]) -> BlockGraph:
    """The graph with operands of contractions at default precision rounded first.

    `reads` says as what a matrix unit reads operands of a dtype (`{"float32": "bfloat16"}`).
    Results keep their dtype. Each value is rounded once, before its first contraction, before what
    only moves it there, and before and behind loops that only read, slice and stack it
    (`_carried`). Views are each reader's own (`schedule/repeated.py`): one that a contraction reads
    moves what is rounded, whatever reads the others. The same graph where there is nothing to
    round.
    """
    if not reads:
        return graph
    own = repeat_cheap(graph)
    found = _rounded(own, reads, frozenset(), frozenset())
    return graph if found is own else found


def _rounded(
    graph: BlockGraph, reads: Mapping[str, str], given: frozenset[int], left: frozenset[int]
) -> BlockGraph:
    """The same of a body of which inputs (`given`) and outputs (`left`), by place, are rounded."""
    values = list(graph.values)
    carried = _carried(graph, reads, left)[0].union(graph.inputs[k] for k in given)
    operations: list[Operation] = []
    narrow: dict[tuple[int, int | None], int] = {}
    changed = bool(given or left)
    for k in given:
        v = graph.inputs[k]
        values[v] = replace(values[v], dtype=reads[values[v].dtype])

    def rounded_before(op: Operation, v: int) -> int:
        """The id of a value as it is after rounding, which is done here if it was not yet."""
        if v in carried:  # narrow as it is made
            return v
        key = v, op.remat
        if key not in narrow:
            dtype = reads[graph.values[v].dtype]
            narrow[key] = len(values)
            values.append(TensorType(values[v].shape, dtype))
            operations.append(_rounding(op, v, narrow[key], dtype))
        return narrow[key]

    for op in graph.operations:
        if op.regions:
            made = frozenset(k for k, v in enumerate(op.outputs) if v in carried)
            read = _sliced(op, reads, made)
            inputs = tuple(
                rounded_before(op, v) if p in read else v for p, v in enumerate(op.inputs)
            )
            entering = _entering(op, read)
            regions = tuple(
                _rounded(region, reads, frozenset(own), made)
                for region, own in zip(op.regions, entering, strict=True)
            )
            changed |= any(a is not b for a, b in zip(regions, op.regions, strict=True))
            for k in made:
                v = op.outputs[k]
                values[v] = replace(values[v], dtype=reads[values[v].dtype])
            operations.append(replace(op, inputs=inputs, regions=regions))
            continue
        positions = _rounded_operands(graph, op, reads)
        moves = bool(op.outputs) and op.outputs[0] in carried
        if moves:
            positions = _data(graph, op)
        if not positions:
            operations.append(op)
            continue
        dtype = reads[graph.values[op.inputs[positions[0]]].dtype]
        inputs = tuple(
            rounded_before(op, v) if p in positions else v for p, v in enumerate(op.inputs)
        )
        changed = True
        if moves:
            (moved,) = op.outputs
            values[moved] = replace(values[moved], dtype=dtype)
            operations.append(replace(op, inputs=inputs))
            continue
        result = {"$dtype": graph.values[op.outputs[0]].dtype}
        params = {**op.params, "preferred_element_type": result}
        operations.append(replace(op, inputs=inputs, params=params))
    if not changed:
        return graph
    last = graph.operations[-1] if graph.operations else Operation("round_operand", (), ())
    last = replace(last, remat=None)
    outputs = tuple(
        rounded_before(last, v) if k in left else v for k, v in enumerate(graph.outputs)
    )
    return replace(graph, values=tuple(values), operations=tuple(operations), outputs=outputs)


def _rounding(op: Operation, v: int, to: int, dtype: str) -> Operation:
    """A rounding before an operation, from where that is."""
    params = {"new_dtype": {"$dtype": dtype}}
    own = replace(at(op), remat=op.remat, places=op.places)
    return replace(own, kernel="round_operand", inputs=(v,), outputs=(to,), params=params)


def _multiplied(graph: BlockGraph, op: Operation) -> tuple[int, ...]:
    """The operands that a contraction's matrix units multiply and the compiler rounds before it:
    both of an operation that has a precision. A ragged product is a kernel of its own, which reads
    them rounded, too (libtpu 0.0.52; 0.0.42 gave it float32)."""
    if op.regions or "precision" not in op.params:
        return ()
    signature = registry.signature_in(graph, op)
    gemm = signature.gemm if signature else None
    return (gemm.lhs, gemm.rhs) if gemm else ()


def _rounded_operands(
    graph: BlockGraph, op: Operation, reads: Mapping[str, str]
) -> tuple[int, ...]:
    """The operands that a contraction reads rounded: none where it asks for a precision."""
    read = _multiplied(graph, op)
    dtypes = {graph.values[op.inputs[p]].dtype for p in read}
    known = len(dtypes) == 1 and next(iter(dtypes)) in reads
    return read if known and _default(op.params.get("precision")) else ()


def _carried(
    graph: BlockGraph, reads: Mapping[str, str], left: frozenset[int]
) -> tuple[frozenset[int], frozenset[int]]:
    """Values that are rounded where they are made, and inputs, by place, that are so outside.

    Contractions alone read them, rounded, and they are no more than other values moved, or what a
    scan stacks of its rounds: the compiler moves the rounding there, and with it before what is
    sent to make them. Outputs `left`, by place, leave rounded.
    """
    outside = {v for k, v in enumerate(graph.outputs) if k not in left}
    readers: dict[int, list[bool]] = {}  # per value, whether each reader takes it rounded
    for k in left:
        readers.setdefault(graph.outputs[k], []).append(True)
    found: set[int] = set()

    def alone(v: int) -> bool:
        known = graph.values[v].dtype in reads and v not in outside
        return known and bool(readers.get(v)) and all(readers[v])

    for op in reversed(graph.operations):
        rounds: Collection[int] = _rounded_operands(graph, op, reads)
        if op.regions:
            made = frozenset(k for k in stacked(op) if alone(op.outputs[k]))
            found.update(op.outputs[k] for k in made)
            rounds = _sliced(op, reads, made)
        elif len(op.outputs) == 1 and _moves(graph, op, reads.keys()) and alone(op.outputs[0]):
            found.add(op.outputs[0])
            rounds = _data(graph, op)
        for p, v in enumerate(op.inputs):
            readers.setdefault(v, []).append(p in rounds)
    return frozenset(found), frozenset(k for k, v in enumerate(graph.inputs) if alone(v))


def _entering(op: Operation, operands: Collection[int]) -> tuple[frozenset[int], ...]:
    """By region of an operation, the last of which is a loop's body, the places there of operands
    that the body takes (`taken`)."""
    places = taken(op)
    others = [frozenset[int]()] * (len(op.regions) - 1)
    return (*others, frozenset(places[p] for p in operands)) if op.regions else ()


def _sliced(op: Operation, reads: Mapping[str, str], left: frozenset[int]) -> frozenset[int]:
    """The operands of a loop, no carries, that every round reads rounded and not otherwise."""
    places = taken(op)
    if not places:
        return frozenset()
    _, read = _carried(op.regions[-1], reads, left)
    return frozenset(p for p, k in places.items() if k in read)


def _moves(graph: BlockGraph, op: Operation, dtypes: Collection[str]) -> bool:
    """Whether an operation on some dtypes only says where elements lie. Of what makes fewer only
    slices do, which the compiler rounds before: a table is not rounded for a few rows."""
    if op.regions or registry.meaning(op.kernel) == "rounding":
        return False
    made = graph.values[op.outputs[0]]
    data = [graph.values[op.inputs[p]] for p in _data(graph, op)]
    if made.dtype not in dtypes or not data:
        return False
    signature = registry.signature_in(graph, op)
    if signature is None or signature.opaque or signature.fusion not in ("view", "loop"):
        return False
    if not signature.takes and sum(prod(t.shape) for t in data) > prod(made.shape):
        return False
    # Where to read is computed once for every element that is read, if anything is.
    return not signature.flops or signature.flops in signature.reads


def _data(graph: BlockGraph, op: Operation) -> tuple[int, ...]:
    """The operands that have the dtype of the result."""
    dtype = graph.values[op.outputs[0]].dtype
    return tuple(p for p, v in enumerate(op.inputs) if graph.values[v].dtype == dtype)


def _default(precision: Any) -> bool:
    """Whether a contraction leaves its precision to the target."""
    several = precision if isinstance(precision, list | tuple) else (precision,)
    return all(p in _DEFAULT for p in several)


def unrounded(graph: BlockGraph, reads: Mapping[str, str]) -> BlockGraph:
    """The graph whose contractions read what was rounded for them: `rounded` taken back.

    Convolutions and ragged products whose result has the dtype of their operands do not say so, in
    either graph.
    Raises PlanError where a rounding is none of `reads`, or something else reads it.
    """
    found, left = _unrounded(graph, reads, {})
    if left:
        raise PlanError("returns what is rounded for contractions only", where=graph.name)
    return found


def _unrounded(
    graph: BlockGraph, reads: Mapping[str, str], given: Mapping[int, str]
) -> tuple[BlockGraph, dict[int, str]]:
    """The same of a body whose inputs at some places come rounded, from the dtypes `given`; and
    the outputs that leave it so."""
    operations: list[Operation] = []
    values = list(graph.values)
    wide: dict[int, int] = {}

    def widened(v: int, dtype: str) -> None:
        wide[v] = v
        values[v] = replace(values[v], dtype=dtype)

    for k, dtype in given.items():
        widened(graph.inputs[k], dtype)
    for k, op in enumerate(graph.operations):
        where = f"operation {k} ({op.kernel})"
        if registry.meaning(op.kernel) == "rounding":
            (v,), (made,) = op.inputs, op.outputs
            if reads.get(graph.values[v].dtype) != graph.values[made].dtype:
                raise PlanError("the plan's target rounds no operand so", where=where)
            wide[made] = v
            continue
        if len(op.outputs) == 1 and not wide.keys().isdisjoint(op.inputs):
            (made,) = op.outputs
            data = _data(graph, op)
            if all(op.inputs[p] in wide for p in data) and _moves(graph, op, reads.values()):
                widened(made, values[wide[op.inputs[data[0]]]].dtype)
                inputs = tuple(wide.get(v, v) for v in op.inputs)
                operations.append(replace(op, inputs=inputs))
                continue
        places = taken(op)
        read: Collection[int] = places.keys()
        known = not op.regions and not wide.keys().isdisjoint(op.inputs)
        if known and _default(op.params.get("precision")):
            read = _multiplied(graph, op)
        if any(v in wide and p not in read for p, v in enumerate(op.inputs)):
            raise PlanError("reads what is rounded for contractions only", where=where)
        inputs = tuple(wide.get(v, v) for v in op.inputs)
        narrow = [p for p in places if op.inputs[p] in wide]
        regions = []
        for region, own in zip(op.regions, _entering(op, narrow), strict=True):
            entering = {places[p]: values[inputs[p]].dtype for p in narrow if places[p] in own}
            found, left = _unrounded(region, reads, entering)
            for place, dtype in left.items():
                if place not in stacked(op):
                    what = "returns what is rounded for contractions only"
                    raise PlanError(what, where=f"{where}, {region.name}")
                widened(op.outputs[place], dtype)
            regions.append(found)
        params = op.params
        if op.kernel in _SILENT:
            same = {"$dtype": values[inputs[0]].dtype}
            if params.get("preferred_element_type") == same:
                params = {**params, "preferred_element_type": None}
        operations.append(replace(op, inputs=inputs, regions=tuple(regions), params=params))
    left = {k: values[wide[v]].dtype for k, v in enumerate(graph.outputs) if v in wide}
    outputs = tuple(wide.get(v, v) for v in graph.outputs)
    found = replace(graph, values=tuple(values), operations=tuple(operations), outputs=outputs)
    return found, left
