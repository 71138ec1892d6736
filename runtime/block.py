"""The part of an operation's index space that one device works on, and the pieces it touches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..layout import Layout, MeshShape
from ..metakernels.signature import OperationSignature
from ..zspace import Projection
from .collectives import block_number

if TYPE_CHECKING:
    import jax

    Offset = jax.Array | int


@dataclass(frozen=True)
class IndexBlock:
    """One device's block of an index space: dim d is cut by the mesh axes `cuts[d]`.

    Block j of a dim of extent N in n blocks is [j·N/n, (j+1)·N/n). Extents are known, offsets are
    traced scalars (s32[]) inside `shard_map`, or the integer 0 where nothing is cut.
    """

    signature: OperationSignature
    cuts: tuple[tuple[int, ...], ...]
    mesh: MeshShape

    @cached_property
    def extents(self) -> tuple[int, ...]:
        """Sizes of the block. Raises PlanError where a cut leaves unequal blocks."""
        sizes = self.signature.extents
        if len(sizes) != len(self.cuts):
            raise PlanError(
                f"cuts for {len(self.cuts)} index dims of {len(sizes)}", where=self.signature.kernel
            )
        for d, (n, axes) in enumerate(zip(sizes, self.cuts, strict=True)):
            if n % self.mesh.parts(axes):
                raise PlanError(
                    f"index dim {d} of extent {n} does not divide into {self.mesh.parts(axes)}",
                    where=self.signature.kernel,
                )
        return tuple(n // self.mesh.parts(a) for n, a in zip(sizes, self.cuts, strict=True))

    @property
    def is_whole(self) -> bool:
        """Whether the block is the whole index space."""
        return self.extents == self.signature.extents

    def is_cut(self, d: int) -> bool:
        return self.extents[d] != self.signature.extents[d]

    def offset(self, d: int) -> Offset:
        """Where the block begins in index dim d."""
        if not self.is_cut(d):
            return 0
        return block_number(self.cuts[d], self.mesh) * self.extents[d]

    def start(self, projection: Projection, k: int) -> Offset:
        """Where the block's image begins in tensor dim k, counted from the tensor's start."""
        at: Offset = projection.offset[k]
        for d, a in enumerate(projection.matrix[k]):
            if a < 0:
                at = at + a * (self.extents[d] - 1)
            if a and self.is_cut(d):
                at = at + a * self.offset(d)
        return at

    def starts(self, projection: Projection, k: int) -> NDArray[np.int64]:
        """`start` on every device, row-major over the mesh: s64[devices]."""
        at = np.full(self.mesh.devices, projection.offset[k])
        for d, a in enumerate(projection.matrix[k]):
            if a < 0:
                at += a * (self.extents[d] - 1)
            if a:
                at += a * block_numbers(self.cuts[d], self.mesh) * self.extents[d]
        return at

    def image(self, x: jax.Array, p: int, layout: Layout, where: str) -> jax.Array:
        """The box of operand p that the block touches, cut out of the local array where larger.

        `x` is this device's block of the operand in `layout`. Raises PlanError where the box is not
        inside the local array on every device.
        """
        from jax import lax

        projection = self.signature.inputs[p]
        shape = self.signature.input_types[p].shape
        footprint = projection.footprint(self.extents)
        local = layout.local_shape(shape, self.mesh)
        if x.shape != local:
            raise PlanError(
                f"operand {p} has local shape {x.shape}, its layout says {local}", where=where
            )
        for k, (size, have) in enumerate(zip(footprint, local, strict=True)):
            first = self.starts(projection, k)
            inside = first - block_numbers(layout.dims[k], self.mesh) * have
            if size == have and not inside.any():
                continue
            if inside.min() < 0 or inside.max() + size > have:
                raise PlanError(
                    f"dim {k} of operand {p}: the index block reads [{first[0]}, "
                    f"{first[0] + size}) on the first device, outside the block of {have} it has",
                    where=where,
                    hint=f"Layout {layout} does not serve these cuts: {self.cuts}.",
                )
            at: Offset = int(inside[0])
            if (inside != inside[0]).any():
                at = self.start(projection, k) - block_number(layout.dims[k], self.mesh) * have
            x = lax.dynamic_slice_in_dim(x, at, size, k)
        return x


def block_numbers(axes: tuple[int, ...], mesh: MeshShape) -> NDArray[np.int64]:
    """`collectives.block_number` on every device, row-major over the mesh: s64[devices]."""
    coordinates = np.indices(mesh.sizes).reshape(len(mesh.sizes), -1)
    number = np.zeros(mesh.devices, np.int64)
    for a in axes:
        number = number * mesh.sizes[a] + coordinates[a]
    return number
