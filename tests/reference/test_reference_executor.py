"""The reference executor against JAX: whole programs, and programs in shards of any shape."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from models import example
from tapestry_egg.errors import GraphError, TemplateError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.executor import CoverError, execute
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import ZRange
from tests.metakernels.covers import operations, random_covers

Array = Any
F32 = np.float32
zr = ZRange.parse


def traced(fn: Callable[..., Any], *args: Any) -> tuple[BlockGraph, list[Array]]:
    return trace(fn, *args).graph, [np.asarray(x) for x in jax.tree.leaves(args)]


def signature_at(graph: BlockGraph, path: tuple[int, ...]) -> OperationSignature:
    op, inside = next((op, g) for at, op, g in operations(graph) if at == path)
    types = [tuple(inside.values[v] for v in ids) for ids in (op.inputs, op.outputs)]
    return registry.signature(op.kernel, op.params, *types)


def same(got: Any, wanted: Any, tolerance: float = 0.0) -> None:
    """Equal shapes, dtypes and values; floats up to a tolerance, relative and absolute."""
    leaves = jax.tree.leaves(wanted)
    assert len(got) == len(leaves)
    for a, b in zip(got, map(np.asarray, leaves), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if tolerance and b.dtype.kind not in "biu":
            np.testing.assert_allclose(a, b, tolerance, tolerance)
        else:
            np.testing.assert_array_equal(a, b)


# Programs

USUAL = ("llama", "mlp", "moe", "sorting", "while_loop")
LONG = ("convnet", "gpt2", "recurrent", "vit")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*USUAL, *(pytest.param(name, marks=pytest.mark.long) for name in LONG)]
)
def test_train_steps_give_what_jax_gives_whole_and_in_random_shards(name: str) -> None:
    fn, args = example(name)
    graph, inputs = traced(fn, *args)
    whole = execute(graph, inputs)
    same(whole, jax.jit(fn)(*args), 3e-5)
    # Sums in another order differ by rounding only.
    same(execute(graph, inputs, random_covers(graph, random.Random(name))), whole, 1e-5)


def test_a_shard_sees_its_boxes_and_nothing_else() -> None:
    """Elements that no projection of a shard names are NaN; its results stay finite."""
    x, w = np.ones((4, 6), F32), np.ones((6, 8), F32)
    graph, _ = traced(jnp.matmul, x, w)
    x[:2], w[:, :5] = np.nan, np.nan
    cover = [zr("zr[0:2, 0:8, 0:6]"), zr("zr[2:4, 0:5, 0:6]"), zr("zr[2:4, 5:8, 0:6]")]
    (out,) = execute(graph, [x, w], {(0,): cover})
    assert np.isfinite(out[2:, 5:]).all() and np.isnan(out[:2]).all() and np.isnan(out[:, :5]).all()


# One operation in shards


def test_empty_boxes_are_no_shards() -> None:
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    graph, inputs = traced(lambda x: x.max(1), x)
    cover = [zr("zr[3:3, 0:4]"), zr("zr[0:3, 0:3]"), zr("zr[0:2, 4:4]"), zr("zr[0:3, 3:4]")]
    same(execute(graph, inputs, {(0,): cover}), x.max(1))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*product(("sum", "prod", "max", "min"), (np.float32, np.int8)), ("or", bool), ("and", bool)],
)
def test_reductions_of_nothing(name: str, dtype: type) -> None:
    reduce, x = getattr(lax, f"reduce_{name}"), np.zeros((3, 0, 2), dtype)
    graph, inputs = traced(lambda x: reduce(x, (1,)), x)
    same(execute(graph, inputs), reduce(x, (1,)))


def test_at_the_ends_of_what_integers_hold() -> None:
    x = np.array([[-128, 5, -128, 127], [0, 1, 0, 2]], np.int8)
    y = np.array([[np.nan, 1.0, np.inf], [-5.7, 1e20, -1e20]], np.float32)

    def run(x: Any, y: Any) -> Any:
        unsigned = lax.top_k(x.astype(np.uint8), 4)
        return lax.top_k(x, 3), unsigned, lax.top_k(y, 2)[1], y.astype(np.int8), y.astype(np.uint32)

    graph, inputs = traced(run, x, y)
    same(execute(graph, inputs), jax.jit(run)(x, y))


def test_elements_of_half_a_byte_are_parts_too() -> None:
    """NumPy has no such view; the index space is that of the bytes all the same."""
    graph, inputs = traced(
        lambda x: lax.bitcast_convert_type(x, "int4"), np.arange(6, dtype="int8")
    )
    signature = signature_at(graph, (0,))
    assert signature.extents == (6,) and signature.outputs[0].shape == (1, 2)
    with pytest.raises(TemplateError, match="no reference for bit casts to int4"):
        execute(graph, inputs)


def test_contractions_and_updates_of_nothing() -> None:
    x, none = np.ones((2, 0), np.float32), np.zeros((0, 3), np.float32)
    at, start = np.zeros((0, 1), np.int32), np.ones((4, 3), np.float32)
    graph, inputs = traced(
        lambda x, none, start: (x @ none, start.at[at[:, 0]].add(none)), x, none, start
    )
    same(execute(graph, inputs), (np.zeros((2, 3), np.float32), start))


@pytest.mark.parametrize(("shape", "dims"), [((3,), ()), ((1, 3), (0,)), ((3, 2, 1), (1, 2))])
def test_what_a_reduction_starts_from_is_an_identity_to_xla(shape: Any, dims: Any) -> None:
    def program(x: Any) -> Any:
        starts = np.float32(1), np.float32(3)
        return lax.reduce((x, x), starts, lambda a, b: (a[0] + b[0], a[1] * b[1]), dims)

    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    graph, inputs = traced(program, x)
    same(execute(graph, inputs), jax.jit(program)(x))


def test_an_index_space_without_points() -> None:
    graph, inputs = traced(lambda x: lax.reduce_max(x, (1,)), np.ones((3, 0), F32))
    least = np.full(3, -np.inf, F32)
    same(execute(graph, inputs), least)
    same(execute(graph, inputs, {(0,): [ZRange((0, 0), (3, 0))]}), least)


# Regions


@pytest.mark.slow
def test_loops_and_branches_with_their_bodies_in_shards() -> None:
    def f(w: Array, c: Array, xs: Array, k: Array) -> Any:
        def step(c: Array, x: Array) -> Any:
            c = jnp.sin(c @ w) + x
            return c, c * 2

        c, ys = lax.scan(step, c, xs, reverse=True)
        c = lax.fori_loop(0, 3, lambda i, v: v + i, c)
        _, c = lax.while_loop(lambda v: v[0] < k, lambda v: (v[0] + 1, v[1] * 0.5), (0, c))
        return lax.switch(k, [jnp.sin, jnp.cos, lambda v: v @ w], c), ys

    rng = np.random.default_rng(0)
    w, c, xs = (rng.normal(size=s).astype(F32) for s in ((4, 4), (6, 4), (5, 6, 4)))
    for k in (-3, 0, 2, 9):
        args = (w, c, xs, np.int32(k))
        graph, inputs = traced(f, *args)
        covers = random_covers(graph, random.Random(k))
        assert sum(len(path) > 1 for path in covers) > 5
        same(execute(graph, inputs, covers), f(*args), 1e-5)


@pytest.mark.parametrize("mode", ["clip", "fill"])
def test_windows_at_places_outside(mode: str) -> None:
    reads = lax.GatherDimensionNumbers((1, 2), (), (0, 1))
    writes = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))

    def fn(x: Array, i: Array, u: Array) -> Any:
        read = lax.gather(x, i, reads, (2, 3), mode=mode)
        return read, lax.scatter_add(x, i, u, writes, mode=mode)

    places = np.array([[-2, 0], [0, 4], [3, 3], [5, 9], [4, -1]], np.int32)
    x, updates = np.arange(42, dtype=F32).reshape(6, 7), np.arange(30, dtype=F32).reshape(5, 2, 3)
    graph, inputs = traced(fn, x, places, updates)
    wanted = jax.jit(fn)(x, places, updates)
    same(execute(graph, inputs), wanted)
    for seed in range(4):
        same(execute(graph, inputs, random_covers(graph, random.Random(seed))), wanted)


def test_a_scan_of_no_steps() -> None:
    args = (np.ones(3, F32), np.ones((0, 3), F32))
    graph, inputs = traced(lambda c, xs: lax.scan(lambda c, x: (c + x, c), c, xs), *args)
    same(execute(graph, inputs), [args[0], np.zeros((0, 3), F32)])


# What is refused

PRODUCT = traced(jnp.matmul, np.ones((4, 6), F32), np.ones((6, 8), F32))


@pytest.mark.parametrize(
    ("boxes", "message"),
    [
        (["zr[0:2, 0:8, 0:6]"], r"point \(2, 0, 0\) of zr\[0:4, 0:8, 0:6\] is left out"),
        (["zr[0:4, 0:5, 0:6]", "zr[0:4, 3:8, 0:6]"], r"overlap in zr\[0:4, 3:5, 0:6\]"),
        (["zr[0:4, 0:8, 0:7]"], r"leaves the index space"),
        (["zr[0:4, 0:8]"], r"has rank 2"),
        # As many points as there are, but two overlap and two are missing.
        (["zr[0:4, 0:8, 0:3]", "zr[0:4, 0:8, 2:5]"], r"overlap"),
    ],
)
def test_a_cover_must_be_disjoint_and_exact(boxes: list[str], message: str) -> None:
    graph, inputs = PRODUCT
    with pytest.raises(CoverError, match=message) as caught:
        execute(graph, inputs, {(0,): [zr(b) for b in boxes]})
    assert "operation (0,) (dot_general" in caught.value.where


def test_dims_that_must_stay_whole_are_not_cut() -> None:
    graph, inputs = traced(lambda x: lax.cumsum(x, 1), np.ones((2, 4), F32))
    cut = ZRange.from_shape((2, 4)).split(1, 2)
    with pytest.raises(CoverError, match="cuts index dim i1, whose role is"):
        execute(graph, inputs, {(0,): cut})
    same(execute(graph, inputs, {(0,): ZRange.from_shape((2, 4)).split(0, 1)}),
         np.cumsum(inputs[0], 1))  # fmt: skip


@pytest.mark.parametrize("path", [(1,), (0, 0, 0), (), (-1,), (0, 0)])
def test_a_cover_of_no_operation(path: tuple[int, ...]) -> None:
    graph, inputs = PRODUCT
    with pytest.raises(CoverError, match="there is no operation at"):
        execute(graph, inputs, {path: [zr("zr[0:4, 0:8, 0:6]")]})


def test_inputs_that_do_not_fit() -> None:
    graph, (x, y) = PRODUCT
    for wrong in ([x], [x, y.T], [x, y.astype(np.float64)]):
        with pytest.raises(GraphError, match="input"):
            execute(graph, wrong)


def test_a_kernel_without_a_reference() -> None:
    graph, inputs = traced(lambda x: lax.approx_max_k(x, 1)[0], np.eye(3, dtype=F32))
    with pytest.raises(TemplateError, match="no reference for approx_top_k"):
        execute(graph, inputs)


def test_clipping_leaves_the_part_inside() -> None:
    bounds = zr("zr[0:4, 2:6]")
    assert zr("zr[-1:3, 5:9]").clip(bounds) == zr("zr[0:3, 5:6]")
    assert zr("zr[1:2, 3:4]").clip(bounds) == zr("zr[1:2, 3:4]")
    assert zr("zr[-3:-1, 7:9]").clip(bounds) == zr("zr[0:0, 6:6]")
