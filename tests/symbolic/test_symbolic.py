"""Programs written in kernels: what symbolic execution gives is a program like others."""

from __future__ import annotations

from functools import cache, partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tapestry_egg as te
from tapestry_egg.errors import GraphError, TapestryError, TemplateError
from tapestry_egg.loom import to_loom
from tapestry_egg.loom.nodes import APPLICATION, body_of
from tapestry_egg.loom.read import PROGRAMS
from tapestry_egg.metakernels.views import View, ViewError, folded_views
from tapestry_egg.reference.executor import execute
from tapestry_egg.show.drawing import draw, parse_cover
from tapestry_egg.symbolic.kernels import Kernel
from tapestry_egg.tracing.trace import Program

TEMPLATES = Path(__file__).parents[2] / "docs" / "templates" / "tapestry.yaml"

LINEAR, RELU = Kernel("linear"), Kernel("relu")


@pytest.fixture(autouse=True, scope="module")
def kernels() -> None:
    def linear(x: Any, A: Any, b: Any = None) -> Any:
        return x @ A if b is None else x @ A + b

    te.kernel("linear", TEMPLATES, run=linear, reference=linear)
    relu = partial(te.kernel, "relu", TEMPLATES)
    relu(run=lambda x: jnp.maximum(x, 0), reference=lambda x: np.maximum(x, 0))


@cache
def linear_relu() -> Program:
    x, w, b = te.tensor("x", (100, 12)), te.tensor("W", (12, 32)), te.tensor("b", (32,))
    return te.program(RELU(LINEAR(x, A=w, b=b)), name="linear.relu")


def arrays(*shapes: tuple[int, ...]) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.standard_normal(s).astype(np.float32) for s in shapes]


X, W, B = arrays((100, 12), (12, 32), (32,))
WANTED = np.maximum(X @ W + B, 0)


def test_kernels_on_symbolic_tensors_are_a_block_graph() -> None:
    graph = linear_relu().graph
    assert [op.kernel for op in graph.operations] == ["linear", "relu"]
    assert graph.input_names == ("x", "W", "b") and graph.output_names == ("",)
    assert [str(graph.values[v]) for v in graph.outputs] == ["f32[100, 32]"]
    assert graph.operations[0].source.function == "linear_relu", "the user's line, not ours"
    assert "RELU(LINEAR(" in graph.operations[0].source.text


def test_x7_the_fourfold_sharding() -> None:
    """The figures of the Tapestry project's example, with x at the origin."""
    graph = linear_relu().graph
    covers = dict(parse_cover(graph, text) for text in ("0:batch=2,out=2", "1:shape0=2,shape1=2"))
    loom = to_loom(linear_relu(), covers)
    assert PROGRAMS.issues(loom) == []
    labels = {n.id: n.label for n in loom.nodes}
    parts = [body_of(n) for n in loom.nodes if n.kind == APPLICATION]
    linear = [p for p in parts if labels[p.operationId] == "linear"]
    boxes = {str(p.outputs["y"][0].range.range()): p for p in linear}
    assert set(boxes) == {f"zr[{r}, {c}]" for r in ("0:50", "50:100") for c in ("0:16", "16:32")}
    last = boxes["zr[50:100, 16:32]"]
    assert [str(last.inputs[k][0].range.range()) for k in ("x", "A", "b")] == [
        "zr[50:100, 0:12]",
        "zr[0:12, 16:32]",
        "zr[16:32]",
    ]
    read = {k: sum(p.inputs[k][0].range.range().size for p in linear) for k in ("x", "A", "b")}
    assert read == {"x": 2400, "A": 768, "b": 64}
    (out,) = execute(graph, [X, W, B], covers)
    np.testing.assert_allclose(out, WANTED, rtol=1e-5, atol=1e-5)


def test_it_is_saved_and_drawn_as_others_are(tmp_path: Path) -> None:
    te.save(linear_relu(), tmp_path / "p.json")
    assert te.load(tmp_path / "p.json").graph == linear_relu().graph
    cover = dict([parse_cover(linear_relu().graph, "0:batch=2,out=2")])
    draw(linear_relu().graph, str(tmp_path / "p.svg"), cover)
    assert (tmp_path / "p.svg").read_text().count("linear") >= 1
    assert te.trace(linear_relu()) is linear_relu(), "so a file of the command line may give it"


@pytest.mark.slow
def test_it_is_optimised_and_run_as_others_are() -> None:
    brief = te.Settings(work=0.1, forms=0, recompute=0)
    square = [te.MeshShape(("x", "y"), (2, 2))]
    pins = {"result": ("x", "y")}
    plan = te.optimize(linear_relu(), "cpu:4", pins=pins, mesh_shapes=square, settings=brief).best()
    found = {name: plan.tensor(name).layout for name in ("x", "W", "b")}
    assert found == {"x": "[x, .]", "W": "[., y]", "b": "[y]"}
    for run in (
        linear_relu(),
        te.compile(plan),
        te.compile(te.optimize(linear_relu(), "cpu:8", settings=brief).best()),
    ):
        np.testing.assert_allclose(run(X, W, B), WANTED, rtol=1e-5, atol=1e-5)


def test_trees_constants_lists_and_kernels_of_jax(tmp_path: Path) -> None:
    x, y = te.tensor("x", (4, 6)), te.tensor("y", (6,))
    total = te.kernel("sum", TEMPLATES)(x, axis=1)
    joined = te.kernel("concat", TEMPLATES)(xs=[y, y, y], axis=0)
    first, second = te.kernel("split", TEMPLATES)(joined, chunk=9)
    scaled = te.kernel("mul")(x, np.full((4, 6), 2, np.float32))
    program = te.program({"a": total, "b": [second, scaled]}, inputs=[y, x])
    assert program.graph.output_names == ("['a']", "['b'][0]", "['b'][1]")
    assert [str(t) for t in program.output_types] == ["f32[4]", "f32[9]", "f32[4, 6]"]
    assert first.shape == (9,) and program.graph.input_names == ("y", "x")
    only = te.program({"twice": scaled})
    np.testing.assert_array_equal(only(np.ones((4, 6), "f"))["twice"], np.full((4, 6), 2))


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda x, w: LINEAR(w, w), TemplateError, "no template fits linear"),
        (lambda x, w: LINEAR(x), GraphError, "operand A of linear is missing"),
        (lambda x, w: LINEAR(x, w, x=x), GraphError, "given twice"),
        (lambda x, w: LINEAR(x, w, c=x), TemplateError, "no operand of linear is called c"),
        (lambda x, w: RELU(x, w), GraphError, "takes 1 operands, 2 are given"),
        (lambda x, w: te.kernel("lineer"), TemplateError, "no template for kernel 'lineer'"),
        (lambda x, w: te.kernel("tanh", run=jnp.tanh), GraphError, "two primitives are called"),
        (lambda x, w: te.program((x, 3)), GraphError, "no symbolic tensors"),
        (lambda x, w: te.program(LINEAR(x, w), inputs=[x]), GraphError, "not among the inputs"),
        (lambda x, w: te.program((x, te.tensor("x", ()))), GraphError, "two inputs"),
        (lambda x, w: te.tensor("x", (-1,)), GraphError, "is not a shape"),
        (lambda x, w: te.tensor("x", (1,), "float7"), GraphError, "unknown dtype"),
        (lambda x, w: x["0, 0, 0"], ViewError, "more dims"),
        (lambda x, w: x[1.5], ViewError, "no selector"),
        (lambda x, w: x.seen(View.of((12, 12)).diagonal()), ViewError, "no kernel gives"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, error: type[TapestryError], said: str) -> None:
    with pytest.raises(error, match=said):
        make(te.tensor("x", (12, 12)), te.tensor("W", (12, 4)))


def test_a_kernel_may_be_given_again(tmp_path: Path) -> None:
    """As a cell of a notebook is run again."""
    file = tmp_path / "own.yaml"
    for factor in (2, 3):
        file.write_text("own:\n  inputs: {x: }\n  out: {shape: $x.shape, dtype: $x.dtype}\n")
        own = te.kernel("own", file, run=lambda x, by=factor: x * by)
    assert te.program(own(te.tensor("x", (2,))))(np.ones(2, "f")).tolist() == [3, 3]


def test_a_kernel_that_nothing_runs_is_planned_and_not_run() -> None:
    gray = te.kernel("desaturate", TEMPLATES)(te.tensor("image", (8, 16, 16, 3), "uint8"))
    program = te.program(gray)
    assert program.output_types[0].shape == (8, 16, 16)
    with pytest.raises(GraphError, match="no primitive 'desaturate'"):
        program(np.zeros((8, 16, 16, 3), np.uint8))


ENTRIES = st.one_of(
    st.integers(-3, 2),
    st.just(None),
    st.builds(
        slice,
        st.none() | st.integers(-4, 4),
        st.none() | st.integers(-4, 4),
        st.sampled_from([None, 1, 2, 3, -1, -2]),
    ),
)


@settings(max_examples=40)
@given(st.lists(ENTRIES, max_size=4), st.permutations(range(3)))
def test_selections_are_numpys(entries: list[Any], order: list[int]) -> None:
    """The kernels of a selection read what NumPy's indexing reads, and are one view."""
    selector = tuple(entries)
    if sum(e is not None for e in entries) > 3:
        return
    array = np.arange(60, dtype=np.float32).reshape(3, 4, 5)
    base = te.tensor("x", (3, 4, 5))
    turned = base.transposed(*order)
    found = turned[selector]
    wanted = array.transpose(order)[selector]
    program = te.program(found)
    np.testing.assert_array_equal(execute(program.graph, [array])[0], wanted)
    if not wanted.size or found is base:
        return
    folded = folded_views(program.graph)
    view = folded[program.graph.outputs[0]][1] if folded else View.of((3, 4, 5))
    np.testing.assert_array_equal(view.read(array), wanted)
