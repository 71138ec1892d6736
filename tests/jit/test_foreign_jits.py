"""Functions of `eqx.filter_jit` and `nnx.jit` through `te.jit`: as without it, and planned."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.cli.app import app
from tapestry_egg.errors import GraphError
from tapestry_egg.pipeline import Settings
from tapestry_egg.tracing.trace import Program

QUICK = Settings(work=0.1, recompute=0, forms=0, merge=False)
X, Y = jnp.linspace(-1, 1, 128).reshape(16, 8), jnp.ones((16, 4))

pytestmark = pytest.mark.slow


def test_equinox_modules_with_functions_in_them() -> None:
    eqx = pytest.importorskip("equinox")

    def step(model: Any, x: jax.Array, y: jax.Array, rate: float = 0.1) -> Any:
        def loss(model: Any) -> jax.Array:
            return jnp.mean((jax.vmap(model)(x) - y) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -rate * g, grads)), value

    model = eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))
    given, planned = eqx.filter_jit(step), te.jit(eqx.filter_jit(step), settings=QUICK)
    ours = theirs = model
    for rate in (0.1, 0.1, 0.2):
        ours, value = planned(ours, X, Y, rate)
        theirs, wanted = given(theirs, X, Y, rate)
        np.testing.assert_allclose(value, wanted, rtol=1e-5)
    assert type(ours) is type(model) and ours.activation is model.activation
    assert planned.plan(model, X, Y, 0.1).graph.name == "step"
    assert len(planned.front(model, X, Y, 0.1).plans) > 0
    np.testing.assert_allclose(
        planned.lower(model, X, Y).compile()(model, X, Y)[1], given(model, X, Y)[1]
    )
    with pytest.raises(te.TapestryError, match=r"(?s)by equinox.*keeps static what is no array"):
        te.jit(given, static_argnums=1)


def test_nnx_modules_are_updated_in_place() -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    class Model(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.linear, self.norm = nnx.Linear(8, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.norm(self.linear(x))

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def run(step: Any) -> tuple[list[float], Any]:
        model = Model(nnx.Rngs(0))
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
        values = [float(step(model, optimizer, X, Y)) for _ in range(3)]
        return values, nnx.state(model)

    given, planned = nnx.jit(step), te.jit(nnx.jit(step), settings=QUICK)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        values, state = run(planned)
    wanted, wanted_state = run(given)
    np.testing.assert_allclose(values, wanted, rtol=1e-4)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(wanted_state), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)
    assert isinstance(given.jitted_fn, type(jax.jit(step)))  # the user's own is as it was
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    assert planned.compiled(model, optimizer, X, Y).mesh.size == 8
    plan = planned.plan(model, optimizer, X, Y)  # what is updated leaves as it came
    pairs = dict(plan.origin.feedback)
    assert len(pairs) == len(plan.out_shardings) - 1  # all but the loss
    assert all(plan.out_shardings[j] == plan.in_shardings[i] for j, i in pairs.items())


def test_traced_functions_of_nnx_update_their_modules() -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    transform = optax.adam(0.1)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - y) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def made() -> tuple[Any, Any]:
        model = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, transform, wrt=nnx.Param)

    jitted = nnx.jit(step)
    program = te.trace(jitted, *made(), X, Y)
    assert len(program.graph.outputs) == 9 and program.name == "step"
    plan = te.optimize(program, "cpu:8", settings=QUICK).best("seconds")
    assert len(plan.origin.feedback) == 8, "all but the loss comes back where it was"
    states = []
    for run in (jitted, program, te.compile(plan)):
        model, optimizer = made()
        values = [float(run(model, optimizer, X, Y)) for _ in range(3)]
        states.append([*values, *jax.tree.leaves(nnx.state((model, optimizer)))])
    for ours in states[1:]:
        for a, b in zip(ours, states[0], strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    with pytest.raises(te.TapestryError, match=r"(?s)by flax.*nnx.jit\(f, donate_argnums="):
        te.trace(jitted, *made(), X, Y, donate_argnums=0)
    with pytest.warns(UserWarning, match=r"51 of 58 operations were removed"):
        te.trace(step, *made(), X, Y)


def test_traced_functions_of_equinox_take_their_modules() -> None:
    eqx = pytest.importorskip("equinox")

    class Layer(eqx.Module):  # type: ignore[misc, name-defined]
        weight: jax.Array
        act: Any = jnp.tanh

        @eqx.filter_jit  # type: ignore[untyped-decorator]
        def __call__(self, x: jax.Array) -> Any:
            return self.act(x @ self.weight), self

    layer = Layer(jnp.ones((8, 4)) / 8)
    wanted, _ = layer(X)
    for program, arguments in (
        (te.trace(Layer.__call__, layer, X), (layer, X)),
        (te.trace(layer.__call__, X), (X,)),
    ):
        made, again = program(*arguments)
        np.testing.assert_allclose(made, wanted, rtol=1e-6)
        assert again.act is layer.act
    with pytest.raises(te.TapestryError, match="cannot be traced as a function"):
        te.trace(eqx.filter_grad(eqx.filter_jit(lambda m, x: m(x)[0].sum())), layer, X)


def example() -> tuple[Any, tuple[Any, ...]]:
    """What the command line is given: a step that donates its modules."""
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        optimizer.update(model, grads)
        return value

    def made() -> tuple[Any, Any]:
        model = nnx.Linear(1024, 2048, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.adamw(1e-3), wrt=nnx.Param)

    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    return nnx.jit(step, donate_argnums=(0, 1)), (*nnx.eval_shape(made), x)


@pytest.mark.parametrize("donated", [False, True])
def test_the_state_of_modules_goes_with_the_file_of_their_graph(
    donated: bool, tmp_path: Path
) -> None:
    step, arguments = example()
    program = te.trace(step if donated else nnx_jit(step.fun), *arguments)
    te.save(program, tmp_path / "step.graph.json")
    again = te.load(tmp_path / "step.graph.json")
    assert isinstance(again, Program) and again.state == program.state
    assert len(again.state) == len(program.graph.inputs) - 1  # all but the batch
    document = json.loads((tmp_path / "step.graph.json").read_text())
    for result, argument in (("[7]", "[0].kernel"), ("[0][0].kernel", "[2]")):
        (tmp_path / "bad.json").write_text(json.dumps({**document, "state": {result: argument}}))
        with pytest.raises(GraphError, match=r"\.state\["):
            te.load(tmp_path / "bad.json")


def nnx_jit(function: Any) -> Any:
    return pytest.importorskip("flax.nnx").jit(function)


def test_the_command_line_plans_modules_as_state(tmp_path: Path) -> None:
    step, arguments = example()
    te.save(te.trace(step, *arguments), tmp_path / "step.graph.json")
    words = ["optimize", str(tmp_path / "step.graph.json"), "--target", "h100:8", "--work", "0.1"]
    assert CliRunner().invoke(app, [*words, "-o", str(tmp_path), "-q"]).exit_code == 0
    front = te.load(next(tmp_path.glob("*.front.json")))
    assert isinstance(front, te.Front)
    for plan in front.plans:
        pairs = dict(plan.origin.feedback)
        assert len(pairs) == len(plan.in_shardings) - 1
        assert all(plan.out_shardings[j] == plan.in_shardings[i] for j, i in pairs.items())


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("donate", ["all", "all-except-first", "none"])
def test_modules_that_equinox_donates_lie_as_they_come_back(donate: str, single: bool) -> None:
    eqx = pytest.importorskip("equinox")
    optax = pytest.importorskip("optax")
    transform = optax.adamw(1e-2)
    x = jnp.linspace(-1, 1, 128 * 64).reshape(128, 64)

    @eqx.filter_jit(donate=donate)  # type: ignore[untyped-decorator]
    def step(x: Any, both: Any, *, scale: float = 1.0) -> Any:
        model, state = both

        def loss(model: Any) -> jax.Array:
            return scale * jnp.mean(jax.vmap(model)(x) ** 2)

        value, grads = eqx.filter_value_and_grad(loss)(model)
        updates, state = transform.update(grads, state, eqx.filter(model, eqx.is_array))
        both = eqx.apply_updates(model, updates), state
        return both if single else (both, value)

    model = eqx.nn.MLP(64, 64, 256, 2, key=jax.random.key(1))
    both = model, transform.init(eqx.filter(model, eqx.is_array))
    arrays = len(jax.tree.leaves(eqx.filter(both, eqx.is_array)))
    planned = te.jit(step, settings=Settings(work=0.2, front=False))
    with warnings.catch_warnings():
        if donate == "all-except-first":
            warnings.simplefilter("error", UserWarning)  # nothing is moved at every call
        for _ in range(3):
            found = planned(jnp.copy(x), both)
            both = found if single else found[0]
    plan = planned.plan(x, both)
    assert len(plan.origin.feedback) == (0 if donate == "none" else arrays)
    names = plan.graph.input_names, plan.graph.output_names
    for j, i in plan.origin.feedback:
        assert plan.out_shardings[j] == plan.in_shardings[i]
        assert names[1][j].removeprefix("" if single else "[0]") == names[0][i].removeprefix("[1]")


def test_a_step_that_updates_nothing_is_told_once() -> None:
    step, arguments = example()
    nnx = pytest.importorskip("flax.nnx")
    given = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), arguments)
    planned = te.jit(step.fun, settings=QUICK)
    with pytest.warns(UserWarning, match=r"operations were removed.*nnx.jit") as told:
        planned(*given)
    (one,) = [w for w in told if "were removed" in str(w.message)]
    assert one.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        planned(*given)
        planned(*given[:2], jnp.ones((128, 1024)))
        te.jit(nnx.jit(step.fun), settings=QUICK)(*given)


def test_a_loaded_plan_takes_modules_if_its_function_is_traced_again(tmp_path: Path) -> None:
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")

    @nnx.jit  # type: ignore[untyped-decorator]
    def train(model: Any, x: Any) -> Any:
        value, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model), grads))
        return value

    @eqx.filter_jit  # type: ignore[untyped-decorator]
    def call(model: Any, x: Any) -> Any:
        return model, jax.vmap(model)(x)

    for step, made in (
        (train, lambda: nnx.Linear(8, 4, rngs=nnx.Rngs(0))),
        (call, lambda: eqx.nn.MLP(8, 4, 16, 1, key=jax.random.key(0))),
    ):
        program = te.trace(step, made(), X)
        te.optimize(program, "cpu:8", settings=QUICK).save(tmp_path / "front.json")
        plan = te.load(tmp_path / "front.json").best()  # type: ignore[union-attr, operator]
        with pytest.raises(te.TapestryError, match=r"te.compile\(plan, program="):
            te.compile(plan)(made(), X)
        run, ours, theirs = te.compile(plan, program=te.trace(step, made(), X)), made(), made()
        for one, two in zip(
            jax.tree.leaves((run(ours, X), run(ours, X))),
            jax.tree.leaves((step(theirs, X), step(theirs, X))),
            strict=True,
        ):
            if isinstance(two, jax.Array):
                np.testing.assert_allclose(one, two, rtol=1e-5)
        other = te.trace(step, made(), jnp.ones((32, 8)))
        with pytest.raises(te.TapestryError, match="computes something else"):
            te.compile(plan, program=other)
        with pytest.raises(te.TapestryError, match="is not what"):
            te.compile(plan, program=te.trace(lambda x: x + 1, X))


@pytest.mark.filterwarnings("ignore:.*donated arrays")
def test_arguments_and_results_of_equinox_are_named_by_their_paths() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.Linear(8, 4, key=jax.random.key(0))
    scaled = {"up": X}

    def step(first: Any, model: Any, *, scale: Any) -> Any:
        return {"model": model, "loss": (jax.vmap(model)(first["up"]) * scale).sum()}

    for donate in ("none", "all", "all-except-first", "warn"):
        graph = te.trace(eqx.filter_jit(step, donate=donate), scaled, model, scale=X[0, 0]).graph
        named = dict(zip(graph.input_names, graph.inputs, strict=True))
        assert {n: graph.values[v].shape for n, v in named.items()} == {
            "[0]['up']": X.shape, "[1].weight": (4, 8), "[1].bias": (4,), "['scale']": (),
        }  # fmt: skip
        assert graph.output_names == ("marker", "['loss']", "['model'].weight", "['model'].bias")
    alone = te.trace(eqx.filter_jit(model), X[0]).graph
    assert set(alone.input_names) == {"fun.weight", "fun.bias", "[0]"}
    assert alone.output_names == ("marker", "")
    front = te.optimize(
        te.trace(eqx.filter_jit(step), scaled, model, scale=X[0, 0]),
        "cpu:8",
        pins={"[1].weight": ("x", None), "result['model'].bias": ("x",)},
        mesh_shapes=[te.MeshShape(("x",), (2,))],
        settings=QUICK,
    )
    assert front.best().tensor("[1].weight").layout.startswith("[x, .]")


def test_parameters_are_named_by_their_places_in_modules() -> None:
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Block(nnx.Module):  # type: ignore[misc, name-defined]
        def __init__(self, rngs: Any) -> None:
            self.up = nnx.Linear(8, 8, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(2)])
            self.norm, self.again = nnx.BatchNorm(8, rngs=rngs), self.up  # which is shared
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            return self.drop(self.norm(self.again(self.layers[1](self.layers[0](self.up(x))))))

    @nnx.jit(donate_argnums=0, static_argnums=1)  # type: ignore[untyped-decorator]
    def step(both: Any, scale: float, x: Any, *, other: Any) -> Any:
        model, optimizer = both

        def loss(model: Any) -> Any:
            return scale * jnp.mean(model(x) ** 2) + jnp.mean(other(x) ** 2)

        value, grads = nnx.value_and_grad(loss)(model)
        optimizer.update(model, grads)
        return value

    model = Block(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    program = te.trace(step, (model, optimizer), 2.0, X, other=model.up)
    graph = program.graph
    wanted = {"[2]": X}
    for above, node in (("[0][0]", model), ("[0][1]", optimizer), ("['other']", model.up)):
        for path, variable in nnx.to_flat_state(nnx.state(node)):
            keys = (f".{k}" if str(k).isidentifier() else f"[{k}]" for k in path)
            wanted[above + "".join(keys)] = variable[...]
    found = dict(zip(graph.input_names, (graph.values[v] for v in graph.inputs), strict=True))
    assert {name: t.shape for name, t in found.items()} == {
        name: jnp.shape(wanted[name]) for name in found
    }
    # What is shared is passed once, and all that is passed comes back.
    assert wanted.keys() - found.keys() == {"['other'].bias", "['other'].kernel"}
    assert set(program.state.values()) >= {n for n in found if n.startswith("[0]")}
    pins = {"[0][0].layers[1].kernel": (None, "x")}
    plan = te.optimize(program, "cpu:2", pins=pins, settings=QUICK).best()
    at = graph.input_names.index("[0][0].layers[1].kernel")
    assert plan.in_shardings[at].show(plan.mesh) == "[., x]"
