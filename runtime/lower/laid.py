"""Arrays laid in memory as a plan counts them, and the barriers that keep them so."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tapestry_egg.machine.tiles import Tiles, stored_bytes, tight_order
from tapestry_egg.plans.lying import laid_in_order

from .regions import Turned

if TYPE_CHECKING:
    import jax


def barrier(tree: Any) -> Any:
    """`lax.optimization_barrier` of a pytree of arrays; of nothing, nothing."""
    import jax

    return jax.lax.optimization_barrier(tree) if jax.tree.leaves(tree) else tree


def in_order(x: jax.Array) -> jax.Array:
    """An array, written once with its dims in order.

    XLA for GPUs gathers along the dim that lies outermost, and lays all that is computed of it
    element by element in the same way. Where convolutions are on the way, which take dims in order,
    it holds what they read and leave in both.
    """
    return barrier(laid_in_order(x))


def laid_tight(x: Any, tiles: Tiles) -> Any:
    """A stack that its compiler lays so that tiles pad it least; keys of random numbers, and stacks
    that are taken from what they are a transposition of, as they are."""
    import jax

    if isinstance(x, Turned) or jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return x
    order = tight_order(x.shape, x.dtype.itemsize, tiles)
    return laid_in_order(x, order) if order else x


def turned_back(x: jax.Array, tiles: Tiles) -> jax.Array:
    """A table to which rows were added, with lanes along its columns, as it is padded least. What
    is computed of it element by element, and states with it, else lies as it was added to."""
    if x.ndim != 2:
        return x
    shape, size = x.shape, x.dtype.itemsize
    if stored_bytes(shape, size, tiles) == stored_bytes(shape, size, tiles, windows=(0,)):
        return x
    return barrier(laid_in_order(x, (1, 0)))
