"""Problems of costs in pairs, under limits: reduced, searched on the engine, and put back together.

Two threads search at once where there are two processors, from other seeds; each hears what the
other has found.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from tapestry_egg.extract.engine.network import network_of
from tapestry_egg.extract.engine.sweeps import evaluate
from tapestry_egg.extract.engine.within import Within
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem
from tapestry_egg.extract.gym.choices.standing import Standing
from tapestry_egg.parallel.deadline import held

from .network import Unanswerable, reduced

# Before the deadline: to put an answer together and check it, as a share and at least.
_CLOSING, _CLOSING_LEAST = 0.01, 0.05

# An answer is checked while the search goes on so many times later than its check takes.
_CHECKING = 20.0

# The other thread ends after a pass at most, but for what is compiled for the first time: seconds.
_ENDING = 5.0


def run(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Answer a problem by the deadline (`time.perf_counter`), as a method of the table."""
    offered, due = math.inf, 0.0

    def offer() -> None:
        nonlocal offered
        found = solving.search
        if found.rows is not None and found.seconds < offered:
            offered = found.seconds
            standing.offer(Choice(solving.form.nodes(found.rows)), "network")

    def heard() -> None:
        nonlocal due
        if solving.form.exact:
            standing.raise_bound(whole(problem, solving.bound))
        begun = time.perf_counter()
        if begun >= due:  # to check an answer takes its time
            offer()
            due = time.perf_counter() + _CHECKING * (time.perf_counter() - begun)

    try:
        with held():  # whatever the time, there is an answer
            solving = Solving(problem, None, deadline, seed)
            standing.notes += solving.form.notes
            solving.report = heard
            solving.search.open()
        try:
            solving.run()
        finally:  # also where it is interrupted
            with held():
                offer()
    except Unanswerable as e:
        standing.fail(str(e))
        return
    if solving.infeasible:
        standing.fail(solving.reason)
    elif solving.search.proven and solving.form.exact:
        standing.close()
    elif solving.search.rows is None:
        standing.reason = solving.reason


class Solving:
    """The search of one problem within its limits, or within one other, until some time."""

    def __init__(
        self,
        problem: ChoiceProblem,
        limit: int | None,
        until: float,
        seed: int,
        least: int | None = None,
    ) -> None:
        """Raises Unanswerable where nothing is within the limit. What the labellings use is told
        from `least` on, where that is below the limit."""
        self.problem = problem
        self.begun = time.perf_counter()
        self.limit = -1 if limit is None else limit
        limits = None if limit is None else np.array([limit], dtype=np.int64)
        self.form = reduced(problem, limits, least)
        self.net = network_of(self.form.problem)
        left = until - self.begun
        self.seconds = max(left - max(_CLOSING * left, min(_CLOSING_LEAST, 0.5 * left)), 1e-3)
        self.report: Callable[[], None] = lambda: None
        step, most = difference(problem), self.form.limit
        self.search = Within(self.net, most, self._spent, seed, step, lambda search: self.report())
        self.rival = Within(self.net, most, self._spent, seed + 1, step)
        self.ended = False

    def _spent(self) -> float:
        """How much of the time is over, as a share."""
        return 1.0 if self.ended else (time.perf_counter() - self.begun) / self.seconds

    @property
    def value(self) -> float:
        """The least cost found."""
        return self.search.seconds + self.form.constant

    @property
    def bound(self) -> float:
        """What every choice within the limits costs at least."""
        return min(self.search.bound, self.search.seconds) + self.form.constant

    @property
    def infeasible(self) -> bool:
        """Whether nothing is within the limits."""
        return self.search.proven and self.search.rows is None and self.form.exact

    def run(self) -> None:
        """Search until the time is over or the answer is proven."""
        other = threading.Thread(target=self.rival.run, daemon=True)
        try:
            if (os.cpu_count() or 1) > 1 and not self.search.done():
                other.start()
                self.search.hear = self._news
            self.search.run()
        finally:
            with held():
                self.ended = True
                if other.ident is not None:  # no thread is left when the process ends
                    other.join(_ENDING)
                self._news()

    def _news(self) -> None:
        """Take up what the other thread has found."""
        rival, search = self.rival, self.search
        if rival.rows is not None and rival.seconds < search.seconds:
            search.offer(rival.rows)
        search.raise_bound(rival.bound)
        search.proven = search.proven or rival.proven

    @property
    def reason(self) -> str:
        """What is known of the memory that answers need, none being within the limits."""
        form, search, usage = self.form, self.search, self.problem.usage
        words = ["no choice within the limits was found"]
        if self.infeasible:
            words = ["no choice keeps all limits"]
        if search.nearest is not None and len(form.moment):
            profile = evaluate(self.net, search.nearest)[2][: self.net.moments]
            at = int(profile.argmax())
            moment = int(form.moment[at])
            limit = int(usage.limits[moment % len(usage.limits)])
            most = limit + round(float(profile[at]) - form.limit)
            words.append(f"the nearest one uses {most} at time {moment}, the limit is {limit}")
        least = math.ceil(search.least_peak - form.limit) if search.least_peak else 0
        if least > 0:
            words.append(f"at some time every choice is above the limit by {least} at least")
        return "; ".join(words)


def difference(problem: ChoiceProblem) -> float:
    """What costs of answers differ by at least: 1 where all are integers, else 0 is known."""
    columns = (problem.costs[0], *problem.pairs.costs[:1])
    return 1.0 if all(c.dtype.kind == "i" for c in columns) else 0.0


def whole(problem: ChoiceProblem, bound: float) -> int | float:
    """A bound on integers, rounded up."""
    if not math.isfinite(bound) or not difference(problem):
        return bound
    return math.ceil(bound - 1e-9 * max(1.0, abs(bound)) * 2.0**-20)
