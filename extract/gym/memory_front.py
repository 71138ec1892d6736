"""Fronts of cost against peak memory."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.problem.problem import Ints
from tapestry_egg.parallel.deadline import held

from .choices import Choice, ChoiceProblem
from .fronts import Front, Sweep
from .network import Unanswerable
from .solver import Solving

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
    sweep = Sweep(problem, lambda e: e.peak, most_peak(problem), deadline, 1e-9, told)
    work = _Work(sweep, problem.usage.limit, seed)
    return sweep.front(work.run, "peak", "network")


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
