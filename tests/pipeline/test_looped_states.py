"""Loops whose values are carried in another layout than they enter and leave in.

Every plan of a front passes the ledger, which counts the arrays of the emitted program: a carry in
another layout than the state that it renews has memory of its own, and what a loop copies for its
next round is no result. No plan is left out on the way.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.runtime.emitted import audit

Round = Callable[[jax.Array, jax.Array], jax.Array]

SQUARE = jax.ShapeDtypeStruct((2048, 2048), jnp.float32)
CUBE = jax.ShapeDtypeStruct((64, 64, 64), jnp.complex64)

ROUNDS: dict[str, tuple[Round, jax.ShapeDtypeStruct]] = {
    "products": (lambda u, k: jnp.sin(u @ k) @ k, SQUARE),
    "sorted both ways": (lambda u, k: jnp.sort(jnp.sort(u, 0) * k, 1), SQUARE),
    "transforms": (lambda u, k: jnp.fft.ifftn(jnp.fft.fftn(u) * k), CUBE),
    "one transform": (lambda u, k: jnp.fft.fftn(u) * k, CUBE),
    "decomposed": (lambda u, k: jnp.linalg.cholesky(u @ u.T + k), SQUARE),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "donated"),
    [*((name, True) for name in ROUNDS), ("sorted both ways", False)],
)
def test_every_plan_holds_what_it_promises(name: str, donated: bool) -> None:
    one, shape = ROUNDS[name]

    def rounds(u: jax.Array, k: jax.Array) -> jax.Array:
        return lax.fori_loop(0, 10, lambda _, u: one(u, k), u)

    program = te.trace(rounds, shape, shape, donate_argnums=0 if donated else ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that a plan is left out
        fronts = [
            te.optimize(program, "h100:8", pins=pins, settings=te.Settings(work=0.3))
            for pins in (None, {"[0]": ("x",) + (None,) * (len(shape.shape) - 1)})
        ]
    for plan in (p for front in fronts for p in front):
        audit(plan)
