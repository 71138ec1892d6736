"""Whether boxes cover a box exactly: every point once, none twice, nothing outside."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product

from .zrange import Point, ZRange


@dataclass(frozen=True, slots=True)
class CoverFault:
    """A point that is not in as many boxes as it should be: one inside `whole`, none outside.

    `boxes` are all that hold it, or the one box that has another rank than `whole`.
    """

    point: Point
    boxes: tuple[ZRange, ...]
    whole: ZRange

    def __str__(self) -> str:
        if not self.boxes:
            at = ", ".join(map(str, self.point))
            return f"point ({at}) of {self.whole} is left out"
        if len(self.point) != self.whole.rank or self.point not in self.whole:
            return f"{self.boxes[0]} is not inside {self.whole}"
        a, b, *_ = self.boxes
        return f"{a} and {b} overlap in {a.intersection(b)}"


def cover_fault(boxes: Iterable[ZRange], whole: ZRange) -> CoverFault | None:
    """The least point that `boxes` do not cover as an exact cover of `whole` would; None if exact.

    That the sizes add up is not enough: an overlap and a gap of one size cancel. Here every box
    puts +1 and -1 on its 2^rank corners (the mixed difference of its indicator function, a map
    without kernel), and the corners of an exact cover cancel to those of the whole. It takes one
    pass over the boxes, whatever their number. The corners of an empty box cancel: it covers
    nothing, and is welcome anywhere.
    """
    weights: dict[Point, int] = {}
    them = tuple(boxes)
    signs = tuple(product((0, 1), repeat=whole.rank))

    def put(box: ZRange, weight: int) -> None:
        for corner in signs:
            at = tuple(e if c else s for c, s, e in zip(corner, box.start, box.end, strict=True))
            weights[at] = weights.get(at, 0) + (-weight if sum(corner) % 2 else weight)

    for box in them:
        if box.rank != whole.rank:
            return CoverFault(box.start, (box,), whole)
        put(box, 1)
    put(whole, -1)
    left = [point for point, weight in weights.items() if weight]
    if not left:
        return None
    # No corner that is left lies below the least one, so there the count is wrong by its weight.
    least = min(left)
    return CoverFault(least, tuple(box for box in them if least in box), whole)
