"""Meshes that are the same but for the names of their axes are searched once."""

from __future__ import annotations

from itertools import combinations, permutations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.problem.assemble import assemble
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tapestry_egg.tracing.trace import Program, trace

KINDS = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
SPECS = ("h100:8", "h100:2x4", "h100:4x8", "cpu:12", "v5e:4x4", "v5e:2x4", "v5e:8x8")


def sizes(spec: str, axes: int = 2) -> list[tuple[int, ...]]:
    target = load_target(spec)
    return [mesh.sizes for mesh in target.distinct(target.mesh_shapes(axes))]


def test_on_one_switch_the_order_of_axes_is_all_the_same() -> None:
    assert sizes("h100:8") == [(8,), (2, 4)]
    assert sizes("h100:8", 3) == [(8,), (2, 4), (2, 2, 2)]
    assert sizes("cpu:12") == [(12,), (2, 6), (3, 4)]


def test_between_hosts_it_is_not() -> None:
    """Four groups of two hosts, or two groups that each lie in one host."""
    assert {(2, 4), (4, 2)} <= set(sizes("h100:2x4"))


def priced(mesh: MeshShape, order: tuple[int, ...], target: Target) -> list[float]:
    """What collectives take over every group of a mesh's axes, the axes read in an order."""
    groups = [g for n in range(len(order)) for g in combinations(order, n + 1)]
    return [
        float(collective_seconds(kind, nbytes, tuple(sorted(g)), mesh, target))
        for g in groups
        for kind in KINDS
        for nbytes in (64.0, 1e9)
    ]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("axes", [2, 3])
def test_what_is_left_out_costs_the_same_as_something_kept(spec: str, axes: int) -> None:
    target = load_target(spec)
    every = target.mesh_shapes(axes)
    kept = target.distinct(every)
    assert set(kept) <= set(every) and kept[0] == every[0]

    def alike(a: MeshShape, b: MeshShape) -> bool:
        same = tuple(range(len(b.sizes)))
        return any(
            tuple(a.sizes[k] for k in order) == b.sizes
            and priced(a, order, target) == pytest.approx(priced(b, same, target), rel=1e-12)
            for order in permutations(range(len(a.sizes)))
        )

    for mesh in every:
        assert mesh in kept or any(alike(mesh, other) for other in kept)


F32 = jnp.float32
WIDE, TALL = jax.ShapeDtypeStruct((16, 64), F32), jax.ShapeDtypeStruct((64, 32), F32)


def step(w: jax.Array, x: jax.Array) -> jax.Array:
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)


def program() -> Program:
    return trace(step, TALL, WIDE, donate_argnums=(0,))


def problem(mesh: tuple[int, int]) -> Problem:
    graph, shape = program().graph, MeshShape(("x", "y"), mesh)
    plan = scheduled(graph, feedback_pairs(graph))
    found = saturate(encode(plan.program, shape), load_books(("sharding", "collectives")))
    return assemble(unit_choices(plan, found, shape, load_target("h100:8"))).problem


@pytest.mark.slow
def test_every_strategy_has_its_like_on_the_mesh_with_other_names() -> None:
    one, other = problem((2, 4)), problem((4, 2))
    for a, b in zip((*one.variables, *one.pairs), (*other.variables, *other.pairs), strict=True):
        for x, y in ((a.seconds, b.seconds), (a.joules, b.joules)):
            np.testing.assert_allclose(np.sort(x.ravel()), np.sort(y.ravel()), rtol=1e-12)


@pytest.mark.slow
def test_all_meshes_that_are_asked_for_are_searched() -> None:
    both = [MeshShape(("x", "y"), (2, 4)), MeshShape(("x", "y"), (4, 2))]
    settings = Settings(work=0.2, recompute=0, forms=0, merge=False)
    fronts = [
        optimize(program(), "h100:8", mesh_shapes=shapes, settings=settings)
        for shapes in (both[:1], both[1:], both)
    ]
    (costs, *others) = [[p.costs.seconds for p in front] for front in fronts]
    for found in others:
        assert found == pytest.approx(costs)
    assert {str(m) for m in (p.mesh for p in fronts[1])} == {str(both[1])}
