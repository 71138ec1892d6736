"""Operands of contractions in the dtype in which a target's matrix units read them.

Where a target multiplies float32 matrices in one bfloat16 pass, as TPUs do at JAX's default
precision, its compiler rounds the operands first, and moves that rounding before collectives and
into what is kept for later. Said in the program, a plan moves and holds what will be moved and
held, with the numbers that the user's own `jax.jit` gives on that target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.metakernels import registry

_DEFAULT = (None, "DEFAULT", "default")


def rounded(graph: BlockGraph, reads: Mapping[str, str]) -> BlockGraph:
    """The graph with operands of contractions at default precision rounded first.

    `reads` says as what a matrix unit reads operands of a dtype (`{"float32": "bfloat16"}`).
    Results keep their dtype. Each value is rounded once, before its first contraction. The same
    graph where there is nothing to round.
    """
    if not reads:
        return graph
    values = list(graph.values)
    operations: list[Operation] = []
    narrow: dict[tuple[int, int | None], int] = {}
    changed = False
    for op in graph.operations:
        if op.regions:
            regions = tuple(rounded(region, reads) for region in op.regions)
            changed |= any(a is not b for a, b in zip(regions, op.regions, strict=True))
            operations.append(replace(op, regions=regions))
            continue
        read = _multiplied(graph, op)
        types = [values[op.inputs[p]] for p in read]
        dtypes = {t.dtype for t in types}
        dtype = reads.get(next(iter(dtypes))) if len(dtypes) == 1 else None
        if dtype is None or not _default(op.params.get("precision")):
            operations.append(op)
            continue
        inputs = list(op.inputs)
        for p in read:
            v = op.inputs[p]
            key = v, op.remat
            if key not in narrow:
                narrow[key] = len(values)
                values.append(TensorType(values[v].shape, dtype))
                operations.append(_rounding(op, v, narrow[key], dtype))
            inputs[p] = narrow[key]
        result = {"$dtype": graph.values[op.outputs[0]].dtype}
        params = {**op.params, "preferred_element_type": result}
        operations.append(replace(op, inputs=tuple(inputs), params=params))
        changed = True
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
    wide: dict[int, int] = {}
    for k, op in enumerate(graph.operations):
        where = f"operation {k} ({op.kernel})"
        if op.kernel == "round_operand":
            (v,), (made,) = op.inputs, op.outputs
            if reads.get(graph.values[v].dtype) != graph.values[made].dtype:
                raise PlanError("the plan's target rounds no operand so", where=where)
            wide[made] = v
            continue
        read = _multiplied(graph, op) if not wide.keys().isdisjoint(op.inputs) else ()
        default = _default(op.params.get("precision"))
        if any(v in wide and not (p in read and default) for p, v in enumerate(op.inputs)):
            raise PlanError("reads what is rounded for contractions only", where=where)
        inputs = tuple(wide.get(v, v) for v in op.inputs)
        regions = tuple(unrounded(region, reads) for region in op.regions)
        params = op.params
        if op.kernel == "conv_general_dilated":
            same = {"$dtype": graph.values[inputs[0]].dtype}
            if params.get("preferred_element_type") == same:
                params = {**params, "preferred_element_type": None}
        operations.append(replace(op, inputs=inputs, regions=regions, params=params))
    if any(v in wide for v in graph.outputs):
        raise PlanError("returns what is rounded for contractions only", where=graph.name)
    return replace(graph, operations=tuple(operations))
