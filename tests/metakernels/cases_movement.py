"""Cases of the kernels that move elements."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from tapestry_egg.runtime.lower.kernels.rings import ring_shift_p
from tests.metakernels.cases import Case, Draw, of


@of("movement", "broadcast_in_dim")
def broadcast(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(0, 4)
    kept = draw.some(range(len(shape)))
    shape = shape if len(kept) < len(shape) else (2, *shape)
    source = tuple(1 if draw.rng.random() < 0.3 else shape[d] for d in kept)
    return lambda x: lax.broadcast_in_dim(x, shape, kept), (draw.any(source),)


@of("movement", "reshape")
def reshape(draw: Draw, kernel: str) -> Case:
    factors = [draw.choice((1, 2, 2, 3, 5)) for _ in range(draw.size(0, 5))]

    def grouped() -> tuple[int, ...]:
        left, out = list(factors), []
        if draw.rng.random() < 0.3:
            draw.rng.shuffle(left)
        while left:
            n = draw.size(1, len(left))
            out.append(math.prod(left[:n]))
            left = left[n:]
        return tuple(out) + ((1,) if draw.coin() else ())

    old, new = grouped(), grouped()
    if old == new:
        new = (1, *new)
    order = draw.order(len(old)) if draw.coin() else None
    return lambda x: lax.reshape(x, new, order), (draw.floats(old),)


@of("movement", "squeeze")
def squeeze(draw: Draw, kernel: str) -> Case:
    shape = tuple(1 if draw.coin() else draw.size() for _ in range(draw.size(1, 4))) + (1,)
    ones = [d for d, n in enumerate(shape) if n == 1]
    dims = draw.some(ones, 1)
    return lambda x: lax.squeeze(x, dims), (draw.any(shape),)


@of("movement", "transpose")
def transpose(draw: Draw, kernel: str) -> Case:
    x = draw.any(draw.shape(2, 4))
    order = draw.order(x.ndim)
    order = order if order != tuple(range(x.ndim)) else order[::-1]
    return lambda x: lax.transpose(x, order), (x,)


@of("movement", "rev")
def rev(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    dims = draw.some(range(len(shape)), 1)
    # A dim of one element reversed is what it was.
    long = [n + (k in dims) for k, n in enumerate(shape)]
    return lambda x: lax.rev(x, dims), (draw.any(long),)


@of("movement", "concatenate")
def concatenate(draw: Draw, kernel: str) -> Case:
    shape, many = draw.shape(1, 3), draw.size(2, 3)
    axis = draw.size(0, len(shape) - 1)
    xs = [draw.floats((*shape[:axis], draw.size(1, 4), *shape[axis + 1 :])) for _ in range(many)]
    return lambda *xs: lax.concatenate(xs, axis), tuple(xs)


@of("movement", "stack")
def stack(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(0, 3)
    axis = draw.size(0, len(shape))
    xs = tuple(draw.floats(shape) for _ in range(draw.size(1, 3)))
    return lambda *xs: jnp.stack(xs, axis), xs


@of("movement", "unstack")
def unstack(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    axis = draw.size(0, len(shape) - 1)
    return lambda x: jnp.unstack(x, axis=axis), (draw.floats(shape),)


@of("movement", "split")
def split(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(0, 2)
    axis, sizes = draw.size(0, len(shape)), [draw.size(1, 3) for _ in range(draw.size(2, 3))]
    x = draw.floats((*shape[:axis], sum(sizes), *shape[axis:]))
    return lambda x: lax.split(x, sizes, axis), (x,)


@of("movement", "tile")
def tile(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    reps = tuple(draw.size(1, 3) for _ in shape)
    reps = (2, *reps[1:]) if set(reps) == {1} else reps
    return lambda x: jnp.tile(x, reps), (draw.floats(shape),)


@of("movement", "slice")
def slice_(draw: Draw, kernel: str) -> Case:
    starts, strides = [], []
    shape, limits = [], []
    for _ in range(draw.size(1, 3)):
        start, stride, count = draw.size(0, 2), draw.size(1, 3), draw.size(1, 4)
        limit = start + (count - 1) * stride + 1
        starts.append(start)
        strides.append(stride)
        limits.append(limit)
        shape.append(limit + draw.size(0 if shape else 1, 2))  # less than all, which is no slice
    return lambda x: lax.slice(x, starts, limits, strides), (draw.any(shape),)


@of("movement", "pad")
def pad(draw: Draw, kernel: str) -> Case:
    shape, config = draw.shape(1, 3), []
    for n in shape:
        hole = draw.choice((0, 0, 1, 2))
        long = n + (n - 1) * hole
        low = draw.size(-2, 4)
        high = draw.size(-2, 4)
        if long + low + high < 1:
            low = high = 0
        config.append((low, high, hole))
    if not any(map(any, config)):  # tracing drops what changes nothing
        config[0] = (1, 0, 0)
    return lambda x: lax.pad(x, np.float32(2.5), config), (draw.floats(shape),)


@of("movement", "ring_shift")
def ring_shift(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    shifts = tuple([draw.size(-n, n) for n in shape])
    return lambda x: ring_shift_p.bind(x, shifts=shifts), (draw.floats(shape),)


@of("movement", "iota")
def iota(draw: Draw, kernel: str) -> Case:
    shape = draw.shape(1, 3)
    dim, dtype = draw.size(0, len(shape) - 1), draw.choice((np.int32, np.float32, np.uint8))
    return lambda: lax.broadcasted_iota(dtype, shape, dim), ()
