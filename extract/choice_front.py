"""The front of a choice problem in two objectives, exact or with a certified distance.

`choice_front` adds the number of selected nodes as a second objective. It eliminates where the form
is narrow, keeping Pareto sets; elsewhere it solves for the least cost with at most so many nodes,
splitting the widest gap between known points until none is left or time is up.
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

from ..errors import ExtractError
from ..executors import INTERRUPTED
from . import pareto
from .check_choices import evaluate
from .choices import Choice, ChoiceProblem, Number
from .dag.cost_unit import Scaled
from .dag.form import AndOr, problem_choice, trim, working_form
from .dag.lazy_milp import Picks, Record, Search, split
from .dag.methods import impossible
from .dag.reductions import reduce
from .dag.tree_elimination import WIDEST, Entry, chosen_nodes, eliminate, non_dominated
from .deadline import TimeUp, ends_at, held

# Floats that differ by less than this share are the same: the tolerance of the programs solved.
_SAME = 1e-7

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

    def document(self, chosen: Callable[[Choice], Any] | None = None) -> dict[str, Any]:
        """The front as JSON data: values, bounds and chosen nodes of every point, these by name or
        as `chosen` says."""
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
                    "choices": chosen(p.choice) if chosen else p.choice.names(self.problem),
                }
                for p in self.points
            ],
        }

    def save(self, path: str | Path) -> None:
        """Write the front to a JSON file."""
        Path(path).write_text(json.dumps(self.document(), indent=1) + "\n", encoding="utf-8")


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
    search = _FrontSearch(both, deadline, seed, widest, told)
    method = "elimination"
    try:
        with ends_at(deadline):
            form = working_form(both)
            reason = impossible(both, form)
            if reason:
                return ChoiceFront(both, both.objectives, (), 0.0, "reductions", 0.0, reason)
            reduce(form, deadline)
            if not search.eliminated(form):
                method = "milp"
                search.bisect(form)
    except TimeUp:
        search.cut_short()
    except KeyboardInterrupt:
        search.cut_short()
        search.notes += (INTERRUPTED,)
    return search.front(method, time.perf_counter() - started)


class _FrontSearch:
    """The least cost f(k) of answers with at most k nodes, for all k.

    `lower[k]` is a bound on f(k), `choices` are answers by their scaled values. Both say where the
    front may still be.
    """

    def __init__(
        self,
        problem: ChoiceProblem,
        deadline: float,
        seed: int,
        widest: int,
        told: Callable[[str], None] | None = None,
    ) -> None:
        self.notes: tuple[str, ...] = ()
        self.told = told
        self.problem = problem
        self.deadline = deadline
        self.seed = seed
        self.widest = widest
        self.choices: dict[tuple[int, int], Choice] = {}
        self.lower: list[Scaled] = []
        self.scale = 1

    def _left(self) -> float:
        return self.deadline - time.perf_counter()

    def eliminated(self, form: AndOr) -> bool:
        """The front by elimination; False where the form is too wide or time is up."""
        self.scale = form.scales[0]
        if not form.acyclic:
            return False
        parts = split(form)
        start = (0, 0) if parts == [form] else (form.constant[0], form.constant[1])
        total: list[Entry] = [(start, None)]
        for part in parts:
            end = min(self.deadline, time.perf_counter() + max(1.0, 0.5 * self._left()))
            found = eliminate(part, end, None, 300_000, self.widest)
            if found is None:
                return False
            total = non_dominated(
                (tuple(x + y for x, y in zip(a, b, strict=True)), (way, nodes))
                for a, way in total
                for b, nodes in found.points
            )
        with held():
            for (cost, count), way in total:
                choice = problem_choice(self.problem, form, chosen_nodes(way))
                self.choices[cost, count] = choice
        return True

    def cut_short(self) -> None:
        """Note that nothing more is known than what was found."""
        if not self.lower:
            self.lower = [-math.inf] * (len(self.problem.classes) + 1)

    def bisect(self, form: AndOr) -> None:
        """Least costs under limits on the number of nodes, the widest gap first."""
        most = len(self.problem.classes)
        self.lower = [-math.inf] * (most + 1)
        self._solve(form, most, self._left() / 3)
        fewest = self._solve(_swapped(form), None, self._left() / 4)
        for k in range(min(math.ceil(fewest), most + 1) if fewest > 0 else 0):
            self.lower[k] = math.inf
        tries = [0.0] * (most + 1)
        while self._left() > 0.05:
            gaps = self._gaps()
            if not gaps:
                break
            # The widest first; one that was tried in vain waits for the others.
            _, a, b = min((tries[(a + b) // 2] - min(e, 10.0) / 100.0, a, b) for e, a, b in gaps)
            k = (a + b) // 2
            share = max(0.5, self._left() / (4.0 + len(gaps))) * (1.0 + tries[k])
            self._solve(form, k, min(self._left(), share))
            for j in range(a, b + 1):
                tries[j] += 1.0

    def _solve(self, form: AndOr, limit: int | None, seconds: float) -> Scaled:
        """Solve under a limit, keep what is found; returns the bound on the first objective."""
        deadline = time.perf_counter() + max(0.05, seconds)
        widest = min(8, self.widest)
        search = Search(min(self.deadline, deadline), self.seed, widest, limit)
        known = math.inf if limit is None else self._upper()[limit]
        record = Record(self._take, known)
        bound = search.solve(form.copy(), record, lambda b: None)
        if limit is not None:
            for k in range(limit + 1):
                self.lower[k] = max(self.lower[k], bound)
        if self.told is not None and self.choices:
            epsilon = max((e for e, _, _ in self._gaps()), default=0.0)
            best = min(cost for cost, _ in self.choices) / self.scale
            front = len(pareto.non_dominated(list(self.choices)))
            least = f"bound {max(self.lower[-1], -math.inf) / self.scale:.10g}"
            self.told(f"front {front}, best {best:.10g}, {least}, gap {epsilon:.2%}")
        return bound

    def _take(self, value: int, picks: Picks) -> None:
        node = [-1] * len(self.problem.classes)
        for c, n in picks:
            node[c] = n
        choice = trim(self.problem, node)
        cost, count = evaluate(self.problem, choice).values
        self.choices[int(cost * self.scale), int(count)] = choice

    def _upper(self) -> list[Scaled]:
        """The least known cost with at most k nodes, for all k."""
        upper: list[Scaled] = [math.inf] * len(self.lower)
        for cost, count in self.choices:
            upper[count] = min(upper[count], cost)
        for k in range(1, len(upper)):
            upper[k] = min(upper[k], upper[k - 1])
        return upper

    def _open(self, lower: Scaled, upper: Scaled) -> bool:
        """Whether a cost may be below a known one; integers are compared exactly."""
        if self.scale == 1 or math.inf in (upper, lower):
            return lower < upper
        return lower < upper - _SAME * abs(upper)

    def _gaps(self) -> list[tuple[float, int, int]]:
        """Runs of limits where the front may still be: (epsilon, first, last)."""
        found: list[tuple[float, int, int]] = []
        upper = self._upper() if self.lower else []
        for k, (least, most) in enumerate(zip(self.lower, upper, strict=True)):
            if not self._open(least, most):
                continue
            e = self._epsilon_at(k, least, most)
            if found:
                before, a, b = found[-1]
                if b == k - 1 and self.lower[b] == least and upper[b] == most:
                    found[-1] = (max(before, e), a, k)
                    continue
            found.append((e, k, k))
        return found

    def _epsilon_at(self, k: int, lower: Scaled, upper: Scaled) -> float:
        """The share by which answers of k nodes, costing `lower` at least, may be better.

        They are dominated by the known answer of at most k nodes when their cost grows, and by one
        that costs no more than `lower` when their number of nodes does.
        """
        by_cost = pareto.excess(upper, lower)
        counts = [count for cost, count in self.choices if cost <= lower]
        by_count = (min(counts) - k) / max(k, 1) if counts else math.inf
        return max(0.0, min(by_cost, by_count))

    def front(self, method: str, seconds: float) -> ChoiceFront:
        """What was found, with the certificate."""
        values = list(self.choices)
        points = []
        for i in pareto.non_dominated(values):
            cost, count = values[i]
            choice = self.choices[values[i]]
            found = evaluate(self.problem, choice)
            if not found.feasible:
                raise ExtractError(
                    f"an answer of the front is none: {found.violations[0]}",
                    where=f"front of {self.problem.name}",
                    hint="This is a defect of tapestry-egg; please report the file.",
                )
            bound: Number = found.values[0]
            if self.lower and self._open(self.lower[count], cost):
                low = self.lower[count]
                bound = low if low == -math.inf else Fraction(int(low), self.scale)
            points.append(ChoicePoint(found.values, choice, bound))
        epsilon = max((e for e, _, _ in self._gaps()), default=0.0)
        reason = "" if points else "no answer was found in time"
        objectives = self.problem.objectives
        if not points:
            epsilon = math.inf
        return ChoiceFront(
            self.problem, objectives, tuple(points), epsilon, method, seconds, reason, self.notes
        )


def _swapped(form: AndOr) -> AndOr:
    """A form with its two objectives exchanged."""
    other = form.copy()
    other.costs = (other.costs[1], other.costs[0])
    other.constant.reverse()
    other.scales = (other.scales[1], other.scales[0])
    return other
