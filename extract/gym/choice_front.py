"""The front of a choice problem in two objectives, exact or with a certified distance.

`choice_front` adds the number of selected nodes as a second objective. It eliminates where the form
is narrow, keeping Pareto sets; elsewhere it closes the widest gap between answers and bounds until
none is left or time is up (`dag/front_search.py`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.choices.check import evaluate
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem, Number
from tapestry_egg.extract.gym.choices.front import ChoiceFront, ChoicePoint
from tapestry_egg.extract.gym.dag.egraph.form import trim, working_form
from tapestry_egg.extract.gym.dag.egraph.reductions import reduce
from tapestry_egg.extract.gym.dag.egraph.tree_elimination import WIDEST
from tapestry_egg.extract.gym.dag.front_bounds import FrontBounds, Point
from tapestry_egg.extract.gym.dag.front_search import FrontSearch
from tapestry_egg.extract.gym.dag.lazy_milp import Picks
from tapestry_egg.extract.gym.dag.methods import impossible
from tapestry_egg.parallel.deadline import TimeUp, ends_at
from tapestry_egg.parallel.executors import INTERRUPTED

# Forms of more nodes get answers before they are reduced.
_LARGE = 1000

#: The objective that is added: how many distinct nodes are selected.
NODES = "nodes"


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
