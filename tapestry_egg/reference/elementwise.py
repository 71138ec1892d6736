"""NumPy implementations of the elementwise kernels."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np

from tapestry_egg.errors import TemplateError

from .call import Array, Call, Reference, numpy_dtype, wide


def _special(name: str) -> Callable[..., Array]:
    """A function of SciPy, which is loaded when it is first called: that takes a while."""

    def call(*operands: Any) -> Array:
        import scipy.special

        return getattr(scipy.special, name)(*operands)

    return call


def _integers(x: Array) -> bool:
    return x.dtype.kind in "iu"


def _divide(x: Array, y: Array) -> Array:
    if not _integers(x):
        return x / y
    # NumPy rounds down, XLA towards zero; by zero it gives a word of ones, and the least integer by
    # -1 stays as it is.
    none = y == 0
    by = np.where(none, 1, y).astype(x.dtype)
    quotient = x // by
    quotient = quotient + ((quotient < 0) & (quotient * by != x)).astype(x.dtype)
    return np.asarray(np.where(none, np.invert(np.zeros_like(x)), quotient))


def _remainder(x: Array, y: Array) -> Array:
    """What is left of a division towards zero; all of x where y is 0."""
    if not _integers(x):
        return np.fmod(x, y)
    return np.asarray(np.where(y == 0, x, np.fmod(x, np.where(y == 0, 1, y).astype(x.dtype))))


def _power(x: Array, y: Array) -> Array:
    out = np.power(x, y)
    if out.dtype.kind == "f":
        # NumPy takes x ** 0.5 for a square root, of which that of -inf is no number.
        out = np.where(np.isneginf(x) & (y == 0.5), np.inf, out)
    return np.asarray(out)


def _whole_power(x: Array, y: int) -> Array:
    """By products, as JAX does: of -x it is then that of x, but for the sign. NumPy's is not in
    every digit."""
    if _integers(x) or y == 0:
        return np.asarray(x**y)
    out, left = None, abs(y)
    while left:
        if left & 1:
            out = x if out is None else out * x
        left >>= 1
        if left:
            x = x * x
    assert out is not None
    return np.asarray(out if y > 0 else 1 / out)


def _shift(x: Array, y: Array, kind: str) -> Array:
    """Shifts by the width or more empty the word, or fill it with the sign."""
    width = 8 * x.dtype.itemsize
    far = (y < 0) | (y >= width)
    by = np.where(far, 0, y).astype(x.dtype)
    if kind == "left":
        return np.asarray(np.where(far, 0, np.left_shift(x, by)))
    if kind == "arithmetic":
        signed = x.view(np.dtype(f"i{x.dtype.itemsize}"))
        shifted = np.right_shift(signed, by.view(signed.dtype))
        return (
            np.where(far, np.where(signed < 0, -1, 0), shifted).astype(signed.dtype).view(x.dtype)
        )
    unsigned = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    emptied = np.where(far, 0, np.right_shift(unsigned, by.view(unsigned.dtype)))
    return np.asarray(emptied.astype(unsigned.dtype).view(x.dtype))


def _mulhi(x: Array, y: Array) -> Array:
    width = 8 * x.dtype.itemsize
    product = x.astype(object) * y.astype(object)
    return np.asarray(product >> width)


def _bit_length(x: Array) -> Array:
    unsigned = x.view(np.dtype(f"u{x.dtype.itemsize}"))
    return np.asarray(np.vectorize(lambda v: int(v).bit_length(), otypes=[np.int64])(unsigned))


def _total_order(x: Array) -> Array:
    """Integers in the order -NaN < -inf < ... < -0 < +0 < ... < inf < NaN."""
    if x.dtype.kind in "biuc":
        return x
    bits = x.view(np.dtype(f"i{x.dtype.itemsize}"))
    return np.where(bits < 0, np.bitwise_xor(bits, np.iinfo(bits.dtype).max), bits)


def _round(call: Call, x: Array) -> Array:
    if call.params.get("rounding_method") in ("TO_NEAREST_EVEN", 1):
        return np.round(x)
    return np.copysign(np.floor(np.abs(x) + 0.5), x)


def _reduce_precision(call: Call, x: Array) -> Array:
    """Round to a float of fewer exponent and mantissa bits. Below its least normal is zero, unless
    the operand has no more exponent bits: then subnormal numbers are rounded as such."""
    import ml_dtypes

    digits, bits = call.params["mantissa_bits"], call.params["exponent_bits"]
    bias = 2 ** (bits - 1) - 1
    own = ml_dtypes.finfo(call.operands[0].dtype)
    _, power = np.frexp(x)
    if bits >= own.nexp:
        power = np.maximum(power, own.minexp + 1)
    step = power - 1 - digits
    rounded = np.ldexp(np.round(np.ldexp(x, -step)), step)
    _, power = np.frexp(rounded)
    rounded = np.where(power - 1 > bias, np.copysign(np.inf, x), rounded)
    if bits < own.nexp:
        tiny = (power - 1 < 1 - bias) & np.isfinite(x)
        rounded = np.where(tiny, np.copysign(0.0, x), rounded)
    return np.asarray(rounded)


def _convert(call: Call, x: Array) -> Array:
    to = numpy_dtype(call.params["new_dtype"])
    if to.kind == "b":
        return np.asarray(x != 0)
    if x.dtype.kind == "c" and to.kind != "c":
        x = x.real
    if to.kind in "iu" and x.dtype.kind not in "biu":
        return _nearest(wide(x), to)
    return x


def _nearest(x: Array, to: np.dtype[Any]) -> Array:
    """Numbers cut off to integers; those beyond the ends are the ends, and nan is 0."""
    ends = np.iinfo(to)
    beyond = [np.isnan(x), x <= float(ends.min), x >= float(ends.max)]
    inside = np.where(np.any(beyond, 0), 0, np.trunc(x)).astype(to)
    return np.select(beyond, [np.array(n, to) for n in (0, ends.min, ends.max)], inside)


def _select(call: Call) -> Array:
    which, *cases = call.operands
    if len(cases) == 1:
        return cases[0]
    out = cases[0]
    for k, case in enumerate(cases[1:], 1):
        out = np.where(which.astype(np.int64) == k, case, out)
    return out


_UNARY: dict[str, Callable[[Any], Any]] = {
    "abs": np.abs,
    "acos": np.arccos,
    "acosh": np.arccosh,
    "asin": np.arcsin,
    "asinh": np.arcsinh,
    "atan": np.arctan,
    "atanh": np.arctanh,
    "bessel_i0e": _special("i0e"),
    "bessel_i1e": _special("i1e"),
    "cbrt": np.cbrt,
    "ceil": np.ceil,
    "clz": lambda x: 8 * x.dtype.itemsize - _bit_length(x),
    "conj": np.conj,
    "copy": lambda x: x,
    "copy_p": lambda x: x,
    "cos": np.cos,
    "cosh": np.cosh,
    "digamma": _special("psi"),
    "erf": _special("erf"),
    "erf_inv": _special("erfinv"),
    "erfc": _special("erfc"),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "floor": np.floor,
    "imag": np.imag,
    "is_finite": np.isfinite,
    "lgamma": _special("gammaln"),
    "log": np.log,
    "log1p": np.log1p,
    "log2": np.log2,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "name": lambda x: x,
    "sharding_constraint": lambda x: x,
    "neg": np.negative,
    "not": np.invert,
    "population_count": lambda x: np.bitwise_count(x.view(np.dtype(f"u{x.dtype.itemsize}"))),
    "real": np.real,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sign": np.sign,
    "sin": np.sin,
    "sinh": np.sinh,
    "sqrt": np.sqrt,
    "square": np.square,
    "stop_gradient": lambda x: x,
    "tan": np.tan,
    "tanh": np.tanh,
}


def _complex(x: Array, y: Array) -> Array:
    """The number of two parts: 0 and an infinity make no NaN, as they would in x + 1j * y."""
    out = np.empty(np.broadcast_shapes(x.shape, y.shape), np.result_type(x, y, np.complex64))
    out.real, out.imag = x, y
    return out


_BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "add": np.add,
    "add_any": np.add,
    "and": np.bitwise_and,
    "atan2": np.arctan2,
    "complex": _complex,
    "div": _divide,
    "eq": np.equal,
    "eq_to": lambda x, y: np.equal(_total_order(x), _total_order(y)),
    "ge": np.greater_equal,
    "gt": np.greater,
    "igamma": _special("gammainc"),
    "igammac": _special("gammaincc"),
    "le": np.less_equal,
    "le_to": lambda x, y: np.less_equal(_total_order(x), _total_order(y)),
    "lt": np.less,
    "lt_to": lambda x, y: np.less(_total_order(x), _total_order(y)),
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "mulhi": _mulhi,
    "ne": np.not_equal,
    "or": np.bitwise_or,
    "polygamma": lambda n, x: _special("polygamma")(n.astype(np.int64), x),
    "pow": _power,
    "rem": _remainder,
    "shift_left": lambda x, y: _shift(x, y, "left"),
    "shift_right_arithmetic": lambda x, y: _shift(x, y, "arithmetic"),
    "shift_right_logical": lambda x, y: _shift(x, y, "logical"),
    "sub": np.subtract,
    "xor": np.bitwise_xor,
    "zeta": _special("zeta"),
}
#: Exact on bits: these must see the operands in their own dtype.
_EXACT = (
    "eq_to",
    "le_to",
    "lt_to",
    "copy",
    "copy_p",
    "name",
    "sharding_constraint",
    "stop_gradient",
)


def _exactly(function: Callable[..., Any]) -> Reference:
    return lambda call: function(*call.operands)


def _unary(function: Callable[[Any], Any]) -> Reference:
    return lambda call: function(wide(call.operands[0]))


def _binary(function: Callable[[Any, Any], Any]) -> Reference:
    return lambda call: function(wide(call.operands[0]), wide(call.operands[1]))


def _bitcast(call: Call) -> Array:
    # Between widths a last dim holds the parts of an element.
    made = np.ascontiguousarray(call.operands[0]).reshape(-1).view(call.dtype())
    if made.size != prod(call.shape()):  # NumPy gives four bits a byte of their own
        raise TemplateError(f"there is no reference for bit casts to {call.dtype()} by parts")
    return made.reshape(call.shape())


def _nextafter(call: Call) -> Array:
    return np.asarray(np.nextafter(call.operands[0], call.operands[1]))


def _clamp(call: Call) -> Array:
    low, x, high = call.operands
    return np.asarray(np.minimum(np.maximum(x, low), high))


ELEMENTWISE: dict[str, Reference] = {
    **{name: _unary(f) for name, f in _UNARY.items() if name not in _EXACT},
    **{name: _binary(f) for name, f in _BINARY.items() if name not in _EXACT},
    **{name: _exactly(_UNARY[name]) for name in _EXACT if name in _UNARY},
    **{name: _exactly(_BINARY[name]) for name in _EXACT if name in _BINARY},
    "bitcast_convert_type": _bitcast,
    "clamp": _clamp,
    "convert_element_type": lambda call: _convert(call, call.operands[0]),
    "integer_pow": lambda call: _whole_power(wide(call.operands[0]), call.params["y"]),
    "nextafter": _nextafter,
    "optimization_barrier": lambda call: call.operands,
    "reduce_precision": lambda call: _reduce_precision(call, wide(call.operands[0])),
    "regularized_incomplete_beta": lambda call: _special("betainc")(*map(wide, call.operands)),
    "round_operand": lambda call: _convert(call, call.operands[0]),
    "round": lambda call: _round(call, wide(call.operands[0])),
    "select_n": _select,
}
