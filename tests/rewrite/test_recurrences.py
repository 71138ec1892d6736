"""Loops whose states are prefixes: the loop's numbers, without a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.rewrite.streams.apart import STATES, with_rounds_at_once
from tapestry_egg.tracing.emit import emit

SHAPE = 3, 4
Step = Callable[[Any, Any, Any], tuple[Any, Any]]


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


def loops(graph: BlockGraph) -> int:
    return sum(op.is_scan for op in graph.walk())


def advantages(g: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Rewards to go, until an episode ends."""
    g = x + 0.9 * jnp.where(y > 1.0, 0.0, g)
    return g, g - y


def momentum(s: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """One state follows from another one, which is read before and after its change."""
    v, p = s
    new = 0.9 * v + 0.1 * x
    return (new, p - y * new + v), p


def shifted(s: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """What the round before was given, and the one before that."""
    last, other, same = s
    return (x, last, same), other * y + same


def resets(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return lax.select(y > 0, h, x), h


def turned(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """A complex gate of each state."""
    return h * jnp.exp(lax.complex(-jnp.abs(y), x)) + x, jnp.abs(h)


def counted(s: Any, x: Any, y: Any) -> tuple[Any, Any]:
    n, total = s
    return (n + 1, total * 3 + n.astype(jnp.uint32)), None


STEPS: dict[str, tuple[Step, Any]] = {
    # A step of a state and two values, and the first state.
    "gated": (lambda h, x, y: (jax.nn.sigmoid(y) * h + x, h), jnp.ones(SHAPE)),
    "zero": (lambda h, x, y: (y * h + x, None), jnp.zeros(SHAPE)),
    "mean": (lambda h, x, y: (0.9 * h + 0.1 * x,) * 2, jnp.ones(SHAPE)),
    "less": (lambda h, x, y: (x - h / (2 + y * y), h), jnp.ones(SHAPE)),
    "sum": (lambda h, x, y: (h + x * y, h), jnp.ones(SHAPE)),
    "sum from zero": (lambda h, x, y: (h + x * y, h), jnp.zeros(SHAPE)),
    "product": (lambda h, x, y: (h * jnp.cos(y), h), jnp.ones(SHAPE)),
    "twice": (lambda h, x, y: (h + h * 0.1 + x,) * 2, jnp.ones(SHAPE)),
    "largest": (lambda h, x, y: (jnp.maximum(h, x), h - y), jnp.zeros(SHAPE)),
    "least": (lambda h, x, y: (jnp.minimum(jnp.minimum(y, h), x), h), jnp.full(SHAPE, jnp.inf)),
    "advantages": (advantages, jnp.zeros(SHAPE)),
    "momentum": (momentum, (jnp.ones(SHAPE), jnp.ones(SHAPE))),
    "shifted": (shifted, (jnp.ones(SHAPE), jnp.zeros(SHAPE), jnp.ones(SHAPE))),
    "resets": (resets, jnp.ones(SHAPE)),
    "turned": (turned, jnp.ones(SHAPE, jnp.complex64)),
    "counted": (counted, (jnp.int32(5), jnp.uint32(7))),
    "repeated": (lambda h, x, y: (h + 0.5, (h, x.sum())), jnp.ones(SHAPE)),
    "a gate of each row": (lambda h, x, y: (jax.nn.sigmoid(y[:, :1]) * h + x, h), jnp.ones(SHAPE)),
    "outer": (lambda h, x, y: (y[0] * h + x[:, :1] * y[:1], h.sum(0)), jnp.zeros(SHAPE)),
    "a quotient of each": (lambda h, x, y: (x - h / (2 + y[:, :1] ** 2), h), jnp.ones(SHAPE)),
    "product of rows": (lambda h, x, y: (h * jnp.cos(y[:, :1]), h), jnp.ones(SHAPE)),
    "rows reset": (lambda h, x, y: (jnp.where(y[:, :1] > 0, h, x), h), jnp.ones(SHAPE)),
    "two gates": (lambda h, x, y: (h * y[:, :1] * y[:1] + x, h), jnp.ones(SHAPE)),
    "largest of each": (lambda h, x, y: (jnp.maximum(h, x[:, :1]), h - y), jnp.zeros(SHAPE)),
    "of all": (lambda h, x, y: (h, jnp.sort(x) @ y.T), jnp.ones(SHAPE)),
    "a rate": (lambda h, x, y: (h * 0.5, h * x), jnp.float32(1)),
    "a rate of its own": (lambda h, x, y: (h * 0.9 + 1, h * x), jnp.float32(1)),
    "first of rounds": (lambda h, x, y: (x, h), jnp.ones(SHAPE)),
}


def agree(want: Any, found: Any, rtol: float = 2e-5) -> None:
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(b, a, rtol=rtol, atol=rtol)


def run_of(name: str, reverse: bool = False) -> Callable[..., Any]:
    step, first = STEPS[name]

    def run(x: Any, y: Any) -> Any:
        return lax.scan(lambda s, xy: step(s, *xy), first, (x, y), reverse=reverse)

    return run


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_states_without_a_loop(name: str, reverse: bool) -> None:
    for rounds in (2, 7):
        x, y = drawn(rounds, *SHAPE), drawn(rounds, *SHAPE, seed=1)
        graph = te.trace(run_of(name, reverse), x, y).graph
        changed = with_rounds_at_once(graph, states=True)
        assert loops(changed) == 0 < loops(graph)
        agree(emit(graph)(x, y), jax.jit(lambda *a: emit(changed)(*a))(x, y))  # noqa: B023
        assert with_rounds_at_once(changed, states=True) is changed


@pytest.mark.parametrize("name", [n for n in STEPS if n not in ("counted", "turned")])
def test_derivatives_are_recurrences_too(name: str) -> None:
    def loss(x: Any, y: Any) -> Any:
        return sum(jnp.sum(z**2) for z in jax.tree.leaves(run_of(name)(x, y)))

    x, y = drawn(6, *SHAPE), drawn(6, *SHAPE, seed=1)
    graph = te.trace(jax.grad(loss, (0, 1)), x, y).graph
    changed = with_rounds_at_once(graph, states=True)
    assert loops(changed) == 0
    agree(emit(graph)(x, y), jax.jit(lambda *a: emit(changed)(*a))(x, y), 2e-4)


@pytest.mark.parametrize("name", ["gated", "mean", "sum from zero", "largest", "least", "resets"])
def test_what_is_not_finite_is_found_in_the_same_places(name: str) -> None:
    x, y = np.array(drawn(8, *SHAPE)), np.array(drawn(8, *SHAPE, seed=1))
    x[2, 0, 0], x[3, 0, 1], x[4, 1, 1], y[5, 2, 2] = np.nan, np.inf, -np.inf, np.nan
    graph = te.trace(run_of(name), x, y).graph
    want, found = emit(graph)(x, y), emit(with_rounds_at_once(graph, states=True))(x, y)
    agree(want, found)


def dense(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return h @ y.T @ y + x, h


def across(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Linear, and each element of the new state is made of another one of the old."""
    return jnp.roll(h, 1, 0) * 0.5 + x, None


def both_ways(s: Any, x: Any, y: Any) -> tuple[Any, Any]:
    a, b = s
    return (0.5 * b + x, 0.5 * a + y), None


def rounded(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    return (0.5 * h + x).astype(jnp.bfloat16).astype(jnp.float32), None


def mixed(h: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """A maximum of sums is neither a maximum nor a sum."""
    return jnp.maximum(h + x, y), None


IN_ORDER: dict[str, tuple[Step, Any]] = {
    "dense": (dense, jnp.ones(SHAPE)),
    "across": (across, jnp.ones(SHAPE)),
    "reversed": (lambda h, x, y: (lax.rev(h, (0,)) * 0.5 + x, None), jnp.ones(SHAPE)),
    "both ways": (both_ways, (jnp.ones(SHAPE), jnp.ones(SHAPE))),
    "rounded": (rounded, jnp.ones(SHAPE)),
    "mixed": (mixed, jnp.ones(SHAPE)),
    "squared": (lambda h, x, y: (h * h * 0.1 + x, None), jnp.ones(SHAPE)),
    "gate of itself": (lambda h, x, y: (jax.nn.sigmoid(h) * h + x, None), jnp.ones(SHAPE)),
    "chosen by itself": (lambda h, x, y: (lax.select(h > 0, h, x), None), jnp.ones(SHAPE)),
    "divisor": (lambda h, x, y: (x / h, None), jnp.ones(SHAPE)),
    "part written": (lambda h, x, y: (h.at[1:2].set(x[:1]), h), jnp.ones(SHAPE)),
    "part added": (lambda h, x, y: (h.at[jnp.int32(y[0, :2])].add(x[:2]), h), jnp.ones(SHAPE)),
    "narrow": (
        lambda h, x, y: (h * 0.5 + x.astype(h.dtype), None),
        jnp.ones(SHAPE, jnp.bfloat16),
    ),
    "recomputed": (jax.checkpoint(lambda h, x, y: (0.5 * h + jnp.sin(x), h)), jnp.ones(SHAPE)),
}


@pytest.mark.parametrize("name", IN_ORDER)
def test_what_needs_its_rounds_in_order_stays_a_loop(name: str) -> None:
    step, first = IN_ORDER[name]

    def run(x: Any, y: Any) -> Any:
        h, out = lax.scan(lambda s, xy: step(s, *xy), first, (x, y))
        return jax.tree.map(jnp.sum, (h, out))

    fn = jax.grad(lambda x, y: jax.tree.leaves(run(x, y))[0]) if name == "recomputed" else run
    x, y = drawn(4, *SHAPE), drawn(4, *SHAPE, seed=1)
    graph = te.trace(fn, x, y).graph
    changed = with_rounds_at_once(graph, states=True)
    assert loops(changed) == loops(graph) > 0
    agree(emit(graph)(x, y), emit(changed)(x, y))


@st.composite
def bodies(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Operations on the values before: two states, two values of a round, and a scalar."""
    count = draw(st.integers(1, 6))
    return [
        (draw(st.integers(0, 7)), draw(st.integers(0, 4 + k)), draw(st.integers(0, 4 + k)))
        for k in range(count)
    ]


KINDS: list[Callable[[Any, Any], Any]] = [
    lambda a, b: a + b,
    lambda a, b: a - 0.5 * b,
    lambda a, b: a * jnp.tanh(b),
    lambda a, b: a / (1.5 + b * b),
    lambda a, b: -a,
    lambda a, b: jnp.maximum(a, b),
    lambda a, b: jnp.where(b > 0, a, 0.3 * b),
    lambda a, b: a + b.mean(0, keepdims=True),
]


@settings(max_examples=30, deadline=None)
@given(bodies(), st.data(), st.booleans(), st.booleans())
@pytest.mark.slow
def test_random_bodies(ops: Any, data: st.DataObject, reverse: bool, derivative: bool) -> None:
    last = st.integers(0, 4 + len(ops))
    carried, kept = (data.draw(last), data.draw(last)), data.draw(last)

    def run(x: Any, y: Any) -> Any:
        def step(s: Any, xy: Any) -> tuple[Any, Any]:
            values = [*s, *xy, jnp.full(SHAPE, 0.7)]
            for which, a, b in ops:
                values.append(KINDS[which](values[a], values[b]))
            return (values[carried[0]], values[carried[1]]), values[kept]

        return lax.scan(step, (jnp.ones(SHAPE), jnp.zeros(SHAPE)), (x, y), reverse=reverse)

    def loss(x: Any, y: Any) -> Any:
        return sum(jnp.sum(jnp.sin(z)) for z in jax.tree.leaves(run(x, y)))

    fn = jax.grad(loss, (0, 1)) if derivative else run
    x, y = drawn(5, *SHAPE) / 2, drawn(5, *SHAPE, seed=1) / 2
    graph = te.trace(fn, x, y).graph
    agree(emit(graph)(x, y), emit(with_rounds_at_once(graph, states=True))(x, y), 2e-4)


@pytest.mark.slow
def test_a_plan_of_a_gated_recurrence_runs_on_devices_and_is_saved(tmp_path: Any) -> None:
    def loss(w: Any, x: Any) -> Any:
        def step(h: Any, u: Any) -> tuple[Any, Any]:
            gate = jax.nn.sigmoid(u @ w["gate"])
            h = gate * h + (1 - gate) * (u @ w["in"])
            return h, h @ w["out"]

        return jnp.mean(lax.scan(step, jnp.zeros((16, 64)), x)[1] ** 2)

    w = {name: drawn(64, 64, seed=k) / 8 for k, name in enumerate(("gate", "in", "out"))}
    x = drawn(48, 16, 64, seed=9)
    step = jax.value_and_grad(loss)
    front = te.optimize(te.trace(step, w, x), target="h100:8", settings=te.Settings(work=0.3))
    plan = min(front, key=lambda p: p.costs.seconds)
    assert STATES in plan.rules
    on_cpus = te.optimize(te.trace(step, w, x), target="cpu:8", settings=te.Settings(work=0.3))
    assert not any(STATES in p.rules for p in on_cpus)
    te.save(plan, tmp_path / "plan.json")
    saved = te.load(tmp_path / "plan.json")
    agree(jax.jit(step)(w, x), te.compile(saved)(w, x), 2e-4)
