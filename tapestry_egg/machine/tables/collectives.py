"""Measured times of collectives, by kind, size of the group and bytes.

Each series, one kind in groups of one size, is smoothed and made monotone in its bytes
(`series.py`). Between groups of two sizes log time is linear in the log of the size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.errors import TargetError
from tapestry_egg.graph.blockgraph import itemsize

from .files import TableFile, rows
from .series import Series, scatter

Array = NDArray[np.float64]

LEADING = ("kind", "dtype", "devices", "group")
KINDS = (
    "all_gather",
    "all_reduce",
    "reduce_scatter",
    "all_to_all",
    "permute_oneway",
    "permute_pairwise",
    "permute_ring",
)


@dataclass(frozen=True, eq=False)
class CollectiveTable:
    """All series of a file."""

    name: str
    series: tuple[Series, ...]

    def has(self, kind: str) -> bool:
        return any(s.kind == kind for s in self.series)

    def time(self, kind: str, dtype: str, nbytes: Array, group: int, devices: int) -> Array:
        """Seconds for tensors of `nbytes` (as `Series` counts them) in groups of `group`.

        `devices` is how many the level joins: of equal groups, those measured among about as many
        count. Beyond the largest group the time is that of the largest.
        """
        own = [s for s in self.series if s.kind == kind]
        found: dict[int, Series] = {}
        for s in own:
            known = found.get(s.group)
            if known is None or _far(s, dtype, devices) < _far(known, dtype, devices):
                found[s.group] = s
        groups = sorted(found)
        x = np.log(np.maximum(np.asarray(nbytes, np.float64), 1.0))
        above = next((g for g in groups if g >= group), groups[-1])
        below = next((g for g in reversed(groups) if g <= group), groups[0])
        low, high = found[below].at(x), found[above].at(x)
        if below == above:
            return np.exp(low)
        share = np.log(group / below) / np.log(above / below)
        out: Array = np.exp(low + share * (high - low))
        return out


@lru_cache(maxsize=32)
def collective_table(file: TableFile) -> CollectiveTable:
    """The table of a file. Raises TargetError with file and line for what is malformed."""
    found: list[Series] = []
    for row in rows(file, LEADING):
        kind, dtype = row.text("kind"), row.text("dtype")
        devices, group = row.count("devices"), row.count("group")
        if kind not in KINDS:
            raise row.error("kind", f"known are {', '.join(KINDS)}")
        try:
            itemsize(dtype)
        except Exception as e:
            raise row.error("dtype", "it must be a dtype") from e
        if not 2 <= group <= devices:
            raise row.error("group", "it must be from 2 to devices")
        if any(
            (s.kind, s.dtype, s.devices, s.group) == (kind, dtype, devices, group) for s in found
        ):
            raise row.error("kind", "this series occurs twice")
        points = []
        for column in row.columns[len(LEADING) :]:
            seconds = row.seconds(column)
            if not column.isdigit() or int(column) < 1:
                raise TargetError(
                    f"the column {column!r:.40} is no number of bytes", where=row.where
                )
            if seconds is not None:
                points.append((int(column), seconds))
        if len(points) < 2:
            raise TargetError("a series needs two times", where=row.where)
        x, y = np.log(np.array(sorted(points))).T
        found.append(Series(kind, dtype, devices, group, x, y))
    noise = scatter([s for s in found if not s.kind.startswith("permute")])
    return CollectiveTable(file.name, tuple([replace(s, noise=noise) for s in found]))


def errors_by_kind(table: CollectiveTable) -> Sequence[tuple[str, str, int, float, float]]:
    """(kind, dtype, rows, median and 90th percentile of the error) of each kind and dtype, rows
    left out one by one."""
    out = []
    for kind in KINDS:
        for dtype in dict.fromkeys(s.dtype for s in table.series if s.kind == kind):
            own = [s for s in table.series if (s.kind, s.dtype) == (kind, dtype)]
            size = np.abs(np.concatenate([s.left_out() for s in own]))
            row = float(np.median(size)), float(np.percentile(size, 90))
            out.append((kind, dtype, len(size), *row))
    return out


def _far(series: Series, dtype: str, devices: int) -> tuple[bool, float]:
    """How badly a series stands for another dtype and number of devices."""
    return series.dtype != dtype, abs(float(np.log(series.devices / devices)))
