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
    waits, _ = lax.optimization_barrier((jnp.asarray(number, dtype), after))
    return lax.broadcast_in_dim(waits, tuple(shape), ())
