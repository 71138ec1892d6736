"""Functions of `eqx.filter_jit` and `nnx.jit` through `te.jit`: as without it, and planned."""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

QUICK = Settings(work=0.2)
X, Y = jnp.linspace(-1, 1, 128).reshape(16, 8), jnp.ones((16, 4))

pytestmark = pytest.mark.slow


def test_equinox_modules_with_functions_in_them() -> None:
    eqx = pytest.importorskip("equinox")

    def step(model: Any, x: jax.Array, y: jax.Array, rate: float = 0.1) -> Any:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads)), value

    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    given, planned = eqx.filter_jit(step), te.jit(eqx.filter_jit(step), settings=QUICK)
    ours = theirs = model
    for rate in (0.1, 0.1, 0.2):
        ours, value = planned(ours, X, Y, rate)
        theirs, wanted = given(theirs, X, Y, rate)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert type(ours) is type(model) and ours.activation is model.activation
    assert planned.plan(model, X, Y, 0.1).graph.name == "step"
    assert len(planned.front(model, X, Y, 0.1).plans) > 0
    np.testing.assert_allclose(
        planned.lower(model, X, Y).compile()(model, X, Y)[1], given(model, X, Y)[1]
    )
    with pytest.raises(te.TapestryError, match="jitted by equinox"):
        te.jit(given, static_argnums=1)


def test_nnx_modules_are_updated_in_place() -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    class Model(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.linear, self.norm = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def run(step: Any) -> tuple[list[float], Any]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        values = [float(step(model, optimizer, X, Y)) for _ in range(3)]
        return values, nnx.state(model)

    given, planned = nnx.jit(step), te.jit(nnx.jit(step), settings=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        values, state = run(planned)
    wanted, wanted_state = run(given)
    np.testing.assert_allclose(values, wanted, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert isinstance(given.jitted_fn, type(jax.jit(step)))  # the user's own is as it was
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert planned.compiled(model, optimizer, X, Y).mesh.size == 8
    plan = planned.plan(model, optimizer, X, Y)  # what is updated leaves as it came
    pairs = dict(plan.origin.feedback)
    assert len(pairs) == len(plan.out_shardings) - 1  # all but the loss
    assert all(plan.out_shardings[j] == plan.in_shardings[i] for j, i in pairs.items())
