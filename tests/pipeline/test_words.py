"""The user's words: constraints, shardings and a named mesh are heeded exactly, as by `jax.jit`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, TapestryError, TargetError
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.pins.boundary import Fixed, restrict
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.mesh_contract import MeshContract
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import BodyPlan, Plan
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import scheduled
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Budget, saturate
from tests.machine.test_meshes import blocks_of

QUICK = Settings(work=0.5, algebra=replace(Settings().algebra, iterations=0), recompute=0)


def user_mesh(
    sizes: tuple[int, ...] = (4, 2),
    names: tuple[str, ...] = ("data", "model"),
    kind: AxisType = AxisType.Auto,
) -> Mesh:
    return jax.make_mesh(sizes, names, axis_types=(kind,) * len(sizes))


def arguments() -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    w = {k: jnp.asarray(rng.normal(size=s), jnp.float32) for k, s in SHAPES.items()}
    return w, jnp.asarray(rng.normal(size=(64, 16)), jnp.float32)


SHAPES = {"up": (16, 32), "down": (32, 16)}


def forward(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w["up"]) @ w["down"]


def same_numbers(got: Any, wanted: Any) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        # Sums round by what is added up, which results may be much smaller than.
        least = 2e-6 * float(np.abs(np.asarray(b)).max(initial=0.0))
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=max(1e-5, least))


def entering(plan: Plan) -> dict[str, Layout]:
    return dict(zip(plan.graph.input_names, plan.in_shardings, strict=True))


# The boundary, by enumeration


@pytest.mark.parametrize(("sizes", "plan"), [((4, 2), (2, 2, 2)), ((8,), (2, 4)), ((4, 2), (4, 2))])
def test_boundary_rows_are_exactly_those_that_the_users_axes_express(
    sizes: tuple[int, ...], plan: tuple[int, ...]
) -> None:
    names = ("a", "b")[: len(sizes)]
    contract = MeshContract(names, sizes)
    mesh = next(m for m in contract.meshes(len(plan)) if m.sizes == plan)
    graph = te.trace(lambda x, y: (x * 2, x.T @ y), jnp.ones((8, 16)), jnp.ones((8, 4))).graph
    machine = te.load_target("cpu:8")
    schedule = scheduled(graph, feedback_pairs(graph))
    found = saturate(encode(schedule.program, mesh), load_books(["sharding"]), Budget())
    free = unit_choices(schedule, found, mesh, machine, contract)
    bound = restrict(free, Fixed((), contract))
    checked = 0
    for u, unit in enumerate(schedule.units):
        port = schedule.program.instances[unit.root].port
        if port not in ("input", "output"):
            assert len(bound.rows[u]) == len(free.rows[u])
            continue
        value = unit.outputs[0] if port == "input" else unit.reads[0][2]
        shape = schedule.program.types[value].shape
        side = "gives" if port == "input" else "needs"
        have = {_held(x[0], mesh, shape) for x in getattr(free.rows[u], side)}
        kept = {_held(x[0], mesh, shape) for x in getattr(bound.rows[u], side)}
        wanted = set()
        for count in range(len(names) + 1):
            for order in permutations(range(len(names)), count):
                for where in product(range(len(shape)), repeat=count):
                    dims = tuple(
                        tuple(names[n] for n, k in zip(order, where, strict=True) if k == d)
                        for d in range(len(shape))
                    )
                    wanted.add(blocks_of(names, sizes, dims, shape).tobytes())
        assert kept == have & wanted and kept
        checked += len(have) > len(kept)
    assert bool(checked) == (plan != sizes)


def _held(layout: Layout, mesh: MeshShape, shape: tuple[int, ...]) -> bytes:
    dims = tuple(tuple(mesh.names[a] for a in d) for d in layout.dims)
    return blocks_of(mesh.names, mesh.sizes, dims, shape).tobytes()


# Against jax.jit


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_shardings_are_those_of_jax_jit(kind: AxisType) -> None:
    mesh = user_mesh(kind=kind)
    w, x = arguments()

    def sharding(*spec: Any) -> NamedSharding:
        return NamedSharding(mesh, P(*spec))

    ins = ({"up": sharding(None, "model"), "down": sharding("model")}, sharding("data"))
    outs = (sharding("data", "model"), sharding())

    def step(w: dict[str, jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = forward(w, x)
        return y, y.sum()

    auto = user_mesh()
    wanted = jax.jit(
        step,
        in_shardings=jax.tree.map(lambda s: NamedSharding(auto, s.spec), ins),
        out_shardings=jax.tree.map(lambda s: NamedSharding(auto, s.spec), outs),
    )(w, x)
    front = te.optimize(
        te.trace(step, w, x), "cpu:8", in_shardings=ins, out_shardings=outs, settings=QUICK
    )
    for plan in front:
        run = te.compile(plan, mesh)
        got = run(w, x)
        same_numbers(got, wanted)
        for a, b, s in zip(got, wanted, outs, strict=True):
            assert a.sharding.mesh is mesh and a.sharding.is_equivalent_to(s, a.ndim)
            assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for have, want in zip(run.in_shardings, jax.tree.leaves(ins), strict=True):
            assert have.is_equivalent_to(want, 2)
        with jax.set_mesh(mesh):  # the results mix with the user's arrays
            mixed = jax.jit(lambda a, b: a + b)(got[0], jax.device_put(x, outs[0]))
        same_numbers(mixed, wanted[0] + x)
        if kind == AxisType.Explicit:
            assert str(jax.typeof(got[0]).sharding.spec) == str(P("data", "model"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_plan_that_divides_the_users_axes_comes_back_under_their_names(kind: AxisType) -> None:
    mesh = user_mesh((8,), ("d",), kind)
    w, x = arguments()
    fine = [m for m in MeshContract(("d",), (8,)).meshes(2) if len(m.sizes) == 2]
    front = te.optimize(
        te.trace(forward, w, x), "cpu:8", mesh=mesh, mesh_shapes=fine, settings=QUICK
    )
    wanted = jax.jit(forward)(w, x)
    for plan in front:
        assert len(plan.mesh.sizes) == 2
        run = te.compile(plan, mesh)
        y = run(w, jax.device_put(x, NamedSharding(mesh, P("d"))))
        assert y.sharding.mesh is mesh
        assert all(s.mesh is mesh for s in (*run.in_shardings, *run.out_shardings))
        same_numbers(y, wanted)
        again = jax.device_put(x, NamedSharding(mesh, y.sharding.spec))
        with jax.set_mesh(mesh):
            same_numbers(jax.jit(lambda a, b: a * b)(y, again), wanted * x)
        same_numbers(run(w, y), jax.jit(forward)(w, wanted))  # fed back


def test_a_prefix_and_none_leave_the_rest_free() -> None:
    w, x = arguments()
    program = te.trace(forward, w, x)
    mesh = MeshShape(("data", "model"), (4, 2))
    front = te.optimize(
        program,
        "cpu:8",
        mesh=mesh,
        in_shardings=(P("model"), None),
        out_shardings=P(None, "data"),
        settings=QUICK,
    )
    for plan in front:
        assert entering(plan)["[0]['up']"] == entering(plan)["[0]['down']"] == Layout(((1,), ()))
        assert plan.out_shardings == (Layout(((), (0,))),)
    assert entering(front.best())["[1]"] != Layout(((1,), ())), "None pins nothing"


@pytest.mark.slow
def test_an_output_that_feeds_back_may_be_asked_for_elsewhere() -> None:
    w, x = arguments()

    def step(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        g = jax.grad(lambda w: forward(w, x).sum())(w)
        return jax.tree.map(lambda p, d: p - d, w, g)

    program = te.trace(step, w, x, donate_argnums=0)
    shapes = {"mesh": MeshShape(("x", "y"), (4, 2)), "settings": QUICK, "state": {"": "[0]"}}
    kept = te.optimize(program, "cpu:8", in_shardings=({"up": P("x"), "down": P()}, None), **shapes)
    for plan in kept:
        leaving = dict(zip(plan.graph.output_names, plan.out_shardings, strict=True))
        assert leaving["['up']"] == entering(plan)["[0]['up']"] == Layout(((0,), ()))
    moved = te.optimize(
        program,
        "cpu:8",
        in_shardings=({"up": P("x"), "down": P()}, None),
        out_shardings={"up": P("y"), "down": None},
        **shapes,
    )
    plan = moved.best()
    leaving = dict(zip(plan.graph.output_names, plan.out_shardings, strict=True))
    assert leaving["['up']"] == Layout(((1,), ())) and leaving["['down']"] == Layout(((), ()))
    same_numbers(te.compile(plan)(*arguments()), jax.jit(step)(*arguments()))


@pytest.mark.parametrize(
    ("words", "error", "said"),
    [
        ({"in_shardings": (P(), P(), P())}, ExtractError, "structure does not fit"),
        ({"in_shardings": ({"up": P()}, None)}, ExtractError, "structure does not fit"),
        ({"out_shardings": (P(), P())}, ExtractError, "structure does not fit"),
        ({"in_shardings": (None, P(None, None, "x"))}, ExtractError, "has 3 dims"),
        ({"in_shardings": (None, P("q"))}, TargetError, "no mesh has the axis 'q'"),
        ({"in_shardings": (None, "x")}, ExtractError, "names no mesh axes"),
        ({"mesh": MeshShape(("x",), (4,))}, TargetError, "has 4 devices, cpu:8 has 8"),
        (
            {"mesh": MeshShape(("x",), (8,)), "mesh_shapes": [MeshShape(("a", "b"), (3, 3))]},
            TargetError,
            "not made of the axes",
        ),
        (
            {"in_shardings": (None, P("x")), "pins": {"[1]": (None, "x")}},
            ExtractError,
            r"pinned to \[., x\] and to \[x, .\]",
        ),
    ],
)
def test_wrong_words_are_refused(
    words: dict[str, Any], error: type[TapestryError], said: str
) -> None:
    program = te.trace(forward, *arguments())
    with pytest.raises(error, match=said):
        te.optimize(program, "cpu:8", settings=QUICK, **words)


def test_shardings_of_several_meshes_are_refused_and_uneven_ones_named() -> None:
    program = te.trace(forward, *arguments())
    a, b = (NamedSharding(user_mesh((8,), (n,)), P(n)) for n in "ab")
    with pytest.raises(ExtractError, match="several meshes: 8a, 8b"):
        te.optimize(program, "cpu:8", in_shardings=(a, b), settings=QUICK)
    odd = te.trace(lambda x: x + 1, jnp.zeros((6, 4)))
    with pytest.raises(ExtractError, match=r"\[0\] of shape \[6, 4\] cannot be cut evenly"):
        te.optimize(odd, "cpu:8", in_shardings=(NamedSharding(user_mesh(), P("data")),))
    with pytest.raises(ExtractError, match=r"the output of shape \[6, 4\] cannot be cut evenly"):
        te.optimize(odd, "cpu:8", out_shardings=NamedSharding(user_mesh(), P("data")))


# What is said of it


@pytest.mark.slow
def test_the_users_own_shardings_stand_beside_the_front_and_nothing_is_worse() -> None:
    rng = np.random.default_rng(3)
    w, x = arguments()
    program = te.trace(forward, w, x)
    specs = [P(), P("x"), P(None, "x"), P("y", "x"), P(("x", "y")), P(None, ("y", "x"))]
    mesh = MeshShape(("x", "y"), (4, 2))
    worse = 0
    for _ in range(4):
        down, up, data, out = (specs[k] for k in rng.integers(len(specs), size=4))
        front = te.optimize(
            program,
            "cpu:8",
            mesh=mesh,
            in_shardings=({"down": down, "up": up}, data),
            out_shardings=out,
            settings=QUICK,
        )
        own = front.original
        assert own is not None and own.name == "given"
        assert own.in_shardings == front[0].in_shardings
        assert own.out_shardings == front[0].out_shardings
        assert front.best().costs.seconds <= own.costs.seconds
        assert any(
            p.costs.seconds <= own.costs.seconds * 1.01
            and p.costs.peak_bytes <= own.costs.peak_bytes * 1.01
            and p.costs.joules <= own.costs.joules * 1.01
            for p in front
        )
        worse += front.best().costs.seconds < own.costs.seconds * 0.99
        assert "\ngiven " in str(
            front
        ) and "given: the plan that the given shardings lead to" in str(front)
        same_numbers(te.compile(own)(w, x), forward(w, x))
    assert worse, "the search finds something that propagation does not"
    assert te.optimize(program, "cpu:8", mesh=mesh, settings=QUICK).original is None


def test_a_saved_front_keeps_the_users_own_plan(tmp_path: Path) -> None:
    from tapestry_egg.files.files import load, save

    program = te.trace(forward, *arguments())
    front = te.optimize(program, "cpu:8", in_shardings=(P(), P("x")), settings=QUICK)
    save(front, tmp_path / "f.json")
    again = load(tmp_path / "f.json")
    assert again.original == front.original and front.original is not None


@pytest.mark.slow
def test_what_the_contract_costs_is_told() -> None:
    # Eight parts do not divide four rows, four parts would: at the boundary the one axis of eight
    # cannot say so.
    x, w = jnp.ones((4, 256)), jnp.ones((256, 255))
    program = te.trace(lambda x, w: jnp.tanh(jnp.tanh(x @ w)), x, w)
    line = te.optimize(program, "cpu:8", mesh=MeshShape(("d",), (8,)), settings=QUICK)
    (told,) = [n for n in line.notes if n.text.startswith("The mesh 8d costs")]
    free = te.optimize(program, "cpu:8", settings=QUICK)
    assert line.best().costs.seconds > free.best().costs.seconds * 1.01
    share = line.best().costs.seconds / free.best().costs.seconds - 1
    assert f"costs {100 * share:.1f} %" in told.text
    small = te.trace(lambda x: x * 2, jnp.ones((8, 8)))
    easy = te.optimize(small, "cpu:8", mesh=MeshShape(("d",), (8,)), settings=QUICK)
    assert any("costs no time" in n.text for n in easy.notes)
    assert not any(n.kind == "mesh-cost" for n in free.notes)


# Explicit mode


@pytest.mark.slow
def test_results_have_the_types_of_explicit_mode_and_cost_what_they_cost_in_auto_mode() -> None:
    costs = {}
    x = jnp.ones((64, 64))
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = user_mesh(kind=kind)
        at = NamedSharding(mesh, P("data", "model"))

        def step(w: jax.Array, m: jax.Array, g: jax.Array) -> tuple[jax.Array, jax.Array]:
            m = 0.9 * m + g
            return w - m, m

        with jax.set_mesh(mesh):
            args = [jax.device_put(x, at) for _ in range(3)]
            wanted = jax.jit(step)(*args)
            program = te.trace(step, *args, donate_argnums=(0, 1))
            front = te.optimize(
                program,
                "cpu:8",
                in_shardings=(at, at, at),
                state={"[0]": "[0]", "[1]": "[1]"},
                settings=QUICK,
            )
            got = te.compile(front.best(), mesh)(*args)
        costs[kind] = front.best().costs
        same_numbers(got, wanted)
        if kind == AxisType.Explicit:
            assert [jax.typeof(a).sharding for a in got] == [jax.typeof(a).sharding for a in wanted]
    assert costs[AxisType.Auto] == costs[AxisType.Explicit]


# Constraints inside a program: they hold in every plan, wherever the user has written them.


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


# Constraints beside constraints, views and reductions: each value exists as it is asked for.


Asked = Callable[..., jax.Array]
MEETING: dict[str, Callable[[Asked, jax.Array], jax.Array]] = {
    "one after another": lambda c, x: c(c(x * 2, "data", "model"), "data") + 1,
    "with a loop between": lambda c, x: c(c(x * 2, "model", "data") + 1, "data", "model") * 3,
    "with a view between": lambda c, x: c(c(x * 2, "data").T, "data") * 3,
    "before a reduction": lambda c, x: c(c(x * 2, "data", "model").sum(1), "model") * 3,
    "before what joins its dims": lambda c, x: c(x * 2, "data", "model").reshape(-1) * 3,
    "after what splits a dim": lambda c, x: c((x * 2).reshape(16, 4, 16), "model")[0] * 3,
}


@pytest.mark.parametrize("kind", MEETING)
def test_constraints_hold_whatever_is_beside_them(kind: str) -> None:
    mesh, x = user_mesh(), arguments()[1]

    def asked(x: jax.Array, *spec: Any) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))

    def step(x: jax.Array) -> jax.Array:
        return MEETING[kind](asked, x)

    plan = te.optimize(te.trace(step, x), "cpu:8", mesh=mesh, settings=QUICK).best()
    assert constrained(plan) and all(holds(*one) for one in constrained(plan))
    same_numbers(te.compile(plan, mesh)(x), jax.jit(step)(x))
