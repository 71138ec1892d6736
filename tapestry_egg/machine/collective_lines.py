"""Collective lines: what one collective takes, and lines below that, by the bytes that enter it.

Of every line below the seconds T(x) of a collective of x bytes, T(x) >= l + b x, it follows what
any collectives take at least: l for each, and b for each of their bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import MeshShape

from .costs import collective_seconds
from .target import Target

Floats = NDArray[np.float64]

# Amounts, between none and all that one collective may have, at which its seconds are looked at.
_POINTS = 1 << 13
#: The same for what bytes add to those of others.
FINELY = 1 << 15


@dataclass(frozen=True)
class Line:
    """What one collective takes at least: seconds, and more for each byte that enters it."""

    latency: float
    per_byte: float


# Searches ask for the same few kinds again and again, from problems that share nothing else.
@lru_cache(maxsize=1024)
def lines_below(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float
) -> tuple[Line, ...]:
    """Lines that are nowhere above the seconds of one collective of a kind that up to `most` bytes
    enter: the steepest that has no latency, and those along the hull."""
    corners = _below(_points(name, axes, mesh, target, most).tolist())
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(corners)]
    along = [Line(a[1] - s * a[0], s) for a, s in zip(corners, slopes, strict=False)]
    steepest = steepest_below(name, axes, mesh, target, most)
    return (steepest, *(x for x in along if x.latency >= 0 and x.per_byte >= 0))


@lru_cache(maxsize=1024)
def steepest_below(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float
) -> Line:
    """The first of these alone, which takes no hull."""
    x, seconds = _points(name, axes, mesh, target, most)[1:].T
    return Line(0.0, float((seconds / x).min()))


def _points(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float
) -> Floats:
    """[points, 2]: bytes that enter a collective of a kind, and no more than the seconds that it
    takes of so many or, up to the next point, of fewer."""
    x = np.linspace(0.0, most, _POINTS)
    seconds = collective_times(name, axes, mesh, target, most, _POINTS)
    if target.combiner is not None and name in target.combiner.contiguous:
        seconds = seconds + 4.0 * x / target.hbm_bytes_per_second
    # Seconds rise with bytes: what they are anywhere in a step is no less than before it.
    return np.column_stack([x, np.concatenate((seconds[:1], seconds[:-1]))])


@lru_cache(maxsize=128)
def collective_times(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float, points: int
) -> Floats:
    """Seconds of one collective that none up to `most` bytes enter, at so many points."""
    amounts = np.linspace(0.0, most, points)
    seconds = np.array(collective_seconds(name, amounts, axes, mesh, target))
    seconds.flags.writeable = False  # it is everybody's
    return seconds


def _below(points: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    """The corners of the hull below some points, which come from left to right."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        while len(found) > 1:
            (x0, y0), (x1, y1) = found[-2:]
            if (y1 - y0) * (x - x0) < (y - y0) * (x1 - x0):
                break
            found.pop()
        found.append((x, y))
    return found
