"""The front of a choice problem in two objectives, exact or with a certified distance.

`choice_front` adds the number of selected nodes as a second objective. It eliminates where the form
is narrow, keeping Pareto sets; elsewhere it closes the widest gap between answers and bounds until
none is left or time is up (`dag/front_search.py`).
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from tapestry_egg.atomic import write_atomic
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices.check import evaluate
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Number
from tapestry_egg.extract.gym.dag.egraph.form import trim, working_form
from tapestry_egg.extract.gym.dag.egraph.reductions import reduce
from tapestry_egg.extract.gym.dag.egraph.tree_elimination import WIDEST
from tapestry_egg.extract.gym.dag.front_bounds import FrontBounds, Point
from tapestry_egg.extract.gym.dag.front_search import FrontSearch
from tapestry_egg.extract.gym.dag.lazy_milp import Picks
from tapestry_egg.extract.gym.dag.methods import impossible
from tapestry_egg.extract.search import pareto
from tapestry_egg.parallel.deadline import TimeUp, ends_at
from tapestry_egg.parallel.executors import INTERRUPTED

# Forms of more nodes get answers before they are reduced.
_LARGE = 1000

#: The objective that is added: how many distinct nodes are selected.
NODES = "nodes"


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

    def best(self, objective: str = "", limits: Mapping[str, Number] | None = None) -> ChoicePoint:
        """The point with the least of an objective (the first by default) within limits.

        Raises ExtractError for an unknown objective, and for limits that no point meets: it then
        says the least that is reachable.
        """
        at = self._index(objective or self.objectives[0])
        bounds = {self._index(k): v for k, v in (limits or {}).items()}
        fitting = [p for p in self.points if all(p.values[i] <= v for i, v in bounds.items())]
        if not fitting:
            words = [
                f"{self.objectives[i]}: asked {_show(v)}, least reachable "
                f"{_show(min((p.values[i] for p in self.points), default=math.inf))}"
                for i, v in bounds.items()
            ]
            raise ExtractError(
                "no answer meets the limits" if self.points else self.reason or "no answer",
                where=f"front of {self.problem.name}",
                hint="; ".join(words),
            )
        return min(fitting, key=lambda p: (p.values[at], p.values))

    def _index(self, objective: str) -> int:
        if objective not in self.objectives:
            raise ExtractError(
                f"unknown objective {objective!r}",
                where=f"front of {self.problem.name}",
                hint=f"Objectives are {', '.join(self.objectives)}.",
            )
        return self.objectives.index(objective)

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

    def merge(self, other: ChoiceFront) -> ChoiceFront:
        """The non-dominated points of two fronts of one problem; the better certificate holds.

        Raises ExtractError for fronts of different problems or objectives.
        """
        same = self.problem.nodes == other.problem.nodes and self.objectives == other.objectives
        if not same:
            raise ExtractError("fronts of different problems", where=self.problem.name)
        points = [*self.points, *other.points]
        kept = [points[i] for i in pareto.non_dominated([p.values for p in points])]  # type: ignore[misc]
        return replace(
            self,
            points=tuple(kept),
            epsilon=min(self.epsilon, other.epsilon),
            method=self.method if self.method == other.method else f"{self.method}, {other.method}",
        )

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

    def save(self, path: str | Path) -> None:
        """Write the front to a JSON file."""
        write_atomic(path, json.dumps(self.document(), indent=1) + "\n")


def _show(value: Number) -> str:
    return str(value) if isinstance(value, int) else f"{float(value):.10g}"


def _plain(value: Number) -> int | float | None:
    if isinstance(value, int):
        return value
    return float(value) if math.isfinite(value) else None


def with_node_count(problem: ChoiceProblem) -> ChoiceProblem:
    """A problem whose second objective is the number of selected nodes; further ones go.

    Raises ExtractError for a problem with pairs or limits.
    """
    if len(problem.pairs) or problem.usage:
        raise ExtractError(
            "fronts of cost and number of nodes are for problems without pairs and limits",
            where=f"choice problem {problem.name}",
        )
    ones = np.ones(len(problem.nodes), dtype=np.int64)
    return replace(
        problem, objectives=(problem.objectives[0], NODES), costs=(problem.costs[0], ones)
    )


def choice_front(
    problem: ChoiceProblem,
    seconds: float = 60.0,
    seed: int = 0,
    widest: int = WIDEST,
    told: Callable[[str], None] | None = None,
) -> ChoiceFront:
    """The front of cost and number of selected nodes.

    Forms of more than `widest` treewidth are not eliminated. `told` hears how it stands, in words,
    after every program solved. An interruption (Ctrl-C) keeps what was found. Every point is
    recomputed by the checker. Raises ExtractError for a problem with pairs or limits.
    """
    started = time.perf_counter()
    both = with_node_count(problem.verify())
    deadline = started + seconds
    found = _Found(both, told)
    method = "reductions"
    notes: tuple[str, ...] = ()
    try:
        with ends_at(deadline):
            form = working_form(both)
            reason = impossible(both, form)
            if reason:
                return ChoiceFront(both, both.objectives, (), 0.0, method, 0.0, reason)
            found.scale = form.scales[0]
            search = FrontSearch(form, found.bounds, found.take, deadline, seed, widest, found.tell)
            if len(form.home) > _LARGE:
                search.start()
            reduce(form, started + 0.3 * seconds)
            found.bounds.measure(form)
            method = "elimination"
            if not search.eliminated():
                method = "milp"
                search.run()
    except TimeUp:
        pass
    except KeyboardInterrupt:
        notes = (INTERRUPTED,)
    return found.front(method, time.perf_counter() - started, notes)


class _Found:
    """The answers found, by their scaled values, and the bounds on what was not."""

    def __init__(self, problem: ChoiceProblem, told: Callable[[str], None] | None = None) -> None:
        self.problem = problem
        self.told = told
        self.scale = 1
        self.bounds = FrontBounds(len(problem.classes))
        self.choices: dict[Point, tuple[Choice, tuple[Number, ...]]] = {}

    def take(self, picks: Picks) -> Point:
        """Note the answer of (class, node) pairs; returns its scaled values."""
        node = [-1] * len(self.problem.classes)
        for c, n in picks:
            node[c] = n
        choice = trim(self.problem, node)
        found = evaluate(self.problem, choice)
        if not found.feasible:
            raise ExtractError(
                f"an answer of the front is none: {found.violations[0]}",
                where=f"front of {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        cost, count = found.values
        point = int(cost * self.scale), int(count)
        self.choices.setdefault(point, (choice, found.values))
        return point

    def tell(self) -> None:
        """Say how it stands."""
        if self.told is None or not self.choices:
            return
        points = self.bounds.points
        best = min(cost for cost, _ in points) / self.scale
        least = f"bound {self.bounds.lower[-1] / self.scale:.10g}"
        epsilon = self.bounds.epsilon()
        self.told(f"front {len(points)}, best {best:.10g}, {least}, gap {epsilon:.2%}")

    def front(self, method: str, seconds: float, notes: tuple[str, ...]) -> ChoiceFront:
        """What was found, with the certificate."""
        bounds, points = self.bounds, []
        for cost, count in sorted(bounds.points):
            choice, values = self.choices[cost, count]
            bound: Number = values[0]
            low = bounds.lower[count]
            if bounds.open(low, cost):
                bound = low if low == -math.inf else Fraction(int(low), self.scale)
            points.append(ChoicePoint(values, choice, bound))
        reason = "" if points else "no answer was found in time"
        return ChoiceFront(
            self.problem,
            self.problem.objectives,
            tuple(points),
            bounds.epsilon(),
            method,
            seconds,
            reason,
            notes,
        )
