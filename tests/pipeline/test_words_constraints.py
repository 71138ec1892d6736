"""Constraints inside a program: they hold in every plan, wherever the user has written them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import BodyPlan, Plan
from tests.pipeline.test_words import QUICK, arguments, forward, same_numbers, user_mesh


def constrained(plan: Plan) -> list[tuple[list[Any], Layout, MeshShape]]:
    """What every constraint of a plan asks for, and the layout that its value has."""

    def of(body: BodyPlan) -> list[tuple[list[Any], Layout, MeshShape]]:
        out = []
        for op, s in zip(body.graph.operations, body.strategies, strict=True):
            if op.kernel == "sharding_constraint":
                out.append((op.params["dims"], s.gives[0], plan.mesh))
            for inner in s.bodies:
                out += of(inner)
        return out

    return of(plan.body)


def holds(dims: list[Any], layout: Layout, mesh: MeshShape) -> bool:
    names = [[mesh.names[a] for a in d] for d in layout.dims]
    return not layout.partial and all(w is None or w == h for w, h in zip(dims, names, strict=True))


@pytest.mark.slow
def test_a_constrained_value_exists_as_asked_in_every_plan() -> None:
    mesh = user_mesh()
    w, x = arguments()

    def step(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        hidden = jnp.tanh(x @ w["up"])
        hidden = jax.lax.with_sharding_constraint(hidden, NamedSharding(mesh, P("model", "data")))
        free = jax.lax.with_sharding_constraint(
            hidden @ w["down"], NamedSharding(mesh, P(P.UNCONSTRAINED, "model"))
        )
        return (free * 2).sum()

    front = te.optimize(te.trace(step, w, x), "cpu:8", settings=QUICK)
    wanted = jax.jit(step)(w, x)
    for plan in front:
        asked = constrained(plan)
        assert {str(d) for d, *_ in asked} == {"[['model'], ['data']]", "[None, ['model']]"}
        assert all(holds(*one) for one in asked)
        run = te.compile(plan, mesh)
        same_numbers(run(w, x), wanted)
        assert "tensor<32x8xf32>" in run.lower().as_text(), "64 over model, 32 over data"
    # Without it no plan is so: the constraint decides, not the costs.
    free = te.optimize(
        te.trace(lambda w, x: (forward(w, x) * 2).sum(), w, x), "cpu:8", mesh=mesh, settings=QUICK
    )
    assert "tensor<32x8xf32>" not in te.compile(free.best(), mesh).lower().as_text()


def test_an_output_constrained_last_leaves_as_jax_jit_leaves_it() -> None:
    mesh = user_mesh()
    x = arguments()[1]

    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = jax.lax.with_sharding_constraint(x * 2, NamedSharding(mesh, P("model", "data")))
        return y, x + 1

    wanted = jax.jit(step)(x)
    plan = te.optimize(te.trace(step, x), "cpu:8", settings=QUICK).best()
    got = te.compile(plan, mesh)(x)
    same_numbers(got, wanted)
    assert got[0].sharding.is_equivalent_to(wanted[0].sharding, 2)
    # The user's word for the result goes before it, and the value is still made as constrained.
    said = te.optimize(te.trace(step, x), "cpu:8", out_shardings=(P("data"), None), settings=QUICK)
    for p in said:
        assert p.out_shardings[0] == Layout(((0,), ())) and all(holds(*c) for c in constrained(p))


@pytest.mark.slow
def test_constraints_hold_in_loops_under_vmap_and_in_gradients() -> None:
    mesh = user_mesh()
    ask = NamedSharding(mesh, P("data", "model"))

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        def layer(h: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jax.lax.with_sharding_constraint(jnp.tanh(h @ w), ask), None

        h, _ = jax.lax.scan(layer, x, None, length=3)
        rows = jax.vmap(
            lambda r: jax.lax.with_sharding_constraint(r * 2, NamedSharding(mesh, P("model")))
        )(h)
        return jnp.sum(rows**2)  # of a plain sum the gradient is a number, which nothing constrains

    w, x = jnp.eye(16) * 0.5, arguments()[1]
    program = te.trace(jax.grad(loss), w, x)
    plan = te.optimize(program, "cpu:8", settings=QUICK).best()
    asked = constrained(plan)
    assert len(asked) >= 3, "forward and backward, inside the loop and outside"
    assert {str(d) for d, *_ in asked} == {"[['data'], ['model']]", "[None, ['model']]"}
    assert all(holds(*one) for one in asked)
    same_numbers(te.compile(plan, mesh)(w, x), jax.jit(jax.grad(loss))(w, x))


@pytest.mark.slow
def test_a_constraint_that_no_mesh_can_heed_is_told_once() -> None:
    x = jnp.ones((6, 4))

    def step(x: jax.Array) -> jax.Array:
        y = x * 2
        uneven = NamedSharding(AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,)), P("x"))
        return jax.lax.with_sharding_constraint(y, uneven).sum()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        front = te.optimize(te.trace(step, x), "cpu:8", settings=QUICK)
    (told,) = [str(w.message) for w in caught if "constraint" in str(w.message)]
    assert "is left out" in told and Path(__file__).name in told and told in map(str, front.notes)
    assert told.endswith("6 is not divisible by the 8 devices of x")

    def other(x: jax.Array) -> jax.Array:
        asked = NamedSharding(AbstractMesh((4,), ("q",), axis_types=(AxisType.Auto,)), P("q"))
        return jax.lax.with_sharding_constraint(x * 2, asked).sum()

    with pytest.warns(UserWarning, match="axes of the mesh 4q, and the meshes of plans are 8x"):
        te.optimize(te.trace(other, jnp.ones((8, 4))), "cpu:8", settings=QUICK)


def test_reshard_is_a_constraint_in_explicit_mode() -> None:
    mesh = user_mesh(kind=AxisType.Explicit)
    x = arguments()[1]

    def step(x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.sharding.reshard(x * 2, P("model", "data"))) + 1

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
        program = te.trace(step, placed)
        wanted = jax.jit(step)(placed)
        front = te.optimize(program, "cpu:8", mesh=mesh, settings=QUICK)
        for plan in front:
            assert constrained(plan) and all(holds(*one) for one in constrained(plan))
            got = te.compile(plan, mesh)(placed)
            same_numbers(got, wanted)
            assert jax.typeof(got).sharding == jax.typeof(wanted).sharding


def test_out_sharding_and_device_put_are_constraints() -> None:
    mesh = user_mesh(kind=AxisType.Explicit)
    w, x = arguments()

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        y = jnp.einsum("bk,kh->bh", x, w, out_sharding=P("model", "data"))
        return jnp.tanh(y).sum()

    with jax.set_mesh(mesh):
        program = te.trace(
            step,
            jax.device_put(w["up"], NamedSharding(mesh, P())),
            jax.device_put(x, NamedSharding(mesh, P())),
        )
    plan = te.optimize(program, "cpu:8", mesh=mesh, settings=QUICK).best()
    (asked,) = constrained(plan)
    assert asked[0] == [["model"], ["data"]] and holds(*asked)
    auto = user_mesh()

    def moved(x: jax.Array) -> jax.Array:
        return jnp.tanh(jax.device_put(x * 2, NamedSharding(auto, P(None, "data")))).sum()

    plan = te.optimize(te.trace(moved, x), "cpu:8", settings=QUICK).best()
    assert constrained(plan) and all(
        c[0] == [[], ["data"]] and holds(*c) for c in constrained(plan)
    )
