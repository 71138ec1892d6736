"""Gradients of pooling.

XLA's compiler for GPUs takes a select-and-scatter apart (`SelectAndScatterExpander`): one array of
places for every dim of what was pooled, an array of zeros, and a scatter into it. Those zeros are
merged with any others of that shape, such as those that a rectifier compares with, and then live as
long as these. Here which element a window chose is one number. Where windows lie side by side every
element belongs to one window only, and takes its window's gradient or zero. Where they overlap it
takes the sum of what the windows give that have it in their first place, in their second and so on.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

import jax
import jax.numpy as jnp
from jax import lax


def lie_side_by_side(
    window: Sequence[int], strides: Sequence[int], padding: Sequence[Sequence[int]]
) -> bool:
    """Whether windows of these sizes neither overlap, nor leave gaps, nor reach outside."""
    inside = all(tuple(p) == (0, 0) for p in padding)
    return inside and tuple(window) == tuple(strides)


#: Windows of more places are left to the compiler: an element would ask as many windows. The
#: template knows it (`metakernels/templates/window.yaml`).
_PLACES = 32


def are_small(window: Sequence[int]) -> bool:
    """Whether windows have so few places that every element asks all windows it may be in."""
    return prod(window) <= _PLACES


def unpooled_over(
    source: jax.Array,
    operand: jax.Array,
    select: str,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
) -> jax.Array:
    """`select_and_scatter_add` over any windows: an element of `operand` takes the sum of the
    elements of `source` whose windows chose it (`select`: `ge` or `le`, the first of equals)."""
    inner = [d for d, w in enumerate(window) if w > 1]
    steps = {d: prod(operand.shape[e] for e in inner if e > d) for d in inner}

    def places(shape: Sequence[int], begin: Sequence[int], by: Sequence[int]) -> jax.Array:
        found = jnp.zeros(shape, jnp.int32)
        for d, step in steps.items():
            found += (begin[d] + by[d] * lax.broadcasted_iota(jnp.int32, shape, d)) * step
        return found

    rank = range(operand.ndim)
    own = places(operand.shape, [0 for _ in rank], [1 for _ in rank])
    chosen = _chosen(operand, own, select, window, strides, padding)
    zero = jnp.zeros((), source.dtype)
    every = []
    for at in product(*(range(w) for w in window)):
        low = [k - before for k, (before, _) in zip(at, padding, strict=True)]
        here = jnp.where(chosen == places(source.shape, low, strides), source, zero)
        ends = [
            (first, n - first - (m - 1) * s - 1, s - 1)
            for first, n, m, s in zip(low, operand.shape, source.shape, strides, strict=True)
        ]
        every.append(lax.pad(here, zero, ends))
    return sum(every[1:], every[0])


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
    chosen = _chosen(held, place, select, window, window, [(0, 0)] * held.ndim)
    taken = jnp.where(_spread(chosen, window) == place, _spread(source, window), 0)
    ends = [(0, n - c, 0) for n, c in zip(operand.shape, covered, strict=True)]
    return lax.pad(taken, jnp.zeros((), taken.dtype), ends)


def _chosen(
    held: jax.Array,
    place: jax.Array,
    select: str,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[Sequence[int]],
) -> jax.Array:
    """The place of the element that each window chooses."""
    compare = {"ge": lax.ge, "le": lax.le}[select]

    def better(
        a: tuple[jax.Array, jax.Array], b: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        # Of equals the first in the window is chosen, in whichever order they are compared. A place
        # of -1 is that of no element, which none is worse than.
        wins = jnp.where(a[0] == b[0], a[1] < b[1], compare(a[0], b[0]))
        first = (a[1] >= 0) & ((b[1] < 0) | wins)
        return jnp.where(first, a[0], b[0]), jnp.where(first, a[1], b[1])

    nothing = (jnp.zeros((), held.dtype), jnp.int32(-1))
    edges = tuple((low, high) for low, high in padding)
    both = (held, place)
    return lax.reduce_window(both, nothing, better, tuple(window), tuple(strides), edges)[1]


def _spread(x: jax.Array, window: Sequence[int]) -> jax.Array:
    """Every element over its window."""
    shape = [n for both in zip(x.shape, window, strict=True) for n in both]
    wide = lax.broadcast_in_dim(x, shape, range(0, 2 * x.ndim, 2))
    return wide.reshape([n * w for n, w in zip(x.shape, window, strict=True)])
