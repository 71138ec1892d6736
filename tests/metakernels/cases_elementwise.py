"""Cases of the elementwise kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from tapestry_egg.runtime.lower.precision import round_operand_p
from tapestry_egg.tracing.codec import primitive
from tests.metakernels.cases import Array, Case, Draw, of

FLOATS = (
    "floor ceil cbrt square exp exp2 expm1 tanh logistic sin cos tan asin acos atan sinh cosh "
    "asinh atanh erf erfc erf_inv is_finite bessel_i0e bessel_i1e"
).split()
POSITIVE = "log log1p sqrt rsqrt lgamma digamma".split()
# Kernels of newer JAX, and those of them that this one does not have.
NEWER = frozenset(name for name in ("log2",) if hasattr(lax, name))
ABSENT = frozenset({"log2"}) - NEWER
BITS = "population_count clz not".split()
ANY = "neg abs sign copy stop_gradient optimization_barrier".split()


def pair(draw: Draw, kind: str) -> tuple[Array, Array]:
    """Two operands that broadcast against each other: dims of size 1, or a scalar."""
    shape = draw.shape(0, 3)
    other = tuple(1 if draw.rng.random() < 0.2 else n for n in shape)
    if draw.rng.random() < 0.2:
        other = ()
    made = []
    for s in (shape, other):
        if kind == "float":
            made.append(draw.floats(s))
        elif kind == "positive":
            made.append(draw.positive(s))
        elif kind == "flag":
            made.append(draw.flags(s))
        elif kind == "complex":
            made.append(draw.complexes(s))
        else:
            made.append(draw.integers(s, 1, 90) * draw.choice((1, -1)))
    return (made[0], made[1]) if draw.coin() or other == () else (made[1], made[0])


@of("elementwise", *FLOATS)
def floats(draw: Draw, kernel: str) -> Case:
    return getattr(lax, kernel), (draw.floats(draw.shape()),)


@of("elementwise", *POSITIVE, *NEWER, "acosh")
def positive(draw: Draw, kernel: str) -> Case:
    x = draw.positive(draw.shape())
    return getattr(lax, kernel), (x + np.float32(1) if kernel == "acosh" else x,)


@of("elementwise", *BITS)
def bits(draw: Draw, kernel: str) -> Case:
    function = lax.bitwise_not if kernel == "not" else getattr(lax, kernel)
    return function, (draw.integers(draw.shape()),)


@of("elementwise", *ANY)
def anything(draw: Draw, kernel: str) -> Case:
    x = draw.any(draw.shape())
    if kernel == "optimization_barrier":
        rest = draw.floats((*x.shape[: draw.size(0, 2)], *draw.shape(0, 1)))
        return lambda x, y: lax.optimization_barrier((x, y)), (x, rest)
    if kernel == "copy":
        return jnp.copy, (x,)
    if kernel == "stop_gradient":
        return lax.stop_gradient, (draw.floats(draw.shape()),)
    return getattr(lax, kernel), (x,)


@of("elementwise", "name")
def name(draw: Draw, kernel: str) -> Case:
    return lambda x: checkpoint_name(x, "saved"), (draw.floats(draw.shape()),)


@of("elementwise", "sharding_constraint")
def constraint(draw: Draw, kernel: str) -> Case:
    mesh = jax.sharding.AbstractMesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    asked = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return lambda x: lax.with_sharding_constraint(x, asked), (draw.any(draw.shape(1, 3)),)


@of("elementwise", "real", "imag", "conj")
def parts(draw: Draw, kernel: str) -> Case:
    real = kernel == "conj" and draw.coin()
    x = draw.floats(draw.shape()) if real else draw.complexes(draw.shape())
    return getattr(lax, kernel), (x,)


@of("elementwise", "integer_pow")
def integer_pow(draw: Draw, kernel: str) -> Case:
    y = draw.choice((-2, 3, 5))
    return lambda x: lax.integer_pow(x, y), (draw.floats(draw.shape()),)


@of("elementwise", "round", "reduce_precision")
def rounding(draw: Draw, kernel: str) -> Case:
    x = draw.floats(draw.shape())
    if kernel == "round":
        method = draw.choice(tuple(lax.RoundingMethod))
        return lambda x: lax.round(x * 4, method), (x,)
    exponent, mantissa = draw.choice(((8, 7), (4, 3), (5, 10)))
    return lambda x: lax.reduce_precision(x, exponent, mantissa), (x,)


@of("elementwise", "add", "sub", "mul", "div", "rem", "max", "min")
def arithmetic(draw: Draw, kernel: str) -> Case:
    kinds = (
        ("float", "integer", "complex") if kernel in ("add", "sub", "mul") else ("float", "integer")
    )
    return getattr(lax, kernel), pair(draw, draw.choice(kinds))


@of("elementwise", "atan2", "nextafter", "igamma", "igammac", "zeta")
def transcendental(draw: Draw, kernel: str) -> Case:
    if kernel in ("atan2", "nextafter"):
        x, y = pair(draw, "float")
        return getattr(lax, kernel), (np.broadcast_to(x, y.shape) if not x.shape else x, y)
    x, y = pair(draw, "positive")
    return getattr(lax, kernel), (x + np.float32(2) if kernel == "zeta" else x, y)


@of("elementwise", "pow")
def power(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    return lax.pow, (draw.positive(shape), draw.floats(shape))


@of("elementwise", "polygamma")
def polygamma(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    return lax.polygamma, (np.full(shape, 2.0, np.float32), draw.positive(shape))


@of("elementwise", "regularized_incomplete_beta")
def beta(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    return lax.betainc, tuple(draw.positive(shape) for _ in range(3))


@of("elementwise", "add_any", "mulhi")
def bound(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    if kernel == "mulhi":
        x, y = (draw.integers(shape, -(2**31), 2**31) for _ in range(2))
    else:
        x, y = draw.floats(shape), draw.floats(shape)
    return lambda x, y: primitive(kernel).bind(x, y), (x, y)


@of("elementwise", "and", "or", "xor")
def logic(draw: Draw, kernel: str) -> Case:
    return getattr(lax, f"bitwise_{kernel}"), pair(draw, draw.choice(("flag", "integer")))


@of("elementwise", "shift_left", "shift_right_logical", "shift_right_arithmetic")
def shifts(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    return getattr(lax, kernel), (draw.integers(shape, -99, 99), draw.integers(shape, 0, 40))


@of("elementwise", "eq", "ne", "lt", "le", "gt", "ge")
def comparisons(draw: Draw, kernel: str) -> Case:
    x, y = pair(draw, draw.choice(("float", "integer")))
    return getattr(lax, kernel), (np.where(draw.flags(x.shape), x, -x), y)


@of("elementwise", "eq_to", "le_to", "lt_to")
def total_order(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    x, y = (draw.numbers.choice(np.float32([-0.0, 0.0, -1, 2, np.inf, np.nan]), shape)
            for _ in range(2))  # fmt: skip
    return lambda x, y: primitive(kernel).bind(x, y), (np.asarray(x), np.asarray(y))


@of("elementwise", "complex")
def complexes(draw: Draw, kernel: str) -> Case:
    return lax.complex, pair(draw, "float")


@of("elementwise", "clamp")
def clamp(draw: Draw, kernel: str) -> Case:
    shape = draw.shape()
    low = -draw.positive(shape if draw.coin() else ())
    high = draw.positive(shape if draw.coin() else ())
    return lax.clamp, (low, draw.floats(shape), high)


@of("elementwise", "select_n")
def select(draw: Draw, kernel: str) -> Case:
    shape, cases = draw.shape(), draw.size(2, 3)  # one case is no choice: it is not traced
    at = shape if draw.coin() else ()
    which = draw.flags(at) if cases == 2 else draw.integers(at, 0, cases)
    return lax.select_n, (which, *(draw.floats(shape) for _ in range(cases)))


@of("elementwise", "convert_element_type")
def convert(draw: Draw, kernel: str) -> Case:
    to = draw.choice((np.int32, np.float16, ml_dtypes.bfloat16, np.bool_, np.complex64, np.int8))
    x = draw.choice((draw.floats, draw.integers, draw.flags))(draw.shape())
    if x.dtype == np.float32:
        x = x * np.float32(9)
    if x.dtype == to:
        to = np.float32
    return lambda x: lax.convert_element_type(x, to), (x,)


@of("elementwise", "round_operand")
def rounded(draw: Draw, kernel: str) -> Case:
    to = jnp.dtype(draw.choice((np.float16, ml_dtypes.bfloat16)))
    return lambda x: round_operand_p.bind(x, new_dtype=to), (draw.floats(draw.shape()),)


@of("elementwise", "bitcast_convert_type")
def bitcast(draw: Draw, kernel: str) -> Case:
    """To the same width, to parts of elements, and parts to elements."""
    to = draw.choice((np.int32, np.int8, np.float32))
    if to is np.float32:
        return lambda x: lax.bitcast_convert_type(x, to), (
            draw.integers((*draw.shape(), 4), dtype=np.int8),
        )
    return lambda x: lax.bitcast_convert_type(x, to), (draw.floats(draw.shape()),)
