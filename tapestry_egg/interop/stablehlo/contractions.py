"""Products, convolutions and factorisations of StableHLO, as JAX has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .constants import dtype_of, ints, shape_of, word


def dot_general(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.DotDimensionNumbers(operation.attributes["dot_dimension_numbers"])
    contracting = tuple(dims.lhs_contracting_dimensions), tuple(dims.rhs_contracting_dimensions)
    batch = tuple(dims.lhs_batching_dimensions), tuple(dims.rhs_batching_dimensions)
    if "algorithm" in operation.attributes:
        raise ValueError("a product by an algorithm of its own")
    return lax.dot_general(
        args[0],
        args[1],
        (contracting, batch),
        precision=_precision(operation),
        preferred_element_type=dtype_of(operation.results[0].type.element_type),
    )


def dot(operation: Any, args: list[Any], runner: Any) -> Any:
    """The product of vectors and matrices: along the last dim of one and the first of the other."""
    from jax import lax

    return lax.dot_general(
        args[0],
        args[1],
        (((args[0].ndim - 1,), (0,)), ((), ())),
        precision=_precision(operation),
        preferred_element_type=dtype_of(operation.results[0].type.element_type),
    )


def convolution(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax
    from jaxlib.mlir.dialects import stablehlo

    has = operation.attributes
    dims = stablehlo.ConvDimensionNumbers(has["dimension_numbers"])
    spatial = tuple(dims.kernel_spatial_dimensions)
    if "window_reversal" in has:
        turned = [d for d, r in zip(spatial, has["window_reversal"], strict=True) if bool(r)]
        args = [args[0], lax.rev(args[1], turned) if turned else args[1]]
    numbers = lax.ConvDimensionNumbers(
        (dims.input_batch_dimension, dims.input_feature_dimension, *dims.input_spatial_dimensions),
        (dims.kernel_output_feature_dimension, dims.kernel_input_feature_dimension, *spatial),
        (
            dims.output_batch_dimension,
            dims.output_feature_dimension,
            *dims.output_spatial_dimensions,
        ),
    )

    def each(name: str) -> tuple[int, ...]:
        return ints(has[name]) if name in has else (1,) * len(spatial)

    around = np.array(has["padding"]) if "padding" in has else np.zeros((len(spatial), 2), int)
    return lax.conv_general_dilated(
        args[0],
        args[1],
        window_strides=each("window_strides"),
        padding=[(int(a), int(b)) for a, b in around.reshape(-1, 2)],
        lhs_dilation=each("lhs_dilation"),
        rhs_dilation=each("rhs_dilation"),
        dimension_numbers=numbers,
        feature_group_count=int(has["feature_group_count"].value),
        batch_group_count=int(has["batch_group_count"].value),
        precision=_precision(operation),
        preferred_element_type=dtype_of(operation.results[0].type.element_type),
    )


def fft(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    kind = getattr(lax.FftType, word(operation.attributes["fft_type"]))
    return lax.fft(args[0], kind, ints(operation.attributes["fft_length"]))


def cholesky(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    if not bool(operation.attributes["lower"].value):
        raise ValueError("a Cholesky factor of the upper triangle")
    return lax.linalg.cholesky(args[0], symmetrize_input=False)


def triangular_solve(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    has = operation.attributes
    turned = word(has["transpose_a"])
    return lax.linalg.triangular_solve(
        *args,
        left_side=bool(has["left_side"].value),
        lower=bool(has["lower"].value),
        unit_diagonal=bool(has["unit_diagonal"].value),
        transpose_a=turned != "NO_TRANSPOSE",
        conjugate_a=turned == "ADJOINT",
    )


def rng_bit_generator(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    kinds = {
        "THREE_FRY": lax.RandomAlgorithm.RNG_THREE_FRY,
        "PHILOX": lax.RandomAlgorithm.RNG_PHILOX,
        "DEFAULT": lax.RandomAlgorithm.RNG_DEFAULT,
    }
    made = operation.results[1].type
    return lax.rng_bit_generator(
        args[0],
        shape_of(made),
        dtype_of(made.element_type),
        algorithm=kinds[word(operation.attributes["rng_algorithm"])],
    )


def _precision(operation: Any) -> Any:
    """The precisions of two operands; None where the module says none."""
    from jax import lax

    if "precision_config" not in operation.attributes:
        return None
    said = tuple(word(p) for p in operation.attributes["precision_config"])
    return tuple(getattr(lax.Precision, p) for p in said) if said else None


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    "stablehlo.dot": dot,
    "stablehlo.dot_general": dot_general,
    "stablehlo.convolution": convolution,
    "stablehlo.fft": fft,
    "stablehlo.cholesky": cholesky,
    "stablehlo.triangular_solve": triangular_solve,
    "stablehlo.rng_bit_generator": rng_bit_generator,
}
