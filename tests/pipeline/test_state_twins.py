"""Scans, `argmax` and `top_k` along a dim that devices share, beside twins: the same mathematics,
written so that no operation runs along a dim that is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime import compare, planned_collectives

Array = Any
P = jax.sharding.PartitionSpec
QUICK = Settings(work=0.3, recompute=0, forms=0)
DEVICES = 8


def first(x: Array, axis: int) -> Array:
    return jnp.argmax(x, axis)


def first_twin(x: Array, axis: int) -> Array:
    n, top = x.shape[axis], jnp.max(x, axis, keepdims=True)
    places = lax.broadcasted_iota(jnp.int32, x.shape, axis)
    return jnp.min(jnp.where(x == top, places, n), axis)


def decoded(h: Array, w: Array, choose: Callable[[Array, int], Array] = first) -> Array:
    """Greedy decoding over a vocabulary in blocks."""

    def step(h: Array, _: None) -> tuple[Array, Array]:
        token = choose(h @ w, 1)
        return jnp.tanh(h + jnp.expand_dims(token, 1)), token

    return lax.scan(step, h, length=4)[1]


def summed(x: Array) -> Array:
    return jnp.cumsum(x, 0)


def in_blocks(x: Array) -> Array:
    """Sums of blocks, and sums of their totals."""
    blocks = jnp.cumsum(x.reshape(DEVICES, -1, *x.shape[1:]), 1)
    before = jnp.cumsum(blocks[:, -1], 0) - blocks[:, -1]
    return (blocks + before[:, None]).reshape(x.shape)


def gradient(fn: Callable[[Array], Array]) -> Callable[[Array], Array]:
    return jax.grad(lambda x: (fn(x) ** 2).sum())


def greatest(x: Array) -> Any:
    return lax.top_k(x, 4)


def greatest_in_blocks(x: Array) -> Any:
    rows, n = x.shape
    values, places = lax.top_k(x.reshape(rows, DEVICES, -1), 4)
    places = places + (n // DEVICES) * jnp.arange(DEVICES)[None, :, None]
    best, which = lax.top_k(values.reshape(rows, -1), 4)
    return best, jnp.take_along_axis(places.reshape(rows, -1), which, 1)


COLUMNS = P(None, "x")
#: The program and its twin, shapes of the arguments, and how they lie: large for what is planned,
#: small for what is run.
TWINS: dict[str, tuple[Any, Any, list[tuple[int, ...]], list[tuple[int, ...]], Any]] = {
    "argmax": (
        *(lambda x: first(x, 1), lambda x: first_twin(x, 1)),
        *([(4096, 65536)], [(4, 64)], (COLUMNS,)),
    ),
    "argmax of many": (
        *(lambda x: first(x, 0), lambda x: first_twin(x, 0)),
        *([(64, 2**22)], [(16, 64)], (P("x"),)),
    ),
    "argmax of all": (
        *(lambda x: jnp.argmax(x), lambda x: first_twin(x.reshape(-1), 0)),
        *([(4096, 4096)], [(16, 8)], (P("x"),)),
    ),
    "decoding": (
        *(decoded, lambda h, w: decoded(h, w, first_twin)),
        *([(256, 1024), (1024, 131072)], [(4, 8), (8, 64)], (P(), COLUMNS)),
    ),
    "cumsum": (summed, in_blocks, [(2**23,)], [(64,)], (P("x"),)),
    "gradient of cumsum": (
        *(gradient(summed), gradient(in_blocks)),
        *([(2**20, 8)], [(64, 2)], (P("x"),)),
    ),
    "top_k": (greatest, greatest_in_blocks, [(1024, 65536)], [(4, 64)], (COLUMNS,)),
}


def fastest(fn: Any, shapes: list[tuple[int, ...]], lie: Any, target: str) -> Plan:
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    program = te.trace(fn, *arguments)
    front = te.optimize(
        program,
        target,
        in_shardings=lie,
        mesh_shapes=[MeshShape(("x",), (DEVICES,))],
        settings=QUICK,
    )
    return front.best("seconds")


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_what_is_written_plainly_is_no_slower_than_its_twin(name: str) -> None:
    plain, twin, shapes, _, lie = TWINS[name]
    mine, theirs = (fastest(fn, shapes, lie, "h100:8") for fn in (plain, twin))
    assert mine.costs.seconds <= 1.1 * theirs.costs.seconds
    assert mine.costs.peak_bytes <= 1.25 * theirs.costs.peak_bytes
    operand = 4 * np.prod(shapes[-1]) / DEVICES
    sent = sum(c.wire_bytes * c.count for c in planned_collectives(mine))
    assert sent <= operand, "no operand is gathered: that sends seven such blocks"


@pytest.mark.slow
@pytest.mark.parametrize("name", TWINS)
def test_such_plans_give_the_numbers_of_their_twins(name: str) -> None:
    plain, twin, _, shapes, lie = TWINS[name]
    rng = np.random.default_rng(0)
    arguments = [rng.integers(-9, 9, s).astype(np.float32) for s in shapes]
    plan = fastest(plain, shapes, lie, f"cpu:{DEVICES}")
    run = te.compile(plan, jax.devices()[:DEVICES])
    assert compare(plan, run.compile()).equal
    for got, wanted in zip(
        jax.tree.leaves(run(*arguments)), jax.tree.leaves(twin(*arguments)), strict=True
    ):
        np.testing.assert_allclose(got, wanted, 1e-6)
