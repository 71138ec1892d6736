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

from tapestry_egg.extract.engine.network import network_of
from tapestry_egg.extract.engine.sweeps import evaluate
from tapestry_egg.extract.engine.within import Within
from tapestry_egg.parallel.deadline import held

from .choices import Choice, ChoiceProblem
from .extraction import Extraction
from .network import Unanswerable, reduced

# Before the deadline: to put an answer together and check it, as a share and at least.
_CLOSING, _CLOSING_LEAST = 0.01, 0.05

# An answer is checked while the search goes on so many times later than its check takes.
_CHECKING = 20.0

# The other thread ends after a pass at most, but for what is compiled for the first time: seconds.
_ENDING = 5.0


def run(extraction: Extraction, deadline: float, seed: int) -> None:
    """Answer a problem by the deadline (`time.perf_counter`), as a method of the table."""
    problem = extraction.problem
    offered, due = math.inf, 0.0

    def offer() -> None:
        nonlocal offered
        found = solving.search
        if found.rows is not None and found.seconds < offered:
            offered = found.seconds
            extraction.offer(Choice(solving.form.nodes(found.rows)))

    def heard() -> None:
        nonlocal due
        if solving.form.exact:
            extraction.raise_bound(solving.bound)
        begun = time.perf_counter()
        if begun >= due:  # to check an answer takes its time
            offer()
            due = time.perf_counter() + _CHECKING * (time.perf_counter() - begun)

    try:
        with held():  # whatever the time, there is an answer
            solving = Solving(problem, None, deadline, seed)
            extraction.notes += solving.form.notes
            solving.report = heard
            solving.search.open()
        try:
            solving.run()
        finally:  # also where it is interrupted
            with held():
                offer()
    except Unanswerable as e:
        extraction.fail(str(e))
        return
    if solving.infeasible:
        extraction.fail(solving.reason)
    elif solving.search.proven and solving.form.exact:
        extraction.close()
    elif solving.search.rows is None:
        extraction.reason = solving.reason


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
        self.form = reduced(problem, limit, least)
        self.net = network_of(self.form.problem)
        left = until - self.begun
        self.seconds = max(left - max(_CLOSING * left, min(_CLOSING_LEAST, 0.5 * left)), 1e-3)
        self.report: Callable[[], None] = lambda: None
        step, most = float(problem.integral), self.form.limit
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
        form, search = self.form, self.search
        limit = self.problem.usage.limit or 0
        words = ["no choice within the limits was found"]
        if self.infeasible:
            words = ["no choice keeps all limits"]
        if search.nearest is not None and len(form.moment):
            profile = evaluate(self.net, search.nearest)[2][: self.net.moments]
            at = int(profile.argmax())
            over = round(float(profile[at]) - form.limit)
            words.append(
                f"the nearest one uses {limit + over} at time {int(form.moment[at])}, "
                f"the limit is {limit}"
            )
        least = math.ceil(search.least_peak - form.limit) if search.least_peak else 0
        if least > 0:
            words.append(f"at some time every choice is above the limit by {least} at least")
        return "; ".join(words)
