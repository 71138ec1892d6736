"""Cases of the kernels that stream over scores, in every order of their dims."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from tapestry_egg.runtime.lower.kernels.attention import (
    flash_attention_backward_p,
    flash_attention_p,
)
from tapestry_egg.runtime.lower.kernels.streaming import PRIMITIVES
from tests.metakernels.cases import Array, Case, Draw, of
from tests.metakernels.cases_contraction import arranged


@of("streaming", "softmax", "logsumexp")
def normalised(draw: Draw, kernel: str) -> Case:
    x = draw.floats(draw.shape(1))
    axes = draw.some(range(x.ndim), 1)
    return lambda x: PRIMITIVES[kernel].bind(x, axes=axes), (x,)


def scored(draw: Draw) -> tuple[Array, Array, Any, list[int], int]:
    """Two operands, the numbers of their product, the extents of its dims, how many are batch."""
    batch, summed, left, right = ([draw.size() for _ in range(draw.size(0, 2))] for _ in range(4))
    right = right or [draw.size()]
    if len(batch) + len(left) + len(right) > 4:
        batch = []
    b, k = len(batch), len(summed)
    one, at = arranged(draw, batch + summed + left)
    two, to = arranged(draw, batch + summed + right)
    free_one = [n for d, n in enumerate(one) if d not in at[: b + k]]
    free_two = [n for d, n in enumerate(two) if d not in to[: b + k]]
    numbers = ((at[b : b + k], to[b : b + k]), (at[:b], to[:b]))
    return draw.floats(one), draw.floats(two), numbers, [*batch, *free_one, *free_two], b


@of("streaming", "dot_logsumexp")
def log_of_sum(draw: Draw, kernel: str) -> Case:
    x, w, numbers, sizes, _ = scored(draw)
    params = {"scores": numbers, "axes": draw.some(range(len(sizes)), 1), "dtype": np.float32}
    return lambda x, w: PRIMITIVES[kernel].bind(x, w, **_plain(params)), (x, w)


@of("streaming", "exp_dot", "attention")
def weighted(draw: Draw, kernel: str) -> Case:
    x, w, numbers, sizes, _ = scored(draw)
    dims = list(draw.order(len(sizes)))
    contracted = dims[: draw.size(1, len(dims))]
    kept = dims[len(contracted) :]
    batch = list(draw.some(kept))
    values = [sizes[d] for d in (*batch, *contracted)] + [
        draw.size() for _ in range(draw.size(0, 2))
    ]
    shape, to = arranged(draw, values)
    b, c = len(batch), len(contracted)
    params: dict[str, Any] = {
        "scores": numbers,
        "values": ((contracted, to[b : b + c]), (batch, to[:b])),
        "swapped": int(draw.coin()),
        "dtype": np.float32,
    }
    v = draw.floats(shape)
    if kernel == "exp_dot":
        shift = draw.some(range(len(sizes)))
        z = draw.floats([sizes[d] for d in shift])
        params["shift"] = shift
        return lambda x, w, z, v: PRIMITIVES[kernel].bind(x, w, z, v, **_plain(params)), (
            x,
            w,
            z,
            v,
        )
    if draw.coin():
        return lambda x, w, v: PRIMITIVES[kernel].bind(x, w, v, **_plain(params)), (x, w, v)
    params["mask_dims"] = draw.some(range(len(sizes)))
    mask = draw.flags([1 if draw.coin() else sizes[d] for d in params["mask_dims"]])
    fill = np.float32(-2.0)
    return (
        lambda x, w, v, mask, fill: PRIMITIVES[kernel].bind(x, w, v, mask, fill, **_plain(params)),
        (x, w, v, jnp.asarray(mask), fill),
    )


@of("streaming", "flash_attention", "flash_attention_backward")
def fused(draw: Draw, kernel: str) -> Case:
    batch, rows, keys, groups, shared, width = (draw.size(1, 4) for _ in range(6))
    causal = draw.coin()
    window = draw.size(1, 4) if causal and draw.coin() else 0
    params = {"scale": 0.5, "causal": causal, "window": window, "fill": -4.0}
    q = draw.floats((batch, rows, groups * shared, width))
    k, v = (draw.floats((batch, keys, groups, width)) for _ in range(2))
    mask: tuple[Array, ...] = ()
    if draw.coin():
        full = (batch, groups * shared, rows, keys)
        given = draw.floats(tuple(n if draw.coin() else 1 for n in full))
        mask = (given > 0,) if draw.coin() else (given,)
    if kernel == "flash_attention":
        return lambda *xs: flash_attention_p.bind(*xs, **params), (q, k, v, *mask)

    def gradients(q: Array, k: Array, v: Array, grad: Array, *mask: Array) -> list[Array]:
        out, stats = flash_attention_p.bind(q, k, v, *mask, **params)
        return flash_attention_backward_p.bind(q, k, v, stats, out, grad, *mask, **params)

    return gradients, (q, k, v, draw.floats(q.shape), *mask)


def _plain(value: Any) -> Any:
    """Lists as tuples, which parameters of primitives must be."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return tuple(map(_plain, value)) if isinstance(value, list | tuple) else value
