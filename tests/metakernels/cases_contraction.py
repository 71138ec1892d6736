"""Cases of contractions, convolutions and windows."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
from jax import lax

from tests.metakernels.cases import Array, Case, Draw, of


def arranged(draw: Draw, sizes: list[int]) -> tuple[tuple[int, ...], list[int]]:
    """A shape with the given extents in any order, and the dims where they ended up."""
    places = draw.order(len(sizes))
    shape = [0] * len(sizes)
    for n, at in zip(sizes, places, strict=True):
        shape[at] = n
    return tuple(shape), list(places)


def operand(draw: Draw, shape: tuple[int, ...], kind: str) -> Array:
    if kind == "integer":
        return draw.integers(shape)
    if kind == "small":
        return draw.integers(shape, dtype=np.int8)
    if kind == "complex":
        return draw.complexes(shape)
    return draw.floats(shape, ml_dtypes.bfloat16 if kind == "narrow" else np.float32)


@of("contraction", "dot_general")
def dot(draw: Draw, kernel: str) -> Case:
    batch, summed, left, right = ([draw.size() for _ in range(draw.size(0, 2))] for _ in range(4))
    if len(batch) + len(summed) + len(left) + len(right) > 5:
        batch = []
    b, k = len(batch), len(summed)
    one, at = arranged(draw, batch + summed + left)
    two, to = arranged(draw, batch + summed + right)
    dims = ((at[b : b + k], to[b : b + k]), (at[:b], to[:b]))
    kind = draw.choice(("float", "integer", "complex", "narrow", "small"))
    wide = {"narrow": np.float32, "small": np.int32}.get(kind)
    x, y = operand(draw, one, kind), operand(draw, two, kind)
    return lambda x, y: lax.dot_general(x, y, dims, preferred_element_type=wide), (x, y)


@of("contraction", "ragged_dot_general")
def ragged_dot(draw: Draw, kernel: str) -> Case:
    b, m, k, n, groups = (draw.size(1, 4) for _ in range(5))
    rows = draw.size(2, 8)
    cuts = np.sort(draw.numbers.integers(0, rows + 1, groups))
    sizes = np.diff(cuts, prepend=0).astype(np.int32)  # some rows may belong to no group
    form = draw.choice(("rows", "batch", "middle", "contracted", "plain"))
    if form == "plain":
        x, y = draw.floats((rows, k)), draw.floats((groups, k, n))
        return lax.ragged_dot, (x, y, sizes)
    if form == "batch":
        dims = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (1,))), (1,), (0,))
        x, y = draw.floats((b, rows, k)), draw.floats((groups, b, k, n))
        sizes = np.broadcast_to(sizes, sizes.shape)
    elif form == "middle":
        dims = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((), ())), (0,), (0,))
        x, y = draw.floats((rows, m, k)), draw.floats((groups, k, n))
    elif form == "rows":
        dims = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
        x, y = draw.floats((rows, k)), draw.floats((groups, k, n))
    else:
        dims = lax.RaggedDotDimensionNumbers((((1, 3), (1, 3)), ((0,), (0,))), (1,), ())
        x, y = draw.floats((b, rows, m, k)), draw.floats((b, rows, n, k))
    return lambda x, y, s: lax.ragged_dot_general(x, y, s, dims), (x, y, sizes)


@of("contraction", "conv_general_dilated")
def convolution(draw: Draw, kernel: str) -> Case:
    rank = draw.choice((1, 1, 2))
    n, groups, batches, inner, outer = (draw.size(1, 3) for _ in range(5))
    groups, batches = draw.choice(((groups, 1), (1, batches), (1, 1)))
    spatial, window, how = [], [], []
    for _ in range(rank):
        stride, hole, gap = draw.choice(((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2),
                                         (2, 2, 1), (3, 2, 1), (2, 3, 2)))  # fmt: skip
        w, size = draw.size(1, 3), draw.size(1, 8)
        low, high = draw.size(-1, 3), draw.size(-1, 3)
        short = (w - 1) * gap + 1 - ((size - 1) * hole + 1 + low + high)
        spatial.append(size)
        window.append(w)
        how.append((stride, hole, gap, (low, high + max(0, short) + (short == 0 and draw.coin()))))
    lhs, ls = arranged(draw, [n * batches, groups * inner, *spatial])
    rhs, rs = arranged(draw, [groups * batches * outer, inner, *window])
    _, out = arranged(draw, [1] * (rank + 2))
    kind = draw.choice(("float", "float", "integer", "narrow"))
    x, y = operand(draw, lhs, kind), operand(draw, rhs, kind)
    wider = None
    if kind == "integer" and draw.coin():  # products that do not fit into the operands' width
        x, y, wider = 40 * x.astype(np.int8), 40 * y.astype(np.int8), np.int32
    strides, holes, gaps, padding = zip(*how, strict=True)
    return (
        lambda x, y: lax.conv_general_dilated(
            x, y, strides, padding, holes, gaps,
            lax.ConvDimensionNumbers(tuple(ls), tuple(rs), tuple(out)), groups, batches,
            preferred_element_type=wider,
        ),
        (x, y),
    )  # fmt: skip


@of("window", "reduce_window_sum", "reduce_window_max", "reduce_window_min")
def window(draw: Draw, kernel: str) -> Case:
    shape, windows, strides, padding, holes, gaps = [], [], [], [], [], []
    for _ in range(draw.size(1, 3)):
        size, w, stride = draw.size(1, 8), draw.size(1, 3), draw.size(1, 3)
        hole, gap = draw.choice(((1, 1), (1, 1), (1, 2), (2, 1), (3, 1)))
        low, high = (draw.size(0, 2), draw.size(0, 2)) if draw.coin() else (0, 0)
        short = (w - 1) * gap + 1 - ((size - 1) * hole + 1 + low + high)
        for list_, value in zip(
            (shape, windows, strides, padding, holes, gaps),
            (size, w, stride, (low, high + max(0, short)), hole, gap),
            strict=True,
        ):
            list_.append(value)
    primitive = getattr(lax, f"{kernel}_p")

    def pool(x: Array) -> Array:
        return primitive.bind(
            x,
            window_dimensions=tuple(windows),
            window_strides=tuple(strides),
            padding=tuple(padding),
            base_dilation=tuple(holes),
            window_dilation=tuple(gaps),
        )

    return pool, (draw.choice((draw.floats, draw.integers))(shape),)


@of("window", "select_and_scatter_add")
def select_and_scatter_add(draw: Draw, kernel: str) -> Case:
    """The gradient of pooling, as JAX writes it."""
    shape, windows, strides, padding = [], [], [], []
    for _ in range(draw.size(1, 3)):
        w, stride, count = draw.size(1, 3), draw.size(1, 3), draw.size(1, 4)
        if draw.coin():
            w, low, high, size = stride, 0, 0, stride * count
        else:
            low, high = draw.size(0, w - 1), draw.size(0, w - 1)
            size = max(w, stride * count)
        for list_, value in zip((shape, windows, strides, padding), (size, w, stride, (low, high)),
                                strict=True):  # fmt: skip
            list_.append(value)
    x = draw.numbers.permutation(int(np.prod(shape))).reshape(shape).astype(np.float32)  # no ties

    def pool(x: Array) -> Array:
        return lax.reduce_window(x, -np.inf, lax.max, windows, strides, padding)

    out = jax.eval_shape(pool, x)
    cotangent = draw.floats(out.shape)
    return lambda x, c: jax.vjp(pool, x)[1](c)[0], (x, cotangent)
