"""Gradients of pooling, as they are said to compilers for GPUs."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.runtime.lower.kernels.pooling import lie_side_by_side, unpooled, unpooled_over

#: Compiled as a whole, as it is in plans.
gradient = jax.jit(unpooled_over, static_argnums=(2, 3, 4, 5))

SELECTS = {"ge": lax.ge_p, "le": lax.le_p}


def example(dtype: str, shape: tuple[int, ...], window: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """A source and an operand with many ties, and with what compares oddly."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, size=shape).astype(np.float32)
    if dtype != "int32":
        odd = rng.permutation(x.size)[: x.size // 4].reshape(3, -1)
        x.flat[odd[0]], x.flat[odd[1]], x.flat[odd[2]] = np.nan, np.inf, -np.inf
    tiles = [n // w for n, w in zip(shape, window, strict=True)]
    source = rng.integers(1, 9, size=tiles)
    return jnp.asarray(source, dtype), jnp.asarray(x, dtype)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("bfloat16", "int32"))]
)
def test_every_window_gives_its_gradient_to_what_it_chose(dtype: str, select: str) -> None:
    """Rows and columns that no window covers, ties, infinities and what is no number among them."""
    window = (1, 2, 3, 1)
    source, operand = example(dtype, (3, 7, 11, 4), window)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        operand,
        select_prim=SELECTS[select],
        window_dimensions=window,
        window_strides=window,
        padding=((0, 0),) * 4,
    )
    found = jax.jit(partial(unpooled, select=select, window=window))(source, operand)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("window", "strides", "padding", "they_do"),
    [
        ((1, 2), (1, 2), ((0, 0), (0, 0)), True),
        ((1, 3), (1, 2), ((0, 0), (0, 0)), False),  # overlap
        ((1, 2), (1, 3), ((0, 0), (0, 0)), False),  # gaps
        ((1, 2), (1, 2), ((0, 0), (1, 1)), False),  # reach outside
    ],
)
def test_windows_lie_side_by_side(
    window: tuple[int, ...], strides: tuple[int, ...], padding: tuple, they_do: bool
) -> None:
    assert lie_side_by_side(window, strides, padding) == they_do


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))),  # overlap, reach outside
        ((1, 2, 3, 1), (1, 3, 1, 1), ((0, 0), (0, 0), (2, 2), (0, 0))),  # gaps
        ((2, 2, 1, 1), (1, 1, 2, 1), ((0, 1), (0, 0), (0, 0), (0, 0))),
    ],
)
@pytest.mark.parametrize("select", SELECTS)
def test_windows_that_overlap_add_up_what_they_give_an_element(
    select: str, window: tuple[int, ...], strides: tuple[int, ...], padding: tuple
) -> None:
    x = example("float32", (3, 7, 11, 4), (1, 1, 1, 1))[1]
    x = jnp.where(jnp.isnan(x), 0.0, x)  # XLA for CPUs loses what a window with one gives at edges
    low, high = zip(*padding, strict=True)
    sizes = [
        (n + a + b - w) // s + 1
        for n, a, b, w, s in zip(x.shape, low, high, window, strides, strict=True)
    ]
    source = jnp.asarray(np.random.default_rng(1).integers(1, 9, size=sizes), jnp.float32)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        x,
        select_prim=SELECTS[select],
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    found = gradient(source, x, select, window, strides, padding)
    np.testing.assert_array_equal(found, wanted)


def test_of_equals_the_first_in_a_window_is_chosen() -> None:
    """A compiler may reduce a window's columns before its rows, and then meets others first."""
    x = jnp.asarray(
        [[1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 1, 0]], jnp.float32
    )
    window, strides, padding = (2, 2), (2, 1), ((0, 1), (0, 2))
    source = jnp.arange(1.0, 17.0).reshape(2, 8)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        x,
        select_prim=lax.le_p,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    assert wanted[0, 1] == 1.0 + 2.0, "the first of the first two windows"
    found = gradient(source, x, "le", window, strides, padding)
    np.testing.assert_array_equal(found, wanted)
