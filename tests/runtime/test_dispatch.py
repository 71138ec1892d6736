"""Calls that go straight to their executable, those that come to Python; each runs once."""

from __future__ import annotations

import gc
import importlib
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import tapestry_egg as te
from tapestry_egg.pipeline.jit import optimized as optimized_module
from tapestry_egg.pipeline.jit.optimized import Optimized

# The package's name of it is the function.
compiling = importlib.import_module("tapestry_egg.runtime.compiled")

X = np.arange(64, dtype=np.float32).reshape(8, 8)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every call that came to Python."""
    found: list[int] = []
    ask = Optimized._ask

    def counted(self: Optimized, args: Any, kwargs: Any) -> Any:
        found.append(1)
        return ask(self, args, kwargs)

    monkeypatch.setattr(Optimized, "_ask", counted)
    return found


def test_calls_like_one_before_do_not_come_to_python(asked: list[int]) -> None:
    step = te.jit(lambda state, batch, rate: state * rate + batch.sum(), cache=False)
    state = jnp.asarray(X)
    for _ in range(3):  # the state comes back as planned
        state = step(state, X, 0.5)
    asked.clear()
    for k in range(3):
        state = step(state, X + k, 0.5 * k)
    assert not asked
    np.testing.assert_allclose(np.asarray(step(X, X, 2.0)), X * 2.0 + X.sum(), rtol=1e-6)
    assert asked


@pytest.mark.slow
def test_static_arguments_are_told_apart_by_type_and_value(asked: list[int]) -> None:
    @te.jit(static_argnums=1, cache=False)
    def times(x: jax.Array, n: Any) -> jax.Array:
        return x * n if type(n) is int else x - n

    for n, wanted in ((2, X * 2), (1, X), (True, X - 1), (1.0, X - 1)):
        for _ in range(3):
            np.testing.assert_array_equal(np.asarray(times(X, n)), wanted)
    asked.clear()
    assert float(times(X, 1)[0, 1]) == 1.0 and float(times(X, True)[0, 1]) == 0.0
    assert not asked
    with pytest.raises(ValueError, match="hashable"):
        times(X, [1])


def test_settings_of_jax_lead_to_other_executables() -> None:
    step = te.jit(lambda x: x * 2.0 + 1, cache=False)
    for _ in range(3):
        assert step(X).dtype == np.float32
    with jax.enable_x64(True):
        assert step(X.astype(np.float64)).dtype == np.float64
    with jax.disable_jit():
        np.testing.assert_array_equal(np.asarray(step(X)), X * 2 + 1)
    grad = jax.grad(lambda x: te.jit(lambda y: (y * y).sum(), cache=False)(x))(X)
    np.testing.assert_array_equal(np.asarray(grad), 2 * X)


def test_where_jax_looks_for_nans_the_operation_is_told() -> None:
    step = te.jit(lambda x: jnp.log(x) * 2.0, cache=False)
    giving_up = te.jit(lambda x: jnp.log(x) * 2.0, donate_argnums=0, cache=False)
    step(X)
    step(X)  # known: no Python before the executable
    with jax.debug_nans(True):
        for new in (False, True):
            with pytest.raises(FloatingPointError, match="encountered in log"):
                step(-X[:4] if new else -X)
        with pytest.raises(FloatingPointError, match="in a result of"):
            giving_up(-X)
        with pytest.raises(FloatingPointError, match="in a result of"):
            step.compiled(X)(-X)


def test_other_layouts_are_moved_and_donated_arrays_given_up() -> None:
    step = te.jit(lambda x: x + 1.0, donate_argnums=0, cache=False)
    for _ in range(4):
        given = jax.device_put(X, jax.devices()[-1])
        np.testing.assert_array_equal(np.asarray(step(given)), X + 1)
        assert given.is_deleted()
    held = step(X)
    again = step(held)
    assert held.is_deleted() and not again.is_deleted()


class Picky:
    """A node that cannot be put together while `failing`."""

    failing = False

    def __init__(self, x: Any) -> None:
        if Picky.failing:
            raise ValueError("not now")
        self.x = x


jax.tree_util.register_pytree_node(Picky, lambda p: ((p.x,), None), lambda _, xs: Picky(*xs))


@pytest.fixture
def failing() -> Iterator[None]:
    yield
    Picky.failing = False


@pytest.mark.usefixtures("failing")
@pytest.mark.parametrize("effect", [True, False])
def test_a_call_that_fails_in_the_end_is_not_made_again(effect: bool) -> None:
    runs: list[int] = []

    def fn(x: jax.Array) -> Picky:
        if effect:
            io_callback(lambda: runs.append(1), None)
        return Picky(x * 2.0)

    step = te.jit(fn, donate_argnums=() if effect else 0, cache=False)
    compiled = step.compiled(X)
    for call in (step, step, step, compiled):
        x = jax.device_put(X, compiled.in_shardings[0])
        call(x)
        jax.effects_barrier()
        before = len(runs)
        Picky.failing = True
        given = jax.device_put(X, compiled.in_shardings[0])
        with pytest.raises(ValueError, match="not now"):
            call(given)
        jax.effects_barrier()
        assert len(runs) - before == int(effect)
        Picky.failing = False


def test_a_version_of_jax_without_such_calls_makes_them_in_python(
    monkeypatch: pytest.MonkeyPatch, asked: list[int]
) -> None:
    monkeypatch.setattr(compiling, "_maker", lambda: None)
    step = te.jit(lambda x, n: x * n, static_argnames="n", cache=False)
    for _ in range(3):
        np.testing.assert_array_equal(np.asarray(step(X, n=3)), X * 3)
    assert len(asked) == 3


@pytest.mark.slow
def test_a_function_goes_when_nobody_has_it() -> None:
    step = te.jit(lambda x: x + 1.0, cache=False)
    run = step.compiled(X)
    for _ in range(2):
        step(X), run(X)
    seen = weakref.ref(step), weakref.ref(run)
    gc.collect()
    gc.disable()
    try:
        del step, run
        assert [ref() for ref in seen] == [None, None]
    finally:
        gc.enable()


def test_only_so_many_types_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimized_module, "_MOST", 2)
    step = te.jit(lambda x, n: x * n, static_argnums=1, cache=False)
    for n in (1, 2, 3, 1):
        np.testing.assert_array_equal(np.asarray(step(X, n)), X * n)
    assert len(step._known) == len(step._planned) == 2


def test_after_clear_cache_nothing_is_known(asked: list[int]) -> None:
    step = te.jit(lambda x: x + 2.0, cache=False)
    for _ in range(3):
        step(X)
    asked.clear()
    step.clear_cache()
    np.testing.assert_array_equal(np.asarray(step(X)), X + 2)
    assert asked
