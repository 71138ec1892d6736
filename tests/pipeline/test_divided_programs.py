"""Programs that divide are divided: `te.jit` leaves no part of them whole on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tests.runtime.lowered import numbers

KEYS = jax.random.split(jax.random.key(0), 1024)


def recurrence(a: jax.Array, x: jax.Array) -> jax.Array:
    def both(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(both, (a, x))[1]


def chains(keys: jax.Array, x: jax.Array) -> Any:
    """A Metropolis chain for every key."""

    def chain(key: jax.Array, x: jax.Array) -> Any:
        def step(x: jax.Array, key: jax.Array) -> Any:
            one, other = jax.random.split(key)
            near = x + jax.random.normal(one, x.shape)
            taken = jnp.log(jax.random.uniform(other)) < jnp.sum(x**2 - near**2)
            return jnp.where(taken, near, x), taken

        return lax.scan(step, x, jax.random.split(key, 20))

    return jax.vmap(chain)(keys, x)


def noise(keys: jax.Array, x: jax.Array) -> jax.Array:
    return x * jax.vmap(lambda k: jax.random.normal(k, x.shape[1:]))(keys)


def solved(a: jax.Array, b: jax.Array) -> Any:
    s = a @ jnp.swapaxes(a, -1, -2) + 4 * jnp.eye(a.shape[-1])
    return jnp.linalg.solve(s, b), jnp.linalg.cholesky(s), jnp.linalg.eigh(s)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fn", "args", "dearest"),
    [
        (recurrence, (numbers(64, 8192), numbers(64, 8192, seed=1)), {"concatenate"}),
        (chains, (KEYS, numbers(1024, 16)), {"random_split", "scan"}),
        (noise, (KEYS, numbers(1024, 256)), {"random_bits"}),
        (solved, (numbers(256, 24, 24), numbers(256, 24, 8)), {"lu", "cholesky", "eigh"}),
    ],
)
def test_what_divides_is_divided(
    fn: Callable[..., Any], args: tuple[Any, ...], dearest: set[str]
) -> None:
    jitted = te.jit(fn, cache=False)
    out, wanted = jitted(*args), jax.jit(fn)(*args)
    for x, y in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3)
        assert x.addressable_shards[0].data.size * len(jax.devices()) == x.size
    plan = jitted.plan(*args)
    assert plan.mesh.devices == len(jax.devices())
    found = {op.kernel for op in plan.graph.operations}
    assert dearest <= found
    # What all devices hold of the results of these kernels together is the result once.
    for op, strategy in zip(plan.graph.operations, plan.body.strategies, strict=True):
        if op.kernel in dearest:
            for v, layout in zip(op.outputs, strategy.gives, strict=True):
                if plan.graph.values[v].size > 1:
                    cut = [plan.mesh.parts(axes) for axes in layout.dims]
                    assert np.prod(cut) == plan.mesh.devices, (op.kernel, layout)
