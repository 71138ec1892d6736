"""What an operation is priced by, from the expressions of its template: amounts in index extents,
coordinates of tables, waits, scattered elements and precisions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.metakernels.language.expressions import Expression
from tapestry_egg.metakernels.language.scopes import Names
from tapestry_egg.metakernels.language.template import Template
from tapestry_egg.metakernels.signatures.signature import (
    Blocks,
    Polynomial,
    Scattered,
    Scratch,
)
from tapestry_egg.metakernels.signatures.values import Cost

from .binding import places

#: Of presets of algorithms those that are not the default (jax.lax.DotAlgorithmPreset).
_PRESETS = {
    "F32_F32_F32": "highest",
    "TF32_TF32_F32_X3": "high",
    "BF16_BF16_F32_X3": "high",
    "BF16_BF16_F32_X6": "highest",
    "BF16_BF16_F32_X9": "highest",
}


def polynomial(text: Expression, scope: Mapping[str, Any]) -> Polynomial:
    """An amount as a polynomial over index extents; a number is one per index point."""
    value = text(scope)
    if isinstance(value, int | float):
        value = scope["@all"] * value
    if not isinstance(value, Cost):
        raise text.error(f"{value!r} is not a polynomial in index groups")
    return _terms(text, value)


def _terms(text: Expression, value: Cost) -> Polynomial:
    merged: dict[tuple[int, ...], float] = {}
    for coefficient, dims in value.terms:
        if not math.isfinite(coefficient):
            raise text.error(f"a coefficient is {coefficient}")
        key = tuple(sorted(dims))
        merged[key] = merged.get(key, 0.0) + coefficient
    return tuple((c, dims) for dims, c in merged.items() if c)


def measured(template: Template, names: Names) -> tuple[float, ...] | None:
    """The coordinates at which tables of measured kernels hold the rate."""
    text = template.measured
    if text is None:
        return None
    value = text(names)
    if not isinstance(value, tuple) or not all(isinstance(x, int | float) for x in value):
        raise text.error(f"{value!r} is not a list of numbers")
    return tuple(map(float, value))


def spilled(template: Template, names: Names) -> float:
    """Bytes that each flop takes through memory where no table holds the rate."""
    text = template.spilled
    value = 0.0 if text is None else text(names)
    if text is not None and (not isinstance(value, int | float) or not 0.0 <= value < math.inf):
        raise text.error(f"{value!r} is not a number of bytes")
    return float(value)


def scratch(template: Template, names: Names, scope: Mapping[str, Any]) -> Scratch | None:
    """What is in memory beside operands and results."""
    texts = template.scratch
    if not texts:
        return None
    beside = polynomial(texts["beside"], scope)
    if "blocks" not in texts:
        walked = polynomial(texts["fused"], scope) if "fused" in texts else beside
        return Scratch(0.0, (), (), beside, walked=walked)
    blocks = texts["blocks"](names)
    if not isinstance(blocks, int | float) or not 0.0 <= blocks < math.inf:
        raise texts["blocks"].error(f"{blocks!r} is not a number of blocks")
    fused = texts["fused"](names) if "fused" in texts else blocks
    if not isinstance(fused, int | float) or not 0.0 <= fused <= blocks:
        raise texts["fused"].error(f"{fused!r} is no number of blocks up to {blocks!r}")
    scores = polynomial(texts["scores"], scope)
    if "along" not in texts:
        row = polynomial(texts["row"], scope)
        return Scratch(float(blocks), scores, row, beside, (), float(fused), beside)
    along = polynomial(texts["along"], scope)
    if len(along) != 1:
        raise texts["along"].error("is no product of index dims")
    return Scratch(float(blocks), scores, (), beside, along[0][1], float(fused), beside)


def blocks(template: Template, names: Names, scope: Mapping[str, Any]) -> Blocks | None:
    """The kernels of each block; None where it has none, or one kernel does it all."""
    texts = template.blocks
    if not texts:
        return None
    text, kernels = texts["products"], texts["kernels"](names)
    found = text(scope)
    if not isinstance(found, tuple) or not all(isinstance(p, tuple) and len(p) == 4 for p in found):
        raise text.error(f"{found!r} is not a list of products [batch, m, n, k]")
    if not isinstance(kernels, int | float) or not 0.0 <= kernels < math.inf:
        raise texts["kernels"].error(f"{kernels!r} is not a number of kernels")
    if not found:
        return None
    products = tuple([tuple([_dims(text, side) for side in product]) for product in found])
    moved, again = (polynomial(texts[k], scope) for k in ("moved", "again"))
    return Blocks(products, moved, again, float(kernels))


def _dims(text: Expression, value: Any) -> tuple[int, ...]:
    """The index dims whose product an amount is."""
    terms = _terms(text, value) if isinstance(value, Cost) else ()
    if len(terms) != 1 or terms[0][0] != 1.0:
        raise text.error(f"{value!r} is no product of index dims")
    return terms[0][1]


def steps(template: Template, scope: Mapping[str, Any]) -> Polynomial:
    """Steps that wait for one another; a number is that of all of them."""
    text = template.steps
    if text is None:
        return ()
    value = text(scope)
    if isinstance(value, int | float) and not isinstance(value, bool):
        value = Cost(((float(value), ()),))
    if not isinstance(value, Cost):
        raise text.error(f"{value!r} is not a polynomial in index groups")
    return _terms(text, value)


def scattered(
    template: Template, names: Names, scope: Mapping[str, Any], inputs: Sequence[TensorType]
) -> Scattered | None:
    """What is read, or added to, at places that are data."""
    texts = template.scattered
    if not texts:
        return None
    name = texts["of"].text.strip()
    found = places(template, name, len(inputs))
    if len(found) != 1:
        raise texts["of"].error(f"{name!r} is not an operand")
    (p,) = found
    numbers = {k: texts[k](names) for k in ("run", "within", "times", "unit") if k in texts}
    for k, x in numbers.items():
        if not isinstance(x, int | float) or isinstance(x, bool) or not 0.0 <= x < math.inf:
            raise texts[k].error(f"{x!r} is not a number of elements")
    size = inputs[p].itemsize
    run = max(1.0, float(numbers["run"])) * size
    return Scattered(
        operand=p,
        elements=polynomial(texts["elements"], scope),
        itemsize=size,
        run=run,
        unit=max(1.0, float(numbers.get("unit", numbers["run"]))) * size,
        within=float(numbers["within"]) * size,
        times=float(numbers["times"]),
        counted=name in template.reads,
    )


def precision(template: Template, names: Names) -> str:
    """`high` or `highest` where a product asks for it, else nothing."""
    if template.precision is None:
        return ""
    value = template.precision(names)
    words = value if isinstance(value, tuple) else (value,)
    asked = {_PRESETS.get(str(w), str(w).lower()) for w in words}
    return next((w for w in ("highest", "high") if w in asked), "")
