"""Operations of StableHLO that work element by element, as JAX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .constants import dtype_of, shape_of, word

#: Functions of JAX's `lax` by the name of the operation, where they take its operands as they are.
SAME = {
    **{name: name for name in ("abs", "atan2", "cbrt", "ceil", "clamp", "complex", "erf", "erfc")},
    **{name: name for name in ("erf_inv", "floor", "imag", "is_finite", "lgamma", "digamma")},
    **{name: name for name in ("log", "logistic", "real", "rsqrt", "select", "shift_left")},
    **{name: name for name in ("shift_right_arithmetic", "shift_right_logical", "sign", "sqrt")},
    **{name: name for name in ("square", "tan", "tanh", "sinh", "cosh", "asin", "acos", "atan")},
    **{name: name for name in ("asinh", "acosh", "atanh", "bessel_i1e", "zeta", "polygamma")},
    **{"cosine": "cos", "sine": "sin", "exponential": "exp", "exponential_minus_one": "expm1"},
    **{"log_plus_one": "log1p", "count_leading_zeros": "clz", "popcnt": "population_count"},
    **{"divide": "div", "subtract": "sub", "negate": "neg", "power": "pow", "remainder": "rem"},
    **{"maximum": "max", "minimum": "min", "and": "bitwise_and", "or": "bitwise_or"},
    **{"xor": "bitwise_xor", "not": "bitwise_not", "next_after": "nextafter"},
    **{"optimization_barrier": "optimization_barrier", "add": "add", "multiply": "mul"},
}
#: Of truth values a sum is `or`, a product `and`.
_OF_TRUTH = {"add": "bitwise_or", "mul": "bitwise_and"}
_ORDER = {"EQ": "eq", "NE": "ne", "LT": "lt", "LE": "le", "GT": "gt", "GE": "ge"}


def same(name: str) -> Callable[..., Any]:
    """What an operation of `SAME` is in JAX."""

    def run(operation: Any, args: list[Any], runner: Any) -> Any:
        from jax import lax

        function = SAME[name]
        if function in _OF_TRUTH and args[0].dtype == bool:
            function = _OF_TRUTH[function]
        if function == "optimization_barrier":
            return lax.optimization_barrier(tuple(args))
        return getattr(lax, function)(*args)

    return run


def compare(operation: Any, args: list[Any], runner: Any) -> Any:
    """A comparison; of floats in their total order only inside sorts."""
    from jax import lax

    kind = operation.attributes
    if "compare_type" in kind and word(kind["compare_type"]) == "TOTALORDER":
        raise ValueError("a comparison by the total order of floats")
    return getattr(lax, _ORDER[word(kind["comparison_direction"])])(*args)


def convert(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.convert_element_type(args[0], dtype_of(operation.results[0].type.element_type))


def bitcast_convert(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.bitcast_convert_type(args[0], dtype_of(operation.results[0].type.element_type))


def round_even(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.round(args[0], lax.RoundingMethod.TO_NEAREST_EVEN)


def round_away(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.round(args[0], lax.RoundingMethod.AWAY_FROM_ZERO)


def reduce_precision(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    kept = operation.attributes
    return lax.reduce_precision(
        args[0], int(kept["exponent_bits"].value), int(kept["mantissa_bits"].value)
    )


def is_inf(operation: Any, args: list[Any], runner: Any) -> Any:
    import jax.numpy as jnp

    return jnp.isinf(args[0])


def constant_like(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    number = float(operation.attributes["value"].value)
    return lax.full(shape_of(operation.results[0].type), number, args[0].dtype)


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    **{f"stablehlo.{name}": same(name) for name in SAME},
    **{f"chlo.{name}": same(name) for name in SAME},
    "stablehlo.compare": compare,
    "stablehlo.convert": convert,
    "stablehlo.bitcast_convert": bitcast_convert,
    "stablehlo.round_nearest_even": round_even,
    "stablehlo.round_nearest_afz": round_away,
    "stablehlo.reduce_precision": reduce_precision,
    "chlo.is_inf": is_inf,
    "chlo.constant_like": constant_like,
}
