"""One tensor dim cut by two index dims: a dim put together of heads and what each has."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.certify.legality import check_strategy
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import finish, make_plan, signature_of
from tests.runtime.lowered import as_planned
from tests.shard.test_saturate import saturated

Array = Any
MESH = MeshShape(("x", "y"), (4, 2))
EIGHTHS = MeshShape(("x", "y", "z"), (2, 2, 2))
QUICK = Settings(work=0.3, recompute=0, forms=0)


def normal(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def by_head(w: Array, b: Array) -> Array:
    """Taken apart into four heads, and put together again."""
    return jnp.tanh(w.reshape(4, 64) + b).reshape(256) * 2.0


def scores(x: Array, w: Array) -> Array:
    """Queries of four heads, each with itself: sums over what each head has."""
    q = (x @ w).reshape(16, 4, 32)
    return jnp.einsum("shd,thd->hst", q, q)


@pytest.mark.slow
def test_both_digits_of_a_dim_are_cut_and_nothing_moves() -> None:
    arguments = normal(256), normal(4, 64)
    flat = (("x", "y"),)
    front = te.optimize(
        te.trace(by_head, *arguments),
        "cpu:8",
        mesh_shapes=[MESH],
        pins={"[0]": flat, "[1]": ("x", "y"), "result": flat},
        settings=QUICK,
    )
    plan = front.best("peak_bytes")
    assert not plan.collectives
    assert plan.costs.peak_bytes < 4 * 256, "no device has all of it"
    as_planned(plan, arguments, by_head(*arguments), 1e-6)


@pytest.mark.slow
def test_a_product_makes_heads_that_two_axes_share() -> None:
    """Columns cut by both axes are heads by one and their insides by the other: what is summed over
    these is all that is sent, where columns by head alone would be gathered."""
    arguments = normal(16, 24), normal(24, 128)
    front = te.optimize(
        te.trace(scores, *arguments),
        "cpu:8",
        mesh_shapes=[MESH],
        pins={"[0]": (None, None), "[1]": (None, ("x", "y")), "result": ("x", None, None)},
        settings=QUICK,
    )
    plan = front.best("peak_bytes")
    assert [(c.kind, c.axes) for c in plan.collectives] == [("all_reduce", ("y",))]
    for plan in front:
        as_planned(plan, arguments, scores(*arguments), 1e-3)


@pytest.mark.slow
def test_three_digits_of_a_dim_are_cut_and_nothing_moves() -> None:
    """A dim of (a·b·c) elements taken apart, each part cut over an axis of its own."""
    x, b = normal(256), normal(2, 2, 64)
    flat = (("x", "y", "z"),)

    def function(x: Array, b: Array) -> Array:
        return jnp.tanh(x.reshape(2, 2, 64) + b).reshape(256) * 2.0

    front = te.optimize(
        te.trace(function, x, b),
        "cpu:8",
        mesh_shapes=[EIGHTHS],
        pins={"[0]": flat, "[1]": ("x", "y", "z"), "result": flat},
        settings=QUICK,
    )
    plan = front.best("peak_bytes")
    assert not plan.collectives
    assert plan.costs.peak_bytes < 4 * 256, "no device has all of it"
    as_planned(plan, (x, b), function(x, b), 1e-6)


def reshaped(rng: Random) -> tuple[Any, Array]:
    """A reshape between two ways to put the same digits together."""
    digits = [rng.choice([2, 2, 4, 4, 8, 3, 6]) for _ in range(rng.choice([2, 3, 4]))]
    shapes = []
    for _ in range(2):
        shape, at = [], 0
        while at < len(digits):
            count = rng.choice([1, 1, 2, 3])
            shape.append(int(np.prod(digits[at : at + count])))
            at += count
        shapes.append(shape)
    return (lambda x: lax.reshape(x, shapes[1])), normal(*shapes[0])


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "seeds"), [(MESH, 24), (EIGHTHS, 6)], ids=str)
def test_every_reshape_that_digits_cut_gives_its_elements(mesh: MeshShape, seeds: int) -> None:
    tried = 0
    for seed in range(seeds):
        function, x = reshaped(Random(seed))
        program = trace(function, x)
        if len(program.graph.operations) != 1:
            continue
        signature = signature_of(program.graph, program.graph.operations[0])
        (found,) = saturated([signature], mesh).strategies
        for row in found:
            strategy = Strategy(row.cuts, row.layouts[:1], row.layouts[1:])
            check_strategy(signature, strategy, mesh)
            layouts = (*strategy.needs, *strategy.gives)
            if row.passes or all(x in strategy.cuts for one in layouts for x in one.dims):
                continue
            body = finish(program.graph, mesh, strategy.needs, strategy.gives, (strategy,))
            plan = replace(make_plan(body, mesh), program=program)
            run = te.compile(plan, jax.devices()[:8])
            np.testing.assert_array_equal(np.asarray(run(x)), np.asarray(function(x)))
            tried += 1
    assert tried >= 4
