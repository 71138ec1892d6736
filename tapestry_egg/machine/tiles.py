"""How TPUs lay arrays out in memory, and what that pads."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import prod

# Tiles: how TPUs lay arrays out in memory, and what that pads.
#
# An array lies in tiles of `rows` x `lanes` words, along two of its dims: those that have to be
# padded least; of what windows move over, or rows are added to, and what is computed from that
# element by element, lanes lie along a dim that these do not move along (`schedule/lying.py`). What
# is narrower than a word is packed along the rows, and arrays of few rows lie in tiles of fewer,
# down to what fills a word. Vectors lie in tiles of one row to a whole tile's elements. Read off
# the layouts of modules that libtpu 0.0.42 and 0.0.52 compiled.


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tiles of `rows` x `lanes` words of `word` bytes."""

    lanes: int
    rows: int
    word: int


def stored_bytes(
    shape: Sequence[int], itemsize: int, tiles: Tiles | None, windows: Collection[int] = ()
) -> int:
    """Bytes of an array in memory: of its elements, or of the fewest tiles that hold it, whose
    lanes lie along none of the dims that `windows` move along."""
    whole = prod(shape) * itemsize
    if tiles is None or not whole:
        return whole
    packed = max(tiles.word // itemsize, 1)  # elements of a word
    if len(shape) < 2:
        elements = prod(shape)
        tile = min(max(_power(elements), tiles.lanes * packed), tiles.lanes * tiles.rows)
        return _up(elements, tile) * itemsize
    best, pairs = 0, list(permutations(range(len(shape)), 2))
    pairs = [(lanes, rows) for lanes, rows in pairs if lanes not in windows] or pairs
    for lanes, rows in pairs:
        high = min(max(_power(shape[rows]), packed), tiles.rows)
        padded = whole // (shape[lanes] * shape[rows])
        padded *= _up(shape[lanes], tiles.lanes) * _up(shape[rows], high)
        best = min(best, padded) if best else padded
    return best


def tight_order(shape: Sequence[int], itemsize: int, tiles: Tiles) -> tuple[int, ...] | None:
    """The dims of a stack, that of its steps first, from the outermost to that along lanes, in an
    order in which it is padded least; None where none is padded less than as they are written."""
    written = tuple(range(len(shape)))
    if len(shape) < 3:
        return None

    def padded(order: tuple[int, ...]) -> int:
        *outer, rows, lanes = (shape[d] for d in order)
        return prod(outer) * stored_bytes((rows, lanes), itemsize, tiles, windows=(0,))

    best = min(((0, *inner) for inner in permutations(written[1:])), key=padded)
    return best if padded(best) < padded(written) else None


def _up(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _power(n: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(n - 1, 0).bit_length()
