"""Tiles: how TPUs lay arrays out in memory, and what that pads.

An array lies in tiles of `rows` x `lanes` words, along two of its dims: those that have to be
padded least, but for what some kernels read and make, and what is computed from that element by
element: its last two dims of more than one element, unless it enters or leaves the program. What is
narrower than a word is packed along the rows, and arrays of few rows lie in tiles of fewer, down to
what fills a word. Vectors lie in tiles of one row to a whole tile's elements. Read off the layouts
of modules that libtpu 0.0.42 compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

from .target_table import Table


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `rows` x `lanes` words of `word` bytes; `last` are the kernels whose arrays have
    their last two dims in tiles."""

    lanes: int
    rows: int
    word: int
    last: tuple[str, ...] = ()


def read_tiles(table: Table) -> Tiles:
    """The figures of a target's file."""
    lanes, rows, word = [int(table.number(k, whole=True)) for k in ("lanes", "rows", "word")]
    found = Tiles(lanes, rows, word, table.texts("last") if "last" in table.keys() else ())
    table.finish()
    return found


def stored_bytes(
    shape: Sequence[int], itemsize: int, tiles: Tiles | None, last: bool = False
) -> int:
    """Bytes of an array in memory: of its elements, or of the fewest tiles that hold it, or of
    tiles along its `last` two dims."""
    whole = prod(shape) * itemsize
    if tiles is None or not whole:
        return whole
    packed = max(tiles.word // itemsize, 1)  # elements of a word
    if len(shape) < 2:
        elements = prod(shape)
        tile = min(max(_power(elements), tiles.lanes * packed), tiles.lanes * tiles.rows)
        return _up(elements, tile) * itemsize
    best, pairs = 0, list(permutations(range(len(shape)), 2))
    long = [d for d, n in enumerate(shape) if n > 1]
    # Lanes are not left empty for a dim that would not fill a column of a tile.
    if last and len(long) > 1 and shape[long[-1]] >= tiles.rows:
        pairs = [(long[-1], long[-2])]
    for lanes, rows in pairs:
        high = min(max(_power(shape[rows]), packed), tiles.rows)
        padded = whole // (shape[lanes] * shape[rows])
        padded *= _up(shape[lanes], tiles.lanes) * _up(shape[rows], high)
        best = min(best, padded) if best else padded
    return best


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()
