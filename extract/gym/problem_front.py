"""The front of a snapshot that was read from a file: rows for its variables, with bounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.archive import Archive, so_far
from tapestry_egg.extract.engine.race import Effort, Race, searches_of
from tapestry_egg.extract.problem.problem import Ints, Problem
from tapestry_egg.files import problem_file as snapshot_format
from tapestry_egg.parallel.executors import INTERRUPTED

from .check_problem import row_costs

OBJECTIVES = ("seconds", "peak_bytes", "joules")

# How far floats added in another order may be apart.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class SnapshotPoint:
    """One row per variable; nothing within its peak and joules takes less than `bound` seconds."""

    values: tuple[float, float, float]
    rows: Ints
    bound: float

    @property
    def gap(self) -> float:
        """(seconds - bound) / bound: 0 when the point is known to be on the front."""
        return pareto.excess(self.values[0], self.bound)

    @property
    def proven(self) -> bool:
        """Whether nothing within its peak and joules is faster, but for rounding."""
        return self.gap <= _ROUNDING


@dataclass(frozen=True)
class ProblemFront:
    """Answers of which none dominates another in seconds, peak bytes and joules, fastest first."""

    problem: Problem
    name: str
    points: tuple[SnapshotPoint, ...]
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    objectives = OBJECTIVES
    method = "message passing, elimination"
    reason = ""

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[SnapshotPoint]:
        return iter(self.points)

    @property
    def epsilon(self) -> float:
        """The largest gap."""
        return max(p.gap for p in self.points)

    @property
    def exact(self) -> bool:
        """Whether every point is known to be on the front, but for rounding."""
        return all(p.proven for p in self.points)

    def knee(self) -> SnapshotPoint:
        """The point nearest to having the least of each objective."""
        return self.points[pareto.knee([p.values for p in self.points])]

    def hypervolume(self) -> float:
        """What the points dominate, below 1.1 times the greatest value of each objective."""
        columns = zip(*(p.values for p in self.points), strict=True)
        reference = tuple(1.1 * max(column) for column in columns)
        return pareto.hypervolume([p.values for p in self.points], reference)

    def document(self) -> dict[str, Any]:
        """The front as JSON data: values, bounds and rows of every point."""
        return {
            "name": self.name,
            "objectives": list(OBJECTIVES),
            "epsilon": self.epsilon,
            "exact": self.exact,
            "method": self.method,
            "seconds": round(self.seconds, 3),
            "points": [
                {
                    "values": list(p.values),
                    "bound": p.bound,
                    "rows": snapshot_format.answer(self.problem, p.rows),
                }
                for p in self.points
            ],
        }


def problem_front(
    problem: Problem,
    name: str,
    seconds: float = 60.0,
    tell: Callable[[str], None] | None = None,
    gap: float = 0.0,
    patience: float = math.inf,
) -> ProblemFront:
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
        searched.run()
    except KeyboardInterrupt:
        if not searched.searches[0].archive.candidates:
            raise
        notes = (INTERRUPTED,)
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
        points.append(SnapshotPoint(values, c.rows, min(bound, found.seconds)))
    seconds = time.perf_counter() - started
    return ProblemFront(problem, name, tuple(points), seconds, notes=notes)
