"""Large values that a loop reads and does not change, if they are made one by one of small ones.

They are planned as if they were written in the loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.rewrite.streams.large_inside import with_invariants_inside

ROUNDS, N = 10, 1 << 15
Step = Callable[[jax.Array, jax.Array], jax.Array]


def points(n: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((n,), jnp.float32)] * 3


def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    return (x[:, None] - y[None]) ** 2


def sinkhorn(g: jax.Array, c: jax.Array) -> jax.Array:
    f = -jax.nn.logsumexp(g[None] - c, axis=1)
    return -jax.nn.logsumexp(f[:, None] - c, axis=0)


def matched(g: jax.Array, c: jax.Array) -> jax.Array:
    return jnp.max(g[None] * c, axis=1)


def looped(step: Step, outside: bool, rounds: str = "fori_loop") -> Callable[..., Any]:
    """Rounds of a step that reads distances, which are computed before the loop or in it."""

    def run(x: jax.Array, y: jax.Array, g: jax.Array) -> Any:
        before = distances(x, y)

        def one(g: jax.Array) -> jax.Array:
            return step(g, before if outside else distances(x, y))

        if rounds == "fori_loop":
            return lax.fori_loop(0, ROUNDS, lambda _, g: one(g), g)
        return lax.scan(lambda g, _: (one(g), jnp.sum(g)), g, None, ROUNDS)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("step", "rounds"), [(sinkhorn, "scan"), (matched, "fori_loop")])
def test_where_they_are_written_makes_no_difference(step: Step, rounds: str) -> None:
    settings = te.Settings(work=0.3, merge=False)
    plans = [
        te.optimize(
            te.trace(looped(step, outside, rounds), *points(N)), "h100:8", settings=settings
        )[0]
        for outside in (True, False)
    ]
    assert "invariants-inside" in plans[0].rules and not plans[1].rules
    assert plans[0].costs.seconds <= 1.05 * plans[1].costs.seconds
    assert (
        plans[0].costs.peak_bytes < 8 * points(N)[0].size * 4
    )  # of N ** 2 elements none is stored


@pytest.mark.slow
def test_rounds_that_make_them_compute_the_same() -> None:
    fn = looped(sinkhorn, True, "scan")
    given = [np.random.default_rng(k).normal(size=64).astype(np.float32) for k in range(3)]
    program = te.trace(fn, *points(64))
    inside = te.trace(fn, *points(64)).graph
    assert with_invariants_inside(inside) is not inside
    settings = te.Settings(work=0.3, merge=False)
    plans = te.optimize(program, "h100:8", settings=settings)
    plan = next(p for p in plans if p.mesh.devices == 8)
    found = te.compile(plan, jax.devices()[:8])(*given)
    for a, b in zip(found, jax.jit(fn)(*given), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_product_stays_before_the_loop() -> None:
    """To multiply again in every round is no small work, and what is given is not made at all."""
    square = jax.ShapeDtypeStruct((256, 256), jnp.float32)

    def product(x: jax.Array, y: jax.Array) -> jax.Array:
        c = x @ y
        return lax.fori_loop(0, ROUNDS, lambda _, g: jnp.tanh(g + c * y), x)

    graph = te.trace(product, square, square).graph
    assert with_invariants_inside(graph) is graph
