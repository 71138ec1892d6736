"""Cases of reads and writes at places that are data."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.metakernels.cases import Array, Case, Draw, of

SCATTERS = {
    "scatter": "set",
    "scatter-add": "add",
    "scatter-sub": "subtract",
    "scatter-mul": "multiply",
    "scatter-max": "max",
    "scatter-min": "min",
}


@of("indexing", "dynamic_slice")
def dynamic_slice(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    sizes = tuple(n if draw.coin() else draw.size(1, n) for n in shape)
    starts = tuple(np.int32(draw.size(-2, n + 1)) for n in shape)
    return lambda x, *i: lax.dynamic_slice(x, i, sizes), (draw.any(shape), *starts)


@of("indexing", "dynamic_update_slice")
def dynamic_update_slice(draw: Draw, kernel: str) -> Case:
    shape = (draw.size(2), *draw.shape(0, 2))
    sizes = tuple(n if draw.coin() else draw.size(1, n) for n in shape)
    if sizes == shape:  # what is written over all of an array is no update
        sizes = (shape[0] - 1, *shape[1:])
    starts = tuple(np.int32(draw.size(-2, n + 1)) for n in shape)
    x, update = draw.floats(shape), draw.floats(sizes)
    return lambda x, u, *i: lax.dynamic_update_slice(x, u, i), (x, update, *starts)


def places(draw: Draw, rows: int, wild: bool) -> Array:
    low, high = (-2, rows + 2) if wild else (0, rows)
    return draw.integers(draw.shape(1, 2), low, high)


@of("indexing", "gather")
def gather(draw: Draw, kernel: str) -> Case:
    rows, width, depth = draw.size(2, 8), draw.size(), draw.size()
    form = draw.choice(
        ("rows", "mode", "last", "points", "along", "windows", "flags", "integers", "vmapped")
    )
    x = draw.floats((rows, width, depth))
    if form == "rows":
        return lambda x, i: x[i], (x, places(draw, rows, False))
    if form in ("mode", "flags", "integers"):
        mode, fill = draw.choice((("clip", None), ("fill", None), ("fill", 0), ("fill", 3)))
        if form == "flags":
            x, fill = draw.flags((rows, width)), None if fill is None else True
        elif form == "integers":
            x = draw.integers((rows, width))
        at = places(draw, rows, True)
        return lambda x, i: x.at[i].get(mode=mode, fill_value=fill), (jnp.asarray(x), at)
    if form == "last":
        return lambda x, i: x[:, :, i], (
            draw.floats((width, depth, rows)),
            places(draw, rows, False),
        )
    if form == "points":
        shape = draw.shape(1, 2)
        i, j = (draw.integers(shape, 0, n) for n in (rows, width))
        return lambda x, i, j: x[i, j], (x, i, j)
    if form == "along":
        at = draw.integers((width, draw.size()), 0, rows)
        return lambda x, i: jnp.take_along_axis(x, i, 1), (draw.floats((width, rows)), at)
    if form == "vmapped":
        at, size = draw.integers((width,), -1, rows), draw.size(1, rows)
        return jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (size,))), (
            draw.floats((width, rows)),
            at,
        )
    dims = lax.GatherDimensionNumbers((0, 2), (), (0,))
    size = (draw.size(1, rows), draw.size(1, width))
    at = draw.integers((draw.size(), 1), -2, rows + 1)
    mode = draw.choice(("clip", "fill"))
    return (
        lambda x, i: lax.gather(x, i, dims, size, mode=mode),
        (draw.floats((rows, width)), at),
    )


@of("indexing", *SCATTERS)
def scatter(draw: Draw, kernel: str) -> Case:
    rows, width, depth = draw.size(2, 8), draw.size(), draw.size()
    name = SCATTERS[kernel]
    forms = ["rows", "wild", "clip", "batched", "unique", "points"]
    form = draw.choice(forms + (["window", "gradient"] if kernel == "scatter-add" else []))
    integers = draw.coin()
    x = draw.integers((rows, width)) if integers else draw.floats((rows, width))

    def updates(shape: tuple[int, ...]) -> Array:
        return draw.integers(shape) if integers else draw.floats(shape)

    if form == "gradient":
        at, size = draw.integers((width,), -1, rows), draw.size(1, rows)
        read = jax.vmap(lambda x, i: lax.dynamic_slice(x, (i,), (size,)))
        cotangent = draw.floats((width, size))
        return lambda x, c: jax.vjp(lambda x: read(x, at), x)[1](c)[0], (
            draw.floats((width, rows)),
            cotangent,
        )
    if form == "window":
        part = draw.size(1, width)
        at = draw.integers((draw.size(),), 0, rows)
        u = updates((len(at), part))
        return lambda x, i, u: jnp.asarray(x).at[i, :part].add(u), (x, at, u)
    if form == "points":
        i, j = (draw.integers((3,), 0, n) for n in (rows, width))
        if kernel == "scatter":  # which of two updates of one element stays is not said
            i, j = np.int32([0]), j[:1]
        u = updates(i.shape)
        return lambda x, i, j, u: getattr(jnp.asarray(x).at[i, j], name)(u), (x, i, j, u)
    if form == "batched":
        many = draw.size(1, 3) if kernel != "scatter" else 1
        x = updates((depth, rows, width))
        at, u = draw.integers((depth, many), 0, rows), updates((depth, many, width))
        return jax.vmap(lambda x, i, u: getattr(x.at[i], name)(u)), (x, at, u)
    if form == "unique" or kernel == "scatter":
        low = 0 if form != "wild" else -1
        at = np.int32(draw.numbers.permutation(rows)[: draw.size(1, rows)] + low)
        return lambda x, i, u: getattr(jnp.asarray(x).at[i], name)(u, unique_indices=True), (
            x,
            at,
            updates((len(at), width)),
        )
    at = places(draw, rows, form != "rows")
    u = updates((*at.shape, width))
    mode = "clip" if form == "clip" else None
    return lambda x, i, u: getattr(jnp.asarray(x).at[i], name)(u, mode=mode), (x, at, u)


@of("indexing", "scatter_apply")
def scatter_apply(draw: Draw, kernel: str) -> Case:
    rows, width = draw.size(2, 8), draw.size()
    form = draw.choice(("rows", "wild", "clip", "column", "unique", "all"))
    x = draw.floats((rows, width))
    if form == "all":
        return lambda x: jnp.asarray(x).at[...].apply(jnp.square), (x,)
    if form == "column":
        return lambda x: jnp.asarray(x).at[:, -1].apply(jnp.square), (x,)
    if form == "unique":
        at = np.int32(draw.numbers.permutation(rows)[: draw.size(1, rows)])
    else:
        at = places(draw, rows, form != "rows")
    apply = dict(unique_indices=form == "unique", mode="clip" if form == "clip" else None)
    return lambda x, i: jnp.asarray(x).at[i].apply(lambda v: 3 * v + 1, **apply), (x, at)
