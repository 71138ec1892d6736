"""Nothing is written over what leaves its kernel in a tuple, on GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.lifetimes import lifetimes
from tests.schedule.test_lifetimes import h100s, made_by, scheduled

IMAGES = jax.ShapeDtypeStruct((16, 64, 64, 32), jnp.float32)
WINDOW = jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)
LARGE = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
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


@pytest.mark.parametrize(
    ("target", "matrix", "over"),
    [("h100", MATRIX, True), ("h100", LARGE, False), ("cpu", LARGE, True)],
)
def test_a_large_product_is_the_library_s_where_the_target_says_so(
    target: str, matrix: Any, over: bool
) -> None:
    plan = scheduled(multiplied, matrix, matrix)
    u, v = made_by(plan, "mul")
    lives = lifetimes(plan, costs=load_target(f"{target}:1").fusing)
    assert lives.made[v] == 2 * u + (2 if over else 1)


def test_xla_for_h100_writes_over_no_product_of_the_library() -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices = h100s()[:1]
    program = te.trace(lambda x, w: (jnp.sin(x @ w) * x) @ w[:, :2048], LARGE, LARGE)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    lowered = te.compile(front[0], devices).lower()
    compiled = hlo_stats(lowered.compile({"xla_gpu_enable_triton_gemm": False}))
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.03)


def test_xla_for_h100_has_both_in_memory() -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices = h100s()[:1]
    program = te.trace(twice, IMAGES, WINDOW)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.02)
