"""Projections by position: `[..., 1, 0] :> [..., 1, $inner]` as rows of ( A | B | S ).

A *map* is a list that is read from left to right against the index dims and against the dims of the
tensor. Each entry either takes the next index dim or not, and makes the next row or not:

    entry            index dim   row
    stride a != 0    takes one   a times that dim, the row keeps the dim
    0                takes one   zero: the tensor dim does not move with it
    new              takes none  zero: a tensor dim is inserted
    drop             takes one   none: the index dim does not reach the tensor

The map must take every index dim and make one row per dim of the tensor. A scalar with `...`
fills its list up to that size, `1...[:2]` is a slice of such a filling, and `...` alone fills with
what the list has by default: 1 in a map and in a shape, 0 in an offset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tapestry_egg.metakernels.signatures.values import Row

from .faults import Fault

#: Entries of a map that are no strides.
INSERT, DROP = "new", "drop"


@dataclass(frozen=True, slots=True)
class Fill:
    """An entry `value...` that repeats up to the size of its list; None is the list's default.

    `part` is the slice of the whole filling that is meant. `at` is where the text says so.
    """

    value: int | str | None
    part: tuple[int | None, int | None] | None = None
    at: int = 0

    def __repr__(self) -> str:
        value = "" if self.value is None else str(self.value)
        if self.part is None:
            return f"{value}..."
        low, high = ("" if end is None else end for end in self.part)
        return f"{value}...[{low}:{high}]"


@dataclass(frozen=True, slots=True)
class Diagonal:
    """`map + offset :> shape` before the sizes of its lists are known."""

    map: tuple[Any, ...]
    offset: tuple[Any, ...] | None = None
    shape: tuple[Any, ...] | None = None
    at: int = 0

    def __add__(self, offset: object) -> Diagonal:
        if not isinstance(offset, tuple):
            return NotImplemented
        if self.offset is not None:
            raise TypeError("the map already has an offset")
        return replace(self, offset=offset)


@dataclass(frozen=True, slots=True)
class AugmentedRow:
    """A row `[1, 0... | 4 | 2]` of ( A | B | S ): coefficients, offset, extent."""

    coefficients: tuple[Any, ...]
    offset: Any
    extent: Any
    at: int = 0


def rows_of(value: Any, rank: int, index_rank: int, *, positional: bool) -> tuple[Row, ...]:
    """The rows that `value` stands for, of a tensor of `rank` over `index_rank` index dims.

    A list with a row in it is a list of rows, and its numbers are constant starts. A list without
    one is a map where it can be nothing else (it has `...`, `new` or `drop`), and wherever
    `positional` says so; otherwise its numbers are constant starts. Raises Fault.
    """
    if isinstance(value, Diagonal):
        return diagonal_rows(value, rank, index_rank)
    if not isinstance(value, tuple):
        raise Fault(0, f"{value!r} is not a projection", "Write `[MAP] :> [SHAPE]`, or rows.")
    rows = any(isinstance(v, Row | AugmentedRow) for v in value)
    if not rows and (positional or any(isinstance(v, Fill) or v in (INSERT, DROP) for v in value)):
        return diagonal_rows(Diagonal(value), rank, index_rank)
    out = []
    for v in value:
        if isinstance(v, AugmentedRow):
            out.append(augmented_row(v, index_rank))
        elif isinstance(v, Row):
            out.append(v)
        elif type(v) is int:
            out.append(Row((), v))
        elif isinstance(v, Fill):
            raise Fault(v.at, f"{v} fills a map, and this list has rows of its own")
        else:
            raise Fault(0, f"{v!r} is not a row of a projection")
    return tuple(out)


def diagonal_rows(diagonal: Diagonal, rank: int, index_rank: int) -> tuple[Row, ...]:
    """One row per dim of the tensor. Raises Fault where the lists do not fit its rank or the
    number of index dims."""
    at = diagonal.at
    starts: list[tuple[int, ...]] = []
    taken = 0
    for entry in _filled_map(diagonal.map, rank, index_rank, at):
        row = [0] * index_rank
        if entry != INSERT:
            if taken == index_rank:
                raise Fault(
                    at,
                    f"the map takes more than the {_dims(index_rank)} that there are",
                    "`new` makes a row and takes no index dim.",
                )
            if entry != DROP:
                row[taken] = entry
            taken += 1
        if entry != DROP:
            starts.append(tuple(row))
    if len(starts) != rank:
        raise Fault(at, f"the map makes {len(starts)} rows for a tensor of rank {rank}")
    if taken != index_rank:
        raise Fault(
            at,
            f"the map takes {taken} of the {_dims(index_rank)}",
            "`drop` takes an index dim and makes no row.",
        )
    offsets = filled((Fill(None),) if diagonal.offset is None else diagonal.offset, rank, 0, at)
    extents = filled((Fill(None),) if diagonal.shape is None else diagonal.shape, rank, 1, at)
    for n in extents:
        if n < 0:
            raise Fault(at, f"{n} is not an extent")
    return tuple(map(Row, starts, offsets, extents))


def patch_rows(value: Any, index_rank: int) -> tuple[Row, ...]:
    """The rows of a patch `[0] :> [$n]`, which stand beside the index dims: all of them zero."""
    if isinstance(value, tuple):
        value = Diagonal(value)
    if not isinstance(value, Diagonal):
        raise Fault(0, f"{value!r} is not a patch", "Write `[0] :> [SHAPE]`.")
    for entry in value.map:
        if entry not in (0, INSERT) or isinstance(entry, bool):
            raise Fault(value.at, f"{entry!r} in a patch: its rows take no index dim, write 0")
    size = len(value.map)
    rows = diagonal_rows(replace(value, map=(INSERT,) * size), size, 0)
    return tuple(replace(row, coefficients=(0,) * index_rank) for row in rows)


def augmented_row(row: AugmentedRow, index_rank: int) -> Row:
    """The row with its coefficients filled up to the number of index dims."""
    if not isinstance(row.extent, int) or row.extent < 0:
        raise Fault(row.at, f"{row.extent!r} is not an extent")
    if type(row.offset) is not int:
        raise Fault(row.at, f"{row.offset!r} is not an offset")
    return Row(tuple(filled(row.coefficients, index_rank, 0, row.at)), row.offset, row.extent)


def filled(entries: Sequence[Any], size: int, default: int, at: int) -> list[int]:
    """A list of integers with its fillings written out to `size` entries. Raises Fault."""
    out = _filled(entries, size, default, at)
    for v in out:
        if type(v) is not int:
            raise Fault(at, f"{v!r} is not an integer")
    if len(out) != size:
        raise Fault(at, f"{len(out)} entries where {size} are needed")
    return out


def _filled(entries: Sequence[Any], size: int, default: int, at: int) -> list[Any]:
    return _written_out(entries, default, lambda fill, others: (size, size - len(others)), at)


def _filled_map(entries: Sequence[Any], rank: int, index_rank: int, at: int) -> list[Any]:
    def sizes(fill: Fill, others: list[Any]) -> tuple[int, int]:
        # What only takes index dims fills up to their number, everything else up to the rank.
        if fill.value == DROP:
            return index_rank, index_rank - sum(e != INSERT for e in others)
        return rank, rank - sum(e != DROP for e in others)

    out = _written_out(entries, 1, sizes, at)
    for v in out:
        if type(v) is not int and v not in (INSERT, DROP):
            hint = "Strides are integers; `new` inserts a row, `drop` drops an index dim."
            raise Fault(at, f"{v!r} is not an entry of a map", hint)
    return out


def _written_out(entries: Sequence[Any], default: int, sizes: Any, at: int) -> list[Any]:
    """`sizes` gives, for a filling and the other entries, the whole size and what is left."""
    open_: tuple[int, Fill] | None = None
    out: list[Any] = []
    for entry in entries:
        if not isinstance(entry, Fill):
            out.append(entry)
            continue
        value = default if entry.value is None else entry.value
        if entry.part is not None:
            low, high = entry.part
            whole = sizes(entry, [])[0]
            out.extend([value] * len(range(whole)[low:high]))
        elif open_ is not None:
            raise Fault(
                entry.at,
                "a second filling: one list can have only one that is not sliced",
                "`1...[:2]` is a filling of known size.",
            )
        else:
            open_ = (len(out), entry)
    if open_ is not None:
        place, fill = open_
        left = sizes(fill, out)[1]
        if left < 0:
            raise Fault(fill.at or at, f"there are {-left} entries too many beside {fill}")
        out[place:place] = [default if fill.value is None else fill.value] * left
    return out


def _dims(n: int) -> str:
    return "1 index dim" if n == 1 else f"{n} index dims"
