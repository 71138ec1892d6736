"""Windows whose steps do not make up the operand: 254 rows of 256, on eight devices."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import verify_graph
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.rows.even_parts import with_even_parts
from tapestry_egg.runtime import compare
from tapestry_egg.tracing.trace import trace
from tests.rewrite.block_programs import padded_along

Array = Any
NHWC = ("NHWC", "HWIO", "NHWC")


def normal(*shape: int) -> Array:
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
@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_programs_of_windows_give_their_numbers_with_more_rows(seed: int) -> None:
    with jax.enable_x64(True), warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        checked(seed)


def test_a_chain_of_windows_gets_rows_that_all_devices_share() -> None:
    graph = trace(network, normal(1, 40, 29, 3), normal(3, 3, 3, 4), normal(3, 3, 4, 5)).graph
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
    arguments = normal(1, 128, 64, 8), normal(3, 3, 8, 8), normal(3, 3, 8, 8)
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
