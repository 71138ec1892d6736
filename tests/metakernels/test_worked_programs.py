"""The worked examples of Tapestry's documents, by number: programs, traced and run by shards.

Programs are JAX functions; their graphs run on the reference executor under the covers that the
example gives, and every number is read off the graphs and signatures that tracing made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.metakernels.signatures.splits import Blocks, Gathered, Partial, Replicated, split
from tapestry_egg.monoids.definition import monoid
from tapestry_egg.monoids.fold import fold, wrap
from tapestry_egg.reference.executor import execute
from tapestry_egg.tracing.trace import trace
from tapestry_egg.zspace import Projection, ZRange, cover_fault
from tests.metakernels.covers import operations

Array = Any
zr = ZRange.parse


def traced(fn: Callable[..., Any], *shapes: Sequence[int], dtype: Any = np.float32) -> BlockGraph:
    return trace(fn, *(jax.ShapeDtypeStruct(tuple(s), dtype) for s in shapes)).graph


def signatures(graph: BlockGraph) -> list[OperationSignature]:
    """The signatures of a graph's operations, in program order."""
    return [
        registry.signature(
            op.kernel,
            op.params,
            tuple(g.values[v] for v in op.inputs),
            tuple(g.values[v] for v in op.outputs),
        )
        for _, op, g in operations(graph)
    ]


def only(graph: BlockGraph, kernel: str) -> OperationSignature:
    (found,) = (s for s in signatures(graph) if s.kernel == kernel)
    return found


def dim(signature: OperationSignature, name: str) -> int:
    return [d.name for d in signature.index].index(name)


def integers(*shapes: Sequence[int]) -> list[Array]:
    """Small integers as floats: sums and products of them are exact in every order."""
    rng = np.random.default_rng(7)
    return [rng.integers(-2, 3, s).astype(np.float32) for s in shapes]


def blocks(signature: OperationSignature, **sizes: int) -> tuple[ZRange, ...]:
    """The index space cut every `sizes[name]` points."""
    parts: tuple[ZRange, ...] = (ZRange.from_shape(signature.extents),)
    for name, size in sizes.items():
        parts = tuple(b for p in parts for b in p.split(dim(signature, name), size))
    return parts


# Two layers of an MLP, the first in four shards of 50 x 16, the second in four of 50 x 4


def mlp(x: Array, w1: Array, b1: Array, w2: Array, b2: Array) -> Array:
    y = jnp.maximum(x @ w1 + b1, 0)
    return jnp.maximum(y @ w2 + b2, 0)


def test_x8_two_layer_mlp() -> None:
    shapes = [(100, 12), (12, 32), (32,), (32, 8), (8,)]
    graph = traced(mlp, *shapes)
    found = signatures(graph)
    linears = [s for s in found if s.kernel == "dot_general"]
    # The documents' own check expects [100, 12] of the first layer.
    assert [s.output_types[0].shape for s in linears] == [(100, 32), (100, 8)]
    covers = {}
    for i, s in enumerate(found):
        columns = s.output_types[0].shape[-1] // 2
        if s.kernel == "dot_general":
            covers[(i,)] = blocks(s, m=50, n=columns)
        elif s.kernel in ("add", "max"):
            covers[(i,)] = blocks(s, i0=50, i1=columns)
    assert sorted(map(len, covers.values())) == [4] * 6
    # A linear and the activation after it have the same boxes: they fuse, shard by shard.
    layer1 = [(s, covers[(i,)]) for i, s in enumerate(found) if (i,) in covers][:3]
    made = [[str(s.outputs[0].image(b)) for b in cover] for s, cover in layer1]
    assert (
        made[0]
        == made[1]
        == made[2]
        == [
            "zr[0:50, 0:16]",
            "zr[0:50, 16:32]",
            "zr[50:100, 0:16]",
            "zr[50:100, 16:32]",
        ]
    )
    given = integers(*shapes)
    (out,) = execute(graph, given, covers)
    np.testing.assert_array_equal(out, np.asarray(mlp(*map(jnp.asarray, given))))


def test_x9_sections() -> None:
    shapes = [(20, 30, 128), (128, 32), (32,), (32, 8)]

    def two_layers(x: Array, w1: Array, b1: Array, w2: Array) -> Array:
        return jnp.maximum(jnp.maximum(x @ w1 + b1, 0) @ w2, 0)

    graph = traced(two_layers, *shapes)
    covers = {}
    for i, s in enumerate(signatures(graph)):
        # The first linear in sections 1, 2, 2 of its outputs; all others in two along the largest.
        maps = [n if d.role == "map" else 0 for d, n in zip(s.index, s.extents, strict=True)]
        counts = [2 if d == int(np.argmax(maps)) else 1 for d in range(len(maps))]
        covers[(i,)] = ZRange.from_shape(s.extents).sections([1, 2, 2, 1] if not i else counts)
    assert [len(c) for c in covers.values()] == [4, 2, 2, 2, 2, 2]
    assert [b.shape for b in covers[(0,)]] == [(20, 15, 16, 128)] * 4
    rng = np.random.default_rng(9)
    given = [rng.standard_normal(s).astype(np.float32) for s in shapes]
    (by_sections,), (whole,) = execute(graph, given, covers), execute(graph, given)
    np.testing.assert_allclose(by_sections, whole, 1e-6)
    np.testing.assert_allclose(by_sections, two_layers(*map(jnp.asarray, given)), 1e-5, 1e-4)


# Reductions


def test_x11_sum_over_an_axis() -> None:
    a, b, c, d = 2, 3, 5, 7
    over2, over3 = (
        only(traced(lambda x, k=k: jnp.sum(x, k), (a, b, c, d)), "reduce_sum") for k in (2, 3)
    )
    assert (over2.output_types[0].shape, over3.output_types[0].shape) == ((a, b, d), (a, b, c))
    assert over2.extents == (a, b, d, c) and over2.index[3].role == "reduce"
    # Where the reduced dim is no index dim, as in the documents: every output reads all of it.
    outputs_only = Projection(
        ((1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 0)), (0, 0, 0, 0), (1, 1, 1, c)
    )
    read = over2.inputs[0].compose(outputs_only)
    assert read.matrix == ((1, 0, 0), (0, 1, 0), (0, 0, 0), (0, 0, 1))
    assert read.shape == (1, 1, c, 1)
    assert over2.outputs[0].compose(outputs_only) == Projection.identity(3)


def test_x15_long_reduction() -> None:
    shapes = [(4, 10), (10, 6)]
    graph = traced(jnp.matmul, *shapes)
    (product_,) = signatures(graph)
    x, w = integers(*shapes)
    (whole,) = execute(graph, [x, w])
    for k in (1, 4, 9):
        all_, d = ZRange.from_shape(product_.extents), dim(product_, "k")
        cover = (all_.with_dim(d, 0, k), all_.with_dim(d, k, 10))
        np.testing.assert_array_equal(execute(graph, [x, w], {(0,): cover})[0], whole)
        # The partial values themselves, stacked along a new dim and then summed.
        parts = [(x[:, :k], w[:k]), (x[:, k:], w[k:])]
        stacked = np.stack([execute(traced(jnp.matmul, *map(np.shape, p)), p)[0] for p in parts])
        (state,) = fold(monoid("sum"), wrap(monoid("sum"), stacked)).values()
        np.testing.assert_array_equal(state, whole)
    assert split(product_, {dim(product_, "k"): (5,)}).outputs[0] == {2: Partial("sum")}


# Windows


def test_x13_convolution_as_jax_writes_it() -> None:
    def conv(x: Array, f: Array) -> Array:
        return lax.conv(x, f, (1, 1), "VALID")

    s = only(traced(conv, (100, 1, 10, 10), (128, 1, 3, 3)), "conv_general_dilated")
    assert s.output_types[0].shape == (100, 128, 8, 8)
    y = dim(s, "y0")
    top, bottom = ZRange.from_shape(s.extents).split(y, 4)
    assert [str(s.operand_box(0, half)) for half in (top, bottom)] == [
        "zr[0:100, 0:1, 0:6, 0:10]",
        "zr[0:100, 0:1, 4:10, 0:10]",
    ]
    assert sum(s.operand_box(0, half).size for half in (top, bottom)) == 12000
    assert s.operand_box(0, ZRange.from_shape(s.extents)).size == 10000
    assert split(s, {y: (2,)}).inputs == ({y: Blocks(2, 1, 1)}, {y: Replicated()})
    image, window = integers((1, 1, 10, 10), (1, 1, 3, 3))
    (out,) = execute(traced(conv, image.shape, window.shape), [image, window])
    assert out[0, 0, 0, 0] == (image[0, 0, 0:3, 0:3] * window).sum()
    assert out[0, 0, 1, 0] == (image[0, 0, 1:4, 0:3] * window).sum()


def test_x14_dilation_is_two_dense_convolutions_of_strided_views() -> None:
    def conv(x: Array, f: Array, dilation: int) -> Array:
        return lax.conv_general_dilated(x, f, (1, 1), "VALID", rhs_dilation=(1, dilation))

    image, window = integers((1, 1, 3, 10), (1, 1, 3, 3))
    dilated = traced(lambda x, f: conv(x, f, 2), image.shape, window.shape)
    s = only(dilated, "conv_general_dilated")
    assert s.output_types[0].shape == (1, 1, 1, 6)
    w = dim(s, "w1")
    one = ZRange.from_shape(tuple(n if d == w else 1 for d, n in enumerate(s.extents)))
    assert s.inputs[0].image(one).shape[-1] == 5  # of which three are used
    views = [Projection(((2,),), (first,), (1,)) for first in (0, 1)]  # X[.., 0::2], X[.., 1::2]
    dense = traced(lambda x, f: conv(x, f, 1), (1, 1, 3, 5), window.shape)
    own = only(dense, "conv_general_dilated")
    assert own.output_types[0].shape[-1] == 3 and own.extents[dim(own, "w1")] == 3
    halves = []
    for first, view in enumerate(views):
        (part,) = execute(dense, [np.ascontiguousarray(image[..., first::2]), window])
        halves.append(part)
        # Output j of this half reads the box that output 2j + first of the whole reads.
        j = dim(own, "y1")
        window_of = Projection(((1, 1),), (0,), (1,))  # place p of the window at position j
        for at, place in product(range(3), repeat=2):
            index = [0] * len(own.index)
            index[j], index[w] = at * 2 + first, place
            read = s.inputs[0].point(tuple(index))
            own_box = ZRange(read.start[-1:], read.end[-1:])
            assert view.compose(window_of).point((at, place)) == own_box
    (whole,) = execute(dilated, [image, window])
    np.testing.assert_array_equal(np.stack(halves, axis=-1).reshape(whole.shape), whole)


# Views and data that is not arithmetic


def test_x16_concat_elimination() -> None:
    def joined(a1: Array, a2: Array, b: Array) -> Array:
        return jnp.concatenate([a1, a2]) + b

    def apart(a1: Array, a2: Array, b: Array) -> tuple[Array, Array]:
        return a1 + b, a2 + b

    shapes = [(500, 10), (500, 10), (10,)]
    graph = traced(joined, *shapes)
    add = only(graph, "add")
    concat = only(graph, "concatenate")
    assert concat.output_types[0].shape == (1000, 10)
    shards = ZRange.from_shape(add.extents).split(0, 500)
    # Each shard reads one of the two pieces, exactly; and the shards make up the result.
    assert [str(add.inputs[0].image(s)) for s in shards] == [
        "zr[0:500, 0:10]",
        "zr[500:1000, 0:10]",
    ]
    assert cover_fault([add.outputs[0].image(s) for s in shards], zr("zr[0:1000, 0:10]")) is None
    given = integers(*shapes)
    at = next(path for path, op, _ in operations(graph) if op.kernel == "add")
    (whole,) = execute(graph, given, {at: shards})
    without = traced(apart, *shapes)
    assert "concatenate" not in [s.kernel for s in signatures(without)]
    np.testing.assert_array_equal(np.concatenate(execute(without, given)), whole)
    three = traced(lambda p, q: jnp.concatenate([p, q]), (500, 10, 10), (500, 10, 10))
    assert three.values[three.outputs[0]].shape == (1000, 10, 10)


def test_x18_an_index_tensor_keeps_global_coordinates() -> None:
    scores = np.array(
        [[0.2, 0.3, 0.2, 0.4], [0.2, 0.3, 0.3, 0.2], [0.3, 0.45, 0.7, 0.2], [0.2, 0.9, 0.6, 0.3]],
        np.float32,
    )

    def bounds(x: Array) -> list[Array]:
        cat = x > 0.5
        out = []
        for k in range(2):
            at = lax.broadcasted_iota(jnp.int32, x.shape, k)
            out += [jnp.min(jnp.where(cat, at, 4)), jnp.max(jnp.where(cat, at, -1))]
        return out

    graph = traced(bounds, (4, 4))
    covers = {}
    for path, op, g in operations(graph):
        s = registry.signature(
            op.kernel,
            op.params,
            tuple(g.values[v] for v in op.inputs),
            tuple(g.values[v] for v in op.outputs),
        )
        if s.extents == (4, 4):
            covers[path] = ZRange.from_shape((4, 4)).split(1, 2)  # columns 0:2 and 2:4
    kernels = {op.kernel for path, op, _ in operations(graph) if path in covers}
    assert {"gt", "select_n", "reduce_min", "reduce_max"} <= kernels
    assert [int(v) for v in execute(graph, [scores], covers)] == [2, 3, 1, 2]


def test_x19_desaturate() -> None:
    def desaturate(pixels: Array) -> Array:
        weights = jnp.array([0.25, 0.5, 0.25], jnp.float32)
        return jnp.dot(pixels.astype(jnp.float32), weights).astype(jnp.uint8)

    graph = traced(desaturate, (100, 256, 256, 3), dtype=np.uint8)
    assert str(graph.values[graph.outputs[0]]) == "u8[100, 256, 256]"
    mixing = only(graph, "dot_general")
    quarters = ZRange.from_shape(mixing.extents).split(0, 25)
    assert [str(mixing.inputs[0].image(q)) for q in quarters[:2]] == [
        "zr[0:25, 0:256, 0:256, 0:3]",
        "zr[25:50, 0:256, 0:256, 0:3]",
    ]
    cut = split(mixing, {0: (4,), dim(mixing, "k"): (3,)})
    assert cut.inputs[0] == {0: Blocks(0), 3: Blocks(3)}
    assert cut.inputs[1] == {0: Replicated(), 3: Blocks(0)} and Gathered() not in cut.inputs
    small = traced(desaturate, (3, 4, 4, 3), dtype=np.uint8)
    pixels = np.random.default_rng(2).integers(0, 255, (3, 4, 4, 3)).astype(np.uint8)
    at = next(path for path, op, _ in operations(small) if op.kernel == "dot_general")
    covers = {at: ZRange.from_shape((3, 4, 4, 3)).sections((2, 2, 1, 1))}
    np.testing.assert_array_equal(execute(small, [pixels], covers)[0], desaturate(pixels))
