"""Masks that depend on how far a key is from its row alone: read from iotas and comparisons.

Such a mask is a function of row - key. It is evaluated once for every distance, so that a causal
mask and a window are found whatever comparisons, triangles or constants spell them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .views import Atom, Dims, Views, atoms_of, extent

_COMPARED: dict[str, Callable[[Any, Any], Any]] = {
    "ge": np.greater_equal,
    "gt": np.greater,
    "le": np.less_equal,
    "lt": np.less,
    "eq": np.equal,
    "ne": np.not_equal,
}
_READ = {*_COMPARED, "add", "sub", "and", "or", "not", "select_n", "convert_element_type"}
# Operations one behind the other that are read; told where a mask has more.
_MOST_DEPTH = 24


@dataclass(frozen=True)
class Band:
    """Row t sees the keys t - `back` to t; all of them from the first one where `back` is None."""

    back: int | None


@dataclass(frozen=True)
class _Place:
    """rows·t + keys·s + offset: an integer that is affine in row and key."""

    rows: int
    keys: int
    offset: int


class Bands:
    """Reads masks over given rows and keys."""

    def __init__(self, views: Views, rows: Sequence[Atom], keys: Sequence[Atom]) -> None:
        self.views = views
        self.rows, self.keys = tuple(rows), tuple(keys)
        self.distances = np.arange(1 - extent(keys), extent(rows))

    def band(self, masks: Sequence[tuple[int, Dims, bool]]) -> Band | None:
        """The band that masks (value, dims, whether it holds where keys are seen) leave together,
        None where they are not one."""
        seen = np.ones(len(self.distances), np.bool_)
        for v, dims, holds in masks:
            one = self._flags(v, dims)
            if one is None:
                return None
            seen &= one if holds else ~one
        past = self.distances >= 0
        if (seen & ~past).any() or not seen[past].any():
            return None
        back = int(self.distances[seen].max())
        if not (seen == (past & (self.distances <= back))).all():
            return None
        if extent(self.rows) - extent(self.keys) > back:
            return None  # The last rows see no key: a program has its own mean or NaN there.
        return Band(None if back == self.distances[-1] else back)

    def _flags(self, v: int, dims: Dims, depth: int = 0) -> NDArray[np.bool_] | None:
        """A flag for every distance."""
        made = self._read(v, dims, depth)
        if isinstance(made, bool | np.bool_):
            return np.full(len(self.distances), bool(made))
        return made if isinstance(made, np.ndarray) else None

    def _read(self, v: int, dims: Dims, depth: int = 0) -> Any:
        """A value: a flag for every distance, an integer that is affine in row and key, or None."""
        views = self.views
        v, dims = views.see(v, dims)
        array = views.graph.constants.get(v)
        if array is not None:
            return self._constant(np.asarray(array), dims)
        op = views.maker.get(v)
        if op is not None and depth > _MOST_DEPTH:
            views.ended, op = True, None
        if op is None:
            return None
        if op.kernel == "iota":
            return self._iota(dims[int(op.params["dimension"])])
        if op.kernel not in _READ:
            return None
        read = [self._read(u, views.operand(u, dims), depth + 1) for u in op.inputs]
        if any(x is None for x in read):
            return None
        return self._made(op.kernel, read)

    def _made(self, kernel: str, read: list[Any]) -> Any:
        if kernel in ("add", "sub") or kernel in _COMPARED:
            a, b = read
            if isinstance(a, _Place) and isinstance(b, _Place):
                return self._of_places(kernel, a, b)
            return None
        if kernel == "convert_element_type":
            return read[0]
        flags = [
            np.full(len(self.distances), bool(x)) if isinstance(x, bool | np.bool_) else x
            for x in read
        ]
        if not all(isinstance(x, np.ndarray) for x in flags):
            return None
        if kernel == "and":
            return flags[0] & flags[1]
        if kernel == "or":
            return flags[0] | flags[1]
        if kernel == "not":
            return ~flags[0]
        if kernel == "select_n" and len(flags) == 3:
            return np.where(flags[0], flags[2], flags[1])
        return None

    def _of_places(self, kernel: str, a: _Place, b: _Place) -> Any:
        if kernel == "add":
            return _Place(a.rows + b.rows, a.keys + b.keys, a.offset + b.offset)
        less = _Place(a.rows - b.rows, a.keys - b.keys, a.offset - b.offset)
        if kernel == "sub":
            return less
        if kernel not in _COMPARED or less.rows != -less.keys:
            return None
        return _COMPARED[kernel](less.rows * self.distances + less.offset, 0)

    def _iota(self, atoms: tuple[Atom, ...]) -> _Place | None:
        if atoms == self.rows:
            return _Place(1, 0, 0)
        if atoms == self.keys:
            return _Place(0, 1, 0)
        return _Place(0, 0, 0) if not atoms else None

    def _constant(self, array: NDArray[Any], dims: Dims) -> Any:
        if array.size == 1:
            x = array.reshape(())
            return bool(x) if x.dtype == np.bool_ else _integer(x)
        if atoms_of(dims) not in ((*self.rows, *self.keys), (*self.keys, *self.rows)):
            return self._line(array, dims)
        if array.dtype != np.bool_:
            return None
        table = array.reshape(extent(self.rows), -1)
        if atoms_of(dims)[: len(self.rows)] != self.rows:
            table = array.reshape(extent(self.keys), -1).T
        out = np.zeros(len(self.distances), np.bool_)
        for k, distance in enumerate(self.distances):
            line = np.diagonal(table, -distance)
            if (line != line[0]).any():
                return None
            out[k] = line[0]
        return out

    def _line(self, array: NDArray[Any], dims: Dims) -> _Place | None:
        """A constant 0, 1, 2, … along rows or keys, as `np.arange` leaves it."""
        flat = array.reshape(-1)
        if flat.dtype.kind not in "iu" or not (flat == flat[0] + np.arange(flat.size)).all():
            return None
        place = self._iota(atoms_of(dims))
        return None if place is None else _Place(place.rows, place.keys, int(flat[0]))


def _integer(x: NDArray[Any]) -> _Place | None:
    if x.dtype.kind not in "iu":
        return None
    return _Place(0, 0, int(x))
