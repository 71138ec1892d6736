"""Pins: inputs enter where the user says, the rest is planned around them, and it still runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.errors import ExtractError, TargetError
from tapestry_egg.extract.pins.pins import fitting, read_pins
from tapestry_egg.extract.pins.value_pins import constrained, split_pins
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.plan import Plan
from tapestry_egg.reference.executor import execute

QUICK = Settings(work=0.1, recompute=0, forms=0)
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
    # A graph without names is pinned by numbers.
    assert read_pins(replace(halves.graph, input_names=()), {"[0]": ("x",)}) == pins
    assert replace(halves.graph, output_names=()).output_paths == ("[0]",)


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


# Pins of values inside a program and of its results: which value a word names, and what becomes
# of the program.


def hidden(x: jax.Array) -> jax.Array:
    return jnp.tanh(x) * jnp.exp(x)


def step_with_values(w: jax.Array, x: jax.Array) -> dict[str, jax.Array]:
    h = hidden(x @ w)
    h, rows = jax.lax.scan(lambda c, r: (c + r, jnp.sin(c) * r), h[0], h)
    return {"mean": jnp.mean(rows), "last": h}


GRAPH = te.trace(step_with_values, jnp.ones((16, 32)), jnp.ones((8, 16))).graph
LOOP = next(k for k, op in enumerate(GRAPH.operations) if op.regions)
LINE = step_with_values.__code__.co_firstlineno + 1


def named(word: str, *spec: str | None) -> tuple[object, ...]:
    split = split_pins(GRAPH, {word: spec})
    inputs, inside = split.inputs, split.inside
    return (dict(inputs), *((p.path, p.value, p.pin.dims) for p in inside))


def test_a_value_is_named_by_number_line_or_path() -> None:
    product = GRAPH.producers()
    dot = next(op.outputs[0] for op in GRAPH.operations if op.kernel == "dot_general")
    assert named(f"%{dot}", "x") == ({}, ((), dot, (("x",), ())))
    here = f"{__file__}:{LINE}"
    short = f"test_pins.py:{LINE}"
    assert named(here, "x") == named(short, "x") == ({}, ((), dot, (("x",), ())))
    last = GRAPH.outputs[GRAPH.output_names.index("['last']")]
    assert product[last] == LOOP and named("result['last']", "x")[1] == ((), last, (("x",),))
    sine = next(op for op in GRAPH.operations[LOOP].regions[0].operations if op.kernel == "sin")
    path = ((LOOP, 0),)
    assert named(f"{LOOP}/%{sine.outputs[0]}", "y")[1] == (path, sine.outputs[0], (("y",),))
    assert named("[0]", "x") == ({"[0]": ("x",)},)
    assert named(f"%{GRAPH.inputs[1]}", "x") == ({"[1]": ("x",)},), "an argument by its number"


@pytest.mark.parametrize(
    ("word", "spec", "said"),
    [
        ("%999", ("x",), "numbered from %0"),
        (f"{LOOP + 1}/%0", (), "no nested graph"),
        ("result['first']", (), "no result lies at"),
        ("elsewhere.py:3", (), "no value is made at"),
        (f"test_pins.py:{hidden.__code__.co_firstlineno + 1}", ("x", "y", "z"), "3 dims"),
        ("result['mean']", ("x",), "has 1 dims"),
        ("result['last']", (("x", "x"),), "twice"),
        (f"test_pins.py:{LINE + 1}", (), "read elsewhere"),
    ],
)
def test_what_a_word_does_not_name_is_told(word: str, spec: tuple[str, ...], said: str) -> None:
    with pytest.raises(ExtractError, match=said) as e:
        named(word, *spec)
    assert str(e.value).startswith("pins[")


def test_pins_are_constraints_and_change_no_number() -> None:
    """Put in from the last to the first, whatever the order in which they are given."""
    inner = GRAPH.operations[LOOP].regions[0].operations[0].outputs[0]
    values = [op.outputs[0] for op in GRAPH.operations if op.source.function == "hidden"]
    assert len(values) == 3
    pins = {f"{LOOP}/%{inner}": ("x",), **{f"%{v}": (None, "x") for v in values}}
    pins["result['mean']"] = ()
    for order in (pins, dict(reversed(pins.items()))):
        graph = constrained(GRAPH, split_pins(GRAPH, order).inside)
        verify_graph(graph)
        asked = [op for op in graph.operations if op.kernel == "sharding_constraint"]
        assert {op.inputs[0] for op in asked} == {*values, GRAPH.outputs[1]}
        readers = graph.readers()
        assert all(len(readers[op.inputs[0]]) == 1 for op in asked), "all others read the copy"
        loop = next(op for op in graph.operations if op.regions)
        assert [op.kernel for op in loop.regions[0].operations].count("sharding_constraint") == 1
        given = [
            np.full((16, 32), 0.1, np.float32),
            np.linspace(-1, 1, 128, dtype=np.float32).reshape(8, 16),
        ]
        for a, b in zip(execute(graph, given), execute(GRAPH, given), strict=True):
            np.testing.assert_array_equal(a, b)


def test_what_no_mesh_can_do_is_refused() -> None:
    brief = te.Settings(work=0.2, workers=1, front=False)
    for spec, error, said in (
        (("q",), TargetError, "no mesh has the axis 'q'"),
        (("x",), ExtractError, "cannot be cut evenly"),
    ):
        with pytest.raises(error, match=said):
            te.optimize(
                GRAPH,
                "cpu:3" if error is ExtractError else "cpu:2",
                pins={"result['last']": spec},
                settings=brief,
            )


@pytest.mark.slow
def test_a_plan_makes_the_value_so_and_runs() -> None:
    def mlp(w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w["up"]) @ w["down"]

    w = {"up": jnp.full((16, 64), 0.1), "down": jnp.full((64, 16), 0.1)}
    x = jnp.linspace(-1, 1, 32 * 16).reshape(32, 16)
    program = te.trace(mlp, w, x)
    up = next(op.outputs[0] for op in program.graph.operations if op.kernel == "tanh")
    front = te.optimize(
        program,
        "cpu:8",
        pins={f"%{up}": (None, ("x", "y")), "result": ("x",)},
        settings=replace(QUICK, front=False),
    )
    plan = front.best()
    asked = [op.outputs[0] for op in plan.graph.operations if op.kernel == "sharding_constraint"]
    assert [plan.tensor(f"%{v}").layout for v in asked] == ["[., x·y]", "[x, .]"]
    np.testing.assert_allclose(te.compile(plan)(w, x), mlp(w, x), rtol=1e-5)
    free = te.optimize(program, "cpu:8", settings=QUICK).best()
    answer = free.why_not({"result": (None, "x")}, settings=replace(QUICK, front=False))
    assert answer.difference is not None or answer.refused == "it does"
    assert any("makes it" in m.means for m in answer.means)


def repeated(x: jax.Array) -> jax.Array:
    a = jnp.sin(x)
    b = jnp.sin(x)
    c = jnp.sin(x) * 2.0
    d = jnp.sin(x) * 3.0
    return a * 5.0 + b.sum() + c * d


def test_lines_that_write_the_same_name_the_one_value(tmp_path: Path) -> None:
    """As each line would, were it the only one: who reads what another line wrote is no matter."""
    program = te.trace(repeated, jnp.ones((16, 8)))
    graph = program.graph
    sine, double, triple = (op.outputs[0] for op in graph.operations[:3])
    assert [op.kernel for op in graph.operations[:3]] == ["sin", "mul", "mul"]
    te.save(program, tmp_path / "graph.json")
    first = repeated.__code__.co_firstlineno + 1
    for known in (graph, te.load(tmp_path / "graph.json").graph):
        for k, value in enumerate((sine, sine, double, triple)):
            (pin,) = split_pins(known, {f"{__file__}:{first + k}": ("x",)}).inside
            assert (pin.path, pin.value) == ((), value)
        both = {f"{__file__}:{first}": ("x",), f"{__file__}:{first + 1}": ("x", None)}
        assert [p.value for p in split_pins(known, both).inside] == [sine]
        with pytest.raises(ExtractError, match="one value is pinned"):
            split_pins(known, {**both, f"{__file__}:{first + 1}": (None, "x")})


@pytest.mark.slow
@pytest.mark.parametrize(
    "function", [lambda x: (x, x), lambda x: (jnp.sin(x),) * 2], ids=["an argument", "a value"]
)
@pytest.mark.parametrize("state", [None, {"[0]": "[0]"}], ids=["", "fed back"])
def test_one_value_leaves_as_each_of_its_results_is_pinned(
    function: Callable[[Any], Any], state: Any, tmp_path: Path
) -> None:
    x = np.arange(64.0, dtype=np.float32).reshape(8, 8)
    pins = {"result[0]": ("x", None), "result[1]": (None, "x")}
    program = te.trace(function, x)
    quick = te.Settings(work=0.2, recompute=0, forms=0)
    front = te.optimize(program, "cpu:8", pins=pins, state=state, settings=quick)
    front.save(tmp_path / "front.json")
    for plan in (*front.plans, te.load(tmp_path / "front.json").plans[0]):
        first, second = te.compile(plan)(x)
        assert (first.sharding.spec, second.sharding.spec) == (P("x"), P(None, "x"))
        np.testing.assert_array_equal(first, function(x)[0])
        np.testing.assert_array_equal(second, function(x)[1])


def test_an_argument_is_pinned_in_one_way() -> None:
    graph = te.trace(lambda x: x + 1.0, jnp.ones(8)).graph
    number = f"%{graph.inputs[0]}"
    for pins in ({"[0]": ("x",), number: ()}, {number: (), "[0]": ("x",)}):
        with pytest.raises(ExtractError, match="by its path and by its number"):
            split_pins(graph, pins)
    assert split_pins(graph, {number: ("x",)}).inputs == {"[0]": ("x",)}
    whole = te.trace(lambda x: x + 1.0, jnp.ones((8, 8))).graph
    for first, second in ((("x",), ("x", None)), (["x", None], (("x",), None))):
        assert split_pins(whole, {"[0]": first, "%0": second}).inputs.keys() == {"[0]"}
    with pytest.raises(ExtractError, match="in different layouts"):
        split_pins(whole, {"[0]": ("x",), "%0": (None, "x")})


def test_arguments_and_results_are_named_by_a_part_or_a_pattern() -> None:
    def layers(w: dict[str, jax.Array], x: jax.Array) -> dict[str, jax.Array]:
        return {"loss": jnp.sum(x @ w["up"] @ w["down"]), "down": w["down"] + 1.0}

    square = jnp.ones((8, 8))
    graph = te.trace(layers, {"up": square, "down": square}, square).graph
    x = ("x",)
    assert split_pins(graph, {"up": x}).inputs == {"[0]['up']": x}
    assert split_pins(graph, {"down": x}).inputs == {"[0]['down']": x}  # before the result
    for word in ("result.down", "result['down']", "result[*down*]"):
        (made,) = split_pins(graph, {word: x}).inside
        assert made.value == graph.outputs[graph.output_names.index("['down']")]
    every = {"[0]['down']": (), "[0][*]": x}
    assert split_pins(graph, every).inputs == {"[0]['up']": x, "[0]['down']": ()}
    assert split_pins(graph, {"loss": ()}).inside[0].value in graph.outputs
    two = te.trace(lambda a, b: a["w"] + b["w"], {"w": square}, {"w": square}).graph
    with pytest.raises(ExtractError, match="part of 2 paths") as error:
        split_pins(two, {"w": x})
    assert "[0]['w'], [1]['w']" in error.value.hint and "[*]['w']" in error.value.hint
    assert split_pins(two, {"[*]['w']": x}).inputs == {"[0]['w']": x, "[1]['w']": x}
    with pytest.raises(ExtractError, match="no input lies at 'v'"):
        te.optimize(two, "cpu:2", pins={"v": x})


def test_a_plan_of_pins_inside_takes_its_function_traced_again(tmp_path: Path) -> None:
    """Those of the program and of the bodies of its loops."""
    given = 0.01 * jnp.ones((16, 32)), jnp.ones((8, 16))  # sines of large numbers are rounding
    dot = next(op.outputs[0] for op in GRAPH.operations if op.kernel == "dot_general")
    sine = next(op for op in GRAPH.operations[LOOP].regions[0].operations if op.kernel == "sin")
    front = te.optimize(
        te.trace(step_with_values, *given),
        "cpu:2",
        pins={f"%{dot}": (None, "x"), f"{LOOP}/%{sine.outputs[0]}": ("x",), "result['last']": ()},
        settings=QUICK,
    )
    te.save(front.best(), tmp_path / "plan.json")
    plan = te.load(tmp_path / "plan.json")
    for known in (front.best(), plan):
        run = te.compile(known, program=te.trace(step_with_values, *given))  # type: ignore[arg-type]
        for got, wanted in zip(
            jax.tree.leaves(run(*given)), jax.tree.leaves(step_with_values(*given)), strict=True
        ):
            np.testing.assert_allclose(got, wanted, rtol=1e-5)
        with pytest.raises(te.TapestryError, match="computes something else"):
            other = te.trace(lambda w, x: step_with_values(w, x + 1), *given)
            te.compile(known, program=other)  # type: ignore[arg-type]
