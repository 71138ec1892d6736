"""Nothing is written over what leaves its kernel in a tuple, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.schedule.lifetimes import lifetimes
from tests.schedule.test_lifetimes import counted_twice, h100s, made_by, scheduled

IMAGES = jax.ShapeDtypeStruct((16, 64, 64, 32), jnp.float32)
WINDOW = jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """The second one leaves little, so that most is there between the two."""
    return convolved(convolved(x, w) * x, w[..., :4])


def multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
    return ((x @ w) * x) @ w


def sorted_pairs(x: jax.Array, w: jax.Array) -> jax.Array:
    keys, values = lax.sort((x, w), num_keys=1)
    return (keys * x) @ values


@pytest.mark.parametrize(
    ("f", "arguments", "over"),
    [
        (multiplied, (MATRIX, MATRIX), True),
        (twice, (IMAGES, WINDOW), False),
        (sorted_pairs, (MATRIX, MATRIX), False),
    ],
)
def test_what_a_kernel_leaves_beside_something_else_is_not_written_over(
    f: Callable[..., Any], arguments: tuple[Any, ...], over: bool
) -> None:
    """A library's convolution leaves its workspace, too."""
    plan = scheduled(f, *arguments)
    u, v = made_by(plan, "mul")
    assert lifetimes(plan).made[v] == 2 * u + (2 if over else 1)
    counted_twice(plan)


def test_xla_for_h100_has_both_in_memory() -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices = h100s()[:1]
    program = te.trace(twice, IMAGES, WINDOW)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)
