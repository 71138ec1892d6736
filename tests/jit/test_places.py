"""What `te.jit` makes of meshes and places: which mesh counts, and what arguments pin by lying."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.jit.planning import (
    Request,
    mesh_shape,
    named_mesh,
    pinned_leaves,
    plan_program,
)
from tapestry_egg.tracing.call_signature import on_meshes

QUICK = Settings(
    work=0.2, merge=False, forms=0, algebra=replace(Settings().algebra, iterations=0), recompute=0
)


def grid(names: tuple[str, ...] = ("data", "model"), sizes: tuple[int, ...] = (4, 2)) -> Mesh:
    return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))


def on(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


def forward(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["down"]


W = {"down": jnp.ones((32, 16)), "up": jnp.ones((16, 32))}
X = jnp.ones((64, 16))
PROGRAM = te.trace(forward, W, X)


def test_the_mesh_is_the_one_given_else_that_of_shardings_arguments_or_context() -> None:
    a, b, c = grid(("a", "b")), grid(("c", "d")), grid(("e",), (8,))
    lying = (on(b, "c"), None, None)
    assert named_mesh(Request(mesh=a, committed=lying)) is a
    asked = Request(in_shardings=(None, on(a, "a"), None), committed=lying)
    assert named_mesh(asked) is a and named_mesh(Request(committed=lying)) is b
    assert named_mesh(Request(mesh=jax.devices(), committed=lying)) is b
    assert named_mesh(Request(mesh=jax.devices()[:4], committed=lying)) is None, "other devices"
    assert named_mesh(Request(committed=lying, arguments="free")) is None
    assert named_mesh(Request()) is None
    with jax.set_mesh(c):
        assert named_mesh(Request()) is c and named_mesh(Request(mesh=a)) is a
    with c:
        assert named_mesh(Request()) is c
    one = Mesh(np.array(jax.devices()[:1]), ("one",))
    assert named_mesh(Request(committed=(on(one), None, None))) is None
    assert mesh_shape(a) == MeshShape(("a", "b"), (4, 2)) and mesh_shape(None) is None


def test_arguments_pin_where_nothing_else_is_said() -> None:
    mesh = grid()
    lying = (on(mesh, None, "model"), on(mesh, "model"), on(mesh, "data"))
    inputs, outputs = pinned_leaves(PROGRAM, Request(committed=lying))
    assert inputs.dims == (((), ("model",)), (("model",), ()), (("data",), ()))
    assert outputs.dims == (None,)
    said = Request(
        committed=lying,
        in_shardings=(None, P("data"), None),
        pins={"[0]['down']": ()},
    )
    inputs, _ = pinned_leaves(PROGRAM, said)
    assert inputs.dims == (None, (("data",), ()), (("data",), ()))
    free, _ = pinned_leaves(PROGRAM, replace(said, arguments="free"))
    assert free.dims == (None, (("data",), ()), None)


def test_places_on_another_mesh_count_where_the_axes_express_them() -> None:
    mesh = grid()
    fine = Mesh(mesh.devices.reshape(2, 2, 2), ("p", "q", "r"))
    lying = (on(fine, ("p", "q")), on(fine, None, "r"), on(fine, "p"))
    with pytest.warns(UserWarning, match=r"\[1\] lie on another mesh"):
        inputs, _ = pinned_leaves(PROGRAM, Request(mesh=mesh, committed=lying))
    assert inputs.dims == ((("data",), ()), ((), ("model",)), None)
    turned = Mesh(mesh.devices[::-1], ("data", "model"))
    with pytest.warns(UserWarning, match="lie on another mesh"):
        inputs, _ = pinned_leaves(
            PROGRAM, Request(mesh=mesh, committed=(on(turned, "data"), None, None))
        )
    assert inputs.dims == (None, None, None), "the same names over devices in another order"


@pytest.mark.slow
def test_arguments_that_no_plan_can_leave_in_place_are_moved_and_that_is_told() -> None:
    mesh = grid()
    lying = (on(mesh), on(mesh), on(mesh))
    least = plan_program(PROGRAM, Request(settings=QUICK)).best("peak_bytes").costs.peak_bytes
    tight = Request(committed=lying, settings=QUICK, limits={"peak_bytes": least * 1.05})
    with pytest.warns(UserWarning, match="moved at every call"):
        assert len(plan_program(PROGRAM, tight))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(plan_program(PROGRAM, replace(tight, arguments="free")))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_jit_keeps_the_users_words(kind: AxisType) -> None:
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    auto = grid()
    w = jax.device_put(W, {"down": on(mesh, "model"), "up": on(mesh, None, "model")})
    x = jax.device_put(X, on(mesh, "data"))

    def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        if kind == AxisType.Auto:
            y = jax.lax.with_sharding_constraint(forward(w, x), on(auto, "data", "model"))
        else:
            hidden = jnp.tanh(x @ w["up"])
            y = jnp.matmul(hidden, w["down"], out_sharding=P("data", None))
        return jax.tree.map(lambda a: a * 0.5, w), y

    with jax.set_mesh(mesh):
        wanted = jax.jit(step)(w, x)
        run = te.jit(step, donate_argnums=0, cache=False, settings=QUICK)
        again = jax.tree.map(jnp.copy, w)
        got = run(again, x)
        plan = run.plan(w, x)
        assert plan.in_shardings == (Layout(((1,), ())), Layout(((), (1,))), Layout(((0,), ())))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)
            assert a.sharding.mesh == mesh
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
            assert jax.typeof(a) == jax.typeof(b)
        front = run.front(w, x)
        more = run(got[0], x)  # fed back: no new plan
        assert run.plan(more[0], x) is plan or run.front(more[0], x) is front
        free = te.jit(step, mesh=mesh, arguments="free", cache=False, settings=QUICK)
        assert free.plan(w, x).costs.seconds <= plan.costs.seconds
    with pytest.raises(te.TapestryError, match="pinned"):
        te.jit(step, arguments="anywhere")  # type: ignore[arg-type]


@pytest.mark.slow
def test_parameters_born_in_a_plans_layouts_on_an_explicit_mesh_are_taken_there() -> None:
    """Their types then tell nothing of products along the dims that are cut, and JAX would ask."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        grads = jax.grad(lambda w: jnp.sum((forward(w, x) - 1) ** 2))(w)
        return jax.tree.map(lambda a, g: a - 1e-4 * g, w, grads)

    wanted = jax.jit(step)(jax.jit(step)(W, X), X)
    with jax.set_mesh(mesh):
        run = te.jit(step, mesh=mesh, cache=False, settings=QUICK)
        cut = {"down": P("model"), "up": P(None, "model")}
        w = jax.device_put(W, cut)
        with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
            jax.jit(step)(w, X)
        w = run(run(w, X), X)
        for name, leaf in w.items():
            np.testing.assert_allclose(leaf, wanted[name], rtol=1e-5)
            assert leaf.sharding.mesh == mesh
        whole = NamedSharding(mesh.abstract_mesh, P(None, None))
        assert on_meshes([jax.ShapeDtypeStruct((8, 8), "f", sharding=whole)]) == (), "a type only"
        for abstract in (mesh, mesh.abstract_mesh):
            shapes = {
                k: jax.ShapeDtypeStruct(W[k].shape, W[k].dtype, sharding=NamedSharding(abstract, s))
                for k, s in cut.items()
            }
            plan = te.jit(step, mesh=mesh, cache=False, settings=QUICK).plan(shapes, X)
            assert plan.in_shardings[:2] == (Layout(((1,), ())), Layout(((), (1,))))


@pytest.mark.slow
def test_results_on_an_explicit_mesh_come_back_without_a_new_plan() -> None:
    """Layouts that a plan chose may be such that JAX cannot type the program by them."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    @te.jit(mesh=mesh, cache=False, settings=QUICK, pins={"[0]": ("data",), "[1]": (None, "data")})
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - 0.1 * x.T @ (x @ w)

    w, x = jnp.ones((16, 16)), jnp.full((64, 16), 0.01)
    wanted = jax.jit(step.__wrapped__)(step.__wrapped__(w, x), x)
    once = step(w, x)
    np.testing.assert_allclose(step(once, x), wanted, rtol=1e-5)
    put = jax.device_put(x, on(mesh, None, "data"))
    once = jax.device_put(once, on(mesh, "data"))
    with pytest.raises(Exception, match="Contracting dimensions are sharded"):
        jax.jit(step.__wrapped__)(once, put)
    assert step.plan(once, put) is step.plan(w, x)
    born = te.jit(step.__wrapped__, cache=False, settings=QUICK)
    np.testing.assert_allclose(born(once, put), wanted, rtol=1e-5)
