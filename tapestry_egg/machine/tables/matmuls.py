"""Measured times of matrix products, and what they say of products that nobody measured.

A table holds times of batched products by shape and dtypes. They are smoothed and completed to a
grid (`kriging.py`) once for each dtype asked for; between the points of the grid log time is linear
in log sizes. A product outside the grid is one at its edge, as far as time goes by work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.blockgraph import itemsize

from .files import TableFile, rows
from .kriging import Process

Array = NDArray[np.float64]

LEADING = ("batch", "m", "n", "k")
#: Columns whose logs of times differ by this (a standard deviation) or less tell of one another.
_ALIKE, _COMPANIONS, _COMMON = 0.25, 2, 20
_MOST_POINTS = 20_000  # of the grid of one dtype


@dataclass(frozen=True, slots=True)
class Dtypes:
    """Dtypes of the operands and of the result."""

    lhs: str
    rhs: str
    out: str

    def __str__(self) -> str:
        return f"{self.lhs}*{self.rhs}->{self.out}"

    @property
    def width(self) -> int:
        """Bytes of an element of the wider operand."""
        return max(itemsize(self.lhs), itemsize(self.rhs))


@dataclass(frozen=True, eq=False)
class MatmulTable:
    """Seconds of products, [shapes, dtypes], NaN where not measured; `shapes` is [shapes, 4]."""

    name: str
    shapes: NDArray[np.int64]  # [shapes, 4]: batch, m, n, k
    dtypes: tuple[Dtypes, ...]
    seconds: Array  # [shapes, dtypes]

    def column(self, lhs: str, rhs: str, out: str) -> int | None:
        """The column that stands for these dtypes; None where none has operands as wide.

        Equal operands count before an equal result, then the order of the columns.
        """
        width = max(itemsize(lhs), itemsize(rhs))
        if lhs.startswith(("int", "uint", "bool", "complex")) or lhs == "float64":
            return next(
                (k for k, d in enumerate(self.dtypes) if (d.lhs, d.rhs) == (lhs, rhs)), None
            )
        near = [
            (((d.lhs, d.rhs) != (lhs, rhs), (d.rhs, d.lhs) != (lhs, rhs), d.out != out), k)
            for k, d in enumerate(self.dtypes)
            if d.width == width and d.lhs.startswith(("float", "bfloat"))
        ]
        return min(near)[1] if near else None

    def time(self, shapes: Array, column: int, floor: float) -> Array:
        """Seconds of products of shapes [(batch, m, n, k), ...]; `floor` is what any kernel takes.

        Beyond the table's batch, m and n, work of one is work of another: all are tiles that run
        side by side. What is beyond or below after that goes by work from the edge, the floor not.
        """
        grid = self._grid(column)
        sizes = np.log2(np.maximum(shapes, 1.0))
        inside = np.clip(sizes.T, grid.low, grid.high).T
        excess = (sizes - inside)[:3]
        beyond = np.maximum(excess, 0.0).sum(axis=0)
        for a in (0, 1, 2):
            room = np.maximum(grid.high[a] - inside[a], 0.0)
            taken = np.minimum(room, beyond)
            # Only dims that are not themselves too small take work of others.
            taken = np.where(excess[a] < 0, 0.0, taken)
            inside[a] += taken
            beyond = beyond - taken
        rest = (sizes - inside).sum(axis=0)
        edge = np.exp2(grid.interpolate(inside))
        least = np.minimum(edge, floor)
        out: Array = least + (edge - least) * np.exp2(rest)
        return out

    def left_out(self, column: int) -> tuple[NDArray[np.int64], Array]:
        """(rows, relative errors) of one column, each row predicted from all the others."""
        process, own = self._process(column)
        return own, np.expm1(process.left_out()[: len(own)])

    def _process(self, column: int) -> tuple[Process, NDArray[np.int64]]:
        """What is known of a column, its own rows first, and which rows these are."""
        times = np.log(self.seconds)
        sizes = np.log2(self.shapes.astype(np.float64))
        width, apart = self.dtypes[column].width, []
        for k, d in enumerate(self.dtypes):
            both = np.isfinite(times[:, k]) & np.isfinite(times[:, column])
            if k == column or d.width != width or both.sum() < _COMMON:
                continue
            apart.append((float(np.std(times[both, k] - times[both, column])), k))
        near = [k for spread, k in sorted(apart)[:_COMPANIONS] if spread <= _ALIKE]
        points, columns, values = [], [], []
        for n, k in enumerate([column, *near]):
            known = np.flatnonzero(np.isfinite(times[:, k]))
            points.append(sizes[known])
            columns.append(np.full(len(known), n))
            values.append(times[known, k])
        own = np.flatnonzero(np.isfinite(times[:, column]))
        return Process(np.concatenate(points), np.concatenate(columns), np.concatenate(values)), own

    def _grid(self, column: int) -> _Grid:
        return _grid_of(self, column)


@dataclass(frozen=True, eq=False)
class _Grid:
    """log2 seconds over a grid of log2 sizes."""

    axes: tuple[Array, ...]
    values: Array  # one dim for each axis

    @property
    def low(self) -> Array:
        return np.array([a[0] for a in self.axes])

    @property
    def high(self) -> Array:
        return np.array([a[-1] for a in self.axes])

    def interpolate(self, sizes: Array) -> Array:
        """Multilinear, at points [4, n] within the grid."""
        corners, shares = [], []
        for axis, x in zip(self.axes, sizes, strict=True):
            if len(axis) == 1:
                corners.append((np.zeros(len(x), np.int64),) * 2)
                shares.append(np.zeros(len(x)))
                continue
            k = np.clip(np.searchsorted(axis, x, side="right") - 1, 0, len(axis) - 2)
            corners.append((k, k + 1))
            shares.append((x - axis[k]) / (axis[k + 1] - axis[k]))
        out = np.zeros(sizes.shape[1])
        for ends in product((0, 1), repeat=len(self.axes)):
            share = np.ones(sizes.shape[1])
            for s, e in zip(shares, ends, strict=True):
                share = share * (s if e else 1.0 - s)
            out += share * self.values[tuple([c[e] for c, e in zip(corners, ends, strict=True)])]
        return out


@lru_cache(maxsize=64)
def _grid_of(table: MatmulTable, column: int) -> _Grid:
    process, own = table._process(column)
    sizes = np.log2(table.shapes[own].astype(np.float64))
    axes = tuple(np.unique(sizes[:, a]) for a in range(4))
    shape = tuple(len(a) for a in axes)
    points = np.stack([x.ravel() for x in np.meshgrid(*axes, indexing="ij")], axis=1)
    values = process.predict(points, 0) / np.log(2.0)
    return _Grid(axes, values.reshape(shape))


@lru_cache(maxsize=32)
def matmul_table(file: TableFile) -> MatmulTable:
    """The table of a file. Raises TargetError with file and line for what is malformed."""
    found = list(rows(file, LEADING))
    dtypes = tuple(_dtypes(x, f"{file.name}: the header") for x in found[0].columns[4:])
    shapes, seconds, seen = [], [], set()
    for row in found:
        shape = tuple(row.count(x) for x in LEADING)
        if shape in seen:
            raise TargetError(f"the shape {shape} occurs twice", where=row.where)
        seen.add(shape)
        shapes.append(shape)
        times = [row.seconds(x) for x in row.columns[4:]]
        seconds.append([np.nan if t is None else t for t in times])
    made = MatmulTable(file.name, np.array(shapes, np.int64), dtypes, np.array(seconds))
    for k, d in enumerate(dtypes):
        known = np.isfinite(made.seconds[:, k])
        if not known.any():
            raise TargetError(f"no row has a time of {d}", where=file.name)
        points = 1
        for a in range(4):
            points *= len(np.unique(made.shapes[known, a]))
        if points > _MOST_POINTS:
            raise TargetError(
                f"the sizes of {d} span {points} shapes, at most {_MOST_POINTS} are interpolated",
                where=file.name,
                hint="Measure on a grid: few sizes of each dim, combined.",
            )
    return made


def _dtypes(text: str, where: str) -> Dtypes:
    operands, arrow, out = text.partition("->")
    lhs, star, rhs = operands.partition("*")
    try:
        for name in (lhs, rhs, out):
            if not arrow or not star or itemsize(name) < 1:
                raise ValueError
    except Exception as e:
        raise TargetError(
            f"{text!r:.60} does not name dtypes", where=where, hint="As float32*float32->float32."
        ) from e
    return Dtypes(lhs, rhs, out)


def errors_by_dtype(table: MatmulTable) -> Sequence[tuple[Dtypes, int, float, float]]:
    """(dtypes, rows, median and 90th percentile of the error) of each column, rows left out one by
    one."""
    found = []
    for k, d in enumerate(table.dtypes):
        own, error = table.left_out(k)
        size = np.abs(error)
        found.append((d, len(own), float(np.median(size)), float(np.percentile(size, 90))))
    return found
