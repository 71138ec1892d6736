"""The front of a choice problem: its answers, and the certificate of what may be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError

from .choices import Choice, ChoiceProblem, Number


@dataclass(frozen=True)
class ChoicePoint:
    """One answer of a front. No answer within its other values has a first one below `bound`."""

    values: tuple[Number, ...]
    choice: Choice
    bound: Number

    @property
    def gap(self) -> float:
        """(first value - bound) / |bound|: 0 when the point is known to be on the front."""
        return pareto.excess(self.values[0], self.bound)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ChoiceFront:
    """Answers of which none dominates another, by rising first objective.

    `epsilon`: every answer is dominated by one here when its values may grow by that share; 0 for
    the exact front.
    """

    problem: ChoiceProblem
    objectives: tuple[str, ...]
    points: tuple[ChoicePoint, ...]
    epsilon: float
    method: str
    seconds: float = 0.0
    reason: str = ""
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.points)

    def __iter__(self) -> Iterator[ChoicePoint]:
        return iter(self.points)

    @property
    def name(self) -> str:
        """The problem's name."""
        return self.problem.name

    @property
    def exact(self) -> bool:
        """Whether every non-dominated value is here."""
        return self.epsilon == 0.0

    def knee(self) -> ChoicePoint:
        """The point nearest to having the least of each objective. Raises ExtractError if empty."""
        if not self.points:
            raise ExtractError(self.reason or "no answer", where=f"front of {self.problem.name}")
        return self.points[pareto.knee([p.values for p in self.points])]  # type: ignore[misc]

    def hypervolume(self, reference: tuple[float, ...] | None = None) -> float:
        """What the points dominate, below a reference (1.1 times the greatest value by default)."""
        values = [tuple(map(float, p.values)) for p in self.points]
        if not values:
            return 0.0
        if reference is None:
            most = [max(column) for column in zip(*values, strict=True)]
            reference = tuple(v + 0.1 * abs(v) for v in most)
        return pareto.hypervolume(values, reference)

    def document(
        self, chosen: Callable[[Choice], Any] | None = None, choices: bool = True
    ) -> dict[str, Any]:
        """The front as JSON data: values, bounds and, with `choices`, the chosen nodes of every
        point, by name or as `chosen` says."""
        name = chosen or (lambda choice: choice.names(self.problem))
        return {
            "name": self.problem.name,
            "objectives": list(self.objectives),
            "epsilon": None if math.isinf(self.epsilon) else self.epsilon,
            "exact": self.exact,
            "method": self.method,
            "seconds": round(self.seconds, 3),
            "points": [
                {
                    "values": [_plain(v) for v in p.values],
                    "bound": _plain(p.bound),
                    **({"choices": name(p.choice)} if choices else {}),
                }
                for p in self.points
            ],
        }


def _plain(value: Number) -> int | float | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None
