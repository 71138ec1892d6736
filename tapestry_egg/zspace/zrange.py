"""Half-open boxes of integer points."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product as cartesian
from math import prod
from operator import eq, gt
from operator import index as as_int
from typing import Any

from tapestry_egg.errors import TapestryError

Point = tuple[int, ...]


class ZSpaceError(TapestryError):
    """A range or projection is malformed, or is used with one of another rank."""


_TEXT = re.compile(r"\s*zr\[(.*)\]\s*", re.DOTALL)
_SIDE = re.compile(r"\s*([+-]?\d{1,18})\s*:\s*([+-]?\d{1,18})\s*", re.ASCII)


@dataclass(frozen=True, slots=True)
class ZRange:
    """The points p with start <= p < end in every dim; prints as `zr[0:3, -1:4]`.

    Starts may be negative. A range is empty when some dim is; an empty range still has a place.
    The range of rank 0, `zr[]`, holds exactly one point. Raises ZSpaceError where the ranks of
    `start` and `end` differ or *any* dim ends before it starts.
    """

    start: Point
    end: Point

    def __post_init__(self) -> None:
        start, end = _point(self.start, "start"), _point(self.end, "end")
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "end", end)
        if len(start) != len(end):
            raise ZSpaceError(f"start {start} and end {end} differ in rank")
        if any(map(gt, start, end)):
            d = next(d for d, s in enumerate(start) if s > end[d])
            raise ZSpaceError(
                f"dim {d} of the range from {start} to {end} ends before it starts",
                hint="Ranges are half-open; an empty dim has end == start.",
            )

    @staticmethod
    def from_shape(shape: Sequence[int]) -> ZRange:
        """The box of the given shape at the origin: (2, 3) -> `zr[0:2, 0:3]`."""
        return ZRange((0,) * len(shape), tuple(shape))

    @staticmethod
    def from_start_shape(start: Sequence[int], shape: Sequence[int]) -> ZRange:
        """The box of the given shape at `start`. Raises ZSpaceError where the ranks differ."""
        if len(start) != len(shape):
            raise ZSpaceError(f"start {tuple(start)} and shape {tuple(shape)} differ in rank")
        return ZRange(tuple(start), tuple(s + n for s, n in zip(start, shape, strict=True)))

    @staticmethod
    def parse(text: str) -> ZRange:
        """Read the text form, `zr[0:3, -1:4]`. Raises ZSpaceError on anything else."""
        whole = _TEXT.fullmatch(text)
        sides: list[tuple[int, int]] = []
        if whole is not None:
            body = whole.group(1)
            for part in body.split(",") if body.strip() else ():
                side = _SIDE.fullmatch(part)
                if side is None:
                    whole = None
                    break
                sides.append((int(side.group(1)), int(side.group(2))))
        if whole is None:
            raise ZSpaceError(
                f"{text!r} is not a range", hint="Write one start:end per dim: zr[0:3, -1:4]."
            )
        return ZRange(tuple(s for s, _ in sides), tuple(e for _, e in sides))

    def to_json(self) -> dict[str, list[int]]:
        """Plain form `{"start": [...], "end": [...]}`; shape and size follow and are left out."""
        return {"start": list(self.start), "end": list(self.end)}

    @staticmethod
    def bounding(ranges: Iterable[ZRange]) -> ZRange:
        """The least box around all the given ones; the place of an empty range counts too.

        Raises ZSpaceError when there are none, or their ranks differ.
        """
        boxes = tuple(ranges)
        if not boxes:
            raise ZSpaceError("no ranges to bound")
        for other in boxes:
            boxes[0]._same_rank(other)
        return ZRange(
            tuple(map(min, zip(*(b.start for b in boxes), strict=True))),
            tuple(map(max, zip(*(b.end for b in boxes), strict=True))),
        )

    @property
    def rank(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(e - s for s, e in zip(self.start, self.end, strict=True))

    @property
    def slices(self) -> tuple[Any, ...]:
        """What indexes an array's elements in the box; of rank 0, too, an array."""
        return (*map(slice, self.start, self.end), ...)

    @property
    def size(self) -> int:
        """Number of points; 1 for rank 0."""
        return prod(self.shape)

    @property
    def is_empty(self) -> bool:
        return any(map(eq, self.start, self.end))

    @property
    def inclusive_end(self) -> Point:
        """The greatest point of the range. Raises ZSpaceError when the range is empty."""
        if self.is_empty:
            raise ZSpaceError(f"{self} is empty and has no greatest point")
        return tuple(e - 1 for e in self.end)

    def contains(self, other: ZRange | Sequence[int]) -> bool:
        """Whether a point or a whole range lies inside.

        An empty range lies inside when its place does, its end included: `zr[0:4]` contains
        `zr[4:4]`. An empty range contains no point. Raises ZSpaceError where the ranks differ.
        """
        if isinstance(other, ZRange):
            self._same_rank(other)
            return all(
                s <= a and b <= e
                for s, e, a, b in zip(self.start, self.end, other.start, other.end, strict=True)
            )
        if len(other) != self.rank:
            raise ZSpaceError(f"point {tuple(other)} and range {self} differ in rank")
        return all(s <= p < e for s, e, p in zip(self.start, self.end, other, strict=True))

    def __contains__(self, other: ZRange | Sequence[int]) -> bool:
        return self.contains(other)

    def __iter__(self) -> Iterator[Point]:
        """Every point, row-major (the last dim fastest)."""
        return cartesian(*(range(s, e) for s, e in zip(self.start, self.end, strict=True)))

    def intersection(self, other: ZRange) -> ZRange | None:
        """The common box, or None when the two are apart; boxes that touch share an empty box."""
        self._same_rank(other)
        start = tuple(map(max, self.start, other.start))
        end = tuple(map(min, self.end, other.end))
        if any(s > e for s, e in zip(start, end, strict=True)):
            return None
        return ZRange(start, end)

    def clip(self, bounds: ZRange) -> ZRange:
        """The part of the box inside `bounds`; where there is none, an empty box at their edge."""
        self._same_rank(bounds)
        sides = tuple(zip(self.start, self.end, bounds.start, bounds.end, strict=True))
        start = tuple(min(max(s, low), high) for s, _, low, high in sides)
        return ZRange(
            start,
            tuple(max(min(e, high), s) for s, (_, e, _, high) in zip(start, sides, strict=True)),
        )

    def translate(self, delta: Sequence[int]) -> ZRange:
        """The same box moved by `delta`. Raises ZSpaceError where the ranks differ."""
        if len(delta) != self.rank:
            raise ZSpaceError(f"cannot move {self} by {tuple(delta)}: the ranks differ")
        return ZRange(
            tuple(s + n for s, n in zip(self.start, delta, strict=True)),
            tuple(e + n for e, n in zip(self.end, delta, strict=True)),
        )

    def permute(self, order: Sequence[int]) -> ZRange:
        """The box with dim `order[k]` in place k (as `numpy.transpose`); negative dims count back.

        Raises ZSpaceError unless `order` is a permutation of the dims.
        """
        dims = tuple(self._dim(d) for d in order)
        if sorted(dims) != list(range(self.rank)):
            raise ZSpaceError(f"{tuple(order)} is not a permutation of the {self.rank} dims")
        return ZRange(tuple(self.start[d] for d in dims), tuple(self.end[d] for d in dims))

    def product(self, other: ZRange) -> ZRange:
        """The Cartesian product: the dims of this range followed by those of the other."""
        return ZRange(self.start + other.start, self.end + other.end)

    def with_dim(self, dim: int, start: int, end: int) -> ZRange:
        """The same box with dim `dim` running from `start` to `end`."""
        d = self._dim(dim)
        return ZRange(
            (*self.start[:d], start, *self.start[d + 1 :]),
            (*self.end[:d], end, *self.end[d + 1 :]),
        )

    def split(self, dim: int, chunk: int) -> tuple[ZRange, ...]:
        """Cut dim `dim` every `chunk` points; the last part may be shorter, none is empty.

        A dim of extent 0 yields the range itself. Raises ZSpaceError when `chunk` < 1.
        """
        d = self._dim(dim)
        if chunk < 1:
            raise ZSpaceError(f"cannot cut {self} into chunks of {chunk}")
        s, e = self.start[d], self.end[d]
        return tuple(self.with_dim(d, a, min(a + chunk, e)) for a in range(s, e, chunk)) or (self,)

    def blocks(self, dim: int, count: int) -> tuple[ZRange, ...]:
        """The `count` layout blocks of dim `dim`: block j is [j·⌈N/count⌉, (j+1)·⌈N/count⌉) ∩ dim.

        There are always exactly `count`; where ⌈N/count⌉ does not divide N the last ones are
        short, and some may be empty (extent 5 in 4 blocks: 2, 2, 1, 0).
        """
        d = self._dim(dim)
        if count < 1:
            raise ZSpaceError(f"cannot cut {self} into {count} blocks")
        s, e = self.start[d], self.end[d]
        step = -(-(e - s) // count)
        return tuple(
            self.with_dim(d, min(s + j * step, e), min(s + (j + 1) * step, e)) for j in range(count)
        )

    def sections(self, counts: Sequence[int]) -> tuple[ZRange, ...]:
        """Cut every dim d into `counts[d]` blocks; all Π counts of them, the last dim fastest.

        The policy is that of `blocks`: a count is always met. Where the extent does not allow that
        many parts of ⌈N/count⌉ points, the last ones are short and some may be empty; that is no
        error, because devices are as many as they are, whatever they hold. (`split` is for parts of
        a given size, none of them empty.) Raises ZSpaceError unless there is one positive count per
        dim.
        """
        if len(counts) != self.rank:
            raise ZSpaceError(f"{len(counts)} section counts for {self}, of rank {self.rank}")
        parts: tuple[ZRange, ...] = (self,)
        for d, count in enumerate(counts):
            parts = tuple(block for part in parts for block in part.blocks(d, count))
        return parts

    def __str__(self) -> str:
        body = ", ".join(f"{s}:{e}" for s, e in zip(self.start, self.end, strict=True))
        return f"zr[{body}]"

    def _dim(self, dim: int) -> int:
        if not -self.rank <= dim < self.rank:
            raise ZSpaceError(f"{self} has no dim {dim}")
        return dim % self.rank

    def _same_rank(self, other: ZRange) -> None:
        if self.rank != other.rank:
            raise ZSpaceError(f"{self} and {other} differ in rank")


def _point(value: Iterable[int], what: str) -> Point:
    """A tuple of Python ints; NumPy integers are welcome, floats and bools in disguise are not."""
    try:
        given = tuple(value)
        if bool not in map(type, given):
            return tuple(map(as_int, given))
    except TypeError:
        pass
    raise ZSpaceError(f"{what} {value!r} is not a tuple of integers")


def _matrix(value: Iterable[Iterable[int]]) -> tuple[Point, ...]:
    """Rows of Python ints."""
    try:
        rows = tuple(value)
    except TypeError:
        raise ZSpaceError(f"matrix {value!r} is not a tuple of rows") from None
    return tuple(_point(row, "matrix row") for row in rows)
