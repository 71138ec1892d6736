"""Race: whether what is known already is as good as anything that a problem can hold."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tapestry_egg.extract.problem.problem import Floats
from tapestry_egg.extract.search.archive import Archive, shown
from tapestry_egg.extract.search.settling import SLIVER


def is_beaten(archive: Archive, known: Floats, gap: float, wanted: Sequence[int]) -> bool:
    """Whether bounds prove that no plan of a problem betters what is known [plans, 3], which holds
    (seconds, peak, joules), by more than the share `gap`.

    Of the objectives `wanted`, by their places, seconds are exchanged for each of the others; plans
    that take no less of either than another one are not looked for. No plan is known where none is
    within some peak and joules: then a problem is beaten there only if it has none either.
    """
    columns = [0, *(k for k in (1, 2) if k in wanted)]
    points = known[shown(known)] if len(known) else known
    if not len(points):
        return False
    for s, p, j in points.tolist():
        within = (p if 1 in columns else np.inf, j if 2 in columns else np.inf)
        best = points[(points[:, 1] <= within[0]) & (points[:, 2] <= within[1]), 0].min()
        if archive.bound(*within) < min(s, best) * (1.0 - gap):
            return False
    return all(_steps_hold(archive, points, gap, k) for k in columns[1:])


def _steps_hold(archive: Archive, points: Floats, gap: float, column: int) -> bool:
    """Whether nothing faster lies between the points along one other objective, nor below all."""
    order = np.argsort(points[:, column], kind="stable")
    amounts, seconds = points[order, column], np.minimum.accumulate(points[order, 0])
    # Below each amount, the fastest of those that need less; below the least, there must be none.
    before = np.concatenate(([np.inf], seconds))
    above = np.append(amounts, np.inf)
    for amount, fastest in zip(above.tolist(), before.tolist(), strict=True):
        limit = amount * (1.0 - SLIVER) if np.isfinite(amount) else np.inf
        bound = archive.bound(limit, np.inf) if column == 1 else archive.bound(np.inf, limit)
        if not bound >= fastest * (1.0 - gap):
            return False
    return True
