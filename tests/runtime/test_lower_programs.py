"""Loops, branches and whole programs under plans made by hand and at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.plans.plan import Strategy
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import (
    finish,
    make_plan,
    plan_by_hand,
    random_plan,
)
from tests.runtime.lowered import MESH, X, Y, cut, integers, moved, numbers, same


def test_a_copy_inside_a_scan_counts_by_its_length() -> None:
    def f(w: jax.Array, c: jax.Array, xs: jax.Array) -> Any:
        def step(c: jax.Array, x: jax.Array) -> Any:
            c = jnp.tanh(c @ w + x)
            return c, c * 2

        return lax.scan(step, c, xs, reverse=True)

    args = (numbers(8, 8), numbers(16, 8), numbers(5, 16, 8))
    program = trace(f, *args)
    (scan,) = program.graph.operations
    (inner,) = scan.regions
    rows, whole = cut((X,), ()), cut((), ())
    body = plan_by_hand(
        inner,
        MESH,
        {k: {"m" if op.kernel == "dot_general" else "i0": (X,)}
         for k, op in enumerate(inner.operations)},
        (cut((Y,), ()), rows, rows),
        (rows, rows),
    ).body  # fmt: skip
    stack = cut((), (X,), ())
    outer = Strategy((), (cut((Y,), ()), rows, stack), (rows, stack), (body,))
    plan = make_plan(
        finish(
            program.graph, MESH, (cut((Y,), ()), whole, cut((), (), ())), (rows, stack), (outer,)
        ),
        MESH,
    )
    assert moved(plan) == [("all_gather", 4, 8 * 8 * 4, 5)]
    run = compile(replace(plan, program=program))
    same(run(*args), f(*args))
    # XLA may lift the copy out of the loop; what it then moves is a single trip's bytes.
    assert hlo_stats(run.compile()).by_kind()[("all_gather", 4)] in (256, 5 * 256)


def rnn(w: jax.Array, x: jax.Array, c: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def step(c: jax.Array, x: jax.Array) -> Any:
            c = jnp.tanh(c @ w + x)
            return c, c * 2

        last, all_ = lax.scan(step, c, x)
        return jnp.sum(last * last) + jnp.sum(all_)

    return jax.value_and_grad(loss)(w)


def branches(x: jax.Array, w: jax.Array) -> Any:
    def more(s: Any) -> jax.Array:
        return (s[0] < 5) & (jnp.sum(s[1]) < 100)

    n, x = lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))
    return lax.cond(n > 3, lambda x: x @ w, lambda x: x * 2, x), n


def embedding(table: jax.Array, w: jax.Array, tokens: jax.Array, labels: jax.Array) -> Any:
    def loss(table: jax.Array, w: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(jnp.take(table, tokens, axis=0) @ w)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    return jax.value_and_grad(loss, (0, 1))(table, w)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rnn": (rnn, (numbers(8, 8) / 4, numbers(4, 8, 8), numbers(8, 8))),
    "branches": (branches, (numbers(8, 8), numbers(8, 8) / 3)),
    "embedding": (
        embedding,
        (numbers(32, 16), numbers(16, 32), integers(0, 32, 16), integers(0, 32, 16)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [("rnn", 0), ("branches", 0), ("branches", 1), ("embedding", 1)],
)
def test_random_plans_give_the_original_numbers(name: str, seed: int) -> None:
    fn, args = PROGRAMS[name]
    program = trace(fn, *args)
    plan = random_plan(program.graph, MESH, random.Random(seed))
    same(compile(replace(plan, program=program))(*args), fn(*args), 1e-3)


def test_the_dearest_branch_of_a_conditional_is_planned() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], x)

    args = (np.int32(1), numbers(8, 8))
    program = trace(f, *args)
    graph = program.graph
    at = next(k for k, op in enumerate(graph.operations) if op.kernel == "cond")
    rows, columns, whole = cut((X,), ()), cut((), (X,)), cut((), ())
    bodies = tuple(
        plan_by_hand(region, MESH, cuts, (rows,), (rows,)).body
        for region, cuts in zip(
            graph.operations[at].regions, ({0: {"i0": (X,)}}, {}, {0: {"i1": (X,)}}), strict=True
        )
    )
    strategies = [
        Strategy((), (cut(), rows), (rows,), bodies)
        if op.kernel == "cond"
        else Strategy((), (cut(),) * len(op.inputs), (cut(),) * len(op.outputs))
        for op in graph.operations
    ]
    body = finish(graph, MESH, (cut(), whole), (columns,), tuple(strategies))
    plan = replace(make_plan(body, MESH), program=program)
    gather = ("all_gather", 2, 256, 1)
    # Branch 1 gathers to run whole, branch 2 gathers twice; then the result is gathered.
    assert moved(plan) == [gather, gather, gather]
    same(compile(plan)(*args), f(*args))
