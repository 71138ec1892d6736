"""Under which names a device's rates for a dtype may be listed."""

from __future__ import annotations

from collections.abc import Container

# Products that ask for another precision than the default compute in `float32@highest`, a dtype
# with its precision: where a target lists no rate for that it computes as it does without.


def families(dtype: str) -> tuple[str, ...]:
    """Names under which a rate for `dtype` may be listed, the closest first."""
    base, _, precision = dtype.partition("@")
    names = _families(base)
    return (*(f"{n}@{precision}" for n in names), *names) if precision else names


def computed_as(dtype: str, rates: Container[str]) -> str:
    """The dtype that a product computes in: without its precision where no rate is of that."""
    base, _, precision = dtype.partition("@")
    known = any(f"{name}@{precision}" in rates for name in _families(base))
    return dtype if precision and known else base


def _families(dtype: str) -> tuple[str, ...]:
    if dtype.startswith("float8"):
        return (dtype, "float8", "bfloat16")
    if dtype.startswith(("float4", "float6")):
        return (dtype, "float4", "float8", "bfloat16")
    if dtype in ("int2", "int4", "int8", "uint2", "uint4", "uint8", "bool"):
        return (dtype, "int8")
    return {
        "float16": ("float16", "bfloat16"),
        "tensorfloat32": ("tensorfloat32", "float32"),
        "complex64": ("complex64", "float32"),
        "complex128": ("complex128", "float64"),
    }.get(dtype, (dtype,))
