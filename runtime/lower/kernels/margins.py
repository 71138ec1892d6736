"""Margins: a device's block of an operand with rows of the blocks beside it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.collectives import block_number, places_of
from tapestry_egg.plans.exchanges import Reach, margined

if TYPE_CHECKING:
    import jax


def with_margins(
    x: jax.Array,
    reach: Sequence[Reach],
    layout: Layout,
    mesh: MeshShape,
    outside: jax.Array | None,
    around: bool = False,
) -> tuple[jax.Array, list[int]]:
    """The block `x` with the rows that the device lacks, and where it then begins, dim by dim,
    counted from the begin of the block.

    Dim by dim every device sends the rows at its ends to the devices beside it, by a permute each;
    the first and the last have `outside` there, a scalar, or zeros where nothing reads them; with
    `around` they are beside each other. What
    no device reads is left out before it is sent. Inside `shard_map` over `mesh`. Where nothing is
    lacking, `x` stays as it is.
    """
    from jax import lax

    origin, block = [0] * x.ndim, x.shape
    lacking = [k for k, r in enumerate(reach) if r.low or r.high]
    if not lacking or any(max(reach[k].low, reach[k].high) > block[k] for k in lacking):
        return x, origin
    for k, r in enumerate(reach):
        if k not in lacking and r.begin is not None and r.end is not None:
            begin, end = max(0, r.begin), min(block[k], r.end)
            if 0 < end - begin < block[k]:
                x, origin[k] = lax.slice_in_dim(x, begin, end, axis=k), begin
    for k in lacking:
        axes = tuple(a for a in layout.dims[k] if mesh.sizes[a] > 1)
        x = _with_edges(x, k, reach[k], axes, mesh, outside, around)
        begin, end = margined(reach[k], block[k])
        origin[k], low = begin, reach[k].low
        if end - begin < x.shape[k]:
            x = lax.slice_in_dim(x, begin + low, end + low, axis=k)
    return x, origin


def _with_edges(
    x: jax.Array,
    k: int,
    reach: Reach,
    axes: tuple[int, ...],
    mesh: MeshShape,
    outside: jax.Array | None,
    around: bool,
) -> jax.Array:
    """The block with the last rows of the one before it, and the first ones of the next."""
    import jax.numpy as jnp
    from jax import lax

    parts, places = mesh.parts(axes), places_of(axes, mesh)
    names = tuple(mesh.names[a] for a in sorted(axes))
    here, size, low, high = block_number(axes, mesh), x.shape[k], reach.low, reach.high
    up = list(pairwise([*places, places[0]] if around else places))
    down = [(b, a) for a, b in up]
    pieces = [x]
    if low:
        sent = lax.slice_in_dim(x, size - low, size, axis=k)
        got = lax.ppermute(sent, names, up)
        pieces.insert(0, got if outside is None else jnp.where(here == 0, outside, got))
    if high:
        sent = lax.slice_in_dim(x, 0, high, axis=k)
        got = lax.ppermute(sent, names, down)
        pieces.append(got if outside is None else jnp.where(here == parts - 1, outside, got))
    return lax.concatenate(pieces, k)
