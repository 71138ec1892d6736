"""Loops that are written out, so that products read slices of stacks where these lie."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.rewrite.changes import changed, is_change
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.streams import written_out
from tapestry_egg.rewrite.streams.written_out import (
    RULE,
    SHARED,
    sliced_bytes,
    with_loops_written_out,
)
from tapestry_egg.runtime.emitted import audit, emitted
from tapestry_egg.tracing.emit import emit
from tests.schedule.test_lifetimes import h100s

ROUNDS, ROWS, SIZE = 5, 4, 16


def draw(*shape: int, seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape) / 4, jnp.float32)


W, X, BIAS = draw(ROUNDS, SIZE, SIZE), draw(ROWS, SIZE, seed=1), draw(SIZE, seed=2)
STACK = draw(ROUNDS, ROWS, 6, SIZE, seed=3)


def layers(w: Any, x: Any, b: Any, s: Any) -> Any:
    """What is carried, the same in all rounds, stacked, and a constant of the body."""
    one = np.arange(SIZE, dtype=np.float32)

    def body(x: Any, w: Any) -> Any:
        x = jnp.tanh(x @ w + b) + one
        return x, (x.sum(0), x[0, 0])

    return lax.scan(body, x, w)


def backwards(w: Any, x: Any, b: Any, s: Any) -> Any:
    return lax.scan(lambda x, w: ((y := jnp.sin(x @ w)), y), x, w, reverse=True)


def decoder(w: Any, x: Any, b: Any, s: Any) -> Any:
    """One row is written into each slice of a stack, at the end if it is said to be behind."""

    def body(x: Any, given: Any) -> Any:
        w, s = given
        s = lax.dynamic_update_slice_in_dim(s, (x @ w)[:, None], 9, axis=1)
        return jnp.einsum("bk,btk,kl->bl", x, s, w), s

    return lax.scan(body, x, (w, s))


def decoder_backwards(w: Any, x: Any, b: Any, s: Any) -> Any:
    def body(x: Any, given: Any) -> Any:
        w, s = given
        s = lax.dynamic_update_slice(
            s, (x @ w)[:2, None], (jnp.int32(1), jnp.int32(2), jnp.int32(0))
        )
        return jnp.tanh(s.sum(1) @ w), s

    return lax.scan(body, x, (w, s), reverse=True)


def decoder_at(place: Any, negative: bool = True) -> Any:
    """One that writes where it is said, which JAX moves to where all of the part fits."""

    def fn(w: Any, x: Any, b: Any, s: Any) -> Any:
        def body(x: Any, given: Any) -> Any:
            w, s = given
            at = (jnp.zeros_like(place), jnp.asarray(place), jnp.zeros_like(place))
            s = lax.dynamic_update_slice(s, (x @ w)[:, None], at, allow_negative_indices=negative)
            return jnp.einsum("bk,btk,kl->bl", x, s, w), s

        return lax.scan(body, x, (w, s))

    return fn


PLACES = (np.int32(-12), np.int32(-3), np.int32(7), np.int8(5), np.uint8(200), np.uint32(4e9))


def changing_places(w: Any, x: Any, b: Any, s: Any) -> Any:
    def body(c: Any, w: Any) -> Any:
        x, y = c
        return (y, x @ w), None

    return lax.scan(body, (x, x + 1), w)


def gradient(w: Any, x: Any, b: Any, s: Any) -> Any:
    """Slices that two loops read, and stacks that one makes for the other."""

    def loss(w: Any, x: Any, b: Any) -> Any:
        x, (sums, firsts) = layers(w, x, b, s)
        return (x * sums.sum(0)).sum() + firsts.sum()

    return jax.grad(loss, (0, 1, 2))(w, x, b)


def computed_again(w: Any, x: Any, b: Any, s: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        y = jax.checkpoint(lambda x: jnp.sin(x @ w))(x)
        return jax.checkpoint(lambda y: jnp.tanh(y @ w.T) + b)(y), y.sum()

    def loss(w: Any) -> Any:
        x_, sums = lax.scan(layer, x, w)
        return x_.sum() + (sums**2).sum()

    return jax.grad(loss)(w)


LOOPS = (
    *(layers, backwards, decoder, decoder_backwards, changing_places, gradient, computed_again),
    *(decoder_at(p) for p in PLACES),
    decoder_at(np.int32(-3), negative=False),
)


@pytest.mark.parametrize("fn", LOOPS)
def test_a_loop_written_out_gives_the_same_numbers(fn: Callable[..., Any]) -> None:
    with jax.enable_x64(True):
        given = tuple([jnp.asarray(x, jnp.float64) for x in (W, X, BIAS, STACK)])
        graph, wanted = te.trace(fn, *given).graph, jax.tree.leaves(jax.jit(fn)(*given))
        made, shared = with_loops_written_out(graph), with_loops_written_out(graph, shared=True)
        for one in (made, shared):
            assert not any(op.regions for op in one.operations)
            for a, b in zip(jax.tree.leaves(emit(one)(*given)), wanted, strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)
    # Where a plan is read again, JAX need not have 64-bit types.
    assert changed(graph, {RULE}) == made and is_change(RULE)
    assert changed(graph, {SHARED}) == shared and is_change(SHARED)
    assert (shared != made) == (fn in (gradient, computed_again))
    assert {op.source for op in made.operations} <= {
        *(op.source for op in graph.operations),
        *(x.source for op in graph.operations for r in op.regions for x in r.operations),
    }


def tokens(w: Any, x: Any, b: Any, s: Any) -> Any:
    """A loop of another one's rounds, whose stack it carries on."""

    def one(c: Any, _: Any) -> Any:
        x, s = decoder(w, *c[:1], b, c[1])
        return (x / 4, s), x.sum()

    return lax.scan(one, (x, s), None, length=3)


NESTED: dict[str, Callable[..., Any]] = {
    "in a scan": tokens,
    "in a while": lambda w, x, b, s: lax.while_loop(
        lambda c: c[0] < b[0] + 3, lambda c: (c[0] + 1, layers(w, c[1], b, s)[0]), (0, x)
    ),
    "in a branch": lambda w, x, b, s: lax.cond(
        b[0] > 9, lambda x: x, lambda x: layers(w, x, b, s)[0], x
    ),
    "in two": lambda w, x, b, s: lax.fori_loop(
        0, 2, lambda _, c: tokens(w, c[0], b, c[1])[0], (x, s)
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_loops_inside_others_are_written_out(name: str) -> None:
    graph = te.trace(NESTED[name], W, X, BIAS, STACK).graph
    made = with_loops_written_out(graph)
    assert sliced_bytes(graph) and not sliced_bytes(made)
    verify_graph(made)
    given = W, X, BIAS, STACK
    wanted = jax.tree.leaves(jax.jit(NESTED[name])(*given))
    for a, b in zip(jax.tree.leaves(emit(made)(*given)), wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_every_round_is_computed_again_by_itself() -> None:
    """Else a compiler would hold what all rounds compute again at once."""
    graph = te.trace(computed_again, W, X, BIAS, STACK).graph
    again = {op.remat for op in graph.walk() if op.remat is not None}
    made = with_loops_written_out(graph)
    numbers = {op.remat for op in made.operations if op.remat is not None}
    assert len(numbers) == ROUNDS * len(again) > 0 and not numbers & again


def test_rounds_of_the_loop_outside_count() -> None:
    (alone,), (inside,) = (
        sliced_bytes(te.trace(fn, W, X, BIAS, STACK).graph).values() for fn in (decoder, tokens)
    )
    assert inside == 3 * alone


def printed(w: Any, x: Any, b: Any, s: Any) -> Any:
    def body(x: Any, w: Any) -> Any:
        jax.debug.print("{}", x[0, 0])
        return x @ w, None

    return lax.scan(body, x, w)


LEFT: dict[str, Callable[..., Any]] = {
    "no product reads a slice": lambda w, x, b, s: lax.scan(
        lambda x, w: (jnp.sin(x) * w[:ROWS], None), x, w
    ),
    "a vector is multiplied": lambda w, x, b, s: lax.scan(lambda b, w: (b @ w, None), b, w),
    "nothing is sliced": lambda w, x, b, s: lax.fori_loop(0, 3, lambda _, x: x @ w[0], x),
    "it has effects": printed,
    "all of it is computed again": lambda w, x, b, s: jax.grad(
        lambda w: jax.checkpoint(
            lambda x, w: lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, w)[0]
        )(x, w).sum()
    )(w),
    "it has no rounds": lambda w, x, b, s: lax.scan(lambda x, w: (x @ w, None), x, w[:0]),
}


def test_a_loop_of_more_rounds_than_its_places_count_to_is_written_out() -> None:
    many = (draw(130, SIZE, SIZE), X, BIAS, draw(130, ROWS, 6, SIZE))
    graph = te.trace(fn := decoder_at(np.int8(3)), *many).graph
    got = jax.tree.leaves(emit(with_loops_written_out(graph))(*many))
    for a, b in zip(got, jax.tree.leaves(jax.jit(fn)(*many)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", LEFT)
def test_other_loops_are_left(name: str) -> None:
    graph = te.trace(LEFT[name], W, X, BIAS, STACK).graph
    made = with_loops_written_out(graph)
    again, left = ([op.remat for op in g.walk() if op.remat is not None] for g in (graph, made))
    assert left == again if again else made is graph  # a loop before those may be written out
    assert bool(again) == ("again" in name)


def test_what_is_written_out_is_not_too_long() -> None:
    """Short loops come first."""

    def fn(w: Any, x: Any, b: Any, s: Any) -> Any:
        return lax.scan(lambda x, w: (x @ w, None), layers(w, x, b, s)[0], w)

    graph = te.trace(fn, W, X, BIAS, STACK).graph
    first, second = sliced_bytes(graph)
    assert second < first and sliced_bytes(graph)[first] == W.nbytes
    assert [*sliced_bytes(graph, ROUNDS)] == [first]


@pytest.mark.parametrize(("limit", "front"), [("MOST", True), ("FEW", False)])
@pytest.mark.parametrize(("most", "told"), [(16, 0), (15, 1)])
def test_a_note_counts_loops_that_are_too_long(
    most: int, told: int, limit: str, front: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fn(w: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    shapes = (8, 2048, 2048), (16, 2048)
    program = te.trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    assert len(program.graph.operations[-1].regions[0].operations) == 2
    monkeypatch.setattr(written_out, limit, most)
    notes = te.optimize(program, "h100:1", settings=te.Settings(work=0.1, front=front)).notes
    assert [n.count for n in notes if n.kind == "loops-long"] == [1] * told


@pytest.mark.parametrize("front", [False, True])
def test_a_plan_is_made_again_by_the_names_of_its_rules(front: bool) -> None:
    """As loading does, where long loops were left for one plan that was wanted soon."""

    def fn(w: Any, v: Any, x: Any) -> Any:
        for stack in (w, v):
            x = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, stack)[0]
        return x

    shapes = (50, 512, 512), (300, 512, 512), (16, 512)
    program = te.trace(fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    settings = te.Settings(work=0.1, front=front)
    plans = list(te.optimize(program, "h100:8", settings=settings))
    few = {rule for plan in plans for rule in plan.rules if rule.endswith("-few")}
    assert bool(few) != front
    for plan in plans:
        for step in plan.steps:
            assert digest(changed(program.graph, step.rules)) == step.digest


def test_the_ledger_counts_no_copies_of_what_products_read_where_it_lies() -> None:
    """Else lean plans are refused, of which such slices would be most."""
    shapes = (4, 256, 1024), (4, 1024, 256), (16, 256)

    def mlp(up: Any, down: Any, x: Any) -> Any:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w[0]) @ w[1], None), x, (up, down))[0]

    program = te.trace(mlp, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
    program = replace(program, graph=with_loops_written_out(program.graph))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as that a plan is left out
        front = te.optimize(program, "h100:8", settings=te.Settings(work=0.3, forms=0))
    for plan in front:
        audit(plan)


def products_in_no_order(plan: te.Plan) -> int:
    """How many products of a plan's program need nothing of the product before them."""
    (mapped,) = (e for e in emitted(plan).eqns if e.primitive.name == "shard_map")
    made_of: dict[Any, set[int]] = {}
    products = apart = 0
    for equation in getattr(mapped.params["jaxpr"], "jaxpr", mapped.params["jaxpr"]).eqns:
        of = set().union(*(made_of.get(v, ()) for v in equation.invars if not hasattr(v, "val")))
        if equation.primitive.name == "dot_general":
            apart += products > 0 and products not in of
            products += 1
            of.add(products)
        made_of.update((v, of) for v in equation.outvars)
    assert products > ROUNDS
    return apart


def test_rounds_that_are_computed_again_keep_their_order() -> None:
    """Else a compiler puts the products of all weights' gradients off, and holds what they read."""

    def step(w: Any, v: Any, x: Any) -> Any:
        layer = jax.checkpoint(lambda x, p: (x + jnp.tanh(x @ p[0]) @ p[1], None))

        def loss(w: Any, v: Any) -> Any:
            return jnp.mean(lax.scan(layer, x, (w, v))[0] ** 2)

        return [p - g for p, g in zip((w, v), jax.grad(loss, (0, 1))(w, v), strict=True)]

    shapes = (4, 128, 512), (4, 512, 128), (1024, 128)
    given = (jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)
    program = te.trace(step, *given, donate_argnums=(0, 1))
    front = te.optimize(program, "h100:8", settings=te.Settings(work=0.5))
    assert any(SHARED in plan.rules for plan in front)
    assert not any(map(products_in_no_order, front))


@pytest.mark.parametrize(("front", "tokens"), [(True, 1), (False, 1), (False, 3)])
def test_a_decoding_step_reads_its_weights_and_caches_once(front: bool, tokens: int) -> None:
    """The fastest plan for H100 says so, and XLA holds what it promises."""
    layers, rows, size, places, heads, queries = 8, 32, 1024, 1024, 8, 4

    def step(p: Any, cache: Any, x: Any, at: Any) -> Any:
        def block(x: Any, given: Any) -> Any:
            q, w, v, k = given
            k = lax.dynamic_update_slice_in_dim(k, (x @ w).reshape(rows, 1, heads, -1), at, 1)
            q = (x @ q).reshape(rows, heads, queries, -1)
            a = jax.nn.softmax(jnp.einsum("bhqk,bthk->bhqt", q, k), -1)
            return x + jnp.einsum("bhqt,bthk->bhqk", a, k).reshape(rows, -1) @ v, k

        def one(c: Any, _: Any) -> Any:
            x, cache = c
            return lax.scan(block, x, (*p, cache)), None

        if tokens == 1:
            return one((x, cache), None)[0]
        return lax.scan(one, (x, cache), None, tokens)[0]

    f32, wide = jnp.float32, queries * size
    shapes = (size, wide), (size, size), (wide, size)
    weights = [jax.ShapeDtypeStruct((layers, *s), f32) for s in shapes]
    cache = jax.ShapeDtypeStruct((layers, rows, places, heads, size // heads), f32)
    arguments = weights, cache, jax.ShapeDtypeStruct((rows, size), f32)
    program = te.trace(step, *arguments, jax.ShapeDtypeStruct((), jnp.int32), donate_argnums=1)
    meshes = [MeshShape(("x",), (8,))]
    asked: Any = {"mesh_shapes": meshes, "settings": te.Settings(work=1, front=front)}
    plan = te.optimize(program, "h100:8", **asked)[0]
    other = te.optimize(program, "h100:8", books=["sharding", "collectives"], **asked)[0]
    assert SHARED in plan.rules and plan.costs.seconds < 0.8 * other.costs.seconds
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    compiled = hlo_stats(te.compile(plan, h100s()).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
