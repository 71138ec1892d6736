"""Products packed into one: plans are those of each product alone, however they were packed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

Array = Any
Step = Callable[..., Any]
ROWS, WIDTH, HEADS = 4096, 2048, 16
FEW = Settings(work=2, recompute=0, micro_batches=())


def attention(q: Array, k: Array, v: Array) -> Array:
    q, k, v = [t.reshape(1, t.shape[1], HEADS, -1) for t in (q, k, v)]
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8.0
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -1e30)
    weights = jax.nn.softmax(scores.astype(jnp.promote_types(q.dtype, jnp.float32)))
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(q.dtype), v).reshape(1, q.shape[1], -1)


def apart(x: Array, *weights: Array) -> Array:
    return attention(*[x @ w for w in weights])


def joined(x: Array, *weights: Array) -> Array:
    return attention(*jnp.split(x @ jnp.concatenate(weights, 1), 3, -1))


def sliced(x: Array, w: Array) -> Array:
    return attention(*jnp.split(x @ w, 3, -1))


def viewed(x: Array, w: Array) -> Array:
    y = (x @ w).reshape(*x.shape[:2], 3, HEADS, -1)
    return attention(y[:, :, 0], y[:, :, 1], y[:, :, 2])


def of_parts(x: Array, w: Array) -> Array:
    """What `sliced` and `viewed` are, with the weights of each part as a dim of their own."""
    y = jnp.einsum("btd,dke->btke", x, w.reshape(len(w), 3, -1))
    return attention(y[:, :, 0], y[:, :, 1], y[:, :, 2])


def gradient(step: Step) -> Step:
    def loss(*arguments: Array) -> Array:
        made = step(*arguments)
        wide = jnp.promote_types(made.dtype, jnp.float32)
        return (made.astype(wide) ** 2).mean()

    return lambda *a: jax.grad(loss, tuple(range(len(a))))(*a)


def seconds(step: Step, *shapes: tuple[int, ...], pins: Any = None) -> float:
    types = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes]
    front = te.optimize(te.trace(step, *types), "h100:8", settings=FEW, pins=pins)
    return min(plan.costs.seconds for plan in front)


@pytest.mark.parametrize("of", [lambda step: step, gradient], ids=["forward", "gradient"])
def test_packed_products_take_no_longer_than_each_alone(of: Callable[[Step], Step]) -> None:
    x, w, packed = (1, ROWS, WIDTH), (WIDTH, WIDTH), (WIDTH, 3 * WIDTH)
    assert seconds(of(joined), x, w, w, w) <= 1.1 * seconds(of(apart), x, w, w, w)
    twin = seconds(of(of_parts), x, packed)
    for step in (sliced, viewed):
        assert seconds(of(step), x, packed) <= 1.1 * twin


def test_what_a_view_takes_apart_is_copied_behind_it() -> None:
    def product(x: Array, w: Array) -> Array:
        return jnp.einsum("td,dke->tke", x, w.reshape(WIDTH, 3, WIDTH))

    pins = {"[0]": (None, None), "result": (None, None, "x")}
    x, own = (ROWS, WIDTH), (WIDTH, 3, WIDTH)
    assert seconds(product, x, (WIDTH, 3 * WIDTH), pins=pins) <= 1.2 * seconds(
        product, x, own, pins=pins
    )


def gates(x: Array, w: Array, u: Array) -> Array:
    i, f, c, o = jnp.split(x @ w.T + x @ u.T, 4, -1)
    return jax.nn.sigmoid(i) * jnp.tanh(c) + jax.nn.sigmoid(f) * jax.nn.sigmoid(o)


def uneven(x: Array, w: Array) -> Array:
    """Twice as many columns for the one as for each other."""
    y, n = x @ w, w.shape[1] // 4
    return jnp.sin(y[:, : 2 * n]) * jnp.concatenate([y[:, 2 * n : 3 * n], y[:, 3 * n :]], 1)


PROGRAMS = {
    "gates": (gates, [(256, 128), (512, 128), (512, 128)]),
    "uneven": (uneven, [(256, 128), (128, 256)]),
    "joined": (joined, [(1, 128, 64), *[(64, 64)] * 3]),
    "sliced": (sliced, [(1, 128, 64), (64, 192)]),
    "viewed": (viewed, [(1, 128, 64), (64, 192)]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_of_packed_products_give_the_programs_numbers(name: str) -> None:
    step, shapes = PROGRAMS[name]
    rng = np.random.default_rng(0)
    with jax.enable_x64(True):
        arguments = [jnp.asarray(rng.normal(size=s) / 8.0) for s in shapes]
        step = gradient(step) if name != "gates" else step
        want = jax.tree.leaves(jax.jit(step)(*arguments))
        for plan in te.optimize(te.trace(step, *arguments), "h100:8", settings=FEW):
            got = jax.tree.leaves(te.compile(plan, jax.devices()[:8])(*arguments))
            for one, other in zip(got, want, strict=True):
                tolerance = 1e-12 * float(jnp.abs(other).max())
                np.testing.assert_allclose(one, other, rtol=0.0, atol=max(tolerance, 1e-300))
