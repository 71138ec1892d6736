"""A value that is read along its dims in two ways is cut as two values would be."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

N = 4096
S = jax.ShapeDtypeStruct


def blocks(x: jax.Array) -> jax.Array:
    i = jnp.arange(N) // 64
    return jnp.where(i[:, None] == i[None], x, 0)


def blocks_of_two(x: jax.Array) -> jax.Array:
    i, j = jnp.arange(N) // 64, lax.iota(jnp.int32, N) // 64
    return jnp.where(i[:, None] == j[None], x, 0)


def near(z: jax.Array, _: jax.Array) -> jax.Array:
    k = jax.nn.gelu(z)
    return jnp.exp(-((k[:, None] - k[None]) ** 2))


def near_two(z: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.exp(-((jax.nn.gelu(z)[:, None] - jax.nn.gelu(y)[None]) ** 2))


def fastest(fn: Callable[..., Any], *types: Any) -> te.Plan:
    settings = Settings(work=0.3, merge=False, recompute=0, forms=0)
    return te.optimize(te.trace(fn, *types), "h100:8", settings=settings)[0]


SQUARE, LONG = S((N, N), jnp.float32), S((N,), jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("once", "two", "types"),
    [
        (blocks, blocks_of_two, (SQUARE,)),
        (near, near_two, (LONG, LONG)),
    ],
)
def test_what_is_written_once_is_as_fast_as_what_is_written_twice(
    once: Callable[..., Any], two: Callable[..., Any], types: tuple[Any, ...]
) -> None:
    plan = fastest(once, *types)
    assert plan.costs.seconds <= 1.05 * fastest(two, *types).costs.seconds
    rng = np.random.default_rng(0)
    given = [jnp.asarray(rng.normal(size=t.shape), t.dtype) for t in types]
    found = te.compile(plan, jax.devices()[:8])(*given)
    np.testing.assert_allclose(found, jax.jit(once)(*given), atol=1e-5)
