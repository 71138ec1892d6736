"""Evaluate: both sides of a rule on numbers, by the NumPy references.

Three kinds of numbers, all of them over the same shapes:

    field    integers modulo a prime: additions, products and divisions are exact, so that equal
             polynomials are equal and unequal ones differ at random points except with a
             probability of about degree / prime (Schwartz 1980, Zippel 1979)
    wide     the widest floats there are, so that what remains of an error is far below any law's
    actual   the dtypes that the program has, rounding where it does
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ..blockgraph import TensorType
from ..errors import TemplateError
from ..metakernels import registry
from ..metakernels.reference import reference
from ..metakernels.reference_call import numpy_dtype
from ..metakernels.values import kind
from ..wants import Applied
from ..zspace import ZRange
from .instances import Instance

Array = NDArray[Any]
Numbers = Literal["field", "wide", "actual"]

#: Products of two residues, and sums of 500 of them, fit in 64 bits.
PRIME = 134_217_689
_FIELD = frozenset(
    "add add_any sub mul neg square div integer_pow dot_general conv_general_dilated reduce_sum "
    "cumsum reduce_window_sum copy copy_p name stop_gradient transpose reshape squeeze rev slice "
    "broadcast_in_dim concatenate stack tile pad dynamic_slice dynamic_update_slice".split()
)


class NoReference(Exception):
    """A kernel whose numbers nothing can tell."""


def has_field(instance: Instance) -> bool:
    """Whether both sides consist of sums, products and quotients of numbers, and of moves."""
    return all(
        a.kernel in _FIELD
        and all(
            kind(t.dtype) in ("float", "complex")
            for t in (*a.inputs, a.output)
            if t.rank or t.dtype != "int32"
        )
        and (a.kernel != "integer_pow" or 0 <= a.params["y"] <= 2)
        for a in instance.applied.values()
    ) and all(v == int(v) for v in instance.side.constants.values())


def evaluate(
    instance: Instance, values: Mapping[str, Array], numbers: Numbers
) -> tuple[dict[str, Array], float]:
    """Every tensor of both sides by name, and the greatest magnitude that occurs.

    Raises NoReference for a kernel without a NumPy reference.
    """
    side = instance.side
    at: dict[str, Array] = dict(values)
    most = max((_magnitude(v) for v in at.values()), default=0.0)
    for node in (*side.nodes, *side.built):
        entry = instance.applied[node.signature]
        at[node.name] = _run(_in(entry, numbers), [at[o] for o in node.operands], numbers)
        most = max(most, _magnitude(at[node.name]))
    return at, most


def _run(entry: Applied, operands: list[Array], numbers: Numbers) -> Array:
    if numbers == "field" and entry.kernel == "div":
        inverse = np.array(
            [pow(int(v), PRIME - 2, PRIME) for v in operands[1].reshape(-1)], np.int64
        ).reshape(operands[1].shape)
        return np.asarray(operands[0] * inverse % PRIME)
    signature = registry.signature(entry.kernel, entry.params, entry.inputs, (entry.output,))
    whole = ZRange.from_shape(signature.extents)
    read = []
    for p, x in enumerate(operands):
        box = signature.operand_box(p, whole)
        read.append(x[tuple(slice(a, b) for a, b in zip(box.start, box.end, strict=True))])
    try:
        out = reference(entry.kernel, entry.params, signature, read)[0]
    except (TypeError, ValueError, IndexError, TemplateError) as e:
        raise NoReference(
            f"{entry.kernel}: {e}"
        ) from None  # an odd case that NumPy has no word for
    if numbers == "field" and out.dtype == np.int64:
        return np.asarray(out % PRIME)
    return out


def _in(entry: Applied, numbers: Numbers) -> Applied:
    """The same kernel on the dtypes that the numbers have."""
    if numbers == "actual":
        return entry
    inputs = tuple(as_numbers(t, numbers) for t in entry.inputs)
    params = {k: _param(v, numbers) for k, v in entry.params.items()}
    output = registry.signature(entry.kernel, params, inputs).output_types[0]
    return replace(entry, params=params, inputs=inputs, output=output)


def as_numbers(t: TensorType, numbers: Numbers) -> TensorType:
    """The type in which a tensor is computed."""
    return TensorType(t.shape, _dtype(t.dtype, numbers))


def _dtype(name: str, numbers: Numbers) -> str:
    what = kind(name)
    if numbers == "actual" or what not in ("float", "complex"):
        return name
    if numbers == "field":
        return "int64"
    return "float64" if what == "float" else "complex128"


def _param(value: Any, numbers: Numbers) -> Any:
    if isinstance(value, Mapping) and "$dtype" in value:
        return {"$dtype": _dtype(value["$dtype"], numbers)}
    return value


def _magnitude(x: Array) -> float:
    if x.dtype.kind not in "fc" and x.dtype.name not in _NARROW:
        return 0.0
    wide = np.abs(x.astype(np.complex128 if x.dtype.kind == "c" else np.float64))
    finite = wide[np.isfinite(wide)]
    return float(finite.max()) if finite.size else 0.0


_NARROW = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


def random_values(
    instance: Instance, numbers: Numbers, rng: np.random.Generator, style: str
) -> dict[str, Array]:
    """Inputs of an instance.

    `style` is how floats are drawn: `normal`, `unit` (between 0.1 and 0.9), or `special` (with
    infinities, negative zeros and far magnitudes). Integers take all values of their dtype.
    """
    out: dict[str, Array] = {}
    for name, t in instance.inputs.items():
        dtype = numpy_dtype(_dtype(t.dtype, numbers))
        what = kind(t.dtype)
        if name in instance.side.constants:
            value = instance.side.constants[name]
            if numbers == "field":
                value = int(value) % PRIME
            out[name] = np.full(t.shape, value).astype(dtype)
        elif what == "bool":
            out[name] = rng.random(t.shape) < 0.5
        elif what in ("int", "uint"):
            ends = np.iinfo(dtype)
            small = style == "unit" or (t.rank == 0 and dtype == np.int32)
            low, high = (0, 4) if small else (int(ends.min), int(ends.max))
            out[name] = rng.integers(low, high, t.shape, dtype=dtype, endpoint=True)
        elif numbers == "field":
            out[name] = rng.integers(1, PRIME, t.shape, dtype=np.int64)
        elif what in ("float", "complex"):
            out[name] = _floats(t.shape, what, rng, style).astype(dtype)
        else:
            raise TemplateError(f"no values of dtype {t.dtype} can be drawn")
    return out


def _floats(shape: tuple[int, ...], what: str, rng: np.random.Generator, style: str) -> Array:
    if style == "unit":
        drawn: Array = rng.uniform(0.1, 0.9, shape)
    else:
        drawn = rng.normal(size=shape)
    if style == "special" and what == "float":
        drawn = drawn * 10.0 ** rng.integers(-3, 4, shape)
        for value in (np.inf, -np.inf, 0.0, -0.0):
            drawn = np.where(rng.random(shape) < 0.06, value, drawn)
    if what == "complex":
        drawn = drawn + 1j * rng.normal(size=shape)
    return np.asarray(drawn)
