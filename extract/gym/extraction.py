"""Extraction: the best answer so far, and the two methods that report to it.

A method is a function of (extraction, deadline, seed) that offers choices and bounds until it has
proven its answer or the deadline (`time.perf_counter`) has come. Every choice that is offered is
recomputed by the checker before it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from math import inf

from tapestry_egg.errors import ExtractError
from tapestry_egg.parallel.deadline import TimeUp, ends_at, held

from .check import evaluate
from .choices import Choice, ChoiceProblem, Number

# Values of real-valued costs that differ by less than this share are not told apart: it is what
# solvers of linear programs promise.
_SAME = Fraction(1, 10**7)


@dataclass
class Extraction:
    """The best choice and the best bound known for a problem, and how they came about.

    `bound` is at most the cost of every legal choice (-inf where nothing is known). If there is no
    choice, `reason` says why. `told` hears of every gain once there is one.
    """

    problem: ChoiceProblem
    told: Callable[[Extraction], None] = lambda extraction: None
    choice: Choice | None = None
    value: Number = inf
    bound: Number = -inf
    method: str = ""
    reason: str = "no answer was found in time"
    notes: list[str] = field(default_factory=list)
    infeasible: bool = False
    started: float = field(default_factory=time.perf_counter)
    gained: float = field(default_factory=time.perf_counter)  # when value or bound last improved
    seconds: float = 0.0

    def offer(self, choice: Choice) -> None:
        """Take a choice if it is better than the one held.

        Raises ExtractError for an illegal one: its method is then at fault.
        """
        found = evaluate(self.problem, choice)
        if not found.feasible:
            raise ExtractError(
                f"method {self.method} gave an illegal answer: {found.violations[0]}",
                where=f"choice problem {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        if found.cost < self.value:
            with held():
                self.choice, self.value = choice, found.cost
                self.bound = min(self.bound, found.cost)
            self._gain()

    def raise_bound(self, bound: Number) -> None:
        """Take a lower bound if it is better than the one held."""
        bound = min(self.problem.least(bound), self.value)
        if bound > self.bound:
            self.bound = bound
            self._gain()

    def close(self) -> None:
        """Note that nothing is better than the choice held."""
        if self.choice is not None:
            self.raise_bound(self.value)

    def fail(self, reason: str) -> None:
        """Note that there is no choice, and why."""
        self.infeasible, self.reason = True, reason
        self.told(self)

    def _gain(self) -> None:
        self.gained = time.perf_counter()
        self.seconds = self.gained - self.started
        if self.choice is not None:
            self.told(self)

    @property
    def feasible(self) -> bool:
        """Whether there is a choice."""
        return self.choice is not None

    @property
    def proven(self) -> bool:
        """Whether no choice is better than the one held, or there is none."""
        if self.infeasible:
            return True
        if self.choice is None or self.bound == -inf:
            return False
        if isinstance(self.value, int):
            return self.bound > self.value - 1
        return bool(self.bound >= self.value - _SAME * abs(Fraction(self.value)))

    @property
    def gap(self) -> float:
        """(value - bound) / |value|: 0 when proven, inf when nothing is known."""
        if self.choice is None or self.bound == -inf:
            return inf
        if self.proven:
            return 0.0
        return max(0.0, float(self.value - self.bound)) / max(abs(float(self.value)), 1e-300)

    def enough(self, gap: float, patience: float) -> str:
        """Why the search may end: the choice is this near to its bound, or nothing was gained for
        `patience` seconds; empty if it may not."""
        if gap > 0 and self.gap <= gap:
            return "the gap is small enough"
        if self.choice is not None and time.perf_counter() > self.gained + patience:
            return "nothing was gained"
        return ""


def extract(
    problem: ChoiceProblem,
    seconds: float = 60.0,
    seed: int = 0,
    told: Callable[[Extraction], None] | None = None,
    gap: float = 0.0,
    patience: float = inf,
) -> Extraction:
    """The best choice found for a problem within `seconds`, with a bound.

    The search ends earlier if the choice is within the share `gap` of its bound, and after
    `patience` seconds without a better choice or bound (both only in a main thread).
    `told` is called with every better choice or bound. An interruption (Ctrl-C) ends the search and
    keeps what was found. Raises ExtractError for a problem that no method takes.
    """
    found = Extraction(problem.verify(), told or (lambda extraction: None))
    found.notes += problem.remarks
    deadline = found.started + seconds
    if problem.sums:
        found.method, module = "and-or", "egraph.method"
    elif problem.network:
        found.method, module = "network", "memory_front"
    else:
        raise ExtractError(
            "costs of pairs or limits where choices need others",
            where=f"choice problem {problem.name}",
            hint="Give costs of nodes alone, or a problem in which every class chooses.",
        )
    try:
        run = import_module(f".{module}", __package__).run  # loaded on use
        over = (lambda: bool(found.enough(gap, patience))) if gap or patience < inf else None
        with ends_at(deadline, over):
            run(found, deadline, seed)
        if not found.proven and time.perf_counter() >= deadline:
            raise TimeUp  # which the method saw itself, before it was interrupted
    except TimeUp:
        found.notes.append(found.enough(gap, patience) or "time was up")
    except KeyboardInterrupt:
        found.notes.append("interrupted")
    found.seconds = time.perf_counter() - found.started
    return found
