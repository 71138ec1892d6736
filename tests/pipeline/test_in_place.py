"""What is written into a donated or carried array moves no more than what is written."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

S = jax.ShapeDtypeStruct
CACHE, TOKEN = S((8, 4096, 64), jnp.float32), S((8, 64), jnp.float32)
PLACE = S((), jnp.int32)
TABLE, ROWS = S((1 << 16, 64), jnp.float32), S((96,), jnp.int32)
#: A pass over such an array on one device takes longer.
LITTLE = 8e-6


def updated(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return lax.dynamic_update_slice(cache, token[:, None], (0, i, 0))


def set_(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return cache.at[:, i].set(token)


def added(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return cache.at[:, i].add(token)


def twice(cache: jax.Array, token: jax.Array, i: jax.Array) -> jax.Array:
    return updated(updated(cache, token, i), 2 * token, i + 1)


def fastest(fn: Any, *types: Any, target: str = "h100:1", **words: Any) -> te.Plan:
    program = te.trace(fn, *types, donate_argnums=0)
    return te.optimize(program, target, settings=Settings(work=1.0, merge=False), **words)[0]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [updated, set_, added, twice])
def test_a_token_is_written_into_a_donated_cache(fn: Any) -> None:
    plan = fastest(fn, CACHE, TOKEN, PLACE)
    nbytes = np.prod(CACHE.shape) * 4
    assert plan.costs.seconds < LITTLE
    assert plan.costs.peak_bytes < 1.05 * nbytes


@pytest.mark.slow
def test_a_decoding_loop_takes_little_for_each_token() -> None:
    def decode(cache: jax.Array, tokens: jax.Array) -> jax.Array:
        def step(cache: jax.Array, x: Any) -> tuple[jax.Array, None]:
            return updated(cache, x[0], x[1]), None

        return lax.scan(step, cache, (tokens, jnp.arange(len(tokens))))[0]

    plan = fastest(decode, CACHE, S((64, *TOKEN.shape), jnp.float32))
    assert plan.costs.seconds < 64 * LITTLE
    assert plan.costs.peak_bytes < 1.1 * np.prod(CACHE.shape) * 4


@pytest.mark.slow
def test_what_is_written_may_lie_across_devices_along_two_dims() -> None:
    rng = np.random.default_rng(0)
    x, part = rng.normal(size=(16, 24)), rng.normal(size=(9, 11))
    program = te.trace(
        lambda x, part, i: lax.dynamic_update_slice(x, part, (i, 2 * i)),
        *[S(a.shape, jnp.float32) for a in (x, part)],
        PLACE,
        donate_argnums=0,
    )
    plan = te.optimize(
        program,
        "h100:8",
        mesh_shapes=[te.MeshShape(("x", "y"), (2, 4))],
        pins={"[0]": ("x", "y"), "[1]": (None, None), "result": ("x", "y")},
        settings=Settings(work=1.0, merge=False),
    )[0]
    run = te.compile(plan, jax.devices()[:8])
    for i in (0, 3, 5, 99):
        wanted = x.copy()
        at = min(i, 16 - 9), min(2 * i, 24 - 11)
        wanted[at[0] : at[0] + 9, at[1] : at[1] + 11] = part
        found = run(*[jnp.asarray(a, jnp.float32) for a in (x, part)], jnp.int32(i))
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def descent(table: jax.Array, rows: jax.Array) -> jax.Array:
    return table - 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[rows])))(table)


def momentum(moment: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    return 0.9 * moment + 0.1 * jax.grad(lambda t: jnp.sum(jnp.sin(t[rows])))(table)


@pytest.mark.slow
@pytest.mark.parametrize("fn", [descent, momentum])
def test_the_gradient_of_a_lookup_is_added_where_the_table_is(fn: Any) -> None:
    """No array of its zeros is made. Numbers on eight devices, some rows read several times."""
    rng = np.random.default_rng(0)
    table, moment = rng.normal(size=(2, *TABLE.shape))
    rows = rng.integers(0, 40, size=ROWS.shape)
    gradient = np.zeros(TABLE.shape)
    np.add.at(gradient, rows, np.cos(table[rows]))
    given = [table, rows] if fn is descent else [moment, table, rows]
    wanted = table - 0.1 * gradient if fn is descent else 0.9 * moment + 0.1 * gradient
    types = [S(x.shape, jnp.int32 if x is rows else jnp.float32) for x in given]
    plan = fastest(fn, *types, target="h100:8")
    sizes = {plan.graph.values[v].size for op in plan.graph.operations for v in op.outputs}
    scatter = next(op for op in plan.graph.operations if op.kernel == "scatter-add")
    assert scatter.outputs == plan.graph.outputs and max(sizes) == gradient.size
    made = {
        v for op in plan.graph.operations if op.kernel == "broadcast_in_dim" for v in op.outputs
    }
    assert scatter.inputs[0] not in made
    run = te.compile(plan, jax.devices()[:8])
    found = run(*[jnp.asarray(x, t.dtype) for x, t in zip(given, types, strict=True)])
    np.testing.assert_allclose(found, wanted, atol=1e-5)
