"""Products of all rounds of a loop at once: the loop's numbers, with fewer products in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.rewrite.streams.apart import RULE, with_rounds_at_once
from tapestry_egg.tracing.emit import emit
from tests.rewrite.unbatched import DOUBLED, add_doubled

ROUNDS, ROWS, WIDTH = 5, 3, 4
Step = Callable[[Any, Any], tuple[Any, Any]]


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape) / 2


def weights() -> dict[str, jax.Array]:
    return {name: drawn(WIDTH, WIDTH, seed=k) for k, name in enumerate("uvw")}


def inside(graph: BlockGraph) -> int:
    """Products in the bodies of loops."""
    return sum(
        registry.signature_in(region, op).contracts
        for loop in graph.walk()
        for region in loop.regions
        for op in region.operations
        if not op.regions
    )


def agree(graph: BlockGraph, changed: BlockGraph, *arguments: Any) -> None:
    both = jax.jit(lambda *flat: (emit(graph)(*flat), emit(changed)(*flat)))
    for want, found in zip(*both(*jax.tree.leaves(arguments)), strict=True):
        assert want.dtype == found.dtype
        np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


def recurrent(w: dict[str, jax.Array], h: Any, x: Any) -> tuple[Any, Any]:
    h = jnp.tanh(x @ w["u"] + h @ w["v"])
    return h, h @ w["w"]


def unread(w: dict[str, jax.Array], h: Any, x: Any) -> tuple[Any, Any]:
    """What is given in each round is multiplied by what is the same in all."""
    return h + x @ (w["u"] @ w["v"]), None


def added(w: dict[str, jax.Array], s: Any, x: Any) -> tuple[Any, Any]:
    """Sums round by round: of numbers, of products that are read after the loop, and of others
    that each round reads."""
    n, total, own, h = s
    h = jnp.sin(h @ w["u"] + x)
    more = total + h.T @ x, own + h.T @ h
    return (n + jnp.sum(x > 0, dtype=jnp.int32), *more, h), own.max()


def masked(w: dict[str, jax.Array], h: Any, x: Any) -> tuple[Any, Any]:
    """What is late needs a mask that needs no round, and the state before and after."""
    mask = jnp.where(jnp.tril(jnp.ones((ROWS, ROWS), bool)), x @ x.T, 0.0)
    new = 0.9 * h + x
    return new, mask @ (h @ w["u"]) + new


def kept_in_each(w: dict[str, jax.Array], h: Any, x: Any) -> tuple[Any, Any]:
    """What is the same in all rounds is kept in each, and what is carried on is read by none."""
    return x @ w["v"], (w["u"] @ w["v"], h)


def gradients(w: dict[str, jax.Array], s: Any, x: Any) -> tuple[Any, Any]:
    """Sums of products of what is given, and of one that is the same in all rounds."""
    of_given, of_same = s
    return (of_given + 2.0 * (x.T @ x), of_same + w["u"] @ w["v"]), None


def chosen(w: dict[str, jax.Array], h: Any, x: Any) -> tuple[Any, Any]:
    """A branch that a product decides stays in the loop, and so does the product."""
    y = h @ w["u"]
    either = jax.lax.cond(y.sum() > 0, lambda y: y, lambda y: -y, y)
    return jnp.sin(h + x), (either, h @ w["v"])


STEPS: dict[str, tuple[Callable[..., Any], Any, int, int]] = {
    # A step, what it carries first, and how many products are left in the loop, and carried values.
    "recurrent": (recurrent, jnp.zeros((ROWS, WIDTH)), 1, 1),
    "unread": (unread, jnp.zeros((ROWS, WIDTH)), 0, 0),
    "added": (
        added,
        (jnp.int32(1), *jnp.ones((2, WIDTH, WIDTH)), jnp.ones((ROWS, WIDTH))),
        2,
        3,
    ),
    "given": (kept_in_each, jnp.zeros((ROWS, WIDTH)), 0, 1),
    "gradients": (gradients, (jnp.ones((WIDTH, WIDTH)), jnp.ones((WIDTH, WIDTH))), 0, 0),
    "chosen": (chosen, jnp.zeros((ROWS, WIDTH)), 1, 1),
    "masked": (masked, jnp.ones((ROWS, WIDTH)), 0, 1),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_loop_gives_the_same_with_less_in_it(name: str, reverse: bool) -> None:
    step, first, left, carried = STEPS[name]

    def run(w: dict[str, jax.Array], x: jax.Array) -> Any:
        return jax.lax.scan(lambda h, x: step(w, h, x), first, x, reverse=reverse)

    arguments = weights(), drawn(ROUNDS, ROWS, WIDTH, seed=9)
    graph = te.trace(run, *arguments).graph
    changed = with_rounds_at_once(graph)
    agree(graph, changed, *arguments)
    assert inside(changed) == left < inside(graph)
    assert sum(op.params["num_carry"] for op in changed.operations if op.is_scan) == carried
    assert with_rounds_at_once(changed) is changed


@pytest.mark.parametrize("name", STEPS)
def test_a_derivative_adds_up_products_of_all_rounds(name: str) -> None:
    step, first, *_ = STEPS[name]

    def loss(w: dict[str, jax.Array], x: jax.Array) -> Any:
        ends = jax.lax.scan(lambda h, x: step(w, h, x), first, x)
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(ends))

    arguments = weights(), drawn(ROUNDS, ROWS, WIDTH, seed=9)
    graph = te.trace(jax.grad(loss, argnums=(0, 1)), *arguments).graph
    changed = with_rounds_at_once(graph)
    agree(graph, changed, *arguments)
    assert inside(changed) < inside(graph)


def test_loops_in_loops_and_branches_are_read() -> None:
    def outer(w: dict[str, jax.Array], x: jax.Array) -> Any:
        def round_(h: Any, _: None) -> tuple[Any, Any]:
            inner = jax.lax.scan(lambda h, x: recurrent(w, h, x), h, x)[0]
            return jax.lax.cond(inner.sum() > 0, lambda: inner, lambda: -inner), None

        return jax.lax.scan(round_, jnp.zeros((ROWS, WIDTH)), None, length=3)

    arguments = weights(), drawn(ROUNDS, ROWS, WIDTH, seed=9)
    graph = te.trace(outer, *arguments).graph
    changed = with_rounds_at_once(graph)
    assert changed is not graph
    agree(graph, changed, *arguments)


def again(h: Any, x: Any) -> tuple[Any, Any]:
    return jnp.sin(h @ h.T @ x), h


def recomputed(h: Any, x: Any) -> tuple[Any, Any]:
    """The user says what is not kept."""
    return h + 1.0, jax.checkpoint(lambda h, x: jnp.sin(x @ h.T))(h, x).sum()


def test_what_needs_the_rounds_one_after_the_other_stays() -> None:
    x = drawn(ROUNDS, ROWS, WIDTH)
    graph = te.trace(lambda x: jax.lax.scan(again, jnp.ones((ROWS, WIDTH)), x), x).graph
    assert with_rounds_at_once(graph) is graph


@pytest.mark.parametrize("generator", ["threefry2x32", "rbg"])
def test_numbers_are_drawn_as_in_the_loop(generator: str) -> None:
    """Of many keys at once the second generator draws other numbers than of one after the other."""

    def step(total: Any, given: tuple[Any, Any]) -> tuple[Any, Any]:
        key, x = given
        return total + x @ (jax.random.normal(key, (WIDTH, WIDTH)) @ x.T), None

    keys = jax.random.split(jax.random.key(0, impl=generator), ROUNDS)
    x = drawn(ROUNDS, ROWS, WIDTH)
    graph = te.trace(
        lambda *given: jax.lax.scan(step, jnp.zeros((ROWS, ROWS)), given), keys, x
    ).graph
    changed = with_rounds_at_once(graph)
    assert changed is not graph
    agree(graph, changed, keys, x)


def test_kernels_without_a_rule_for_many_rounds_leave_their_loop_as_it_is(tmp_path: Path) -> None:
    """So may be a user's own, whose template says that it goes element by element."""
    add_doubled(tmp_path)

    def run(w: Any, x: Any) -> Any:
        def step(h: Any, x: Any) -> tuple[Any, Any]:
            return jnp.sin(h + x), DOUBLED.bind(h @ w)

        def other(h: Any, x: Any) -> tuple[Any, Any]:
            return jnp.sin(h + x), h @ w

        h = jnp.ones((ROWS, WIDTH))
        return jax.lax.scan(step, h, x), jax.lax.scan(other, h, x)

    arguments = drawn(WIDTH, WIDTH), drawn(ROUNDS, ROWS, WIDTH)
    graph = te.trace(run, *arguments).graph
    changed = with_rounds_at_once(graph)
    agree(graph, changed, *arguments)
    assert (inside(graph), inside(changed)) == (2, 1)


def test_what_its_user_has_computed_again_stays() -> None:
    def loss(h: Any, x: Any) -> Any:
        return jax.lax.scan(recomputed, h, x)[1].sum()

    arguments = drawn(ROWS, WIDTH), drawn(ROUNDS, ROWS, WIDTH, seed=1)
    graph = te.trace(jax.grad(loss), *arguments).graph
    changed = with_rounds_at_once(graph)
    agree(graph, changed, *arguments)
    numbers = [sum(op.remat is not None for op in g.walk()) for g in (graph, changed)]
    assert numbers[0] == numbers[1] > 0


@pytest.mark.parametrize(("dtype", "left"), [(jnp.bfloat16, 2), (jnp.float32, 1), (jnp.int32, 1)])
def test_a_sum_in_a_narrow_type_is_added_round_by_round(dtype: Any, left: int) -> None:
    """Rounded after every round, it is another sum. What no product is added to stays as well."""

    def step(s: Any, x: Any) -> tuple[Any, Any]:
        h, total, count = s
        h = jnp.sin(h + x)
        return (h, total + (100.0 * h.T @ h).astype(dtype), count + h.max()), None

    def run(x: Any) -> Any:
        first = jnp.ones((ROWS, WIDTH)), jnp.zeros((WIDTH, WIDTH), dtype), jnp.float32(0.0)
        return jax.lax.scan(step, first, x)[0]

    x = drawn(50, ROWS, WIDTH)
    graph = te.trace(run, x).graph
    changed = with_rounds_at_once(graph)
    (loop,) = [op for op in changed.operations if op.is_scan]
    assert loop.params["num_carry"] == left + 1
    for want, found in zip(run(x), emit(changed)(x), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, float), np.asarray(want, float), rtol=2e-6, atol=1e-6
        )


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[int, int, int]], tuple[int, ...], tuple[int, ...]]:
    """Operations on values so far; and which values are carried on, and which are kept."""
    count = draw(st.integers(2, 7))
    ops = []
    for k in range(count):
        values = st.integers(0, 4 + k)
        ops.append((draw(st.integers(0, 4)), draw(values), draw(values)))
    last = st.integers(0, 4 + count)
    return ops, (draw(last), draw(last)), (draw(last), draw(last))


@given(steps(), st.booleans())
@settings(max_examples=12, deadline=None)
@pytest.mark.slow
def test_random_loops_give_the_same(program: Any, derivative: bool) -> None:
    ops, carried, kept = program
    kinds: list[Callable[[Any, Any], Any]] = [
        lambda a, b: a @ b,
        lambda a, b: a + b,
        lambda a, b: jnp.tanh(a) * b,
        lambda a, b: a + b.sum(0),
        lambda a, b: jnp.maximum(a, b.T),
    ]

    def run(w: Any, x: Any) -> Any:
        def step(s: Any, x: Any) -> tuple[Any, Any]:
            values = [*s, w, x, 0.5 * x]
            for which, a, b in ops:
                values.append(kinds[which](values[a], values[b]) / 4)
            # What is carried may also be added to, and no more.
            total = s[0] + values[carried[0]] / 4
            return (total, values[carried[1]]), [values[v] for v in kept]

        return jax.lax.scan(step, (w, -w), x)

    def loss(w: Any, x: Any) -> Any:
        return sum(jnp.sum(y**2) for y in jax.tree.leaves(run(w, x)))

    arguments = drawn(WIDTH, WIDTH), drawn(ROUNDS, WIDTH, WIDTH, seed=1)
    fn = jax.grad(loss, argnums=(0, 1)) if derivative else run
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of operations that nothing reads
        graph = te.trace(fn, *arguments).graph
    agree(graph, with_rounds_at_once(graph), *arguments)


@pytest.mark.slow
def test_a_recurrent_network_has_a_plan_that_multiplies_all_inputs_at_once(tmp_path: Path) -> None:
    def loss(w: dict[str, jax.Array], x: jax.Array) -> Any:
        h = jnp.zeros(x.shape[1:])
        return jnp.mean(jax.lax.scan(lambda h, x: recurrent(w, h, x), h, x)[1] ** 2)

    w = {name: drawn(64, 64, seed=k) / 4 for k, name in enumerate("uvw")}
    x = drawn(24, 512, 64, seed=9)
    step = jax.value_and_grad(loss)
    front = te.optimize(te.trace(step, w, x), target="h100:8", settings=te.Settings(work=0.3))
    plan = min(front, key=lambda p: p.costs.seconds)
    assert RULE in plan.rules
    plain = [p.costs.seconds for p in front if RULE not in p.rules]
    assert not plain or plan.costs.seconds < 0.9 * min(plain)
    te.save(plan, tmp_path / "plan.json")
    saved = te.load(tmp_path / "plan.json")
    want = jax.jit(step)(w, x)
    found = te.compile(saved)(w, x)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-4, atol=2e-6)
