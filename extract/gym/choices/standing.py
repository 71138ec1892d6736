"""The best answer so far: what methods report to, and what an interruption leaves.

Every choice that is offered is recomputed by the checker before it counts; a method's own idea of
its value does not matter.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

from tapestry_egg.errors import ExtractError
from tapestry_egg.parallel.deadline import held

from .check import evaluate
from .choices import Choice, ChoiceProblem, Extraction, Number

# Values of real-valued costs that differ by less than this share are not told apart: it is what
# solvers of linear programs promise.
_SAME = Fraction(1, 10**7)


@dataclass
class Standing:
    """The best choice and the best bound known for the first objective of a problem."""

    problem: ChoiceProblem
    told: Callable[[Standing], None] = lambda standing: None
    choice: Choice | None = None
    values: tuple[Number, ...] = ()
    bound: Number = float("-inf")
    method: str = ""
    reason: str = ""
    notes: list[str] = field(default_factory=list)
    infeasible: bool = False
    started: float = field(default_factory=time.perf_counter)
    gained: float = field(default_factory=time.perf_counter)  # when value or bound last improved

    def offer(self, choice: Choice, method: str) -> bool:
        """Take a choice if it is legal and better than the one held; says whether it was.

        Raises ExtractError for an illegal one: its method is then at fault.
        """
        found = evaluate(self.problem, choice)
        if not found.feasible:
            raise ExtractError(
                f"method {method} gave an answer that is none: {found.violations[0]}",
                where=f"choice problem {self.problem.name}",
                hint="This is a defect of tapestry-egg; please report the file.",
            )
        if self.choice is not None and found.values[0] >= self.values[0]:
            return False
        with held():
            self.choice, self.values, self.method = choice, found.values, method
            self.gained = time.perf_counter()
        self.told(self)
        return True

    def raise_bound(self, bound: Number) -> bool:
        """Take a lower bound if it is better than the one held; says whether it was."""
        if not bound > self.bound:
            return False
        self.bound, self.gained = bound, time.perf_counter()
        self.told(self)
        return True

    def close(self) -> None:
        """Note that nothing is better than the choice held."""
        if self.values:
            self.raise_bound(self.values[0])

    def fail(self, reason: str) -> None:
        """Note that there is no choice, and why."""
        self.infeasible, self.reason = True, reason
        self.told(self)

    @property
    def proven(self) -> bool:
        """Whether no choice is better than the one held, or there is none."""
        if self.infeasible:
            return True
        if not self.values or self.bound == float("-inf"):
            return False
        value, bound = self.values[0], self.bound
        if isinstance(value, int):
            return bound > value - 1
        return bool(bound >= value - _SAME * abs(Fraction(value)))

    def enough(self, gap: float, patience: float) -> str:
        """Why the search may end: the choice is this near to its bound, or nothing was gained for
        `patience` seconds; empty where it may not."""
        if gap > 0 and self.values and self.extraction().gap <= gap:
            return "the gap is small enough"
        if self.choice is not None and time.perf_counter() > self.gained + patience:
            return "nothing was gained"
        return ""

    def extraction(self) -> Extraction:
        """What is held, as a result."""
        bound = self.bound
        if self.values and bound > self.values[0]:
            bound = self.values[0]
        reason = self.reason
        if self.choice is None and not reason:
            reason = "no answer was found in time"
        return Extraction(
            method=self.method,
            choice=self.choice,
            values=self.values,
            bound=bound,
            proven=self.proven,
            seconds=time.perf_counter() - self.started,
            reason=reason,
            notes=(*self.problem.remarks, *self.notes),
        )
