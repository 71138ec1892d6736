"""The front of a saved problem: rows for its variables, with bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Archive, so_far
from tapestry_egg.extract.engine.race import Effort, Race, searches_of
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.parallel.deadline import interruptible
from tapestry_egg.parallel.executors import INTERRUPTED

from .check import row_costs
from .fronts import Front, Point

OBJECTIVES = ("seconds", "peak_bytes", "joules")

# How far floats added in another order may be apart.
_ROUNDING = 1e-9


def problem_front(
    problem: Problem,
    name: str,
    seconds: float = 60.0,
    tell: Callable[[str], None] | None = None,
    gap: float = 0.0,
    patience: float = math.inf,
) -> Front:
    """Search a problem for `seconds`; what the search found is recomputed by the checker.

    Raises ExtractError where no rows are legal together.
    """
    started = time.perf_counter()
    for v in problem.variables:
        if not (v.seconds < math.inf).any():
            raise ExtractError("every row is forbidden", where=f"snapshot {name}: {v.name}")

    def report(archives: Sequence[Archive]) -> None:
        (known,) = archives
        if tell is not None and known.candidates:
            tell(so_far(archives))

    effort = Effort(seconds=max(seconds, 0.1), gap=gap, patience=patience)
    searched = Race(searches_of([problem], gap), effort, report=report)
    notes: tuple[str, ...] = ()
    try:
        with interruptible():
            searched.run()
    except KeyboardInterrupt:
        if not searched.searches[0].archive.candidates:
            raise
        notes = (INTERRUPTED,)
    except ExtractError as error:
        raise ExtractError("no legal choice of rows was found", where=f"snapshot {name}") from error
    archive = searched.searches[0].archive
    points = []
    for c in archive.corners():
        found = row_costs(problem, [int(r) for r in c.rows])
        values = (found.seconds, found.peak_bytes, found.joules)
        close = all(
            math.isclose(x, y, rel_tol=_ROUNDING) for x, y in zip(values, c.costs, strict=True)
        )
        bound = archive.bound(c.peak, c.joules)
        wrong = list(found.violations)
        if not close:
            wrong.append(f"its costs are {values}, not {c.costs}")
        if bound > c.seconds * (1 + _ROUNDING):
            wrong.append(f"it takes {c.seconds} seconds, below the bound of {bound}")
        if wrong:
            raise ExtractError(
                f"an answer of the front is none: {wrong[0]}",
                where=f"snapshot {name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        proven = bound >= found.seconds * (1 - _ROUNDING)
        points.append(Point(values, c.rows, found.seconds if proven else bound))
    return Front(
        name,
        OBJECTIVES,
        tuple(points),
        max(p.gap for p in points),
        "message passing, elimination",
        time.perf_counter() - started,
        notes=notes,
    )
