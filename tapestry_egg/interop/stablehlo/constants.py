"""Constants and attributes of StableHLO as NumPy arrays and Python numbers."""

from __future__ import annotations

import re
from typing import Any

import numpy as np

_DENSE = re.compile(r'dense<(?P<body>"0x[0-9A-Fa-f]*"|.*)> : ', re.DOTALL)
_NUMBER = re.compile(r"[^\s\[\],()]+")
_DTYPES = {
    **{f"i{n}": f"int{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{f"ui{n}": f"uint{n}" for n in (2, 4, 8, 16, 32, 64)},
    **{"i1": "bool", "f16": "float16", "f32": "float32", "f64": "float64", "bf16": "bfloat16"},
    **{"complex<f32>": "complex64", "complex<f64>": "complex128"},
    **{"f8E5M2": "float8_e5m2", "f8E4M3FN": "float8_e4m3fn", "f8E4M3": "float8_e4m3"},
    **{"f8E5M2FNUZ": "float8_e5m2fnuz", "f8E4M3FNUZ": "float8_e4m3fnuz"},
    **{"f8E4M3B11FNUZ": "float8_e4m3b11fnuz", "f8E3M4": "float8_e3m4"},
    **{"f8E8M0FNU": "float8_e8m0fnu", "f4E2M1FN": "float4_e2m1fn"},
}


def dtype_of(element: object) -> np.dtype[Any]:
    """JAX's dtype of an element type. Raises ValueError for one that JAX has not, or has not now:
    without `jax_enable_x64` it would take numbers of 64 bits for such of 32."""
    import jax.numpy as jnp
    from jax import dtypes

    if str(element) not in _DTYPES:
        raise ValueError(f"JAX has no elements of {element}")
    found = np.dtype(jnp.dtype(_DTYPES[str(element)]))
    if dtypes.canonicalize_dtype(found) != found:
        raise ValueError(f"it has elements of {element}; set JAX_ENABLE_X64=1 to keep them")
    return found


def shape_of(type_: Any) -> tuple[int, ...]:
    """The sizes of a tensor type. Raises ValueError where one is not known."""
    if not type_.has_static_shape:
        raise ValueError(f"{type_} has dims of unknown size")
    return tuple(int(n) for n in type_.shape)


def constant(operation: Any) -> np.ndarray[Any, Any]:
    """The array of a `stablehlo.constant`."""
    (result,) = operation.results
    shape, dtype = shape_of(result.type), dtype_of(result.type.element_type)
    if dtype.kind in "biuf":  # complex and narrow types have no way through jaxlib's bindings
        found: np.ndarray[Any, Any] = np.array(operation.attributes["value"]).astype(dtype)
        return found.reshape(shape)
    return _of_text(operation.get_asm(), shape, dtype)


def _of_text(text: str, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """An array as it is printed: its bytes in hexadecimal digits, or number by number."""
    found = _DENSE.search(text)
    if found is None:
        raise ValueError(f"no array is printed in {text[:60]!r}")
    body = found["body"]
    if body.startswith('"0x'):
        values = np.frombuffer(bytes.fromhex(body[3:-1]), dtype)
    else:
        numbers = [_number(word, dtype) for word in _NUMBER.findall(body)]
        if dtype.kind == "c":
            values = np.array(numbers[::2]) + 1j * np.array(numbers[1::2])
        else:
            values = np.array(numbers)
        values = values.astype(dtype)
    if values.size == 1:
        return np.broadcast_to(values.reshape(()), shape)
    return values.reshape(shape)


def _number(word: str, dtype: np.dtype[Any]) -> Any:
    """A number; what no digits say, such as infinity, is printed as its bits."""
    if not word.startswith("0x"):
        return float(word)
    kind = np.dtype(dtype.type(0).real.dtype)
    bits = int(word, 16).to_bytes(kind.itemsize, "little")
    return np.frombuffer(bits, kind)[0].astype(float)


def ints(attribute: Any) -> tuple[int, ...]:
    """The numbers of an array attribute."""
    return tuple(int(n) for n in attribute)


def word(attribute: object) -> str:
    """The word of an enumeration: `LT` of `#stablehlo<comparison_direction LT>`."""
    return str(attribute).rstrip(">").rpartition(" ")[2].rpartition(".")[2]
