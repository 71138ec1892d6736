"""Nothing is written over what leaves its kernel in a tuple, or was written into where it lay, on
GPUs."""

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
from tapestry_egg.schedule.schedules import Schedule, Unit
from tests.schedule.test_lifetimes import h100s, made_by, scheduled

IMAGES = jax.ShapeDtypeStruct((16, 64, 64, 32), jnp.float32)
WINDOW = jax.ShapeDtypeStruct((3, 3, 32, 32), jnp.float32)
ROWS = jax.ShapeDtypeStruct((64,), jnp.int32)
LARGE = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((512, 512), jnp.float32)


def _kernel(of: Schedule, unit: Unit) -> str:
    root = of.program.instances[unit.root]
    return root.port or root.signature.kernel


def convolved(x: jax.Array, w: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=dims)


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    """The second one leaves little, so that most is there between the two."""
    return convolved(convolved(x, w) * x, w[..., :4])


def multiplied(x: jax.Array, w: jax.Array) -> jax.Array:
    return ((x @ w) * x) @ w


def into_rows(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """Little is left by the last product, so that most is there between the two."""
    return ((x @ w).at[rows].add(w[: rows.size]) * x) @ w[:, :4]


def into_rows_twice(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    once = jnp.sin(x @ w).at[rows].add(w[: rows.size])
    return (once.at[rows].add(x[: rows.size]) @ w)[:, :4]


def added_at_once(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """XLA scatters into what the sums are added to."""
    product = x @ w
    sums = jnp.zeros_like(x).at[rows].add(w[: rows.size])
    return (jnp.sin(product) * x + sums) @ w[:, :4]


def added_later(x: jax.Array, w: jax.Array, rows: jax.Array) -> jax.Array:
    """A product stands between the sums and the addition."""
    sums = jnp.zeros_like(x).at[rows].add(w[: rows.size])
    return (jnp.sin(x @ w) * x + sums) @ w[:, :4]


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


def test_what_was_written_into_is_written_over_by_no_kernel_that_goes_by_elements() -> None:
    plan = scheduled(into_rows, MATRIX, MATRIX, ROWS)
    u, v = made_by(plan, "mul")
    assert lifetimes(plan).made[v] == 2 * u + 1


def test_what_was_written_into_is_written_into_again() -> None:
    plan = scheduled(into_rows_twice, MATRIX, MATRIX, ROWS)
    adding = [u for u, unit in enumerate(plan.units) if _kernel(plan, unit) == "scatter-add"]
    (v,) = plan.units[adding[-1]].outputs
    assert lifetimes(plan).made[v] == 2 * adding[-1] + 2


@pytest.mark.parametrize("f", [into_rows, added_at_once, added_later])
def test_xla_for_h100_writes_over_nothing_that_was_scattered_into(f: Callable[..., Any]) -> None:
    """Its heap's simulator has a buffer of several values shared with no more."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    program = te.trace(f, LARGE, LARGE, ROWS)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    lowered = te.compile(front[0], h100s()[:1]).lower()
    compiled = hlo_stats(lowered.compile({"xla_gpu_enable_triton_gemm": False}))
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.03)
