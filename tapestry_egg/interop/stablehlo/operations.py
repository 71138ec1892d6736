"""Operations of StableHLO that are one of JAX's each: by elements, moves, products, factorisations.

A line of `_ONE` is an operation: the function of JAX's `lax` that it is, of its attributes and its
operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .constants import constant, dtype_of, ints, shape_of, word

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
    **{"add": "add", "multiply": "mul"},
}
#: Of truth values a sum is `or`, a product `and`.
_OF_TRUTH = {"add": "bitwise_or", "mul": "bitwise_and"}


class Attributes:
    """What the attributes and results of an operation say, as Python values.

    Raises KeyError for an attribute that is not there, and has no default.
    """

    def __init__(self, operation: Any) -> None:
        self.operation, self.given = operation, operation.attributes

    def __contains__(self, name: str) -> bool:
        return name in self.given

    def ints(self, name: str) -> tuple[int, ...]:
        return ints(self.given[name])

    def number(self, name: str) -> int:
        return int(self.given[name].value)

    def flag(self, name: str, default: bool | None = None) -> bool:
        return default if default is not None and name not in self else bool(self.given[name].value)

    def word(self, name: str) -> str:
        return word(self.given[name])

    def windows(self, count: int, *names: str) -> list[tuple[int, ...]]:
        """Steps of windows per dim: 1 for what is not said."""
        return [self.ints(name) if name in self else (1,) * count for name in names]

    def padding(self, count: int) -> list[tuple[int, int]]:
        """What is padded before and behind each dim."""
        around = np.array(self.given["padding"]) if "padding" in self else np.zeros((count, 2), int)
        return [(int(a), int(b)) for a, b in around.reshape(-1, 2)]

    def precision(self, lax: Any) -> Any:
        """The precisions of two operands; None where the module says none."""
        said = (
            [word(p) for p in self.given["precision_config"]] if "precision_config" in self else ()
        )
        return tuple(getattr(lax.Precision, p) for p in said) or None

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the last result."""
        return shape_of(self.operation.results[len(self.operation.results) - 1].type)

    @property
    def dtype(self) -> np.dtype[Any]:
        """That of the last result."""
        types = self.operation.results
        return dtype_of(types[len(types) - 1].type.element_type)


def _same(name: str) -> Callable[[Any, Attributes, list[Any]], Any]:
    """What an operation of `SAME` is in JAX."""

    def run(lax: Any, has: Attributes, x: list[Any]) -> Any:
        truth = x[0].dtype == bool
        return getattr(lax, _OF_TRUTH.get(SAME[name], SAME[name]) if truth else SAME[name])(*x)

    return run


def _compare(lax: Any, has: Attributes, x: list[Any]) -> Any:
    """A comparison; of floats in their total order only inside sorts."""
    if "compare_type" in has and has.word("compare_type") == "TOTALORDER":
        raise ValueError("a comparison by the total order of floats")
    return getattr(lax, has.word("comparison_direction").lower())(*x)


def _gather(lax: Any, has: Attributes, x: list[Any]) -> Any:
    """Starts are clamped so that slices lie inside, which JAX calls `CLIP`."""
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.GatherDimensionNumbers(has.given["dimension_numbers"])
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(dims.offset_dims),
        collapsed_slice_dims=tuple(dims.collapsed_slice_dims),
        start_index_map=tuple(dims.start_index_map),
        operand_batching_dims=tuple(dims.operand_batching_dims),
        start_indices_batching_dims=tuple(dims.start_indices_batching_dims),
    )
    return lax.gather(
        x[0],
        _vectors_last(x[1], int(dims.index_vector_dim)),
        numbers,
        has.ints("slice_sizes"),
        indices_are_sorted=has.flag("indices_are_sorted", False),
        mode=lax.GatherScatterMode.CLIP,
    )


def scatter(operation: Any, args: list[Any], runner: Any) -> Any:
    """Updates that do not lie inside are dropped."""
    from jax import lax
    from jaxlib.mlir.dialects import stablehlo

    has = Attributes(operation)
    dims = stablehlo.ScatterDimensionNumbers(has.given["scatter_dimension_numbers"])
    numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(dims.update_window_dims),
        inserted_window_dims=tuple(dims.inserted_window_dims),
        scatter_dims_to_operand_dims=tuple(dims.scattered_dims_to_operand_dims),
        operand_batching_dims=tuple(dims.input_batching_dims),
        scatter_indices_batching_dims=tuple(dims.scatter_indices_batching_dims),
    )
    if len(args) != 3:
        raise ValueError("a scatter of several arrays at once")
    functions = {
        "add": lax.scatter_add,
        "multiply": lax.scatter_mul,
        "minimum": lax.scatter_min,
        "maximum": lax.scatter_max,
        "second": lax.scatter,
    }
    how = runner.combination(operation.regions[0])
    if how not in functions:
        raise ValueError(f"a scatter whose updates are combined by {how or 'more than one step'}")
    return functions[how](
        args[0],
        _vectors_last(args[1], int(dims.index_vector_dim)),
        args[2],
        numbers,
        indices_are_sorted=has.flag("indices_are_sorted", False),
        unique_indices=has.flag("unique_indices", False),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _vectors_last(indices: Any, dim: int) -> Any:
    """Indices with their vectors along the last dim, as JAX has them; `dim` may be one beyond."""
    return indices[..., None] if dim == indices.ndim else _numpy().moveaxis(indices, dim, -1)


def _numpy() -> Any:
    import jax.numpy as jnp

    return jnp


def _dot_general(lax: Any, has: Attributes, x: list[Any]) -> Any:
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.DotDimensionNumbers(has.given["dot_dimension_numbers"])
    contracting = tuple(dims.lhs_contracting_dimensions), tuple(dims.rhs_contracting_dimensions)
    batch = tuple(dims.lhs_batching_dimensions), tuple(dims.rhs_batching_dimensions)
    if "algorithm" in has:
        raise ValueError("a product by an algorithm of its own")
    return _product(lax, has, x, (contracting, batch))


def _product(lax: Any, has: Attributes, x: list[Any], dims: Any) -> Any:
    return lax.dot_general(*x, dims, precision=has.precision(lax), preferred_element_type=has.dtype)


def _convolution(lax: Any, has: Attributes, x: list[Any]) -> Any:
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.ConvDimensionNumbers(has.given["dimension_numbers"])
    spatial = tuple(dims.kernel_spatial_dimensions)
    lhs, rhs = x
    if "window_reversal" in has:
        reversed_ = zip(spatial, has.given["window_reversal"], strict=True)
        turned = [d for d, r in reversed_ if bool(r)]
        rhs = lax.rev(rhs, turned) if turned else rhs
    numbers = lax.ConvDimensionNumbers(
        (dims.input_batch_dimension, dims.input_feature_dimension, *dims.input_spatial_dimensions),
        (dims.kernel_output_feature_dimension, dims.kernel_input_feature_dimension, *spatial),
        (
            dims.output_batch_dimension,
            dims.output_feature_dimension,
            *dims.output_spatial_dimensions,
        ),
    )
    steps = has.windows(len(spatial), "window_strides", "lhs_dilation", "rhs_dilation")
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides=steps[0],
        padding=has.padding(len(spatial)),
        lhs_dilation=steps[1],
        rhs_dilation=steps[2],
        dimension_numbers=numbers,
        feature_group_count=has.number("feature_group_count"),
        batch_group_count=has.number("batch_group_count"),
        precision=has.precision(lax),
        preferred_element_type=has.dtype,
    )


def _cholesky(lax: Any, has: Attributes, x: list[Any]) -> Any:
    if not has.flag("lower"):
        raise ValueError("a Cholesky factor of the upper triangle")
    return lax.linalg.cholesky(x[0], symmetrize_input=False)


def _triangular_solve(lax: Any, has: Attributes, x: list[Any]) -> Any:
    turned = has.word("transpose_a")
    return lax.linalg.triangular_solve(
        *x,
        left_side=has.flag("left_side"),
        lower=has.flag("lower"),
        unit_diagonal=has.flag("unit_diagonal"),
        transpose_a=turned != "NO_TRANSPOSE",
        conjugate_a=turned == "ADJOINT",
    )


_RANDOM = {"THREE_FRY": "RNG_THREE_FRY", "PHILOX": "RNG_PHILOX", "DEFAULT": "RNG_DEFAULT"}
_PADS = ("edge_padding_low", "edge_padding_high", "interior_padding")
_SLICES = ("start_indices", "limit_indices", "strides")

_ONE: dict[str, Callable[[Any, Attributes, list[Any]], Any]] = {
    **{f"{dialect}.{name}": _same(name) for dialect in ("stablehlo", "chlo") for name in SAME},
    "stablehlo.optimization_barrier": lambda lax, has, x: lax.optimization_barrier(tuple(x)),
    "stablehlo.compare": _compare,
    "stablehlo.convert": lambda lax, has, x: lax.convert_element_type(x[0], has.dtype),
    "stablehlo.bitcast_convert": lambda lax, has, x: lax.bitcast_convert_type(x[0], has.dtype),
    "stablehlo.round_nearest_even": lambda lax, has, x: lax.round(
        x[0], lax.RoundingMethod.TO_NEAREST_EVEN
    ),
    "stablehlo.round_nearest_afz": lambda lax, has, x: lax.round(
        x[0], lax.RoundingMethod.AWAY_FROM_ZERO
    ),
    "stablehlo.reduce_precision": lambda lax, has, x: lax.reduce_precision(
        x[0], has.number("exponent_bits"), has.number("mantissa_bits")
    ),
    "chlo.is_inf": lambda lax, has, x: _numpy().isinf(x[0]),
    "chlo.constant_like": lambda lax, has, x: lax.full(
        has.shape, float(has.given["value"].value), x[0].dtype
    ),
    "stablehlo.constant": lambda lax, has, x: constant(has.operation),
    "stablehlo.broadcast_in_dim": lambda lax, has, x: lax.broadcast_in_dim(
        x[0], has.shape, has.ints("broadcast_dimensions")
    ),
    "stablehlo.concatenate": lambda lax, has, x: lax.concatenate(x, has.number("dimension")),
    "stablehlo.iota": lambda lax, has, x: lax.broadcasted_iota(
        has.dtype, has.shape, has.number("iota_dimension")
    ),
    "stablehlo.pad": lambda lax, has, x: lax.pad(
        *x, list(zip(*(has.ints(name) for name in _PADS), strict=True))
    ),
    "stablehlo.reshape": lambda lax, has, x: lax.reshape(x[0], has.shape),
    "stablehlo.reverse": lambda lax, has, x: lax.rev(x[0], has.ints("dimensions")),
    "stablehlo.slice": lambda lax, has, x: lax.slice(x[0], *(has.ints(name) for name in _SLICES)),
    "stablehlo.transpose": lambda lax, has, x: lax.transpose(x[0], has.ints("permutation")),
    "stablehlo.dynamic_slice": lambda lax, has, x: lax.dynamic_slice(
        x[0], x[1:], has.ints("slice_sizes"), allow_negative_indices=False
    ),
    "stablehlo.dynamic_update_slice": lambda lax, has, x: lax.dynamic_update_slice(
        x[0], x[1], x[2:], allow_negative_indices=False
    ),
    "stablehlo.gather": _gather,
    # The product of vectors and matrices: along the last dim of one and the first of the other.
    "stablehlo.dot": lambda lax, has, x: _product(
        lax, has, x, (((x[0].ndim - 1,), (0,)), ((), ()))
    ),
    "stablehlo.dot_general": _dot_general,
    "stablehlo.convolution": _convolution,
    "stablehlo.fft": lambda lax, has, x: lax.fft(
        x[0], getattr(lax.FftType, has.word("fft_type")), has.ints("fft_length")
    ),
    "stablehlo.cholesky": _cholesky,
    "stablehlo.triangular_solve": _triangular_solve,
    "stablehlo.rng_bit_generator": lambda lax, has, x: lax.rng_bit_generator(
        x[0],
        has.shape,
        has.dtype,
        algorithm=getattr(lax.RandomAlgorithm, _RANDOM[has.word("rng_algorithm")]),
    ),
}


def _of_jax(
    made: Callable[[Any, Attributes, list[Any]], Any],
) -> Callable[[Any, list[Any], Any], Any]:
    def run(operation: Any, args: list[Any], runner: Any) -> Any:
        from jax import lax

        return made(lax, Attributes(operation), args)

    return run


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    **{name: _of_jax(made) for name, made in _ONE.items()},
    "stablehlo.scatter": scatter,
}
