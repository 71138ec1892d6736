"""Fronts of cost against peak memory."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine.network import network_of
from tapestry_egg.extract.engine.sweeps import evaluate
from tapestry_egg.extract.engine.within import Within
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.parallel.deadline import held

from .choices import Choice, ChoiceProblem
from .extraction import Extraction
from .fronts import Front, Sweep
from .network import Unanswerable, reduced

# Limits that are tried first, after the given one: powers of the way from the least peak to the
# peak of the least cost. The share of the time for each, and for each later one.
_WAY = (0.5, 0.25, 0.75, 0.12)
_FIRST, _LATER = 0.08, 0.04


def memory_front(
    problem: ChoiceProblem,
    seconds: float,
    seed: int = 0,
    told: Callable[[str], None] | None = None,
) -> Front:
    """The front of cost and peak memory, exact or with a bound on what may be missing.

    An interruption (Ctrl-C) keeps the points so far. Raises ExtractError for a problem without a
    limit, or whose choices need others. `told` hears how it stands, in words, after the search at
    each limit.
    """
    if problem.usage.limit is None:
        raise ExtractError(
            "a front of cost against memory needs a limit",
            where=f"choice problem {problem.name}",
            hint="Give the limit of which shares are to be tried.",
        )
    deadline = time.perf_counter() + seconds
    sweep = Sweep(problem, most_peak(problem), deadline, told)
    work = _Work(sweep, problem.usage.limit, seed)
    return sweep.front(work.run)


class _Work:
    """Searches within limits, for one sweep."""

    def __init__(self, sweep: Sweep, given: int, seed: int) -> None:
        self.sweep, self.given, self.seed = sweep, min(given, sweep.top), seed

    def run(self) -> None:
        """Search at the given limit, at both ends, between them, and where most may be missing."""
        sweep = self.sweep
        with held():  # whatever the time, there is a point
            try:
                solving = self._solving(sweep.top, _FIRST)
            except Unanswerable as e:
                sweep.reason = str(e)
                return
            solving.search.open()
            self._take(solving)
        if not sweep.found:
            return
        self.visit(sweep.top, _FIRST)
        self._leanest()
        self.visit(self.given, 2.0 * _FIRST)
        low, high = (min(sweep.found)[0], max(sweep.found)[0])
        for way in _WAY:
            self.visit(int(max(low, 1) * (high / max(low, 1)) ** way), _FIRST)
        sweep.close(lambda gap, share: self.visit(gap.limit, share), _LATER)

    def visit(self, limit: int, share: float) -> None:
        """Search within a limit for a share of the time."""
        sweep = self.sweep
        if limit < 0 or time.perf_counter() >= sweep.deadline:
            return
        sweep.tries[limit] = sweep.tries.get(limit, 0) + 1
        try:
            solving = self._solving(limit, share)
        except Unanswerable as e:
            sweep.reason = str(e)
            sweep.prove(math.inf, most=limit)
            return
        try:
            solving.run()
        finally:
            with held():
                self._take(solving)
        sweep.tell(f", within {limit}: best {solving.value:.10g}, bound {solving.bound:.10g}")

    def _solving(self, limit: int, share: float, least: int | None = None) -> Solving:
        sweep = self.sweep
        return Solving(sweep.problem, limit, sweep.until(share), self.seed, least)

    def _leanest(self) -> None:
        """A choice of little memory, and what all need at least."""
        with held():
            solving = self._solving(self.sweep.top, _FIRST, least=0)
            solving.search.lean(1.0)
            if solving.search.nearest is not None:
                self._keep(solving, solving.search.nearest)
            least = math.ceil(solving.search.least_peak)
            if solving.form.exact and least > 0:
                self.sweep.prove(math.inf, most=least - 1)

    def _take(self, solving: Solving) -> None:
        """What a search within one limit has found and proven."""
        if solving.search.rows is not None:
            self._keep(solving, solving.search.rows)
        bound = math.inf if solving.infeasible else solving.bound
        if solving.form.exact and bound > -math.inf:
            self.sweep.prove(bound, most=solving.limit)

    def _keep(self, solving: Solving, rows: Ints) -> None:
        self.sweep.keep(Choice(solving.form.nodes(rows)))


def most_peak(problem: ChoiceProblem) -> int:
    """The most memory that any choice can take at any time."""
    usage, start = problem.usage, problem.node_start[:-1]
    if not len(start):
        return 0
    amount = np.where(usage.upper > usage.lower, usage.amount, 0)
    amount = np.maximum.reduceat(amount, start).astype(object)  # Python's integers: of any size
    steps = np.zeros(usage.times + 1, dtype=object)
    np.add.at(steps, np.minimum.reduceat(usage.lower, start), amount)
    np.subtract.at(steps, np.maximum.reduceat(usage.upper, start), amount)
    return int(np.cumsum(steps).max(initial=0))


# Problems of costs in pairs, under limits: reduced, searched on the engine, and put back together.
#
# Two threads search at once where there are two processors, from other seeds; each hears what the
# other has found.


# Before the deadline: to put an answer together and check it, as a share and at least.
_CLOSING, _CLOSING_LEAST = 0.01, 0.05

# An answer is checked while the search goes on so many times later than its check takes.
_CHECKING = 20.0

# The other thread ends after a pass at most, but for what is compiled for the first time: seconds.
_ENDING = 5.0


def run(extraction: Extraction, deadline: float, seed: int) -> None:
    """Answer a problem of pairs and limits by the deadline (`time.perf_counter`)."""
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
