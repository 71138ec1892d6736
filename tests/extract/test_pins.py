"""Pins: inputs enter where the user says, the rest is planned around them, and it still runs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.pins.pins import fitting, read_pins
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Plan

QUICK = Settings(work=0.3)
MESH = MeshShape(("x", "y"), (2, 4))


def step(params: dict[str, Any], x: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    def loss(params: dict[str, Any]) -> jax.Array:
        hidden = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])
        return jnp.mean(jnp.square(hidden @ params["down"]["w"]))

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def arguments() -> tuple[dict[str, Any], jax.Array]:
    rng = np.random.default_rng(0)

    def array(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"up": {"w": array(8, 32), "b": array(32)}, "down": {"w": array(32, 8)}}
    return params, array(16, 8)


def program() -> Any:
    return te.trace(step, *arguments(), donate_argnums=0)


def entering(plan: Plan) -> dict[str, Layout]:
    return dict(zip(plan.graph.input_names, plan.in_shardings, strict=True))


@pytest.mark.slow
def test_every_plan_enters_as_pinned_and_leaves_so() -> None:
    pins = {
        "[0]['up']": P(),
        "[0]['up']['w']": (None, ("y", "x")),
        "[0]['down']['w']": P("x", "y"),
        "[1]": ("y",),
    }
    front = te.optimize(program(), "cpu:8", mesh_shapes=[MESH], pins=pins, settings=QUICK)
    assert len(front) and front.original is None  # a pin is no plan that was given
    for plan in front:
        assert entering(plan) == {
            "[0]['down']['w']": Layout(((0,), (1,))),
            "[0]['up']['b']": Layout(((),)),
            "[0]['up']['w']": Layout(((), (1, 0))),
            "[1]": Layout(((1,), ())),
        }
        leaving = [x for x in plan.out_shardings if x.dims]
        assert leaving == list(plan.in_shardings[:3])  # donated: out as it came in


@pytest.mark.slow
def test_pins_only_take_plans_away() -> None:
    free = te.optimize(program(), "cpu:8", mesh_shapes=[MESH], settings=QUICK)
    chosen = free.best("seconds")
    pins = {
        name: tuple(tuple(MESH.names[a] for a in dim) for dim in layout.dims)
        for name, layout in entering(chosen).items()
    }
    same = te.optimize(program(), "cpu:8", mesh_shapes=[MESH], pins=pins, settings=QUICK)
    assert same.best("seconds").costs.seconds == pytest.approx(chosen.costs.seconds, rel=1e-6)
    away = te.optimize(program(), "cpu:8", mesh_shapes=[MESH], pins={"": ()}, settings=QUICK).best(
        "seconds"
    )
    assert all(not x.axes for x in away.in_shardings)
    assert away.costs.seconds >= chosen.costs.seconds * (1 - 1e-9)


def test_only_meshes_with_the_axes_are_planned() -> None:
    shapes = te.load_target("cpu:8").mesh_shapes()
    pins = read_pins(program().graph, {"[1]": (None, "y")})
    assert [s.sizes for s in fitting(pins, shapes)] == [(2, 4), (4, 2)]
    # Eight devices do not divide a dim of four, but two and four of them do.
    halves = te.trace(lambda x: x * 2, jnp.zeros((4, 3)))
    pins = read_pins(halves.graph, {"[0]": ("x",)})
    assert [s.sizes for s in fitting(pins, shapes)] == [(2, 4), (4, 2)]


@pytest.mark.parametrize(
    ("pins", "error", "words"),
    [
        ({"[0]['dwn']": ()}, ExtractError, ("no input lies at", "[0]['down']['w']")),
        (
            {"[0]['up']['w'": ()},
            ExtractError,
            ("no input lies at", "paths: [0]['down']['w'], [0]['up']['b'], [0]['up']['w'], [1]."),
        ),
        ({"[0]": (None, "x")}, ExtractError, ("['up']['b'] is f32[32]", "2 dims", "[0]")),
        ({"[1]": ("x", "x")}, ExtractError, ("occurs twice", "[1]")),
        ({"[1]": "x"}, ExtractError, ("not a layout", "[1]")),
        ({"[1]": (3,)}, ExtractError, ("3 names no mesh axes", "[1]")),
        ({"[1]": ("z",)}, TargetError, ("no mesh has the axis 'z'", "[1]", "2x")),
        ({"[1]": ("data",)}, TargetError, ("no mesh has the axis 'data'", "[1]")),
    ],
)
def test_bad_pins_are_refused_by_path(
    pins: dict[str, Any], error: type[te.TapestryError], words: tuple[str, ...]
) -> None:
    with pytest.raises(error) as caught:
        te.optimize(program(), "cpu:8", pins=pins, settings=QUICK)
    for word in (*words, "pins["):
        assert word in str(caught.value)
    assert caught.value.hint


def test_a_pin_that_does_not_divide_names_the_input() -> None:
    odd = te.trace(lambda x: x + 1, jnp.zeros((16, 3)))
    wanted = r"\[0\] of shape \[16, 3\] cannot be cut evenly .*: 3 is not divisible by [248]$"
    with pytest.raises(ExtractError, match=f"(?m){wanted}"):
        te.optimize(odd, "cpu:8", pins={"[0]": (None, "x")}, settings=QUICK)


@pytest.mark.slow
def test_jit_runs_with_pins() -> None:
    pins = {"[0]": P(), "[0]['up']['w']": P(None, "x"), "[1]": P("x")}
    params, x = arguments()
    wanted = jax.jit(step)(params, x)
    run = te.jit(step, pins=pins, settings=QUICK)
    plan = run.plan(params, x)
    names = plan.mesh.names
    assert entering(plan)["[0]['up']['w']"] == Layout(((), (names.index("x"),)))
    assert entering(plan)["[1]"] == Layout(((names.index("x"),), ()))
    got = run(params, x)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)
