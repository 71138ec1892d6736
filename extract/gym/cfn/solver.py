"""Cost function networks as a method of extraction: reduce, search, prove, and put back together.

Two processes work at once where there are two processors: this one searches, the other solves a
small network as a mixed-integer program, or searches a large one from another seed. They share
what they find; one that is lost loses its own work only.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count, islice

import numpy as np

from tapestry_egg.extract.gym.cfn.network.network import Ints
from tapestry_egg.extract.gym.cfn.network.reach import Reach, reach
from tapestry_egg.extract.gym.cfn.network.reductions import Infeasible, Reduced, begin, reduce
from tapestry_egg.extract.gym.choices.choices import Choice, ChoiceProblem
from tapestry_egg.extract.gym.choices.standing import Standing
from tapestry_egg.parallel.deadline import TimeUp, held

from .aside import WORTH, Aside
from .cores import CoreSearch
from .opening import opening, plain_bound

# Before the deadline: to put an answer together and check it, as a share and at least.
_CLOSING, _CLOSING_LEAST = 0.01, 0.05

# The share of the time that goes into answers before the problem is reduced, or so many seconds;
# and the share that goes at most into reducing it.
_OPENING, _OPENING_LEAST, _REDUCING = 0.01, 0.5, 0.25

# Reductions look at the clock once for so many variables.
_ASKED = 64

# The share of the time that goes at most into saying what memory is needed where none is enough.
_EXPLAINING = 0.2

# An answer is checked while the search goes on so many times later than its check takes.
_CHECKING = 20.0


#: Is told of an answer: what makes it, its cost, and the bound.
Progress = Callable[[Callable[[], Choice], float, float], None]


@dataclass(frozen=True)
class Result:
    """The best choice found, its cost, a bound on every choice's, and what led there.

    Without a choice, `infeasible` says why there is none, or why none was found.
    """

    choice: Choice | None
    value: float
    bound: float
    proven: bool
    reduced: Reduced
    infeasible: Infeasible | None
    steps: int


def run(problem: ChoiceProblem, standing: Standing, deadline: float, seed: int) -> None:
    """Answer a problem by the deadline (`time.perf_counter`), as a method of the table."""
    best: tuple[float, Callable[[], Choice]] | None = None
    due = 0.0

    def progress(choice: Callable[[], Choice], value: float, bound: float) -> None:
        nonlocal best, due
        if best is None or value < best[0]:
            best = value, choice
        standing.raise_bound(whole(problem, bound))
        begun = time.perf_counter()
        if begun >= due:  # to check an answer takes its time
            standing.offer(best[1](), "network")
            due = time.perf_counter() + _CHECKING * (time.perf_counter() - begun)

    try:
        found = solve(problem, deadline - time.perf_counter(), seed, progress)
    except (KeyboardInterrupt, TimeUp):
        with held():
            if best is not None:
                standing.offer(best[1](), "network")
        raise
    standing.notes += found.reduced.log
    if found.choice is not None:
        standing.offer(found.choice, "network")
        standing.raise_bound(whole(problem, found.bound))
        if found.proven:
            standing.close()
    elif found.proven and found.infeasible is not None:
        standing.fail(found.infeasible.reason)
    elif found.infeasible is not None:
        standing.reason = found.infeasible.reason


def solve(
    problem: ChoiceProblem,
    seconds: float,
    seed: int = 0,
    on_progress: Progress | None = None,
    *,
    limits: Ints | None = None,
    processes: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Result:
    """The best choice for the first objective found within some seconds.

    `on_progress` is told of every better one: (a function that makes the choice, its cost, the
    bound). `limits` replace the problem's. Raises ExtractError where choices need others.
    """
    begun = clock()
    reduced = _reduced(problem, limits, seconds, seed, on_progress, clock)
    if reduced.infeasible is not None:
        why = _explained(problem, reduced.infeasible, limits, seconds, seed, clock)
        return Result(None, math.inf, math.inf, True, reduced, why, 0)
    net = reduced.network

    def made(x: Ints) -> Choice:
        return Choice(problem.node_start[:-1] + reduced.lift(x))

    def report(value: float, bound: float) -> None:
        if on_progress is not None and search.best is not None:
            x = search.best
            on_progress(lambda: made(x), value, bound)

    left = seconds - (clock() - begun)
    left -= max(_CLOSING * seconds, min(_CLOSING_LEAST, 0.5 * left))
    count = (os.cpu_count() or 1) if processes is None else processes
    step = difference(problem)
    beside = None
    if count > 1 and left > WORTH and len(net) > 1:
        beside = Aside(net, left, seed + 1, step)
    try:
        search = CoreSearch(
            net, left, seed, report, clock, step, None if beside is None else beside.news
        )
        found = search.run()
    finally:
        if beside is not None:
            beside.end()
    if found.x is None:
        why = _unreached(search.reach, search.proven, reduced, problem, limits)
        return Result(None, math.inf, found.bound, found.proven, reduced, why, found.steps)
    choice = made(found.x)
    bound = found.value if found.proven else min(found.bound, found.value)
    return Result(choice, found.value, bound, found.proven, reduced, None, found.steps)


def _reduced(
    problem: ChoiceProblem,
    limits: Ints | None,
    seconds: float,
    seed: int,
    on_progress: Progress | None,
    clock: Callable[[], float],
) -> Reduced:
    """The problem reduced; answers to it as it is are told of before."""
    since, asked = clock(), count(1)

    def over() -> bool:
        return next(asked) % _ASKED == 0 and clock() - since > _REDUCING * seconds

    if on_progress is None:
        begun = begin(problem, limits=limits)
        return begun if isinstance(begun, Reduced) else begun.reduced(over)

    def tell(x: Ints, value: float) -> None:
        nodes = problem.node_start[:-1] + begun.lift(x)
        on_progress(lambda: Choice(nodes), value, bound)

    with held():  # whatever the time, there is an answer
        begun = begin(problem, limits=limits)
        if isinstance(begun, Reduced):
            return begun
        bound = plain_bound(begun.network)
        answers = opening(
            begun.network, max(_OPENING * seconds, min(_OPENING_LEAST, 0.1 * seconds)), seed, clock
        )
        for x, value in islice(answers, 1):
            tell(x, value)
    for x, value in answers:
        tell(x, value)
    return begun.reduced(over)


def _explained(
    problem: ChoiceProblem,
    why: Infeasible,
    limits: Ints | None,
    seconds: float,
    seed: int,
    clock: Callable[[], float],
) -> Infeasible:
    """Why nothing is left of a problem, in terms of its limits where it is for them."""
    if why.time >= 0 or not problem.usage:
        return why
    legal = reduce(problem, ("consistency", "fixed", "merge"), limits=limits)
    if legal.infeasible is not None or not len(legal.network):
        return why
    rng = np.random.default_rng(seed)
    found = reach(legal.network, _EXPLAINING * seconds, rng, clock)
    return _unreached(found, True, legal, problem, limits)


def _unreached(
    found: Reach | None,
    proven: bool,
    reduced: Reduced,
    problem: ChoiceProblem,
    limits: Ints | None,
) -> Infeasible:
    """What is known of the memory that answers need, none being within the limits."""
    head = "no choice keeps all limits" if proven else "no choice within the limits was found"
    if found is None or not math.isfinite(found.over) or found.over <= 0:
        return Infeasible(head)
    given = problem.usage.limits if limits is None else limits
    at = int(reduced.times[found.time])
    limit = int(given[at % len(given)])
    most = limit + round(found.over)
    words = [head, f"the nearest one uses {most} at time {at}, the limit is {limit}"]
    least = max(math.ceil(found.bound), int(proven)) if math.isfinite(found.bound) else int(proven)
    if least > 0:
        words.append(f"at some time every choice is above the limit by {least} at least")
    return Infeasible("; ".join(words), at, limit + least if least > 0 else -1)


def difference(problem: ChoiceProblem) -> float:
    """What costs of answers differ by at least: 1 where all are integers, else 0 is known."""
    columns = (problem.costs[0], *problem.pairs.costs[:1])
    return 1.0 if all(c.dtype.kind == "i" for c in columns) else 0.0


def whole(problem: ChoiceProblem, bound: float) -> int | float:
    """A bound on integers, rounded up."""
    if not math.isfinite(bound) or not difference(problem):
        return bound
    return math.ceil(bound - 1e-9 * max(1.0, abs(bound)) * 2.0**-20)
