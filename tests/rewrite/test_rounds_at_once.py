"""Products of all rounds of a loop at once: the loop's numbers, with fewer products in it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
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
from tapestry_egg.rewrite.streams.apart import RULE, STATES, folds_of, with_rounds_at_once
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


def test_what_its_user_has_computed_again_stays_so() -> None:
    """What leaves its loop is computed again outside of it."""

    def loss(h: Any, x: Any) -> Any:
        return jax.lax.scan(recomputed, h, x)[1].sum()

    arguments = drawn(ROWS, WIDTH), drawn(ROUNDS, ROWS, WIDTH, seed=1)
    graph = te.trace(jax.grad(loss), *arguments).graph
    for states in (False, True):
        changed = with_rounds_at_once(graph, states)
        agree(graph, changed, *arguments)
        assert inside(changed) == 0 < inside(graph)
        again = [{op.kernel for op in g.walk() if op.remat is not None} for g in (graph, changed)]
        assert again[0] - again[1] <= {"transpose"}, again


def chained(c: Any, x: Any) -> Any:
    """Several terms, from both sides, in two orders."""
    a, b = c
    return (jnp.cos(x) + (a + x) + 2 * x, x + (x * x + b))


def extremes(c: Any, x: Any) -> Any:
    a, b, n = c
    return jnp.maximum(jnp.maximum(x, a), -x), jnp.minimum(b, x[0, 0]), n + 1


def constant(c: Any, x: Any) -> Any:
    """The same in every round, and a sum of both kinds."""
    a, b = c
    return a + 3, b + x + 5


def pairs(c: Any, x: Any) -> Any:
    return (c[0] + (x + 1j * x).astype(c[0].dtype),)


def ends(dtype: Any, fill: float) -> Any:
    return jnp.full((ROWS, WIDTH), fill, dtype)


#: A step, and what it carries first.
FOLDS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "chained": (chained, (ends(float, 0.0), ends(float, 1.5))),
    "extremes": (extremes, (ends(float, -9.0), jnp.float32(0.5), jnp.uint32(7))),
    "extremes of integers": (
        extremes,
        (ends(jnp.int8, -9), jnp.asarray(0, jnp.int8), jnp.asarray(250, jnp.uint8)),
    ),
    "constant": (constant, (ends(jnp.int16, 30_000), ends(float, 1.0))),
    "complex": (pairs, (ends(complex, 1.0),)),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", FOLDS)
def test_what_is_only_combined_is_one_fold_of_all_rounds(name: str, reverse: bool) -> None:
    step, first = FOLDS[name]
    dtype = first[0].dtype if name == "extremes of integers" else jnp.float32

    def run(x: Any) -> Any:
        return jax.lax.scan(lambda c, x: (step(c, x), None), first, x, reverse=reverse)[0]

    x = (20 * drawn(7, ROWS, WIDTH)).astype(dtype)
    graph = te.trace(run, x).graph
    changed = with_rounds_at_once(graph, states=True)
    assert not any(op.is_scan for op in changed.walk())
    assert not any(op.kernel.startswith("cum") for op in changed.walk())
    agree(graph, changed, x)


def half_read(c: Any, x: Any) -> Any:
    half = c + x
    return half + half.mean(), None


def derived(c: Any, x: Any) -> Any:
    new = c + x
    return new, jnp.sin(new)


#: Steps that read what they carry, or use it in another way than one monoid.
NO_FOLDS: dict[str, Callable[..., Any]] = {
    "added twice": lambda c, x: (c + c + x, None),
    "two monoids": lambda c, x: (jnp.maximum(c, x) + x, None),
    "read": lambda c, x: (c + jnp.sin(c + x).sum(), None),
    "read halfway": half_read,
    "kept": lambda c, x: (c + x, c + x),
    "derived": derived,
    "kept before": lambda c, x: (c + x, c),
    "difference": lambda c, x: (x - c, None),
}


@pytest.mark.parametrize("name", NO_FOLDS)
def test_what_rounds_read_is_no_fold(name: str) -> None:
    x, first = drawn(ROUNDS, ROWS, WIDTH), jnp.ones((ROWS, WIDTH))
    graph = te.trace(lambda x: jax.lax.scan(NO_FOLDS[name], first, x), x).graph
    (loop,) = [op for op in graph.walk() if op.is_scan]
    (body,) = loop.regions
    assert not folds_of(body, body.inputs[:1])
    agree(graph, with_rounds_at_once(graph, states=True), x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.uint32])
def test_a_sum_of_all_rounds_is_rounded_once(dtype: Any) -> None:
    """However many terms it has; integers wrap as they do in the loop."""

    def run(x: Any) -> Any:
        first = jnp.full((ROWS, WIDTH), 100, dtype)
        return jax.lax.scan(lambda c, x: (c + x + 3 * x, None), first, x)[0]

    x = jnp.abs(20 * drawn(50, ROWS, WIDTH)).astype(dtype)
    graph = te.trace(run, x).graph
    changed = with_rounds_at_once(graph, states=True)
    assert not any(op.is_scan for op in changed.operations)
    (found,) = emit(changed)(x)
    if jnp.issubdtype(dtype, jnp.integer):
        np.testing.assert_array_equal(found, run(x))
        return
    terms = np.concatenate([np.asarray(y, np.float64) for y in (x, 3 * x)])
    exact = 100.0 + terms.sum(0)
    rounding = max(float(jnp.finfo(dtype).eps) / 2, 1e-5)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= 1.01 * rounding * exact).all()


def test_what_no_product_is_added_to_stays_in_its_loop() -> None:
    def step(s: Any, x: Any) -> tuple[Any, Any]:
        h, total, count = s
        h = jnp.sin(h + x)
        return (h, total + (100.0 * h.T @ h).astype(total.dtype), count + h.max()), None

    def run(x: Any) -> Any:
        first = jnp.ones((ROWS, WIDTH)), jnp.zeros((WIDTH, WIDTH), jnp.bfloat16), jnp.float32(0.0)
        return jax.lax.scan(step, first, x)[0]

    graph = te.trace(run, drawn(50, ROWS, WIDTH)).graph
    (loop,) = [op for op in with_rounds_at_once(graph).operations if op.is_scan]
    assert loop.params["num_carry"] == 2


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


def network(w: Any, x: Any) -> Any:
    return jnp.mean((jax.nn.relu(x @ w["in"]) @ w["out"]) ** 2)


def accumulated(w: Any, x: Any, again: bool = False) -> Any:
    """Losses and gradients of micro-batches, added up; a step of the weights by their mean."""
    loss = jax.checkpoint(network) if again else network

    def step(c: Any, x: Any) -> tuple[Any, Any]:
        return jax.tree.map(jnp.add, c, jax.value_and_grad(loss)(w, x)), None

    first = jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, w)
    loss_sum, sums = jax.lax.scan(step, first, x)[0]
    return loss_sum / len(x), jax.tree.map(lambda w, g: w - 0.1 * g / len(x), w, sums)


def counted(w: Any, x: Any) -> Any:
    """The same, the micro-batches by their numbers."""

    def step(k: Any, c: Any) -> Any:
        return jax.tree.map(jnp.add, c, jax.value_and_grad(network)(w, x[k]))

    first = jnp.zeros((), x.dtype), jax.tree.map(jnp.zeros_like, w)
    loss_sum, sums = jax.lax.fori_loop(0, len(x), step, first)
    return loss_sum / len(x), jax.tree.map(lambda w, g: w - 0.1 * g / len(x), w, sums)


def in_one(w: Any, x: Any) -> Any:
    """Over the whole batch."""
    loss, g = jax.value_and_grad(network)(w, x.reshape(-1, x.shape[-1]))
    return loss, jax.tree.map(lambda w, g: w - 0.1 * g, w, g)


def expert(w: Any, x: Any) -> Any:
    return jax.nn.gelu(x @ w["in"]) @ w["out"]


def experts(run: Callable[..., Any]) -> Callable[..., Any]:
    return jax.grad(lambda w, x: (run(w, x) ** 2).mean())


def one_by_one(w: Any, x: Any) -> Any:
    return jax.lax.map(lambda given: expert(*given), (w, x))


def named(w: Any, x: Any) -> Any:
    """Each is set at its number."""

    def step(k: Any, out: Any) -> Any:
        return out.at[k].set(expert(jax.tree.map(lambda y: y[k], w), x[k]))

    return jax.lax.fori_loop(0, len(x), step, jnp.zeros_like(x))


#: A program whose rounds need not wait, its twin without a loop, and whether weights are stacks.
WHOLE: dict[str, tuple[Callable[..., Any], Callable[..., Any], bool]] = {
    "micro-batches": (accumulated, in_one, False),
    "counted micro-batches": (counted, in_one, False),
    "experts": (one_by_one, jax.vmap(expert), True),
    "numbered experts": (named, jax.vmap(expert), True),
    "gradients of experts": (experts(one_by_one), experts(jax.vmap(expert)), True),
}


def shapes_of(width: int, rows: int, stacks: bool) -> tuple[dict[str, Any], Any]:
    """Of the weights, and of what eight rounds are given."""
    many = (8,) if stacks else ()
    w = {"in": (*many, width, 4 * width), "out": (*many, 4 * width, width)}
    return {k: jax.ShapeDtypeStruct(s, jnp.bfloat16) for k, s in w.items()}, jax.ShapeDtypeStruct(
        (8, rows, width), jnp.bfloat16
    )


@pytest.mark.parametrize("name", WHOLE)
def test_devices_share_rounds_that_need_not_wait(name: str) -> None:
    """On many devices each round is little: alone on one, loop and twin take about as long."""
    loop, twin, stacks = WHOLE[name]
    given = shapes_of(1024, 16384, stacks)
    one = te.Settings(front=False)
    plans = [te.optimize(te.trace(f, *given), "h100:8", settings=one)[0] for f in (loop, twin)]
    assert STATES in plans[0].rules
    assert plans[0].costs.seconds <= 1.1 * plans[1].costs.seconds


def test_rounds_that_devices_have_no_memory_for_stay_in_their_loop() -> None:
    program, one = te.trace(accumulated, *shapes_of(512, 4096, False)), te.Settings(front=False)
    free = te.optimize(program, "h100:8", settings=one)[0]
    most = 0.9 * free.costs.peak_bytes
    small = te.optimize(program, "h100:8", limits={"peak_bytes": most}, settings=one)
    assert STATES not in small[0].rules
    assert small[0].costs.peak_bytes <= most
    assert any(n.kind == "forms" for n in small.notes)


@pytest.mark.parametrize("name", ["micro-batches", "computed again", "gradients of experts"])
def test_plans_with_rounds_at_once_give_what_jax_gives(name: str) -> None:
    """In float64, on eight devices; what is sent is counted when a plan is compiled."""
    again = name == "computed again"
    loop, _, stacks = WHOLE["micro-batches" if again else name]
    fn = partial(accumulated, again=True) if again else loop
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        w, x = jax.tree.map(lambda s: rng.normal(size=s.shape) / 4, shapes_of(16, 64, stacks))
        program = te.trace(fn, w, x)
        plan = te.optimize(program, "h100:8", settings=te.Settings(front=False))[0]
        assert STATES in plan.rules
        for want, found in zip(
            jax.tree.leaves(jax.jit(fn)(w, x)), jax.tree.leaves(te.compile(plan)(w, x)), strict=True
        ):
            assert want.dtype == found.dtype == np.float64
            np.testing.assert_allclose(found, want, rtol=1e-11, atol=1e-12)
