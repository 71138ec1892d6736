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
from tapestry_egg.metakernels import registry

_DEFAULT = (None, "DEFAULT", "default")


def rounded(graph: BlockGraph, reads: Mapping[str, str]) -> BlockGraph:
    """The graph with operands of contractions at default precision rounded first.

    `reads` says as what a matrix unit reads operands of a dtype (`{"float32": "bfloat16"}`).
    Results keep their dtype. Each value is rounded once, before its first contraction, and before
    what only moves it there (`_carried`). The same graph where there is nothing to round.
    """
    if not reads:
        return graph
    values = list(graph.values)
    carried = _carried(graph, reads)
    operations: list[Operation] = []
    narrow: dict[tuple[int, int | None], int] = {}
    changed = False
    for op in graph.operations:
        if op.regions:
            regions = tuple(rounded(region, reads) for region in op.regions)
            changed |= any(a is not b for a, b in zip(regions, op.regions, strict=True))
            operations.append(replace(op, regions=regions))
            continue
        read = _rounded_operands(graph, op, reads)
        moves = bool(op.outputs) and op.outputs[0] in carried
        if moves:
            read = _data(graph, op)
        if not read:
            operations.append(op)
            continue
        dtype = reads[graph.values[op.inputs[read[0]]].dtype]
        inputs = list(op.inputs)
        for p in read:
            v = op.inputs[p]
            if v in carried:  # narrow as it is made
                continue
            key = v, op.remat
            if key not in narrow:
                narrow[key] = len(values)
                values.append(TensorType(values[v].shape, dtype))
                operations.append(_rounding(op, v, narrow[key], dtype))
            inputs[p] = narrow[key]
        changed = True
        if moves:
            (made,) = op.outputs
            values[made] = replace(values[made], dtype=dtype)
            operations.append(replace(op, inputs=tuple(inputs)))
            continue
        result = {"$dtype": graph.values[op.outputs[0]].dtype}
        params = {**op.params, "preferred_element_type": result}
        operations.append(replace(op, inputs=tuple(inputs), params=params))
    if not changed:
        return graph
    return replace(graph, values=tuple(values), operations=tuple(operations))


def _rounding(op: Operation, v: int, to: int, dtype: str) -> Operation:
    params = {"new_dtype": {"$dtype": dtype}}
    return replace(op, kernel="round_operand", inputs=(v,), outputs=(to,), params=params)


def _multiplied(graph: BlockGraph, op: Operation) -> tuple[int, ...]:
    """The operands that a contraction's matrix units multiply and the compiler rounds before it:
    both of an operation on two that has a precision. A ragged product, which has a third, is a
    kernel of its own that takes them as they are."""
    if op.regions or len(op.inputs) != 2 or "precision" not in op.params:
        return ()
    types = [tuple(graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
    signature = registry.signature_of(op, types[0], types[1])
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


def _carried(graph: BlockGraph, reads: Mapping[str, str]) -> frozenset[int]:
    """Values that contractions alone read, rounded, and that are no more than other values moved:
    those are rounded in their place where they have no more elements together. The compiler moves
    the rounding there, and with it before what is sent to make them."""
    outside = set(graph.outputs)
    readers: dict[int, list[bool]] = {}  # per value, whether each reader takes it rounded
    found: set[int] = set()
    for op in reversed(graph.operations):
        rounds: tuple[int, ...] = _rounded_operands(graph, op, reads)
        if len(op.outputs) == 1 and _moves(graph, op, reads.keys()):
            (made,) = op.outputs
            if readers.get(made) and all(readers[made]) and made not in outside:
                found.add(made)
                rounds = _data(graph, op)
        for p, v in enumerate(op.inputs):
            readers.setdefault(v, []).append(p in rounds)
    return frozenset(found)


def _moves(graph: BlockGraph, op: Operation, dtypes: Collection[str]) -> bool:
    """Whether an operation on some dtypes only says where elements lie, and makes no fewer."""
    if op.regions or op.kernel == "round_operand":
        return False
    made = graph.values[op.outputs[0]]
    data = [graph.values[op.inputs[p]] for p in _data(graph, op)]
    if made.dtype not in dtypes or not data or sum(prod(t.shape) for t in data) > prod(made.shape):
        return False
    types = [tuple(graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)]
    signature = registry.signature_of(op, types[0], types[1])
    if signature is None or signature.opaque or signature.fusion not in ("view", "loop"):
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

    Convolutions whose result has the dtype of their operands do not say so, in either graph.
    Raises PlanError where a rounding is none of `reads`, or something else reads it.
    """
    operations: list[Operation] = []
    values = list(graph.values)
    wide: dict[int, int] = {}
    for k, op in enumerate(graph.operations):
        where = f"operation {k} ({op.kernel})"
        if op.kernel == "round_operand":
            (v,), (made,) = op.inputs, op.outputs
            if reads.get(graph.values[v].dtype) != graph.values[made].dtype:
                raise PlanError("the plan's target rounds no operand so", where=where)
            wide[made] = v
            continue
        if len(op.outputs) == 1 and not wide.keys().isdisjoint(op.inputs):
            (made,) = op.outputs
            data = _data(graph, op)
            if all(op.inputs[p] in wide for p in data) and _moves(graph, op, reads.values()):
                wide[made] = made
                types = [values[wide[op.inputs[p]]] for p in data]
                values[made] = replace(values[made], dtype=types[0].dtype)
                inputs = tuple(wide.get(v, v) for v in op.inputs)
                operations.append(replace(op, inputs=inputs))
                continue
        read = _multiplied(graph, op) if not wide.keys().isdisjoint(op.inputs) else ()
        default = _default(op.params.get("precision"))
        if any(v in wide and not (p in read and default) for p, v in enumerate(op.inputs)):
            raise PlanError("reads what is rounded for contractions only", where=where)
        inputs = tuple(wide.get(v, v) for v in op.inputs)
        regions = tuple(unrounded(region, reads) for region in op.regions)
        params = op.params
        if op.kernel == "conv_general_dilated":
            same = {"$dtype": values[inputs[0]].dtype}
            if params.get("preferred_element_type") == same:
                params = {**params, "preferred_element_type": None}
        operations.append(replace(op, inputs=inputs, regions=regions, params=params))
    if any(v in wide for v in graph.outputs):
        raise PlanError("returns what is rounded for contractions only", where=graph.name)
    return replace(graph, values=tuple(values), operations=tuple(operations))
