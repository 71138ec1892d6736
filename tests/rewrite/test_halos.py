"""Windows over a dim that devices share: blocks with the edges of their neighbours."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.pipeline import Settings
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.rows.halos import found_in, with_halos
from tapestry_egg.runtime import compare
from tapestry_egg.tracing.trace import trace

Array = Any
NHWC = ("NHWC", "HWIO", "NHWC")


def normal(*shape: int) -> Array:
    rng = np.random.default_rng(sum(shape))
    return np.asarray(rng.normal(size=shape), np.float32)


def convolved(x: Array, w: Array, stride: int = 1) -> Array:
    return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=NHWC)


def pooled(x: Array, combine: Any, start: float) -> Array:
    return lax.reduce_window(x, start, combine, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def depthwise(x: Array, w: Array) -> Array:
    """Holes in the window, and channels first."""
    return lax.conv_general_dilated(
        *(x, w, (1, 1), "SAME"),
        rhs_dilation=(2, 2),
        dimension_numbers=("NCHW", "OIHW", "NCHW"),
        feature_group_count=3,
    )


def looped(x: Array, w: Array) -> Array:
    return lax.scan(lambda x, w: (jnp.tanh(convolved(x, w)), None), x, w)[0]


X, W = normal(2, 16, 6, 3), normal(3, 3, 3, 5)
#: Programs, their arguments, and how many windows of each slide over blocks.
PROGRAMS: dict[str, tuple[Callable[..., Array], tuple[Array, ...], int]] = {
    "convolution": (convolved, (X, W), 1),
    "strides": (lambda x, w: convolved(x, w, 2), (X, W), 1),
    "even window": (convolved, (X, normal(2, 2, 3, 5)), 1),
    "two": (lambda x, w, v: convolved(convolved(x, w), v), (X, W, normal(5, 1, 5, 2)), 2),
    "depthwise": (depthwise, (normal(3, 3, 16, 6), normal(6, 1, 3, 3)), 1),
    "max": (lambda x: pooled(x, lax.max, -jnp.inf), (-abs(X),), 1),
    "sum": (lambda x: pooled(x, lax.add, 0.0), (X,), 1),
    "loop": (looped, (X, normal(2, 3, 3, 3, 3)), 2),
}


def check(function: Callable[..., Array], arguments: tuple[Array, ...], n: int) -> BlockGraph:
    graph = trace(function, *arguments).graph
    made = with_halos(graph, n)
    verify_graph(made)
    pairs = zip(execute(made, list(arguments)), execute(graph, list(arguments)), strict=True)
    for got, want in pairs:
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)
    return made


@pytest.mark.parametrize("name", PROGRAMS)
def test_windows_over_blocks_give_what_those_over_the_whole_give(name: str) -> None:
    """Along the height, also where it ends: nothing is above what lies outside."""
    function, arguments, count = PROGRAMS[name]
    made = check(function, arguments, 4)
    graph = trace(function, *arguments).graph
    assert sum(times for _, times in found_in(graph, 4)) == count
    assert made is not graph


def test_what_needs_no_edges_or_has_too_many_is_left_as_it_is() -> None:
    for arguments, n in (
        ((normal(4, 16, 6, 3), W), 4),  # a batch that is shared
        ((normal(2, 18, 6, 3), W), 4),  # blocks that are not equal
        ((normal(2, 8, 6, 3), normal(7, 3, 3, 5)), 4),  # edges of more than the next block
        ((normal(2, 16, 8, 3), normal(1, 1, 3, 5)), 4),  # a window of one
    ):
        graph = trace(convolved, *arguments).graph
        assert with_halos(graph, n) is graph, arguments[0].shape
    graph = trace(lambda x: x * 2.0, X).graph
    assert with_halos(graph, 4) is graph


def cropped(x: Array, w: Array) -> Array:
    """Along the width not all is read."""
    pads = (1, 1), (2, -2)
    return lax.conv_general_dilated(x, w, (1, 1), pads, dimension_numbers=NHWC)


def spread(x: Array) -> Array:
    """Along the width windows end before what they slide over does."""
    pads = (0, 0), (1, 3), (3, 0), (0, 0)
    return lax.reduce_window(
        *(x, 0.0, lax.add, (1, 5, 1, 1), (1, 1, 3, 1), pads), base_dilation=(1, 1, 2, 1)
    )


@pytest.mark.parametrize(("function", "weights"), [(cropped, (W,)), (spread, ())])
def test_what_does_not_read_all_of_another_dim_is_left_as_it_is(
    function: Callable[..., Array], weights: tuple[Array, ...]
) -> None:
    """Whoever runs a kernel cuts and pads there, which a form has nobody for."""
    arguments = (normal(3, 16, 8, 3), *weights)
    made = check(function, arguments, 4)
    assert found_in(made, 4) == []


WEIGHTS = ((3, 3, 64, 64),)


def network(x: Array, w: Array, v: Array) -> Array:
    return convolved(jax.nn.relu(convolved(x, w)), v)


@pytest.mark.slow
def test_case_26_devices_send_edges_of_images() -> None:
    """One large image: what is sent for a convolution are two rows of every block."""
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((1, 1024, 1024, 64), *2 * WEIGHTS)]
    front = te.optimize(
        te.trace(network, *shapes),
        "h100:8",
        pins={"[0]": (None, "x", None, None)},
        mesh_shapes=[te.MeshShape(("x",), (8,))],
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    best = front.best()
    assert "halos-8" in best.rules
    rows = 1024 * 64 * 4  # bytes
    assert {c.kind for c in best.collectives} == {"all_gather"}, "nothing else moves"
    assert sum(c.payload_bytes * c.count for c in best.collectives) == 2 * 2 * 8 * rows
    assert best.costs.peak_bytes < 3.2 * 1024 * 128 * 64 * 4, "no device holds the image"


@pytest.mark.slow
def test_case_26_plans_give_the_numbers(tmp_path: Path) -> None:
    """On eight devices; and files of them are believed."""
    arguments = [jnp.asarray(0.3 * normal(*s)) for s in ((1, 64, 16, 8), *2 * ((3, 3, 8, 8),))]
    mesh = te.MeshShape(("x",), (8,))
    settings_ = Settings(work=1.0, recompute=0, forms=0)
    front = te.optimize(
        te.trace(network, *arguments), "cpu:8", mesh_shapes=[mesh], settings=settings_
    )
    assert any("halos-8" in p.rules for p in front.plans)
    want = network(*arguments)
    for plan in front.plans:
        run = te.compile(plan, jax.devices()[:8])
        np.testing.assert_allclose(run(*arguments), want, rtol=1e-4, atol=1e-5)
        assert compare(plan, run.lower().compile()).equal
    front.save(tmp_path / "front")
    assert [p.costs for p in te.load(tmp_path / "front").plans] == [p.costs for p in front.plans]
