"""What is added at few places: as fast as the sum of what each place compares to be its own."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te

PLACES = 64


def counted(i: Any, u: Any) -> Any:
    return jnp.bincount(i, length=PLACES)


def weighted(i: Any, u: Any) -> Any:
    return jax.ops.segment_sum(u, i, PLACES)


def compared(i: Any, u: Any) -> Any:
    return jnp.where(i[:, None] == jnp.arange(PLACES), u[:, None], 0.0).sum(0)


def fastest(fn: Any, count: int) -> te.Plan:
    types = [jax.ShapeDtypeStruct((count,), d) for d in (jnp.int32, jnp.float32)]
    settings = te.Settings(work=0.5)
    return te.optimize(te.trace(fn, *types), "h100:8", settings=settings).best("seconds")


@pytest.mark.slow
def test_few_places_take_as_long_as_comparisons() -> None:
    least = fastest(compared, 1 << 20).costs.seconds
    for fn in (counted, weighted):
        assert fastest(fn, 1 << 20).costs.seconds < 1.4 * least


@pytest.mark.slow
def test_places_that_are_outside_count_nowhere() -> None:
    count = 1 << 14
    i = jax.random.randint(jax.random.key(0), (count,), -9, PLACES + 9)
    u = jax.random.normal(jax.random.key(1), (count,))
    for fn in (counted, weighted):
        plan = fastest(fn, count)
        np.testing.assert_allclose(te.compile(plan)(i, u), fn(i, u), rtol=1e-5, atol=1e-5)
