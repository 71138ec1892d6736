"""The part of an operation's index space that one device works on, and the pieces it touches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import PlanError
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.metakernels.signatures.signature import AROUND, OperationSignature
from tapestry_egg.plans.collectives import block_number, zero
from tapestry_egg.plans.exchanges import block_numbers, in_blocks, reaches
from tapestry_egg.zspace import Projection, ZRange, has_gaps

from .margins import Margined

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

    def margined(
        self, operands: Sequence[jax.Array], p: int, layout: Layout, where: str
    ) -> Margined:
        """The block of operand p, in `layout`, that is to get the rows which the device lacks.

        Raises PlanError where these are more than neighbours have.
        """
        reach = reaches(self.signature, p, layout, self.cuts, self.mesh)
        for k, (r, n) in enumerate(zip(reach, operands[p].shape, strict=True)):
            if max(r.low, r.high) > n:
                raise PlanError(
                    f"dim {k} of operand {p}: the index block reads {max(r.low, r.high)} rows "
                    f"outside the block of {n} it has, more than a neighbour has",
                    where=where,
                    hint=f"Layout {layout} does not serve these cuts: {self.cuts}.",
                )
        beyond = self.signature.beyond(p)
        outside = None if beyond is None or beyond == AROUND else self._outside(operands, p)
        return Margined(operands[p], reach, layout, outside)

    def image(
        self,
        operands: Sequence[jax.Array],
        p: int,
        layout: Layout,
        where: str,
        wider: Margined | None = None,
    ) -> jax.Array:
        """The box of operand p that the block touches, cut out of the local array where larger.

        `operands` are this device's blocks, that of operand p in `layout`. Where some device's box
        leaves its block, `wider` has the rows that it lacks; where one leaves the operand, and the
        template says what lies there, the operand is filled up first, unless the kernel does so.
        Raises PlanError where the box is not inside the local array on every device.
        """
        from jax import lax

        x = operands[p]
        projection = self.signature.inputs[p]
        shape = self.signature.input_types[p].shape
        beyond = self.signature.beyond(p)
        footprint = projection.footprint(self.extents)
        local = layout.local_shape(shape, self.mesh)
        if x.shape != local:
            raise PlanError(
                f"operand {p} has local shape {x.shape}, its layout says {local}", where=where
            )
        plain = beyond is None and footprint == local
        type_, extents = self.signature.input_types[p], self.signature.extents
        if plain and in_blocks(projection, type_, layout, self.cuts, extents):
            return x
        around, origin = beyond == AROUND, [0] * x.ndim
        outside = None if beyond is None or around else self._outside(operands, p)
        if wider is not None:
            x, origin = wider.x, wider.origin
        for k, (size, have) in enumerate(zip(footprint, local, strict=True)):
            first = self.starts(projection, k)
            begin = block_numbers(layout.dims[k], self.mesh) * have + origin[k]
            before = 0
            if have == shape[k] and self._takes_part(p, k):
                continue
            if outside is not None and have == shape[k] and self._pads_itself(p, k, first, size):
                continue
            if outside is not None or (around and have == shape[k]):
                before = max(0, int((begin - first).max()))
                after = max(0, int((first + size - begin).max()) - x.shape[k])
                x = _wider(x, k, before, after, outside)
            inside = first - begin + before
            if size == x.shape[k] and not inside.any():
                continue
            if inside.min() < 0 or inside.max() + size > x.shape[k]:
                raise PlanError(
                    f"dim {k} of operand {p}: the index block reads [{first[0]}, "
                    f"{first[0] + size}) on the first device, outside the block of {have} it has",
                    where=where,
                    hint=f"Layout {layout} does not serve these cuts: {self.cuts}.",
                )
            at: Offset = int(inside[0])
            if (inside != inside[0]).any():
                at = self.start(projection, k) + before - origin[k]
                at = at - block_number(layout.dims[k], self.mesh) * have
            x = lax.dynamic_slice_in_dim(x, at, size, k)
        return x

    def _outside(self, operands: Sequence[jax.Array], p: int) -> jax.Array:
        """What lies outside operand p: a scalar."""
        beyond = self.signature.beyond(p)
        assert beyond is not None
        return operands[beyond] if isinstance(beyond, int) else zero(beyond, operands[p].dtype)

    def _pads_itself(self, p: int, k: int, first: NDArray[np.int64], size: int) -> bool:
        """Whether dim k of operand p is read to its ends on every device, and not cut: the kernel
        then fills up what lies outside as its own parameters say."""
        whole = self.signature.inputs[p].image(ZRange.from_shape(self.signature.extents))
        low, high = whole.start[k], whole.end[k]
        uncut = bool((first == low).all()) and size == high - low
        return uncut and low <= 0 and self.signature.input_types[p].shape[k] <= high

    def _takes_part(self, p: int, k: int) -> bool:
        """Whether a kernel that takes a part of operand p has all of it along dim k in its block:
        it then takes the part out itself, in one step. Compilers for TPUs store what is taken out
        of a part that is taken out."""
        if p not in self.signature.takes:
            return False
        row = self.signature.inputs[p].matrix[k]
        return not any(a and self.is_cut(d) for d, a in enumerate(row))

    @property
    def is_sparse(self) -> bool:
        """Whether an operand's box holds elements that the block does not read, though the whole
        index space reads all of the operand's box: the kernel would take them for its own."""
        whole = self.signature.extents
        return any(
            has_gaps(row, size, self.extents) and not has_gaps(row, size, whole)
            for p in range(len(self.signature.inputs))
            for _, row, size in self._dense(p)
        )

    def _dense(self, p: int) -> Iterator[tuple[int, tuple[int, ...], int]]:
        """The dims of operand p of whose boxes the kernel takes all: number, row, box's size."""
        projection, skips = self.signature.inputs[p], self.signature.skips
        rows = zip(projection.matrix, projection.shape, strict=True)
        for k, (row, size) in enumerate(rows):
            if not skips or k not in skips[p]:
                yield k, row, size

    def without_gaps(self, images: Sequence[jax.Array]) -> tuple[jax.Array, ...] | None:
        """The boxes `images` of all operands without the elements that the block does not read.

        Where index dims number a tensor dim as digits do, as groups and channels of one group
        number the channels of a convolution, what is left is numbered by the digits of this block.
        None where a dim with gaps is numbered otherwise.
        """
        import jax.numpy as jnp

        left = []
        for p, x in enumerate(images):
            for k, row, size in self._dense(p):
                if not has_gaps(row, size, self.extents):
                    continue
                if size != 1 or not _are_digits(row, self.signature.extents):
                    return None
                read = np.zeros(1, np.int64)
                for a, n in zip(row, self.extents, strict=True):
                    read = np.add.outer(read, a * np.arange(n if a else 1)).reshape(-1)
                x = jnp.take(x, np.sort(read), axis=k)
            left.append(x)
        return tuple(left)

    def uncut_where_gathered(self, layouts: Sequence[Layout]) -> IndexBlock:
        """The block without the cuts of map dims whose operands are all replicated over them.

        A kernel that cannot run on the boxes of this block, since they are not of a shape that it
        takes, can run on the larger block, whose operands this device has too; see `crop`.
        """
        used = {a for layout in layouts for dim in layout.dims for a in dim}
        return replace(
            self,
            cuts=tuple(
                () if d.role == "map" and not used & set(axes) else axes
                for d, axes in zip(self.signature.index, self.cuts, strict=True)
            ),
        )

    def crop(self, larger: IndexBlock, outputs: Sequence[jax.Array]) -> list[jax.Array]:
        """This block's part of what a kernel gave for a larger block that contains it."""
        from jax import lax

        cropped = []
        for projection, x in zip(self.signature.outputs, outputs, strict=True):
            for k, size in enumerate(projection.footprint(self.extents)):
                if size != x.shape[k]:
                    at = self.start(projection, k) - larger.start(projection, k)
                    x = lax.dynamic_slice_in_dim(x, at, size, k)
            cropped.append(x)
        return cropped


def _wider(x: jax.Array, k: int, before: int, after: int, outside: jax.Array | None) -> jax.Array:
    """The array with so many elements more along a dim: a scalar, or those at its other end."""
    from jax import lax

    if not before and not after:
        return x
    if outside is not None:
        return lax.pad(
            x, outside, [(before, after, 0) if e == k else (0,) * 3 for e in range(x.ndim)]
        )
    n = x.shape[k]
    ends = lax.slice_in_dim(x, n - before, n, axis=k), lax.slice_in_dim(x, 0, after, axis=k)
    return lax.concatenate([ends[0], x, ends[1]], k)


def _are_digits(row: Sequence[int], extents: Sequence[int]) -> bool:
    """Whether row · i numbers all points i from 0 on, each differently, as digits do."""
    weight = 1
    for stride, n in sorted((a, n) for a, n in zip(row, extents, strict=True) if a and n > 1):
        if stride != weight:
            return False
        weight *= n
    return True
