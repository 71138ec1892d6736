"""Dims that devices cannot share, padded: six heads on four devices, odd extents on eight."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType, verify_graph
from tapestry_egg.metakernels import registry
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.rows.even_parts import shared, with_even_parts
from tapestry_egg.runtime import compare
from tapestry_egg.tracing.trace import trace
from tests.rewrite import block_programs
from tests.rewrite.block_programs import agree, numbers, padded_along

Array = Any
LONG = pytest.mark.long
SLOW = pytest.mark.slow


def normal(*shape: int) -> Array:
    rng = np.random.default_rng(sum(shape))
    return jnp.asarray(0.3 * rng.normal(size=shape), jnp.float32)


def padded(function: Callable[..., Any], *inputs: Array) -> list[BlockGraph]:
    """The program with each index dim of each operation padded by three points, checked."""
    graph = trace(function, *inputs).graph
    given_ = jax.tree.leaves(inputs)
    want = numbers(graph, given_)
    made = []
    for k in range(len(graph.operations)):
        for index in range(8):
            try:
                found = padded_along(graph, k, index, _extent(graph, k, index) + 3)
            except IndexError:
                break
            if found is None:
                continue
            agree(found, given_, want, 1e-6)
            made.append(found)
    return made


def _extent(graph: BlockGraph, k: int, index: int) -> int:
    op, values = graph.operations[k], graph.values
    types = tuple(values[v] for v in op.inputs), tuple(values[v] for v in op.outputs)
    return registry.signature_of(op, *types).index[index].size


def inverse(x: Array) -> Array:
    """What is not a number where rows were added."""
    return 1.0 / x + jnp.log(x)


SUMS: dict[str, Callable[[Array], Array]] = {
    "sum": lambda x: inverse(x).sum(0),
    "max": lambda x: (-inverse(x)).max(0),
    "min": lambda x: inverse(x).min(0),
    "prod": lambda x: inverse(x).prod(0),
    "any": lambda x: (inverse(x) > 1e6).any(0),
    "all": lambda x: (inverse(x) < 1e6).all(0),
    "product": lambda x: inverse(x).T @ inverse(x),
    "softmax": lambda x: jax.nn.softmax(inverse(x), axis=0),
    "convolution": lambda x: lax.conv_general_dilated(
        inverse(x)[None], jnp.ones((5, 3, 2)), (1,), "SAME", dimension_numbers=("NCW", "IOW", "NCW")
    ),
}


@pytest.mark.parametrize("name", SUMS)
def test_rows_that_were_added_add_nothing(name: str) -> None:
    """Zero divided, and its logarithm, are in the rows that are added, and in no sum."""
    x = jnp.abs(normal(5, 4)) + 0.5
    made = padded(SUMS[name], x)
    assert made
    sums = {"reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_or", "reduce_and"}
    sums |= {"dot_general", "conv_general_dilated"}
    masked = [g for g in made if any(op.kernel == "select_n" for op in g.operations)]
    assert any(op.kernel in sums for g in masked for op in g.operations)


def test_a_number_that_is_taken_out_of_what_grows() -> None:
    """What takes it out has no index dims."""
    assert padded(lambda x, y: 2.0 * lax.squeeze(x @ y, (0, 1)), normal(1, 4), normal(4, 1))


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 2**32 - 1))
@example(57292)  # sums along a dim of nothing
def test_programs_drawn_at_random_give_their_numbers(seed: int) -> None:
    with block_programs.traced(seed) as (graph, inputs):
        want = numbers(graph, inputs)
        for k in range(0, len(graph.operations), 3):
            for index in range(4):
                try:
                    found = padded_along(graph, k, index, _extent(graph, k, index) + 2)
                except IndexError:
                    break
                if found is not None:
                    agree(found, inputs, want)


def attention(w: Any, x: Array) -> Array:
    q, k, v = (jnp.einsum("bsd,dhk->bshk", x, w[n]) for n in "qkv")
    s = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8**0.5
    s = jnp.where(jnp.tril(jnp.ones(s.shape[-2:], bool)), s, -1e30)
    o = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), v)
    return jnp.einsum("bshk,hkd->bsd", o, w["o"])


def descended(w: Any, x: Array) -> Any:
    g = jax.grad(lambda w: (attention(w, x) ** 2).mean())(w)
    return jax.tree.map(lambda a, b: a - 0.1 * b, w, g)


HEADS = {**{n: normal(9, 6, 8) for n in "qkv"}, "o": normal(6, 8, 9)}, normal(1, 127, 9)


def mlp(w: Any, x: Array, y: Array) -> Any:
    """No dim of it is a multiple of two."""
    g = jax.grad(lambda w: jnp.mean((jax.nn.relu(x @ w["a"]) @ w["b"] - y) ** 2))(w)
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, g)


ODD = {"a": normal(77, 143), "b": normal(143, 77)}, normal(91, 77), normal(91, 77)


def in_a_loop(w: Any, x: Array) -> Array:
    """Six heads in every layer of a scan."""
    return lax.scan(lambda x, w: (x + attention(w, x), None), x, w)[0]


LAYERS = jax.tree.map(lambda a: jnp.stack([a, -a]), HEADS[0]), HEADS[1]


def planned(function: Callable[..., Any], arguments: Any, target: Any, work: float) -> te.Front:
    """A front, all of whose plans run and give the numbers of the program."""
    front = te.optimize(
        te.trace(function, *arguments), target, settings=Settings(work=work, recompute=0, forms=0)
    )
    want = jax.tree.leaves(function(*arguments))
    for plan in front.plans:
        run = te.compile(plan, jax.devices()[: plan.mesh.devices])
        for got, true in zip(jax.tree.leaves(run(*arguments)), want, strict=True):
            np.testing.assert_allclose(got, true, rtol=1e-4, atol=2e-6)
        assert compare(plan, run.lower().compile()).equal
    return front


@pytest.mark.parametrize(
    ("function", "arguments", "share"),
    [
        pytest.param(attention, HEADS, 0.6, marks=SLOW),
        # Its products can be cut over what they sum as well.
        pytest.param(descended, HEADS, 0.95, marks=LONG),
        pytest.param(in_a_loop, LAYERS, 0.6, marks=LONG),
    ],
)
def test_case_34_six_heads_on_four_devices(
    function: Callable[..., Any], arguments: Any, share: float, tmp_path: Path
) -> None:
    """Two heads on each, of which those that were added cost what they take."""
    # Rows, of which there are an odd number, cannot be cut instead; nor scores inside kernels.
    target = replace(te.load_target("cpu:4"), fuses=False)
    front = planned(function, arguments, target, 1.0)
    best = front.best()
    assert "even-parts-4" in best.rules
    as_given = ("sharding", "collectives")  # no book that makes another form
    given = te.optimize(te.trace(function, *arguments), target, books=as_given)
    assert best.costs.seconds < share * given.best().costs.seconds
    front.save(tmp_path / "front")
    assert [p.costs for p in te.load(tmp_path / "front").plans] == [p.costs for p in front.plans]


@pytest.mark.slow
def test_case_34_extents_of_seven_eleven_and_thirteen_on_eight_devices() -> None:
    """Whole where that is quicker, and padded where the work is worth it, with its waste."""
    tiny = planned(lambda x, w: jnp.tanh(x @ w), (normal(7, 11), normal(11, 13)), "cpu:8", 0.5)
    assert "even-parts-8" not in tiny.best().rules
    front = planned(mlp, ODD, "cpu:8", 1.0)
    best = front.best()
    assert "even-parts-8" in best.rules
    products = 5 * 2.0 * 91 * 77 * 143
    share = best.costs.flops / products
    assert 144 / 143 / 8 <= share < 1.1 / 8, "143 become 144, and one device computes eighteen"


def test_what_devices_can_share_is_left_as_it_is() -> None:
    for shapes in (((8, 6), (6, 5)), ((5, 6), (6, 12)), ((3, 16), (16, 3))):
        graph = trace(lambda x, w: x @ w, normal(*shapes[0]), normal(*shapes[1])).graph
        assert with_even_parts(graph, 4) is graph
    graph = trace(lambda x, w: x @ w, normal(5, 7), normal(7, 9)).graph
    assert with_even_parts(graph, 1) is graph
    made = with_even_parts(graph, 4)
    products = [op for op in made.operations if op.kernel == "dot_general"]
    (types,) = [[made.values[v].shape for v in (*op.inputs, *op.outputs)] for op in products]
    assert types == [(5, 8), (8, 9), (5, 9)], "seven are nearest to a multiple of four"
    assert made.outputs == graph.outputs or made.values[made.outputs[0]].shape == (5, 9)


def test_how_many_devices_share_an_operation() -> None:
    params = {"dimension_numbers": [[[1], [0]], [[], []]], "preferred_element_type": None}
    sig = registry.signature(
        "dot_general", params, (TensorType((6, 10), "float32"), TensorType((10, 9), "float32"))
    )
    assert [shared(sig, sig.extents, n) for n in (2, 4, 8, 3, 9, 27, 81, 12, 30, 7)] == [
        *(2, 4, 4, 3, 9, 27, 27, 12, 30, 1)
    ]


def scored(x: Array, w: Array, labels: Array) -> Any:
    """The gradient of a loss over a vocabulary: many more scores than numbers that they are of."""

    def loss(x: Array, w: Array) -> Array:
        scores = jax.nn.log_softmax((x @ w).astype(jnp.float32))
        return -jnp.take_along_axis(scores, labels[:, None], 1).mean()

    return jax.grad(loss, (0, 1))(x, w)


def test_products_that_make_much_more_than_they_read_are_not_shared_by_sums() -> None:
    """Each device would hold all of what they make."""
    graph = trace(lambda x, w: jnp.tanh(x @ w).sum(), normal(22, 4), normal(4, 53)).graph
    (product,) = [op for op in graph.operations if op.kernel == "dot_general"]
    sig = registry.signature_in(graph, product)
    assert [shared(sig, sig.extents, 4, in_all) for in_all in (False, True)] == [4, 2]
    made = with_even_parts(graph, 4)
    (product,) = [op for op in made.operations if op.kernel == "dot_general"]
    sig = registry.signature_in(made, product)
    assert shared(sig, sig.extents, 4, True) == 4
    arguments = [normal(22, 4), normal(4, 53)]
    agree(made, arguments, numbers(graph, arguments), 1e-5)


def test_a_vocabulary_and_rows_that_devices_cannot_share_cost_little_more() -> None:
    """Also where rules have first written what is looked up in each row."""
    one, found = Settings(front=False), []
    for rows, words in ((2046, 50257), (2048, 50304)):
        shapes = ((rows, 512), jnp.bfloat16), ((512, words), jnp.bfloat16), ((rows,), jnp.int32)
        given = [jax.ShapeDtypeStruct(*s) for s in shapes]
        found.append(te.optimize(trace(scored, *given), "h100:8", settings=one)[0])
    assert "even-parts-8" in found[0].rules and len(found[0].rules) > 1
    assert found[0].costs.seconds < 1.5 * found[1].costs.seconds


# Windows whose steps do not make up the operand: 254 rows of 256, on eight devices.


NHWC = ("NHWC", "HWIO", "NHWC")


def sample(*shape: int) -> Array:
    rng = np.random.default_rng(sum(shape))
    return np.asarray(0.3 * rng.normal(size=shape), np.float32)


def convolved(x: Array, w: Array, stride: int = 1, padding: Any = "VALID") -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), padding, dimension_numbers=NHWC)


def network(x: Array, w: Array, v: Array) -> Array:
    """Windows without padding, one after another, up to a mean over places."""
    x = jax.nn.relu(convolved(x, w))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 1, 1, 1), "VALID")
    return jnp.tanh(convolved(x, v)).mean((1, 2))


def drawn(rng: random.Random) -> tuple[Callable[..., Array], list[Array]]:
    """A program of windows, and of what stands between them."""
    places = [rng.choice([9, 10, 12, 13, 16]) for _ in range(rng.choice([1, 1, 2]))]
    width, steps = len(places), []
    arguments = [np.asarray(rng_numbers(rng, (1, *places, 2)))]
    for _ in range(rng.choice([2, 3, 4])):
        kind = rng.choice(["window", "window", "sum", "max", "relu", "inverse", "slice", "own"])
        sizes = tuple(rng.choice([1, 2, 3]) for _ in places)
        strides = tuple(rng.choice([1, 1, 2]) for _ in places)
        padding: Any = rng.choice(["VALID", "VALID", "SAME"])
        if kind == "window":
            padding = rng.choice([padding, [(rng.choice([0, 1, -1]), rng.choice([0, 2]))] * width])
            arguments.append(rng_numbers(rng, (*sizes, 2, 2)))
        holes = tuple(rng.choice([1, 1, 2]) for _ in places)
        steps.append((kind, len(arguments) - 1, sizes, strides, padding, holes))
    end = rng.choice(["all", "mean", "max"])
    numbers = ("NHC", "HIO", "NHC") if width == 1 else NHWC

    def function(*values: Array) -> Array:
        x = values[0]
        for kind, at, sizes, strides, padding, holes in steps:
            if kind == "window":
                x = lax.conv_general_dilated(
                    *(x, values[at], strides, padding),
                    rhs_dilation=holes,
                    dimension_numbers=numbers,
                )
            elif kind in ("sum", "max"):
                start, combine = (0.0, lax.add) if kind == "sum" else (-jnp.inf, lax.max)
                sides = (1, *sizes, 1), (1, *strides, 1)
                x = lax.reduce_window(x, start, combine, *sides, padding)
            elif kind == "relu":
                x = jax.nn.relu(x)
            elif kind == "inverse":
                x = 1.0 / x  # what is no number where rows were added
            elif kind == "slice":
                x = x[:, 1:]
            else:
                x = x + jnp.arange(x.shape[1], dtype=x.dtype).reshape(1, -1, *[1] * width)
        if end == "all":
            return x
        return x.mean(1) if end == "mean" else x.max(1)

    return function, arguments


def rng_numbers(rng: random.Random, shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(rng.randrange(2**31)).normal(size=shape)


def checked(seed: int) -> int:
    """Every operation of a program padded along every index dim, by what makes its operands up and
    by more: how many programs that gave."""
    function, arguments = drawn(random.Random(seed))
    graph, made = trace(function, *arguments).graph, 0
    (true,) = [np.asarray(x) for x in execute(graph, arguments)]
    np.testing.assert_allclose(true, np.asarray(function(*arguments)), rtol=1e-8, atol=1e-8)
    for k in range(len(graph.operations)):
        for index in range(5):
            for size in range(2, 19):
                try:
                    found = padded_along(graph, k, index, size)
                except IndexError:
                    break
                if found is None or len(found.values) == len(graph.values):
                    continue
                verify_graph(found)
                (got,) = (np.asarray(x) for x in execute(found, arguments))
                scale = np.abs(true).max()
                np.testing.assert_allclose(got, true, rtol=0, atol=1e-9 * scale)
                made += 1
    return made


@pytest.mark.slow
@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_programs_of_windows_give_their_numbers_with_more_rows(seed: int) -> None:
    with jax.enable_x64(True), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        checked(seed)


def test_a_chain_of_windows_gets_rows_that_all_devices_share() -> None:
    graph = trace(network, sample(1, 40, 29, 3), sample(3, 3, 3, 4), sample(3, 3, 4, 5)).graph
    made = with_even_parts(graph, 4)
    windows = ("conv_general_dilated", "reduce_window_max")
    rows = [
        (graph_.values[op.inputs[0]].shape[1], graph_.values[op.outputs[0]].shape[1])
        for graph_ in (graph, made)
        for op in graph_.operations
        if op.kernel in windows
    ]
    assert rows == [(40, 38), (38, 36), (36, 34), (40, 40), (40, 40), (40, 40)]
    assert sum(op.kernel == "slice" for op in made.operations) == 0, "nothing is cut back"


@pytest.mark.slow
def test_case_26_windows_without_padding_send_edges_alone() -> None:
    """Of 1024 rows 1022 and 1020 are made: each device gets two rows for each from the next."""
    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32)
        for s in ((1, 1024, 1024, 64), (3, 3, 64, 64), (3, 3, 64, 64))
    ]

    def function(x: Array, w: Array, v: Array) -> Array:
        return jax.nn.relu(convolved(jax.nn.relu(convolved(x, w)), v)).mean((1, 2))

    front = te.optimize(
        te.trace(function, *shapes),
        "h100:8",
        mesh_shapes=[te.MeshShape(("x",), (8,))],
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("peak_bytes")  # the fastest has all rows of x on every device
    assert plan.rules == ("even-parts-8",)
    *edges, mean = [(c.kind, c.payload_bytes) for c in plan.collectives]
    assert edges == [("permute", 2 * width * 64 * 4) for width in (1024, 1022)]
    assert mean[1] <= 64 * 4


@pytest.mark.slow
def test_plans_with_more_rows_give_the_numbers_and_move_what_was_planned() -> None:
    arguments = sample(1, 128, 64, 8), sample(3, 3, 8, 8), sample(3, 3, 8, 8)
    front = te.optimize(
        te.trace(network, *arguments),
        "cpu:8",
        mesh_shapes=[te.MeshShape(("x",), (8,))],
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    assert any(c.kind == "permute" for p in front for c in p.collectives)
    assert any("even-parts-8" in p.rules for p in front)
    for plan in front:
        run = te.compile(plan, jax.devices()[:8])
        np.testing.assert_allclose(run(*arguments), network(*arguments), rtol=1e-4, atol=1e-5)
        assert compare(plan, run.lower().compile()).equal
