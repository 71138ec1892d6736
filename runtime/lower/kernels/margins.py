"""Margins: a device's block of an operand with rows of the blocks beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.collectives import block_number
from tapestry_egg.plans.exchanges import Permute, Reach, Reader, margined, rounds

if TYPE_CHECKING:
    import jax

    #: Dims, each with the rows from the device before and from the next one.
    Came = list[tuple[int, tuple[jax.Array | None, jax.Array | None]]]


@dataclass
class Margined:
    """A block of an operand that gets the rows which the device lacks, dim by dim.

    `origin` says where `x` then begins, counted from the begin of the block. What no device reads
    is left out before rows are sent. The first and the last device have `outside` in the place of
    rows from neighbours, a scalar, or whatever comes where nothing reads it. `came` are the rows
    that came from the device before and from the next one, dim by dim.
    """

    x: jax.Array
    reach: Sequence[Reach]
    layout: Layout
    outside: jax.Array | None
    came: Came = field(default_factory=list)

    def __post_init__(self) -> None:
        from jax import lax

        self.origin, self.block, self.joined = [0] * self.x.ndim, self.x.shape, 0
        for k, r in enumerate(self.reach):
            if not (r.low or r.high) and r.begin is not None and r.end is not None:
                begin, end = max(0, r.begin), min(self.block[k], r.end)
                if 0 < end - begin < self.block[k]:
                    self.x, self.origin[k] = lax.slice_in_dim(self.x, begin, end, axis=k), begin

    def rows(self, k: int, low: int, high: int) -> jax.Array:
        """So many rows along dim k: `low` at its end, for the next device, or `high` at its begin,
        for the one before."""
        from jax import lax

        n = self.x.shape[k]
        return lax.slice_in_dim(self.x, n - low if low else 0, n if low else high, axis=k)

    def widen(self, mesh: MeshShape) -> None:
        """Put all rows that came beside the block."""
        while self.joined < len(self.came):
            self._widen(*self.came[self.joined], mesh)
            self.joined += 1

    def _widen(self, k: int, got: Sequence[jax.Array | None], mesh: MeshShape) -> None:
        """Put the rows that came from the device before and from the next one beside the block: the
        last ones of the former and the first ones of the latter, as many as are read."""
        import jax.numpy as jnp
        from jax import lax

        (before, after), r = got, self.reach[k]
        here, parts = block_number(self.layout.dims[k], mesh), mesh.parts(self.layout.dims[k])
        pieces = [self.x]
        if before is not None and r.low:
            n = before.shape[k]
            rows = lax.slice_in_dim(before, n - r.low, n, axis=k)
            outside = self.outside
            pieces.insert(0, rows if outside is None else jnp.where(here == 0, outside, rows))
        if after is not None and r.high:
            rows = lax.slice_in_dim(after, 0, r.high, axis=k)
            outside = self.outside
            pieces.append(rows if outside is None else jnp.where(here == parts - 1, outside, rows))
        self.x = lax.concatenate(pieces, k)
        begin, end = margined(r, self.block[k])
        self.origin[k] = begin
        if end - begin < self.x.shape[k]:
            self.x = lax.slice_in_dim(self.x, begin + r.low, end + r.low, axis=k)


def exchange(
    readers: Sequence[Reader], blocks: Mapping[tuple[int, int], Margined], mesh: MeshShape
) -> None:
    """Let the rows come that the `blocks` of operands lack, by operation and operand. Inside
    `shard_map` over `mesh`; `readers` send together."""

    def dtype(k: int, e: object) -> str:
        return str(blocks[k, e.operand].x.dtype)  # type: ignore[attr-defined]

    for one in rounds(readers, mesh, dtype):
        got: dict[tuple[object, bool], jax.Array] = {}
        for permute in one.permutes:
            rows = []
            for p in permute.pieces:
                block = blocks[p.reader, p.exchange.operand]
                block.widen(mesh)
                rows.append(block.rows(p.exchange.dim, p.low, p.high))
            for piece, x in zip(permute.pieces, _permuted(rows, permute, mesh), strict=True):
                got[piece.key, bool(piece.low)] = x
        for k, e, key in one.exchanges:
            came = got.get((key, True)), got.get((key, False))
            blocks[k, e.operand].came.append((e.dim, came))


def _permuted(rows: Sequence[jax.Array], permute: Permute, mesh: MeshShape) -> list[jax.Array]:
    """What neighbours have in the place of some rows, which one permute carries, in one array."""
    import jax.numpy as jnp
    from jax import lax

    names = tuple(mesh.names[a] for a in sorted(permute.axes) if mesh.sizes[a] > 1)
    if len(rows) == 1:
        return [lax.ppermute(rows[0], names, permute.pairs)]
    flat = lax.ppermute(lax.concatenate([x.reshape(-1) for x in rows], 0), names, permute.pairs)
    ends = [sum(x.size for x in rows[:n]) for n in range(1, len(rows))]
    return [a.reshape(x.shape) for a, x in zip(jnp.split(flat, ends), rows, strict=True)]
