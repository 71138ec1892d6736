"""How kernels are said to the compilers of some platforms, which take them best, or only, so."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from tapestry_egg.plans.compiler_options import GPUS

from .pooling import are_small, lie_side_by_side, unpooled, unpooled_over
from .ragged_dots import by_group

if TYPE_CHECKING:
    import jax

    from .kernels import Call


def _ragged_dot(call: Call) -> list[jax.Array]:
    return [by_group(*call.operands, **call.params)]


def _pooling_gradient(call: Call) -> list[jax.Array]:
    window, strides, padding = (
        call.params[k] for k in ("window_dimensions", "window_strides", "padding")
    )
    source, operand = call.operands
    select = str(call.params["select_prim"])
    if lie_side_by_side(window, strides, padding):
        return [unpooled(source, operand, select, window)]
    if are_small(window):
        return [unpooled_over(source, operand, select, window, strides, padding)]
    return call.bind(*call.operands)


def _convolution(call: Call) -> list[jax.Array]:
    """A convolution over a dilated operand is the gradient of a strided one, for which cuDNN has a
    kernel. XLA sees that by the reversal of the window (`MatchBackwardInput` of its conv_rewriter),
    which a barrier or a copy of the window hides; else it stores the operand dilated and padded.
    Where the window is the larger, as in the gradient of a transposed convolution's weights, XLA
    has the two change places, and both lie in another order than they are made in: a barrier keeps
    their copies from being made with them.

    Where an operand is padded more on one side, a padded one is stored anyway. The barrier keeps
    that from being shared by the convolution and its gradient, and held in between.
    """
    from jax import lax

    operand, window = call.operands
    dims = call.params["dimension_numbers"]
    space = dims.rhs_spec[2:]
    over = prod(operand.shape[d] for d in dims.lhs_spec[2:])
    if over < prod(window.shape[d] for d in space):
        return call.bind(*lax.optimization_barrier((operand, window)))
    if all(d == 1 for d in call.params["lhs_dilation"]):
        sides = zip(call.params["padding"], call.params["rhs_dilation"], strict=True)
        if not all(low in range(high, high + d) for (low, high), d in sides):
            operand, window = lax.optimization_barrier((operand, window))
        return call.bind(operand, window)
    turned = lax.optimization_barrier(lax.rev(window, space))
    return call.bind(operand, lax.rev(turned, space))


def _transform(call: Call) -> list[jax.Array]:
    """XLA for CPU transforms only what lies row-major, and does not see to it that it does."""
    from jax.experimental.layout import Layout, with_layout_constraint

    def laid(x: jax.Array) -> jax.Array:
        return with_layout_constraint(x, Layout(tuple(range(x.ndim))))

    return [laid(y) for y in call.bind(*map(laid, call.operands))]


def _product(call: Call) -> list[jax.Array]:
    """XLA for CPU has no product of bfloat16 with a wider result for every order and number of
    dims ("Unsupported element type for DotThunk"): of some blocks, or of parts of a batch."""
    wide = call.params["preferred_element_type"]
    narrow = any(x.dtype == "bfloat16" for x in call.operands)
    if not narrow or wide is None or wide.name not in ("float32", "float64"):
        return call.bind(*call.operands)
    return call.bind(*[x.astype(wide) for x in call.operands])


def few_largest(call: Call, x: jax.Array, k: int) -> list[jax.Array]:
    """The `k` largest elements along a dim, and their places, as `top_k` returns them.

    XLA for GPUs sorts for any `k`. A single element is found in one pass instead. The order is that
    of `top_k`: floats compare as integers of their bits do, so -0 is less than 0, and NaN is the
    greatest."""
    import jax.numpy as jnp
    from jax import lax

    if k != 1 or call.platform not in GPUS:
        return call.bind(x, k=k)
    axis, real = call.params.get("axis", -1) % x.ndim, jnp.issubdtype(x.dtype, jnp.floating)

    def turned(bits: jax.Array) -> jax.Array:
        return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)

    def first(a: tuple[jax.Array, ...], b: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        chosen = (a[0] > b[0]) | ((a[0] == b[0]) & (a[1] < b[1]))
        return jnp.where(chosen, a[0], b[0]), jnp.where(chosen, a[1], b[1])

    ordered = turned(lax.bitcast_convert_type(x, f"int{8 * x.dtype.itemsize}")) if real else x
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    least = ordered.dtype.type(jnp.iinfo(ordered.dtype).min)
    none = np.int32(np.iinfo(np.int32).max)
    best, place = lax.reduce((ordered, places), (least, none), first, (axis,))
    value = lax.bitcast_convert_type(turned(best), x.dtype) if real else best
    return [jnp.expand_dims(y, axis) for y in (value, place)]


def _top_k(call: Call) -> list[jax.Array]:
    (x,) = call.operands
    return few_largest(call, x, call.params["k"])


#: Kernel -> how it is said to the compiler of a platform.
SPELLINGS: Mapping[str, Mapping[str, Callable[[Call], list[jax.Array]]]] = {
    "gpu": {
        "conv_general_dilated": _convolution,
        "ragged_dot_general": _ragged_dot,
        "select_and_scatter_add": _pooling_gradient,
        "top_k": _top_k,
    },
    "cpu": {"dot_general": _product, "fft": _transform},
}
