"""Dtypes by name, arrays as base64, and the implementations of random keys."""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import sys
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np

from tapestry_egg.errors import GraphError

_NUMPY = frozenset(
    ("bool", "complex64", "complex128")
    + tuple(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64))
    + tuple(f"float{bits}" for bits in (16, 32, 64))
)


def is_dtype(name: str) -> bool:
    """Whether `name` is a dtype of a tensor: NumPy's, ml_dtypes', `float0` or `key<..>`."""
    import ml_dtypes

    extension = getattr(ml_dtypes, name, None)
    return (
        name in _NUMPY
        or name == "float0"
        or (name.startswith("key<") and name.endswith(">"))
        or (isinstance(extension, type) and issubclass(extension, np.generic))
    )


@cache
def kind(dtype: str) -> str:
    """`bool`, `int`, `uint`, `float`, `complex` or `key` (anything without arithmetic)."""
    if dtype == "bool":
        return "bool"
    for prefix, name in (("uint", "uint"), ("int", "int"), ("complex", "complex")):
        if dtype.startswith(prefix):
            return name
    return "float" if dtype.startswith(("float", "bfloat")) and dtype != "float0" else "key"


def dtype_name(dtype: Any) -> str:
    """`float32`, `bfloat16`, `key<fry>`, `float0`: the name that `TensorType` uses."""
    if getattr(dtype, "names", None) == ("float0",) or str(dtype) == "[('float0', 'V')]":
        return "float0"
    return str(getattr(dtype, "name", dtype))


def decode_dtype(name: object) -> Any:
    """The dtype object that JAX uses for `name`. Raises GraphError for an unknown name."""
    if not isinstance(name, str) or not is_dtype(name):
        raise GraphError(f"{name!r} is not a dtype")
    if name.startswith("key<"):
        import jax

        impl = key_impl(name[4:-1])
        return jax.eval_shape(lambda: jax.random.key(0, impl=impl)).dtype
    if name == "float0":
        return np.dtype([("float0", np.void, 0)])
    if name in _NUMPY:
        return np.dtype(name)
    import ml_dtypes

    return np.dtype(getattr(ml_dtypes, name))


def encode_array(array: np.ndarray) -> dict[str, Any]:
    """`{dtype, shape, data}` with the bytes little-endian in base64."""
    name = dtype_name(array.dtype)
    if not is_dtype(name):
        raise GraphError(f"an array of {name} cannot be stored")
    return {"dtype": name, "shape": list(array.shape), "data": encode_bytes(array)}


def encode_bytes(array: np.ndarray) -> str:
    """The array's bytes, C order, little-endian, base64."""
    plain = np.ascontiguousarray(array)
    order = {"<": "little", ">": "big", "=": sys.byteorder}.get(plain.dtype.byteorder, "little")
    if order == "big":
        plain = plain.byteswap()
    return base64.b64encode(plain.tobytes()).decode("ascii")


def decode_array(form: Any) -> np.ndarray:
    """The array of `{dtype, shape, data}`. Raises GraphError when the bytes do not fit."""
    shape = form["shape"]
    if not isinstance(shape, list) or any(type(d) is not int or d < 0 for d in shape):
        raise GraphError(f"{shape!r} is not a shape")
    return decode_bytes(form["data"], form["dtype"], tuple(shape))


def decode_bytes(data: object, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
    """The array of that type whose bytes are `data`. Raises GraphError when they do not fit."""
    if not isinstance(data, str):
        raise GraphError("array data must be a base64 string")
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as e:
        raise GraphError(f"array data is not base64: {e}") from e
    kind = decode_dtype(dtype)
    if not isinstance(kind, np.dtype):
        raise GraphError(f"an array of {dtype} cannot be stored")
    count = math.prod(shape)
    if len(raw) != count * kind.itemsize:
        raise GraphError(f"array data has {len(raw)} bytes, {count * kind.itemsize} expected")
    if kind.itemsize == 0:
        return np.zeros(shape, kind)
    array = np.frombuffer(raw, kind).reshape(shape)
    return array.byteswap() if kind.itemsize > 1 and sys.byteorder == "big" else array


_KEY_IMPLS: dict[str, Any] = {}


def register_key_impl(impl: Any) -> None:
    """Make an implementation of random keys findable by its name and by its tag."""
    _KEY_IMPLS.setdefault(impl.name, impl)
    _KEY_IMPLS.setdefault(impl.tag, impl)


def key_impl(name: object) -> Any:
    """The implementation of random keys of that name (`threefry2x32`) or tag (`fry`).

    Raises GraphError when there is none.
    """
    if not isinstance(name, str) or name not in _KEY_IMPLS:
        for impl in _jax_key_impls():
            register_key_impl(impl)
    if not isinstance(name, str) or name not in _KEY_IMPLS:
        raise GraphError(f"unknown implementation of random keys {name!r}")
    return _KEY_IMPLS[name]


def _jax_key_impls() -> Iterator[Any]:
    from jax.extend import random

    for known in ("threefry_prng_impl", "rbg_prng_impl", "unsafe_rbg_prng_impl"):
        yield getattr(random, known)
    for module in ("jax._src.random.prng", "jax._src.prng"):  # the registry has no public name
        try:
            yield from getattr(importlib.import_module(module), "prngs", {}).values()
        except ImportError:
            continue
