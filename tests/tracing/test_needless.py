"""What constants decide is decided before a program is planned, as XLA decides it: what was not
chosen is not priced, and nothing is sent for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.runtime import compare

Array = jax.Array
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 32)).astype(np.float32)
N = RNG.integers(-9, 9, (64, 32)).astype(np.int32)
EDGES = np.array([-1.0, 0.0, 2.0], np.float32)


def kernels(function: Callable[..., Any], *arguments: Any) -> list[str]:
    return [op.kernel for op in te.trace(function, *arguments).graph.operations]


def twice(of: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a sum and of the same sum."""

    def function(x: Array) -> Array:
        total = x.sum(0)
        return of(total, total)

    return function


def unsigned(x: Array) -> Array:
    return x.sum(0).astype(jnp.uint32)


DECIDED: dict[str, tuple[Callable[..., Any], Any]] = {
    "a branch": (lambda x: lax.cond(True, lambda a: a[0], lambda a: jnp.exp(a).max(0), x), X),
    "one of three": (
        lambda x: lax.switch(1, [lambda a: jnp.exp(a).max(0), lambda a: a[0], lambda a: a[1]], x),
        X,
    ),
    "a case": (lambda x: jnp.where(True, x[0], jnp.exp(x).sum(0)), X),
    "no round": (lambda x: lax.while_loop(lambda a: False, lambda a: a + a.sum(0), x), X),
    "and no": (lambda x: (x > 0).any(0) & False, X),
    "or yes": (lambda x: (x > 0).any(0) | True, X),
    "and 0": (lambda x: x.sum(0) & jnp.zeros(32, jnp.int32), N),
    "or all bits": (lambda x: x.sum(0) | -1, N),
    "times 0": (lambda x: x.sum(0) * 0, N),
    "less itself": (twice(lambda a, b: a - b), N),
    "exclusive or": (twice(lambda a, b: a ^ b), N),
    "equal to itself": (twice(lambda a, b: a == b), N),
    "less than itself": (twice(lambda a, b: a < b), N),
    "below 0 without a sign": (lambda x: unsigned(x) < 0, N),
    "from 0 without a sign": (lambda x: 0 <= unsigned(x), N),
    "power of 0": (lambda x: jnp.exp(x).sum(0) ** jnp.zeros(()), X),
    "whole power of 0": (lambda x: jnp.exp(x).sum(0) ** 0, X),
    "all written over": (lambda x: jnp.exp(x).at[:].set(x), X),
    "all updated": (lambda x: lax.dynamic_update_slice(jnp.exp(x), x, (3, 0)), X),
    "read by nobody": (lambda x: lax.optimization_barrier((x * 2, jnp.exp(x).sum(0)))[0], X),
    "sorted for nobody": (lambda x: lax.sort((x * 2, jnp.exp(x)), dimension=0)[0], X),
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_constants_decide_needs_no_other_operand(name: str) -> None:
    function, x = DECIDED[name]
    left = set(kernels(function, x))
    assert not left & {"reduce_sum", "reduce_max", "reduce_or", "exp", "cond", "while"}, left
    found, wanted = te.trace(function, x)(jnp.asarray(x)), jax.jit(function)(x)
    assert (found.shape, found.dtype, found.weak_type) == (
        wanted.shape,
        wanted.dtype,
        wanted.weak_type,
    )
    np.testing.assert_array_equal(found, wanted)


def test_keys_of_a_sort_stay_and_so_does_what_is_read() -> None:
    x = jnp.asarray(X)

    def second(x: Array) -> Array:
        return lax.sort((x, jnp.cos(x), jnp.sin(x)), dimension=0, num_keys=1)[1]

    assert set(kernels(second, x)) == {"cos", "sort"}  # in the order of x, not its own
    np.testing.assert_allclose(te.trace(second, x)(x), jax.jit(second)(x), rtol=1e-6)
    assert "exp" in kernels(lambda x: jnp.exp(x).at[:1].set(x[:1]), x)
    assert "exp" in kernels(lambda x: jnp.exp(x).at[:].add(x), x)


@pytest.mark.parametrize("at", [0, 1, -1])
@pytest.mark.parametrize("mode", ["drop", "clip"])
def test_what_may_be_written_nowhere_stays(mode: str, at: int) -> None:
    """A window as large as the array fits at one place only; elsewhere it is dropped, or moved."""
    dims = lax.ScatterDimensionNumbers((0,), (), (0,))

    def function(x: Array, i: Array, new: Array) -> Array:
        return lax.scatter(x, i, new, dims, mode=mode)

    x, new, i = np.arange(6.0, dtype=np.float32), np.ones(6, np.float32), np.array([at], np.int32)
    found = te.trace(function, x, i, new)
    np.testing.assert_array_equal(found(x, i, new), jax.jit(function)(x, i, new))
    assert len(found.graph.operations) == (mode == "drop")


def test_a_barrier_of_which_a_part_is_read_is_planned() -> None:
    """As graphs have it that were written before what is unread was left out."""
    both = te.trace(lambda x: lax.optimization_barrier((x.sum(0), x.max(0))), X).graph
    one = replace(both, outputs=both.outputs[:1], output_names=("",))
    settings = te.Settings(work=0.2, front=False, recompute=0)
    plan = te.optimize(one, "cpu:8", settings=settings).best()
    (found,) = te.compile(plan)(X)
    np.testing.assert_allclose(found, X.sum(0), rtol=1e-4, atol=1e-5)


def test_a_verdict_is_computed_of_constants() -> None:
    """Which way edges are sorted decides which of two searches counts."""
    assert kernels(lambda x: jnp.digitize(x, EDGES), X).count("scan") == 1
    assert kernels(lambda x, e: jnp.digitize(x, e), X, EDGES).count("scan") == 2


def test_floats_keep_what_a_nan_would_show() -> None:
    assert "reduce_sum" in kernels(lambda x: x.sum(0) * 0, X)
    assert "reduce_sum" in kernels(twice(lambda a, b: a - b), X)
    assert "reduce_sum" in kernels(twice(lambda a, b: a == b), X)


def test_what_arguments_decide_stays() -> None:
    assert "cond" in kernels(lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x), X)
    assert "select_n" in kernels(lambda x: jnp.where(x > 0, x, jnp.exp(x)), X)
    for mask in (np.arange(32) > 3, np.arange(32) < 3):
        assert "reduce_sum" in kernels(lambda x, m=mask: jnp.where(m, x[0], x.sum(0)), X)
    late = np.arange(5000) < 4999  # one number nearly to its end
    assert "reduce_sum" in kernels(lambda x: jnp.where(late, x[0], x.sum(0)), np.ones((2, 5000)))
    assert "reduce_sum" in kernels(lambda x: x.sum(0) & 6, N)


def test_nothing_is_sent_for_what_is_not_chosen() -> None:
    """Either branch combines parts of all devices; one of them is taken."""

    def both(x: Array) -> Array:
        return lax.cond(True, lambda a: a.sum(0), lambda a: jnp.exp(a).max(0), x)

    settings = te.Settings(work=0.3, front=False, recompute=0)
    pins = {"[0]": (("y", "x"), None), "result": (("y", "x"),)}
    mesh = te.MeshShape(("x", "y"), (2, 4))
    front = te.optimize(te.trace(both, X), "cpu:8", mesh=mesh, pins=pins, settings=settings)
    for plan in front:
        run = te.compile(plan, jax.devices()[:8])
        np.testing.assert_allclose(run(X), X.sum(0), rtol=1e-4, atol=1e-5)
        assert compare(plan, run.compile()).equal
