"""Gradients of pooling over windows that do not overlap.

XLA's compiler for GPUs takes a select-and-scatter apart (`SelectAndScatterExpander`): one array of
places for every dim of what was pooled, an array of zeros, and a scatter into it. Those zeros are
merged with any others of that shape, such as those that a rectifier compares with, and then live as
long as these. Where windows lie side by side every element belongs to one window only: which one of
a window was chosen is one small number, and an element takes its window's gradient or zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax


def lie_side_by_side(
    window: Sequence[int], strides: Sequence[int], padding: Sequence[Sequence[int]]
) -> bool:
    """Whether windows of these sizes neither overlap, nor leave gaps, nor reach outside."""
    inside = all(tuple(p) == (0, 0) for p in padding)
    return inside and tuple(window) == tuple(strides)


def unpooled(
    source: jax.Array, operand: jax.Array, select: str, window: Sequence[int]
) -> jax.Array:
    """`select_and_scatter_add` over windows side by side: an element of `operand` that its window
    chose (`select`: `ge` or `le`, the first of equals) takes the window's element of `source`, all
    others zero; so does what no window covers."""
    covered = [n * w for n, w in zip(source.shape, window, strict=True)]
    held = lax.slice(operand, [0] * operand.ndim, covered)
    place = jnp.zeros(covered, jnp.int32)
    for d, w in enumerate(window):
        if w > 1:
            inside = lax.broadcasted_iota(jnp.int32, covered, d) % w
            place = place * w + inside
    chosen = _chosen(held, place, select, window)
    taken = jnp.where(_spread(chosen, window) == place, _spread(source, window), 0)
    ends = [(0, n - c, 0) for n, c in zip(operand.shape, covered, strict=True)]
    return lax.pad(taken, jnp.zeros((), taken.dtype), ends)


def _chosen(held: jax.Array, place: jax.Array, select: str, window: Sequence[int]) -> jax.Array:
    """The place within each window of the element that it chooses."""
    compare = {"ge": lax.ge, "le": lax.le}[select]

    def better(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        # A place of -1 is that of no element, which none is worse than.
        first = (a[1] >= 0) & ((b[1] < 0) | compare(a[0], b[0]))
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    nothing = (jnp.zeros((), held.dtype), jnp.int32(-1))
    zeros = tuple([(0, 0)] * held.ndim)
    return lax.reduce_window((held, place), nothing, better, tuple(window), tuple(window), zeros)[1]


def _spread(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Every element over its window."""
    shape = [n for both in zip(x.shape, window, strict=True) for n in both]
    wide = lax.broadcast_in_dim(x, shape, range(0, 2 * x.ndim, 2))
    return wide.reshape([n * w for n, w in zip(x.shape, window, strict=True)])
