"""Added bytes: what bytes add at least to the seconds of any collective that they join."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from tapestry_egg.graph.layout import MeshShape

from .costs import collective_seconds
from .target import Target

# Amounts, from none to all that one collective may have, at which its seconds are looked at.
_POINTS = 1 << 15


def least_added(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float, size: float
) -> float:
    """Seconds that `size` bytes add at least to those of a collective of a kind that no more than
    `most` bytes enter, whatever else enters it."""
    seconds = _seconds(name, axes, mesh, target, most)
    steps = int(size / (most / (_POINTS - 1)))
    # From x bytes to x + size, whatever x is between two points: seconds rise with bytes.
    least = (seconds[steps:-1] - seconds[1 : _POINTS - steps]).min(initial=np.inf)
    return max(0.0, float(least))


# Searches ask for the same few kinds again and again, from problems that share nothing else.
@lru_cache(maxsize=128)
def _seconds(
    name: str, axes: tuple[int, ...], mesh: MeshShape, target: Target, most: float
) -> NDArray[np.float64]:
    """Seconds of one collective that none up to `most` bytes enter, at all points."""
    amounts = np.linspace(0.0, most, _POINTS)
    return np.array(collective_seconds(name, amounts, axes, mesh, target))
