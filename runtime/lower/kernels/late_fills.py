"""Arrays of one number that are not made before something else is there.

XLA fills arrays that wait for nothing when the program begins, several in one kernel, and then
holds all of them until the last is read. What a loop begins with is such an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def filled(shape: Sequence[int], number: float, dtype: Any, *, after: Any) -> jax.Array:
    """An array of one number, made once `after` is there."""
    return each_filled([(shape, number, dtype)], after=after)[0]


def each_filled(
    fills: Sequence[tuple[Sequence[int], float, Any]], *, after: Any
) -> list[jax.Array]:
    """Arrays of a shape, number and dtype each, made once `after` is there.

    Their numbers wait for one another. Arrays that are alike in all would be made once, and be
    copied, which takes twice as long, where a loop writes into each of them.
    """
    found = []
    for shape, number, dtype in fills:
        after, _ = lax.optimization_barrier((jnp.asarray(number, dtype), after))
        found.append(lax.broadcast_in_dim(after, tuple(shape), ()))
    return found
