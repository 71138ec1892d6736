"""Integer affine maps f(x) = A·x + b between spaces of points."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from .zrange import Point, ZSpaceError, _matrix, _point

#: What becomes of leading coordinates that a map does not know: dropped, or passed through.
Embedding = Literal["clip", "tile"]


@dataclass(frozen=True, slots=True)
class AffineMap:
    """f(x) = A·x + b, with one row of `matrix` (A) per output dim and one column per input dim.

    The orientation is rows × columns = outputs × inputs throughout; some descriptions of Tapestry
    store the transpose. A map to rank 0 has no rows to count columns in and must be given
    `input_rank`; elsewhere it follows. Raises ZSpaceError where the pieces do not fit together.
    """

    matrix: tuple[Point, ...]
    offset: Point
    input_rank: int = field(default=-1, kw_only=True)

    def __post_init__(self) -> None:
        matrix = _matrix(self.matrix)
        offset = _point(self.offset, "offset")
        (rank,) = _point((self.input_rank,), "input_rank")
        if rank == -1:
            if not matrix:
                raise ZSpaceError(
                    "a map to rank 0 does not say how many input dims it has",
                    hint="Pass input_rank=.",
                )
            rank = len(matrix[0])
        if rank < 0 or any(len(row) != rank for row in matrix):
            raise ZSpaceError(f"the rows of {matrix} do not have {rank} columns each")
        if len(matrix) != len(offset):
            raise ZSpaceError(f"{len(matrix)} matrix rows and offset {offset} differ in length")
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "input_rank", rank)

    # Standard forms

    @staticmethod
    def identity(rank: int) -> AffineMap:
        """f(x) = x."""
        return AffineMap.from_diagonal((1,) * rank)

    @staticmethod
    def from_diagonal(diagonal: Sequence[int], offset: Sequence[int] | None = None) -> AffineMap:
        """f(x)_k = diagonal_k · x_k + offset_k; no offset means zeros."""
        n = len(diagonal)
        rows = tuple(tuple(a if d == k else 0 for d in range(n)) for k, a in enumerate(diagonal))
        return AffineMap(rows, (0,) * n if offset is None else tuple(offset), input_rank=n)

    @staticmethod
    def constant(value: Sequence[int], input_rank: int) -> AffineMap:
        """f(x) = value, for points of rank `input_rank`."""
        return AffineMap(((0,) * input_rank,) * len(value), tuple(value), input_rank=input_rank)

    # Application

    @property
    def output_rank(self) -> int:
        return len(self.offset)

    def __call__(self, point: Sequence[int]) -> Point:
        """A·x + b. Raises ZSpaceError where the point has another rank."""
        if len(point) != self.input_rank:
            raise ZSpaceError(f"point {tuple(point)} has not the rank {self.input_rank}")
        return tuple(
            b + sum(a * x for a, x in zip(row, point, strict=True))
            for row, b in zip(self.matrix, self.offset, strict=True)
        )

    # Algebra

    def compose(self, inner: AffineMap) -> AffineMap:
        """self ∘ inner: A = A2·A1, b = A2·b1 + b2. Raises ZSpaceError where the ranks differ."""
        if self.input_rank != inner.output_rank:
            raise ZSpaceError(
                f"cannot compose: {self.input_rank} inputs over {inner.output_rank} outputs"
            )
        columns = range(inner.input_rank)
        return AffineMap(
            tuple(
                tuple(sum(a * inner.matrix[j][d] for j, a in enumerate(row)) for d in columns)
                for row in self.matrix
            ),
            self(inner.offset),
            input_rank=inner.input_rank,
        )

    def translate(self, delta: Sequence[int]) -> AffineMap:
        """x -> f(x) + delta."""
        if len(delta) != self.output_rank:
            raise ZSpaceError(f"cannot move rank {self.output_rank} by {tuple(delta)}")
        moved = tuple(b + x for b, x in zip(self.offset, delta, strict=True))
        return AffineMap(self.matrix, moved, input_rank=self.input_rank)

    def permute_input(self, order: Sequence[int]) -> AffineMap:
        """The map that takes points whose coordinate j is coordinate `order[j]` of the old ones."""
        dims = _permutation(order, self.input_rank)
        rows = tuple(tuple(row[d] for d in dims) for row in self.matrix)
        return AffineMap(rows, self.offset, input_rank=self.input_rank)

    def permute_output(self, order: Sequence[int]) -> AffineMap:
        """The map whose result has old coordinate `order[k]` in place k."""
        dims = _permutation(order, self.output_rank)
        return AffineMap(
            tuple(self.matrix[k] for k in dims),
            tuple(self.offset[k] for k in dims),
            input_rank=self.input_rank,
        )

    def embed(self, input_rank: int, leading: Embedding) -> AffineMap:
        """The same map over points with more leading coordinates, `input_rank` in all.

        `clip` drops them; `tile` passes them through, as new leading output dims. Raises
        ZSpaceError for a rank below the map's own.
        """
        extra = input_rank - self.input_rank
        if extra < 0:
            raise ZSpaceError(f"cannot embed {self.input_rank} input dims in {input_rank}")
        rows = tuple((0,) * extra + row for row in self.matrix)
        if leading == "clip":
            return AffineMap(rows, self.offset, input_rank=input_rank)
        own = tuple(tuple(int(d == k) for d in range(input_rank)) for k in range(extra))
        return AffineMap((*own, *rows), (0,) * extra + self.offset, input_rank=input_rank)

    def __str__(self) -> str:
        rows = ", ".join(f"[{', '.join(map(str, row))}]" for row in self.matrix)
        return f"λx.[{rows}]⋅x + [{', '.join(map(str, self.offset))}]"


def _permutation(order: Sequence[int], rank: int) -> tuple[int, ...]:
    dims = tuple(order)
    if sorted(dims) != list(range(rank)):
        raise ZSpaceError(f"{dims} is not a permutation of the {rank} dims")
    return dims
