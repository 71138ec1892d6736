"""Dims that devices cannot share, padded: six heads on four devices, odd extents on eight."""

from __future__ import annotations

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
from tapestry_egg.graph.blockgraph import BlockGraph, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.pipeline import Settings
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
