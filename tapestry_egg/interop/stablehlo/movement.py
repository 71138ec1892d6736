"""Operations of StableHLO that move elements: views, slices, gathers and scatters, as in JAX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .constants import constant, dtype_of, ints, shape_of


def made_constant(operation: Any, args: list[Any], runner: Any) -> Any:
    return constant(operation)


def broadcast_in_dim(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    dims = ints(operation.attributes["broadcast_dimensions"])
    return lax.broadcast_in_dim(args[0], shape_of(operation.results[0].type), dims)


def concatenate(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.concatenate(args, int(operation.attributes["dimension"].value))


def iota(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    type_ = operation.results[0].type
    dim = int(operation.attributes["iota_dimension"].value)
    return lax.broadcasted_iota(dtype_of(type_.element_type), shape_of(type_), dim)


def pad(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    names = ("edge_padding_low", "edge_padding_high", "interior_padding")
    sides = [ints(operation.attributes[name]) for name in names]
    return lax.pad(args[0], args[1], list(zip(*sides, strict=True)))


def reshape(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.reshape(args[0], shape_of(operation.results[0].type))


def reverse(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.rev(args[0], ints(operation.attributes["dimensions"]))


def slice_(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    names = ("start_indices", "limit_indices", "strides")
    return lax.slice(args[0], *(ints(operation.attributes[name]) for name in names))


def transpose(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.transpose(args[0], ints(operation.attributes["permutation"]))


def dynamic_slice(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    sizes = ints(operation.attributes["slice_sizes"])
    return lax.dynamic_slice(args[0], args[1:], sizes, allow_negative_indices=False)


def dynamic_update_slice(operation: Any, args: list[Any], runner: Any) -> Any:
    from jax import lax

    return lax.dynamic_update_slice(args[0], args[1], args[2:], allow_negative_indices=False)


def gather(operation: Any, args: list[Any], runner: Any) -> Any:
    """Starts are clamped so that slices lie inside, which JAX calls `CLIP`."""
    from jax import lax
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.GatherDimensionNumbers(operation.attributes["dimension_numbers"])
    numbers = lax.GatherDimensionNumbers(
        offset_dims=tuple(dims.offset_dims),
        collapsed_slice_dims=tuple(dims.collapsed_slice_dims),
        start_index_map=tuple(dims.start_index_map),
        operand_batching_dims=tuple(dims.operand_batching_dims),
        start_indices_batching_dims=tuple(dims.start_indices_batching_dims),
    )
    return lax.gather(
        args[0],
        _vectors_last(args[1], int(dims.index_vector_dim)),
        numbers,
        ints(operation.attributes["slice_sizes"]),
        indices_are_sorted=_is(operation, "indices_are_sorted"),
        mode=lax.GatherScatterMode.CLIP,
    )


def scatter(operation: Any, args: list[Any], runner: Any) -> Any:
    """Updates that do not lie inside are dropped."""
    from jax import lax
    from jaxlib.mlir.dialects import stablehlo

    dims = stablehlo.ScatterDimensionNumbers(operation.attributes["scatter_dimension_numbers"])
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
        indices_are_sorted=_is(operation, "indices_are_sorted"),
        unique_indices=_is(operation, "unique_indices"),
        mode=lax.GatherScatterMode.FILL_OR_DROP,
    )


def _vectors_last(indices: Any, dim: int) -> Any:
    """Indices with their vectors along the last dim, as JAX has them; `dim` may be one beyond."""
    import jax.numpy as jnp

    return indices[..., None] if dim == indices.ndim else jnp.moveaxis(indices, dim, -1)


def _is(operation: Any, name: str) -> bool:
    return name in operation.attributes and bool(operation.attributes[name].value)


OPERATIONS: dict[str, Callable[[Any, list[Any], Any], Any]] = {
    "stablehlo.constant": made_constant,
    "stablehlo.broadcast_in_dim": broadcast_in_dim,
    "stablehlo.concatenate": concatenate,
    "stablehlo.iota": iota,
    "stablehlo.pad": pad,
    "stablehlo.reshape": reshape,
    "stablehlo.reverse": reverse,
    "stablehlo.slice": slice_,
    "stablehlo.transpose": transpose,
    "stablehlo.dynamic_slice": dynamic_slice,
    "stablehlo.dynamic_update_slice": dynamic_update_slice,
    "stablehlo.gather": gather,
    "stablehlo.scatter": scatter,
}
