"""Whether boxes cover a box exactly: every point once, none twice, nothing outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from .zrange import Point, ZRange


@dataclass(frozen=True, slots=True)
class CoverFault:
    """A point that is in `count` of the boxes, and should be in exactly `expected` (0 or 1)."""

    point: Point
    count: int
    expected: int

    def __str__(self) -> str:
        at = f"({', '.join(map(str, self.point))})"
        if not self.expected:
            return f"point {at} is covered and lies outside"
        return f"point {at} is covered {self.count} times" if self.count else f"{at} is not covered"


def cover_fault(boxes: Iterable[ZRange], whole: ZRange) -> CoverFault | None:
    """The least point that `boxes` do not cover as an exact cover of `whole` would; None if exact.

    That the sizes add up is not enough: an overlap and a gap of one size cancel. Here every box
    puts +1 and -1 on its 2^rank corners (the mixed difference of its indicator function, a map
    without kernel), and the corners of an exact cover cancel to those of the whole. It takes one
    pass over the boxes, whatever their number. The corners of an empty box cancel: it covers
    nothing, and is welcome anywhere. Raises ZSpaceError where the ranks differ.
    """
    weights: dict[Point, int] = {}
    them = tuple(boxes)
    signs = tuple(product((0, 1), repeat=whole.rank))

    def put(box: ZRange, weight: int) -> None:
        for corner in signs:
            at = tuple(e if c else s for c, s, e in zip(corner, box.start, box.end, strict=True))
            weights[at] = weights.get(at, 0) + (-weight if sum(corner) % 2 else weight)

    for box in them:
        whole._same_rank(box)
        put(box, 1)
    put(whole, -1)
    left = [point for point, weight in weights.items() if weight]
    if not left:
        return None
    # No corner that is left lies below the least one, so its weight is the excess at that point.
    least = min(left)
    expected = int(whole.contains(least))
    return CoverFault(least, weights[least] + expected, expected)


def is_exact_cover(boxes: Iterable[ZRange], whole: ZRange) -> bool:
    """Whether every point of `whole` is in exactly one of the boxes, and no other point in any."""
    return cover_fault(boxes, whole) is None
