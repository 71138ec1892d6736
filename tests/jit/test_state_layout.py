"""One state, several functions and shapes: what a plan says of layouts is used outside of it, and
what lies as one plan has it is not moved for the next."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import tapestry_egg as te
from tapestry_egg.pipeline import Settings

LEAST: Any = {"settings": Settings(work=0.2, recompute=0, forms=0), "minimize": "peak_bytes"}
X = jnp.linspace(-1, 1, 64 * 32).reshape(64, 32)


def loss(w: Any, x: jax.Array) -> jax.Array:
    return jnp.mean((jax.nn.relu(x @ w["up"]) @ w["down"] - x) ** 2)


def train(w: Any, x: jax.Array) -> Any:
    value, g = jax.value_and_grad(loss)(w, x)
    return jax.tree.map(lambda p, d: p - 0.1 * d, w, g), value


def initial() -> Any:
    a, b = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(a, (32, 128)) / 6, "down": jax.random.normal(b, (128, 32)) / 11}


@pytest.fixture(scope="module")
def step() -> Any:
    return te.jit(train, donate_argnums=0, **LEAST)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of arrays that were copied to where a plan has them."""
    module = importlib.import_module("tapestry_egg.runtime.compiled")
    shapes: list[tuple[int, ...]] = []
    place = module.placed_as

    def watched(x: Any, *words: Any) -> Any:
        placed = place(x, *words)
        if placed is not x:
            shapes.append(x.shape)
        return placed

    monkeypatch.setattr(module, "placed_as", watched)
    return shapes


@pytest.mark.slow
def test_parameters_are_created_as_the_plan_has_them(step: Any, moved: Any) -> None:
    run = step.compiled(jax.eval_shape(initial), X)
    (shardings, rows), _ = run.input_shardings
    assert any(s.spec for s in shardings.values()), "nothing is cut: the test says nothing"
    state = jax.jit(initial, out_shardings=shardings)()
    batch = jax.device_put(X, rows)
    for _ in range(3):
        state, value = step(state, batch)
    assert not moved
    assert jax.tree.map(lambda a: a.sharding, (state, value)) == run.output_shardings
    expected = initial()
    for _ in range(3):
        expected, wanted = train(expected, X)
    np.testing.assert_allclose(value, wanted, rtol=1e-5)


@pytest.mark.slow
def test_specs_of_a_plan_serve_a_plain_jit(step: Any) -> None:
    plan = step.plan(initial(), X)
    mesh = te.compile(plan).mesh

    def over(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    by_hand = jax.jit(
        train, in_shardings=over(plan.input_specs[0]), out_shardings=over(plan.output_specs)
    )
    state, value = by_hand(initial(), X)
    assert jax.tree.map(lambda a: a.sharding.spec, (state, value)) == plan.output_specs
    np.testing.assert_allclose(value, train(initial(), X)[1], rtol=1e-5)


@pytest.mark.slow
def test_other_functions_and_shapes_leave_the_state_where_it_lies(step: Any, moved: Any) -> None:
    state, _ = step(initial(), X)
    first = step.compiled(state, X).input_shardings[0][0]
    evaluate = te.jit(loss, **LEAST)
    np.testing.assert_allclose(evaluate(state, X), loss(state, X), rtol=1e-5)
    assert evaluate.compiled(state, X).input_shardings[0][0] == first
    ahead = te.jit(loss, **LEAST)  # planned before there is a state
    shapes = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, first
    )
    assert ahead.compiled(shapes, X).input_shardings[0][0] == first
    short = X[:24]
    moved.clear()
    state, value = step(state, short)
    assert step.compiled(state, short).input_shardings[0][0] == first
    state, value = step(state, X)
    evaluate(state, X)
    assert not set(moved) & {a.shape for a in state.values()}
    assert np.isfinite(value)


@pytest.mark.slow
def test_checkpoints_are_restored_as_the_plan_has_them(
    step: Any, moved: Any, tmp_path: Path
) -> None:
    import orbax.checkpoint as ocp

    (shardings, rows), _ = step.compiled(jax.eval_shape(initial), X).input_shardings
    state, before = step(initial(), X)
    checkpointer = ocp.StandardCheckpointer()
    checkpointer.save(tmp_path / "state", state)
    checkpointer.wait_until_finished()
    like = jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), state, shardings
    )
    restored = checkpointer.restore(tmp_path / "state", like)
    moved.clear()
    _, value = step(restored, jax.device_put(X, rows))
    assert not moved and value < before
