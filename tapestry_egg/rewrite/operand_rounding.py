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

#: Operations that the matrix units carry out, with how many leading operands they multiply.
CONTRACTIONS: Mapping[str, int] = {"dot_general": 2, "conv_general_dilated": 2}
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
        count = CONTRACTIONS.get(op.kernel, 0)
        types = [values[v] for v in op.inputs[:count]]
        dtypes = {t.dtype for t in types}
        dtype = reads.get(next(iter(dtypes))) if len(dtypes) == 1 else None
        if dtype is None or not _default(op.params.get("precision")):
            operations.append(op)
            continue
        inputs = list(op.inputs)
        for p, v in enumerate(op.inputs[:count]):
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
        count = CONTRACTIONS.get(op.kernel, 0)
        default = _default(op.params.get("precision"))
        if any(v in wide and not (p < count and default) for p, v in enumerate(op.inputs)):
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
