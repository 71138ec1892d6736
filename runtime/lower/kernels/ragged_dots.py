"""Products of ragged groups of rows, one group after another.

XLA's compiler for GPUs has no kernel for `ragged_dot_general`: it repeats the operands once per
group, with the rows of all other groups zero, and multiplies those (`RaggedDotRewriter`). That does
the same arithmetic and holds as many times more as there are groups. A loop over the groups holds
one product at a time.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .late_fills import filled


def by_group(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **_: Any,
) -> jax.Array:
    """`lax.ragged_dot_general` of two arrays whose ragged dim is a free or a contracted dim of the
    first: [batch, free of lhs, free of rhs], or the same of every group, [groups, ...]."""
    numbers = ragged_dot_dimension_numbers
    contract, batch = numbers.dot_dimension_numbers
    (ragged,) = numbers.lhs_ragged_dimensions
    ends = jnp.cumsum(sizes.astype(jnp.int32))
    spans = ends - sizes.astype(jnp.int32), ends

    def dot(x: jax.Array, y: jax.Array, contracted: Any, batched: Any) -> jax.Array:
        return lax.dot_general(
            x,
            y,
            (contracted, batched),
            precision=precision,
            preferred_element_type=preferred_element_type,
        )

    if ragged in contract[0]:
        other = contract[1][contract[0].index(ragged)]

        def whole(carry: None, span: Any) -> tuple[None, jax.Array]:
            x, y = _rows(lhs, ragged, span), _rows(rhs, other, span)
            return carry, dot(x, y, contract, batch)

        return lax.scan(whole, None, spans)[1]
    (group,) = numbers.rhs_group_dimensions
    inner = (contract[0], _without(contract[1], group))
    outer = (batch[0], _without(batch[1], group))
    free = [d for d in range(lhs.ndim) if d not in (*contract[0], *batch[0])]
    axis = len(batch[0]) + free.index(ragged)

    def part(g: Any, out: jax.Array) -> jax.Array:
        matrix = lax.dynamic_index_in_dim(rhs, g, group, keepdims=False)
        product = dot(lhs, matrix, inner, outer)
        span = [x[g] for x in spans]
        return jnp.where(_inside(product.shape, axis, span), product, out)

    shape = jax.eval_shape(
        lambda x, y: dot(x, lax.index_in_dim(y, 0, group, keepdims=False), inner, outer), lhs, rhs
    )
    nothing = filled(shape.shape, 0, shape.dtype, after=lhs)  # as rows of no group stay
    return lax.fori_loop(0, rhs.shape[group], part, nothing)


def _inside(shape: Any, dim: int, span: Any) -> jax.Array:
    """Which elements of an array lie in rows [start, end) of a dim."""
    place = lax.broadcasted_iota(jnp.int32, shape, dim)
    return (place >= span[0]) & (place < span[1])


def _rows(x: jax.Array, dim: int, span: Any) -> jax.Array:
    """The array with zeros outside rows [start, end) of a dim."""
    return jnp.where(_inside(x.shape, dim, span), x, jnp.zeros((), x.dtype))


def _without(dims: Any, dropped: int) -> list[int]:
    """Dims as they are numbered once one is gone."""
    return [d - (dropped < d) for d in dims]
