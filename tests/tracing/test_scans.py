"""Scans are read and emitted alike, whether JAX counts their values or holds them as trees."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.tracing import emit as emission
from tapestry_egg.tracing.control_flow import with_counts
from tapestry_egg.tracing.emit import emit
from tapestry_egg.tracing.trace import trace


@dataclass
class Tree:
    """What a newer JAX keeps: constants, carries and slices, each a tree of its own."""

    vals: tuple[Any, ...]

    def unpack(self) -> tuple[Tree, Tree, Tree]:
        consts, carry, slices = self.vals
        return Tree(consts), Tree(carry), Tree(slices)


def running(w: Any, start: Any, xs: Any) -> Any:
    def step(carry: Any, x: Any) -> Any:
        carry = jnp.tanh(carry @ w + x)
        return carry, (carry.sum(), x * 2)

    return jax.lax.scan(step, start, xs, reverse=True)


def test_trees_of_a_scan_are_counted() -> None:
    trees = Tree((("w",), ("a", "b"), ("x", "y", "z")))
    given = {"length": 3, "reverse": False, "ft_in": trees, "ft_out": object()}
    assert with_counts(given) == {"length": 3, "reverse": False, "num_consts": 1, "num_carry": 2}
    assert with_counts({"num_consts": 1, "num_carry": 2}) == {"num_consts": 1, "num_carry": 2}


def test_a_scan_is_emitted_where_jax_does_not_take_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    w, start, xs = (rng.normal(size=s).astype("float32") for s in ((4, 4), (2, 4), (5, 2, 4)))
    program = trace(running, w, start, xs)
    wanted = jax.tree.leaves(jax.jit(running)(w, start, xs))
    monkeypatch.setattr(emission, "binds_counts", lambda: False)
    found = jax.jit(emit(program))(w, start, xs)
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def stacking(times: int) -> Any:
    """A loop of which every step's result is stacked so many times, as it leaves and is read."""

    def run(w: Any, start: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            carry = jnp.tanh(carry @ w + x)
            return carry, (carry,) * times

        stacks = jax.lax.scan(step, start, xs)[1]
        return stacks[0], jnp.cumsum(stacks[-1] @ w, 0)

    return run


def test_a_loop_stacks_a_value_once() -> None:
    rng = np.random.default_rng(0)
    w, start, xs = (
        rng.normal(size=s).astype("float32") for s in ((64, 64), (128, 64), (8, 128, 64))
    )
    (scan,) = (
        op for op in trace(stacking(2), w, start, xs).graph.operations if op.kernel == "scan"
    )
    # The last carry and one stack. XLA makes one of both, and what it sends of it is sent once.
    assert len(scan.outputs) == len(scan.regions[0].outputs) == 2
    once, twice = (
        te.optimize(
            trace(stacking(n), w, start, xs),
            "v5e:1",
            settings=te.Settings(work=0.1, forms=0, recompute=0),
        ).best()
        for n in (1, 2)
    )
    assert once.costs == twice.costs
    found = te.compile(twice, jax.devices()[:1])(w, start, xs)
    for got, want in zip(found, jax.jit(stacking(2))(w, start, xs), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def test_two_stacks_of_one_value_leave_as_they_are_asked_to() -> None:
    def both(w: Any, start: Any, xs: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            carry = jnp.tanh(carry @ w + x)
            return carry, (carry, carry * 2, carry)

        return jax.lax.scan(step, start, xs)[1]

    arguments = [np.full(s, 0.1, "float32") for s in ((16, 16), (8, 16), (4, 8, 16))]
    pins = {"result[0]": ("x", None, None), "result[2]": (None, "x", None)}
    mesh = MeshShape(("x",), (4,))
    program = trace(both, *arguments)
    front = te.optimize(
        program,
        "cpu:4",
        pins=pins,
        mesh_shapes=[mesh],
        settings=te.Settings(work=0.1, forms=0, recompute=0),
    )
    plan = front.best("seconds")
    cut = [x.dims for x in plan.out_shardings]
    assert cut[0] == ((0,), (), ()) and cut[2] == ((), (0,), ())
    found = te.compile(plan)(*arguments)
    for got, want in zip(found, jax.jit(both)(*arguments), strict=True):
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
