"""Index projection functions: which box of a tensor a point or box of index space touches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .zrange import Point, ZRange, ZSpaceError, _matrix, _point

Ints = NDArray[np.int64]

_CHUNK = 1 << 14  # boxes per pass of `images`: a few arrays of this many int64 stay in cache


@dataclass(frozen=True, slots=True)
class Projection:
    """P(i) = the box that starts at A·i + B and has shape S.

    `matrix` is A with one row per tensor dim (K) and one column per index dim (P), `offset` is B
    and `shape` is S, both of length K. All are integers and strides may be negative. A tensor of
    rank 0 has no rows to count columns in, so its projection must be given `index_rank`; elsewhere
    it follows from the matrix. A dim with S = 0 (a tensor without elements) projects to empty
    boxes. A projection knows no tensor, so it has no bounds: a padded window begins at -1. What may
    lie outside a tensor is decided where the two are joined, in an operation's signature. Raises
    ZSpaceError where the pieces do not fit together.
    """

    matrix: tuple[tuple[int, ...], ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    index_rank: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        matrix = _matrix(self.matrix)
        offset, shape = _point(self.offset, "offset"), _point(self.shape, "shape")
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "shape", shape)
        (rank,) = _point((self.index_rank,), "index_rank")
        if rank == -1:
            if not matrix:
                raise ZSpaceError(
                    "a projection into a tensor of rank 0 does not say how many index dims it has",
                    hint="Pass index_rank=.",
                )
            rank = len(matrix[0])
            object.__setattr__(self, "index_rank", rank)
        if rank < 0 or any(len(row) != rank for row in matrix):
            raise ZSpaceError(f"the rows of {matrix} do not have {rank} columns each")
        if not len(matrix) == len(offset) == len(shape):
            raise ZSpaceError(
                f"{len(matrix)} matrix rows, offset {offset} and shape {shape} differ in length"
            )
        if any(s < 0 for s in shape):
            raise ZSpaceError(f"shape {shape} of a projection has a negative extent")

    # Standard forms

    @staticmethod
    def identity(n: int) -> Projection:
        """One element per index point, index and tensor dims in the same order."""
        return Projection(
            tuple(tuple(int(k == d) for d in range(n)) for k in range(n)),
            (0,) * n,
            (1,) * n,
            index_rank=n,
        )

    @staticmethod
    def fixed(view: ZRange, index_rank: int) -> Projection:
        """The same box of the tensor for every index point."""
        return Projection(
            ((0,) * index_rank,) * view.rank, view.start, view.shape, index_rank=index_rank
        )

    # Images

    @property
    def tensor_rank(self) -> int:
        return len(self.shape)

    def point(self, i: Sequence[int]) -> ZRange:
        """The box of one index point. Raises ZSpaceError where `i` has another rank."""
        self._fits(len(i), f"index point {tuple(i)}")
        return ZRange.from_start_shape(
            tuple(
                b + sum(a * x for a, x in zip(row, i, strict=True))
                for row, b in zip(self.matrix, self.offset, strict=True)
            ),
            self.shape,
        )

    def image(self, box: ZRange) -> ZRange:
        """The bounding box of the boxes of all points in `box`; exact in one pass over A.

        Each end of a tensor dim is attained at the corner chosen by the signs of that dim's row,
        so rows of mixed signs are right too. An empty box has an empty image, at A·start + B.
        """
        self._fits(box.rank, f"index box {box}")
        if box.is_empty:
            start = self.point(box.start).start
            return ZRange(start, start)
        last = box.inclusive_end
        starts, ends = [], []
        for row, b, s in zip(self.matrix, self.offset, self.shape, strict=True):
            low = high = b
            for a, first_d, last_d in zip(row, box.start, last, strict=True):
                low += a * (first_d if a >= 0 else last_d)
                high += a * (last_d if a >= 0 else first_d)
            starts.append(low)
            ends.append(high + s if s else low)  # a dim without elements stays empty
        return ZRange(tuple(starts), tuple(ends))

    def images(self, starts: NDArray[Any], ends: NDArray[Any]) -> tuple[Ints, Ints]:
        """`image` of N boxes at once: s64[N, P], s64[N, P] -> s64[N, K], s64[N, K].

        Agrees with `image` box by box, empty boxes included. Raises ZSpaceError where the arrays
        do not have P columns or some box ends before it starts.
        """
        first, after = np.asarray(starts, np.int64), np.asarray(ends, np.int64)
        if first.shape != after.shape or first.ndim != 2 or first.shape[1] != self.index_rank:
            raise ZSpaceError(
                f"starts {first.shape} and ends {after.shape} are not two (N, {self.index_rank})"
            )
        if first.size and int((after - first).min()) < 0:
            raise ZSpaceError("some box ends before it starts")
        low = np.empty((len(first), self.tensor_rank), np.int64)
        high = np.empty_like(low)
        for at in range(0, len(first), _CHUNK):
            part = slice(at, at + _CHUNK)
            self._images_into(first[part], after[part], low[part], high[part])
        return low, high

    def _images_into(self, first: Ints, after: Ints, low: Ints, high: Ints) -> None:
        columns = np.ascontiguousarray(first.T)
        extent = np.ascontiguousarray((after - first).T)
        empty = (extent == 0).any(axis=0)
        steps = np.where(empty, 0, extent - 1)
        for k, (row, b, s) in enumerate(zip(self.matrix, self.offset, self.shape, strict=True)):
            start, width = np.full(len(first), b), np.full(len(first), s)
            for d, a in enumerate(row):
                if a:
                    start += a * columns[d]
                    width += abs(a) * steps[d]
                if a < 0:
                    start += a * steps[d]
            low[:, k] = start
            high[:, k] = start + np.where(empty, 0, width) if s else start

    def footprint(self, extents: Sequence[int]) -> tuple[int, ...]:
        """Shape of the image of any index box with the given extents, wherever it lies.

        F_k(r) = S_k + Σ_d |A_kd|·(r_d - 1); zeros when some extent is 0.
        """
        self._fits(len(extents), f"extents {tuple(extents)}")
        if any(r < 1 for r in extents):
            return (0,) * self.tensor_rank
        return tuple(
            s + sum(abs(a) * (r - 1) for a, r in zip(row, extents, strict=True)) if s else 0
            for row, s in zip(self.matrix, self.shape, strict=True)
        )

    # What neighbours share

    def reaches(self, d: int) -> tuple[int, ...]:
        """The tensor dims that move when index dim `d` does; none means the operand is shared."""
        return tuple(k for k, a in enumerate(self.marginal_stride(d)) if a)

    def marginal_stride(self, d: int) -> Point:
        """Column d of A: P(i + e_d) - P(i), the same at every i."""
        if not 0 <= d < self.index_rank:
            raise ZSpaceError(f"there is no index dim {d} among {self.index_rank}")
        return tuple(row[d] for row in self.matrix)

    def marginal_overlap(self, d: int) -> Point:
        """Per tensor dim, elements that neighbours i and i + e_d share: max(0, S_k - |A_kd|)."""
        return tuple(
            max(0, s - abs(a)) for s, a in zip(self.shape, self.marginal_stride(d), strict=True)
        )

    def marginal_waste(self, d: int) -> Point:
        """Per tensor dim, elements skipped between i and i + e_d: max(0, |A_kd| - S_k)."""
        return tuple(
            max(0, abs(a) - s) for s, a in zip(self.shape, self.marginal_stride(d), strict=True)
        )

    def replication_cost(self, sharding: Iterable[ZRange], index: ZRange | None = None) -> int:
        """Elements read more than once because of a sharding: Σ vol P(shard) - vol P(index).

        `index` is the box that the shards cover, their bounding box when None.
        """
        shards = tuple(sharding)
        whole = ZRange.bounding(shards) if index is None else index
        # Shards that hold no point read nothing, even of a tensor of rank 0.
        return sum(self._volume(s) for s in shards) - self._volume(whole)

    # Algebra

    def compose(self, inner: Projection) -> Projection:
        """The projection self ∘ inner: first `inner`, then `self` over the box that it gives.

        A = A2·A1, B = B2 + A2·B1 + Σ_j min(A2_kj, 0)·(S1_j - 1), S = S2 + |A2|·(S1 - 1). Exact on
        index points: the box of i is self.image(inner.point(i)). On index boxes it is the tight
        one: self.image(inner.image(box)) contains it, and equals it when the nonzero terms of every
        entry of A2·A1 share a sign (in particular when there is at most one), else may be larger.
        """
        if self.index_rank != inner.tensor_rank:
            raise ZSpaceError(
                f"cannot compose: {self.index_rank} index dims over {inner.tensor_rank} tensor dims"
            )
        nothing = 0 in inner.shape  # the inner boxes are empty, hence all that follows
        columns = range(inner.index_rank)
        matrix, offset, shape = [], [], []
        for row, b, s in zip(self.matrix, self.offset, self.shape, strict=True):
            matrix.append(
                tuple(sum(a * inner.matrix[j][d] for j, a in enumerate(row)) for d in columns)
            )
            at = b + sum(a * b1 for a, b1 in zip(row, inner.offset, strict=True))
            if nothing or not s:
                offset.append(at)
                shape.append(0)
                continue
            reach = [a * (s1 - 1) for a, s1 in zip(row, inner.shape, strict=True)]
            offset.append(at + sum(min(t, 0) for t in reach))
            shape.append(s + sum(abs(t) for t in reach))
        return Projection(tuple(matrix), tuple(offset), tuple(shape), index_rank=inner.index_rank)

    def translate(self, delta: Sequence[int]) -> Projection:
        """The same projection moved by `delta` in the tensor: relative to absolute selections."""
        if len(delta) != self.tensor_rank:
            raise ZSpaceError(f"cannot move rank {self.tensor_rank} by {tuple(delta)}")
        moved = tuple(b + x for b, x in zip(self.offset, delta, strict=True))
        return Projection(self.matrix, moved, self.shape, index_rank=self.index_rank)

    # Forms for people and files

    def augmented(self) -> str:
        """The doubly augmented matrix ( A | B | S ), one line per tensor dim, columns aligned."""
        rows = [
            [[str(a) for a in row], [str(b)], [str(s)]]
            for row, b, s in zip(self.matrix, self.offset, self.shape, strict=True)
        ]
        wide = max((len(c) for r in rows for part in r for c in part), default=0)
        return (
            "\n".join(
                "( " + " | ".join(" ".join(c.rjust(wide) for c in part) for part in r) + " )"
                for r in rows
            )
            or f"( {self.index_rank} index dims -> a scalar )"
        )

    def show(self, names: Sequence[str] = ()) -> str:
        """One entry per tensor dim, `[x+4:+3, x+2z+5:+2]`: where it starts, and how far it goes."""
        return f"[{', '.join(self.entries(names))}]"

    def entries(self, names: Sequence[str] = ()) -> list[str]:
        """The entries of `show`; index dims are called `i0, i1, ..` where no names are given."""
        index = names or tuple(f"i{d}" for d in range(self.index_rank))
        entries = []
        for row, b, s in zip(self.matrix, self.offset, self.shape, strict=True):
            terms = [
                f"{'-' if a < 0 else '+'}{abs(a) if abs(a) != 1 else ''}{x}"
                for a, x in zip(row, index, strict=True)
                if a
            ]
            if b or not terms:
                terms.append(f"{b:+d}")
            entries.append("".join(terms).removeprefix("+") + (f":+{s}" if s != 1 else ""))
        return entries

    def to_json(self) -> dict[str, Any]:
        """Plain form `{"affineMap": {"projection", "offset"}, "shape"}`; rank 0 adds indexRank."""
        out: dict[str, Any] = {
            "affineMap": {
                "projection": [list(r) for r in self.matrix],
                "offset": list(self.offset),
            },
            "shape": list(self.shape),
        }
        if not self.matrix:
            out["indexRank"] = self.index_rank
        return out

    def __str__(self) -> str:
        return self.show()

    def _fits(self, rank: int, what: str) -> None:
        if rank != self.index_rank:
            raise ZSpaceError(f"{what} has rank {rank}, the projection has {self.index_rank}")

    def _volume(self, box: ZRange) -> int:
        return 0 if box.is_empty else prod(self.footprint(box.shape))


def has_gaps(row: Sequence[int], size: int, extents: Sequence[int]) -> bool:
    """Whether intervals of a size at row · i, for all points i, leave elements between them out."""
    reached = size
    for stride, n in sorted((abs(a), n) for a, n in zip(row, extents, strict=True) if a and n > 1):
        if stride > reached:
            return True
        reached += stride * (n - 1)
    return False
