"""Assembling a problem: what equal layers have in common is worked out, and held, once."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

import tapestry_egg as te
from tapestry_egg.extract.choices.once import Once
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs, flatten
from tapestry_egg.schedule.schedules import in_order, schedule
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.trace import trace

N = 1024


@cache
def stack(layers: int) -> PlanProblem:
    """The problem of a gradient through equal layers with residuals, on a mesh of 2 by 4."""

    def loss(ws: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in ws:
            x = x + jnp.tanh(x @ w)
        return jnp.sum(x)

    args = [jax.ShapeDtypeStruct((N, N), "float32")] * layers
    graph = trace(jax.grad(loss), args, jax.ShapeDtypeStruct((64, N), "float32")).graph
    pairs = feedback_pairs(graph)
    plan = schedule(flatten(in_order(graph, pairs), pairs))
    mesh = MeshShape(("x", "y"), (2, 4))
    found = saturate(encode(plan.program, mesh), load_books(("sharding", "collectives")))
    return assemble(unit_choices(plan, found, mesh, load_target("h100:8")))


def tables(assembled: PlanProblem) -> set[int]:
    """The distinct arrays of costs that a problem holds."""
    problem = assembled.problem
    held = [p.seconds for p in problem.pairs] + [v.seconds for v in problem.variables]
    held += [u.amount for part in (*problem.pairs, *problem.variables) for u in part.uses]
    return {id(array) for array in held}


def test_more_layers_are_more_pairs_of_the_same_tables() -> None:
    few, many = stack(8), stack(16)
    assert len(many.problem.pairs) > 1.6 * len(few.problem.pairs)
    # Only what the readers of one value, spread over all layers, pay is new.
    assert len(tables(many)) < 1.2 * len(tables(few))


def test_shared_tables_belong_to_their_own_rows() -> None:
    """Sharing goes by structure, never by mere size: every table has its variable's labels."""
    problem = stack(8).problem
    for p in problem.pairs:
        assert (p.label_a.max() + 1, p.label_b.max() + 1) == p.seconds.shape
        assert len(p.label_a) == len(problem.variables[p.a])
        assert len(p.label_b) == len(problem.variables[p.b])
        assert all(u.amount.shape == p.seconds.shape for u in p.uses)


def test_once_makes_what_is_new_and_keeps_what_is_not() -> None:
    once, a, made = Once(), np.arange(3), []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    first = once(make, "sum", a, (1, (a, None)))
    assert once(make, "sum", a, (1, (a, None))) == first
    assert once(make, "sum", a.copy(), (1, (a, None))) != first  # equal, but another array
    assert once(make, "sum", a, (1, (a, 0))) != first
    assert once(make, "product", a, (1, (a, None))) != first


def test_a_key_keeps_its_objects_so_that_none_takes_their_place() -> None:
    once = Once()
    for n in range(200):  # each list is gone, but for the key, before the next is made
        assert once(lambda n=n: n, [n]) == n


def test_a_kept_copy_is_held_until_its_last_reader() -> None:
    """Gathered once for the first product and the last; most is alive between the two. That the
    plan's peak says so is what its certificate checks."""

    def twice(x: jax.Array, w: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        return (jnp.tanh(jnp.tanh(x @ w) @ c) @ d) @ w

    shapes = ((64, 256), (256, 256), (256, 8192), (8192, 256))
    program = te.trace(twice, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    plan = te.optimize(
        program,
        "h100:4",
        mesh_shapes=[MeshShape(("x",), (4,))],
        pins={"[0]": ("x", None), "[1]": ("x", None)},
        settings=Settings(work=1.0, workers=1, front=False),
    ).best("seconds")
    (kept,) = plan.body.kept.values()
    assert kept.until == len(plan.graph.operations) - 1
