"""Which cuts of an index space are legal, and what each does to every operand and output.

A cut deals the points of index dim d (extent N) out over n shards: shard j gets the block
[j·⌈N/n⌉, min(N, (j+1)·⌈N/n⌉)). Whether that is a sharding of the tensors follows from the
projections alone. There is nothing here about any kernel, and no point is ever enumerated: the
boxes that shards touch come from the closed form of the range image, all shards at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, permutations
from math import prod

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.zspace import Projection, ZSpaceError

from .signature import OperationSignature

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Replicated:
    """All shards touch the same box: they hold the tensor whole as far as this cut goes."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """Shard j touches layout block j of tensor dim `dim`, and the same box along all other dims.

    The layout blocks of a dim of extent N in n parts are [j·B, (j+1)·B) with B = ⌈N/n⌉. What is
    touched is [j·B - lo, (j+1)·B + hi), cut off at both ends of the tensor; a negative margin says
    that so many elements of the shard's own block are not touched. Shards whose own index block is
    short, because the parts do not divide the extent, may touch less. Neither margin is larger than
    B, so what a shard lacks is in the blocks beside its own. `above` are the other index dims whose
    cuts shard the same tensor dim and count for more: n is then the product of all parts.
    """

    dim: int
    lo: int = 0
    hi: int = 0
    above: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Near:
    """Shard j touches a box inside layout block j of tensor dim `dim` and the blocks beside it.

    Where the steps of a window do not make up the operand, boxes drift away from the blocks: no
    margins serve all shards. `lo` and `hi` are the most that any of them lacks of the block before
    its own and of the next; together less than half of what the shard lacks of the whole tensor.
    """

    dim: int
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Gathered:
    """Shards touch boxes that are no layout blocks: each needs the tensor whole to read its own."""


@dataclass(frozen=True, slots=True)
class Partial:
    """Shards hold values of the same elements, still to be combined under `monoid`."""

    monoid: str


Access = Replicated | Blocks | Near | Gathered | Partial


@dataclass(frozen=True)
class Split:
    """What cutting some index dims does to every operand and output, or why it is not legal.

    `inputs[p][d]` and `outputs[q][d]` say how the port is accessed over the parts of index dim d,
    for every d in `parts` (index dim -> number of parts, at least 2). `refusal` is empty when the
    split is legal; where it is not, there is no access.
    """

    parts: Mapping[int, int]
    inputs: tuple[Mapping[int, Access], ...] = ()
    outputs: tuple[Mapping[int, Access], ...] = ()
    refusal: str = ""

    @property
    def legal(self) -> bool:
        return not self.refusal


def split(signature: OperationSignature, cuts: Mapping[int, Sequence[int]]) -> Split:
    """Cut index dims by mesh axes: `cuts[d]` are the sizes of the axes on dim d, major to minor.

    Only the product of a dim's axes counts, and it is tested as a whole: 4×4 parts may not do what
    4 do. The split is legal when

    * every cut dim has more than one point, and is no `whole` dim;
    * under cuts of map and scan dims every output falls into exactly its layout blocks: each such
      dim shards one tensor dim, in order, and the margins are zero;
    * outputs do not depend on cut `join` dims;
    * under cuts of a reduce dim outputs that do not depend on it are partial under its monoid, and
      the others fall into blocks. Starting values (`initial`) must not depend on it, and are
      partial. One tensor is partial under one monoid only.

    Operands make no split illegal: each cut dim finds an operand replicated, in blocks, near
    blocks, or else gathered. Several cut dims may share one tensor dim as the digits of its block
    number (a reshaped dim): the most cut dims that together make blocks are taken, and of equally
    many the first in order; the others are gathered. What lies outside an operand (a padded window)
    is not read.

    Raises ZSpaceError for a dim that the index space lacks and for an axis smaller than 1.
    """
    parts: dict[int, int] = {}
    for d, sizes in sorted(cuts.items()):
        if not 0 <= d < len(signature.index) or any(n < 1 for n in sizes):
            raise ZSpaceError(
                f"cannot cut index dim {d} of {len(signature.index)} by axes {tuple(sizes)}"
            )
        if prod(sizes) > 1:
            parts[d] = prod(sizes)
    if not parts:
        return Split(
            parts, tuple({} for _ in signature.inputs), tuple({} for _ in signature.outputs)
        )
    if 0 in signature.extents:
        return Split(parts, refusal="the index space has no points")
    for d in parts:
        dim = signature.index[d]
        if dim.role == "whole":
            return Split(parts, refusal=f"index dim {dim.name} is a {dim.role} dim")
        if dim.size == 1:
            return Split(parts, refusal=f"index dim {dim.name} has one point only")
    reduces = {d for d in parts if signature.index[d].role == "reduce"}
    joins = {d for d in parts if signature.index[d].role == "join"}
    monoids = {d: str(signature.index[d].monoid) for d in reduces}
    if len(set(monoids.values())) > 1:
        names = " and ".join(sorted(set(monoids.values())))
        return Split(parts, refusal=f"outputs would be partial under {names} at once")
    shards = _Shards(signature.extents, parts)
    outputs = []
    for q, (projection, tensor) in enumerate(
        zip(signature.outputs, signature.output_types, strict=True)
    ):
        found = shards.access(projection, tensor)
        for d, access in found.items():
            name, here = signature.index[d].name, f"output {q}"
            if d in reduces and access == Replicated():
                found[d] = Partial(monoids[d])
            elif d in joins:
                if access != Replicated():
                    return Split(parts, refusal=f"{here} depends on the joined dim {name}")
            elif not isinstance(access, Blocks) or access.lo or access.hi:
                return Split(parts, refusal=f"{here} does not fall into blocks along {name}")
        blocks = tuple(d for d, access in found.items() if isinstance(access, Blocks))
        if not shards.fill(projection, tensor, blocks):
            return Split(parts, refusal=f"output {q}: shards without points have blocks to make")
        outputs.append(found)
    inputs = []
    for p, (projection, tensor) in enumerate(
        zip(signature.inputs, signature.input_types, strict=True)
    ):
        found = shards.access(projection, tensor)
        if p in signature.initial:
            for d in reduces:
                if found[d] != Replicated():
                    name = signature.index[d].name
                    return Split(parts, refusal=f"the starting value {p} depends on {name}")
                found[d] = Partial(monoids[d])
        inputs.append(found)
    return Split(parts, tuple(inputs), tuple(outputs))


class _Shards:
    """The boxes of index space that shards hold, and what they touch of a tensor."""

    def __init__(self, extents: tuple[int, ...], parts: Mapping[int, int]) -> None:
        self.extents = extents
        self.parts = parts

    def access(self, projection: Projection, tensor: TensorType) -> dict[int, Access]:
        """How a port is accessed over the parts of every cut dim."""
        everywhere = tuple(self.parts)
        moving = self._touched(everywhere, projection, tensor.shape).moving()
        moved = tuple(d for d in everywhere if any(d in dims for dims in moving))
        found: dict[int, Access] = {d: Replicated() for d in everywhere}
        found.update({d: Gathered() for d in moved})
        found.update(self._most_blocks(moved, projection, tensor.shape))
        taken = {a.dim for a in found.values() if isinstance(a, Blocks)}
        for d in moved:
            near = self._near(d, projection, tensor.shape) if found[d] == Gathered() else None
            if near is not None and near.dim not in taken:
                found[d] = near
                taken.add(near.dim)
        return found

    def fill(self, projection: Projection, tensor: TensorType, dims: tuple[int, ...]) -> bool:
        """Whether the blocks that shards touch make up the whole tensor."""
        touched = self._touched(dims, projection, tensor.shape)
        return int((touched.ends - touched.starts).prod(axis=1).sum()) == tensor.size

    def _most_blocks(
        self, dims: tuple[int, ...], projection: Projection, shape: tuple[int, ...]
    ) -> dict[int, Access]:
        for count in range(len(dims), 0, -1):
            for some in combinations(dims, count):
                blocks = self._blocks(some, projection, shape)
                if blocks is not None:
                    return blocks
        return {}

    def _blocks(
        self, dims: tuple[int, ...], projection: Projection, shape: tuple[int, ...]
    ) -> dict[int, Access] | None:
        """The blocks into which a tensor falls when `dims` are cut and no others."""
        touched = self._touched(dims, projection, shape)
        moving = touched.moving()
        if sorted(d for found in moving for d in found) != sorted(dims):
            return None  # a dim moves nothing, or several tensor dims at once
        found: dict[int, Access] = {}
        for k, own in enumerate(moving):
            if not own:
                continue
            size = -(-shape[k] // prod(self.parts[d] for d in own))
            for order in permutations(own):
                margins = touched.margins(k, touched.number(order, self.parts), size, shape[k])
                if margins is not None:
                    found.update({d: Blocks(k, *margins, order[:i]) for i, d in enumerate(order)})
                    break
            else:
                return None
        return found

    def _near(self, d: int, projection: Projection, shape: tuple[int, ...]) -> Near | None:
        """The margins with which boxes are inside blocks of equal size, if `d` alone is cut."""
        parts, size = self.parts[d], self.extents[d]
        reached = [k for k, row in enumerate(projection.matrix) if row[d]]
        if len(reached) != 1 or size % parts or shape[reached[0]] % parts:
            return None
        (k,) = reached
        if projection.matrix[k][d] < 0:
            return None
        block, number = shape[k] // parts, np.arange(parts)
        first = np.zeros((parts, len(self.extents)), np.int64)
        after = np.broadcast_to(np.array(self.extents, np.int64), first.shape).copy()
        first[:, d], after[:, d] = number * (size // parts), (number + 1) * (size // parts)
        starts, ends = (x[:, k].clip(0, shape[k]) for x in projection.images(first, after))
        lo = max(0, int((number * block - starts).max()))
        hi = max(0, int((ends - (number + 1) * block).max()))
        small = max(lo, hi) <= block and 2 * (lo + hi) < (parts - 1) * block
        return Near(k, lo, hi) if small else None

    def _touched(
        self, dims: tuple[int, ...], projection: Projection, shape: tuple[int, ...]
    ) -> _Touched:
        """What shards touch of a tensor when `dims` are cut and no others."""
        counts = tuple(self.parts[d] for d in dims)
        numbers = np.indices(counts).reshape(len(dims), prod(counts)).T
        first = np.zeros((len(numbers), len(self.extents)), np.int64)
        after = np.broadcast_to(np.array(self.extents, np.int64), first.shape).copy()
        short = np.zeros(len(numbers), bool)
        for column, d in enumerate(dims):
            size = -(-self.extents[d] // self.parts[d])
            first[:, d] = np.minimum(numbers[:, column] * size, self.extents[d])
            after[:, d] = np.minimum(first[:, d] + size, self.extents[d])
            short |= after[:, d] - first[:, d] < size
        starts, ends = projection.images(first, after)
        most = np.array(shape, np.int64)
        starts, ends = np.clip(starts, 0, most), np.clip(ends, 0, most)
        some = (starts < ends).all(axis=1)
        return _Touched(dims, numbers[some], starts[some], ends[some], short[some])


@dataclass(frozen=True, eq=False)
class _Touched:
    """What shards touch of one tensor: a box [start, end) each, inside the tensor.

    Shards that touch nothing are left out, for want of points or because they read only padding.
    """

    dims: tuple[int, ...]  # the index dims that are cut
    numbers: Ints  # s64[shards, dims]: which part of every cut dim a shard has
    starts: Ints  # s64[shards, tensor dims]
    ends: Ints
    short: NDArray[np.bool_]  # [shards]: the index block has fewer points than those before it

    def number(self, order: Sequence[int], parts: Mapping[int, int]) -> Ints:
        """Every shard's number when the given cut dims are its digits, major to minor."""
        number = np.zeros(len(self.numbers), np.int64)
        for d in order:
            number = number * parts[d] + self.numbers[:, self.dims.index(d)]
        return number

    def moving(self) -> list[tuple[int, ...]]:
        """Per tensor dim, the cut dims along which what is touched is not always the same."""
        found: list[list[int]] = [[] for _ in range(self.starts.shape[1])]
        for column, d in enumerate(self.dims):
            # Shards that differ in this one number stand together when sorted by all the others.
            rest = np.delete(self.numbers, column, axis=1)
            lines = np.lexsort([*rest.T, np.zeros(len(rest))])
            rest = rest[lines]
            same = (rest[1:] == rest[:-1]).all(axis=1)[:, None]
            differ = np.zeros(len(found), bool)
            for side in (self.starts[lines], self.ends[lines]):
                differ |= ((side[1:] != side[:-1]) & same).any(axis=0)
            for k in np.flatnonzero(differ):
                found[k].append(d)
        return [tuple(own) for own in found]

    def margins(self, k: int, block: Ints, size: int, extent: int) -> tuple[int, int] | None:
        """The margins (lo, hi) with which boxes are the blocks of tensor dim k; None without any.

        `block` numbers the blocks, of `size` each. Of all margins that serve, the least are given.
        """
        starts, ends = self.starts[:, k], self.ends[:, k]
        lo = _margin(block * size - starts, self.short | (starts == 0), size)
        hi = _margin(ends - (block + 1) * size, self.short | (ends == extent), size)
        return None if lo is None or hi is None else (lo, hi)


def _margin(seen: Ints, at_least: NDArray[np.bool_], most: int) -> int | None:
    """The margin seen by every shard; those marked `at_least` would be content with more."""
    low, exact = int(seen[at_least].max(initial=-most)), seen[~at_least]
    margin = int(exact[0]) if exact.size else low
    if (exact != margin).any() or margin < low or abs(margin) > most:
        return None
    return margin
