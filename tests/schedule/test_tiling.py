"""Along which dims of values windows move, so that tiles lie otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.lying import window_dims

Dims = dict[str, set[int]]


def pooled(x: jax.Array) -> jax.Array:
    y = lax.reduce_window(jnp.tanh(jnp.sin(x)), -jnp.inf, lax.max, *WINDOW) + 1
    return jnp.exp(jnp.cos(y))


def of_arguments(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, *WINDOW)


def convolved(x: jax.Array) -> jax.Array:
    kernel = jnp.sin(x[0, :3, :, None] + x[0, :1, 0])  # as many windows as channels
    return jnp.cos(lax.conv_general_dilated(jnp.tanh(x), kernel, (1,), "SAME", None, None, NLC))


def rows_added(x: jax.Array) -> jax.Array:
    y, where = jnp.tanh(x[0]), jnp.argmax(x[0], axis=1)
    return jnp.sin(y.at[where].add(jnp.cos(x[1, :, :])) + 1)


def one_number_added(x: jax.Array) -> jax.Array:
    y, where = jnp.tanh(x[0]), jnp.argmax(x[0], axis=1)[:, None]
    return jnp.put_along_axis(y, where, 1.0, axis=1, inplace=False) + 1


#: Sizes, strides and padding.
WINDOW = (1, 3, 1), (1, 1, 1), "SAME"
NLC = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))

WINDOWS: dict[str, tuple[Callable[[jax.Array], jax.Array], Dims]] = {
    "pooling": (
        pooled,
        {"sin": {1}, "tanh": {1}, "reduce_window_max": {1}, "add": {1}, "cos": {1}, "exp": set()},
    ),
    "pooling of what enters, for what leaves": (of_arguments, {"reduce_window_max": set()}),
    "convolution": (convolved, {"tanh": {1}, "conv_general_dilated": {1}}),
    "rows that are added": (
        rows_added,
        {"tanh": {0}, "cos": {0}, "scatter-add": {0}, "add": set(), "sin": set()},
    ),
    "products": (lambda x: jnp.sin(jnp.tanh(x[0]) @ x[0].T), {"tanh": set(), "dot_general": set()}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_computed_element_by_element_lies_like_what_windows_move_over(name: str) -> None:
    fn, expected = WINDOWS[name]
    program = flatten(te.trace(fn, jnp.ones((2, 16, 8))).graph)
    found: Any = window_dims(program, Tiles(128, 8, 4))
    made = {i.signature.kernel: i.outputs[0] for i in program.instances if i.outputs}
    assert {k: set(found.get(made[k], ())) for k in expected} == expected
    assert not window_dims(program, None)
