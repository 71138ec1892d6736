"""Points of integer space, under the order that boxes are made from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .zrange import Point, ZSpaceError, _point


@dataclass(frozen=True, slots=True)
class ZPoint:
    """A vector of integers, of any rank, 0 included.

    Points are ordered by *dominance*: a <= b when no coordinate of a exceeds that of b. The order
    is partial: of (0, 5) and (3, 4) neither is <= the other. (Plain tuples compare by their first
    difference instead, which says nothing about boxes.) Wherever a range or a projection takes a
    tuple of coordinates it takes a ZPoint too, and gives tuples back. Raises ZSpaceError for
    coordinates that are not integers, and where two points differ in rank.
    """

    coordinates: Point

    def __post_init__(self) -> None:
        object.__setattr__(self, "coordinates", _point(self.coordinates, "coordinates"))

    @staticmethod
    def zero(rank: int) -> ZPoint:
        """The origin."""
        return ZPoint((0,) * rank)

    @staticmethod
    def unit(rank: int, dim: int) -> ZPoint:
        """e_d: one step along dim `dim`."""
        if not -rank <= dim < rank:
            raise ZSpaceError(f"a point of rank {rank} has no dim {dim}")
        return ZPoint(tuple(int(d == dim % rank) for d in range(rank)))

    @property
    def rank(self) -> int:
        return len(self.coordinates)

    def __len__(self) -> int:
        return len(self.coordinates)

    def __iter__(self) -> Iterator[int]:
        return iter(self.coordinates)

    def __getitem__(self, dim: int) -> int:
        return self.coordinates[dim]

    def __le__(self, other: ZPoint | Sequence[int]) -> bool:
        return all(a <= b for a, b in self._pairs(other))

    def __ge__(self, other: ZPoint | Sequence[int]) -> bool:
        return all(a >= b for a, b in self._pairs(other))

    def __lt__(self, other: ZPoint | Sequence[int]) -> bool:
        """a <= b and a != b; that some coordinates are equal does not matter."""
        pairs = self._pairs(other)
        return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)

    def __gt__(self, other: ZPoint | Sequence[int]) -> bool:
        pairs = self._pairs(other)
        return all(a >= b for a, b in pairs) and any(a > b for a, b in pairs)

    def __add__(self, other: ZPoint | Sequence[int]) -> ZPoint:
        return ZPoint(tuple(a + b for a, b in self._pairs(other)))

    def __sub__(self, other: ZPoint | Sequence[int]) -> ZPoint:
        return ZPoint(tuple(a - b for a, b in self._pairs(other)))

    def __neg__(self) -> ZPoint:
        return ZPoint(tuple(-a for a in self.coordinates))

    def __mul__(self, factor: int) -> ZPoint:
        return ZPoint(tuple(a * factor for a in self.coordinates))

    __rmul__ = __mul__

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.coordinates))})"

    def _pairs(self, other: ZPoint | Sequence[int]) -> list[tuple[int, int]]:
        if len(other) != len(self):
            raise ZSpaceError(f"points {self} and {other} differ in rank")
        return list(zip(self, other, strict=True))
