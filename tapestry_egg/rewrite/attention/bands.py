"""Masks that depend on how far a key is from its row alone: read from iotas and comparisons.

Such a mask is a function of row - key. It is evaluated once for every distance, so that a causal
mask and a window are found whatever comparisons, triangles or constants spell them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TemplateError
from tapestry_egg.graph.blockgraph import Operation, TensorType
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature
from tapestry_egg.reference.call import numpy_dtype
from tapestry_egg.reference.kernels import reference

from .views import Atom, Dims, Views, atoms_of, extent

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

    def plus(self, other: _Place, times: int) -> _Place:
        """Another one added so many times."""
        return _Place(
            self.rows + times * other.rows,
            self.keys + times * other.keys,
            self.offset + times * other.offset,
        )


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
        return made if isinstance(made, np.ndarray) and made.dtype == np.bool_ else None

    def _read(self, v: int, dims: Dims, depth: int = 0) -> _Place | NDArray[Any] | None:
        """A value: an element for every distance, or an integer that is affine in row and key."""
        views = self.views
        v, dims = views.see(v, dims)
        array = views.graph.constants.get(v)
        if array is not None:
            return self._constant(np.asarray(array), dims)
        op = views.maker.get(v)
        if op is None or not registry.is_light(op, views.graph.values):
            return None
        if depth > _MOST_DEPTH:
            views.ended = True
            return None
        sig = views.signature(op)
        if sig.means == "count":
            return self._iota(dims[sig.placed[0]])
        read = [self._read(u, views.operand(u, dims), depth + 1) for u in op.inputs]
        known = [x for x in read if x is not None]
        return self._made(op, sig, known) if known and len(known) == len(read) else None

    def _made(
        self, op: Operation, sig: OperationSignature, read: list[_Place | NDArray[Any]]
    ) -> _Place | NDArray[Any] | None:
        places = [x for x in read if isinstance(x, _Place)]
        if len(places) == len(read):
            if sig.means in ("sum", "difference"):
                return places[0].plus(places[1], 1 if sig.means == "sum" else -1)
            if sig.means == "conversion":
                return places[0]
            if sig.means != "comparison":
                return None
            less = places[0].plus(places[1], -1)
            if less.rows != -less.keys:
                return None
            distance = less.rows * self.distances + less.offset
            return self._computed(op, sig, [distance, np.zeros_like(distance)])
        if any(x.rows or x.keys for x in places):
            return None
        return self._computed(op, sig, [x.offset if isinstance(x, _Place) else x for x in read])

    def _computed(
        self, op: Operation, sig: OperationSignature, operands: Sequence[Any]
    ) -> NDArray[Any] | None:
        """What an operation makes, element by element, of elements for every distance."""
        own, n = sig.outputs[0].matrix, len(self.distances)
        rows = [(a, b) for p in sig.inputs for a, b in zip(p.matrix, own, strict=False)]
        if any(a != b and any(a) for a, b in rows) or sig.placed or sig.reduces:
            return None
        dtypes = [t.dtype for t in sig.input_types]
        arrays = [
            np.broadcast_to(np.asarray(x).astype(numpy_dtype(d)), (n,))
            for x, d in zip(operands, dtypes, strict=True)
        ]
        try:
            here = registry.signature(op.kernel, op.params, [TensorType((n,), d) for d in dtypes])
            return reference(op.kernel, op.params, here, arrays)[0]
        except TemplateError:  # it has no reference
            return None

    def _iota(self, atoms: tuple[Atom, ...]) -> _Place | None:
        if atoms == self.rows:
            return _Place(1, 0, 0)
        if atoms == self.keys:
            return _Place(0, 1, 0)
        return _Place(0, 0, 0) if not atoms else None

    def _constant(self, array: NDArray[Any], dims: Dims) -> Any:
        if array.size == 1:
            x = array.reshape(())
            whole = x.dtype.kind in "iu"
            return _Place(0, 0, int(x)) if whole else np.full(len(self.distances), x)
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
