"""What a front claims of all plans together, held against every labelling of small problems."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.front.merge import epsilon, least_peak
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.extract.search import exact
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.search.messages.dual import Cut, Dual, Prices
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.engine.archive import SLIVER, Effort
from tests.extract.test_batches import TIMES, ladder
from tests.extract.test_search_rivals import costs


def needed(points: list[tuple[float, float]], every: list[tuple[float, float, float]]) -> float:
    """By which share the points must grow to dominate every labelling in seconds and peak."""
    return max(
        min(max(seconds / s, peak / p) for seconds, peak in points) - 1.0 for s, p, _ in every
    )


def archive_of(problem: Problem, small: bool) -> Archive:
    search = Search(problem, Effort(prices=4, steps=2, seconds=60.0, gap=0.05))
    search.small &= small
    return search.run()


@pytest.mark.slow
@settings(max_examples=12)
@given(st.integers(0, 10**6), st.booleans())
@example(4, True)  # a plan below the smallest peak shown, which another is close to
@example(19, False)  # one below the smallest peak found
@example(44, False)
def test_every_labelling_is_dominated_within_epsilon(seed: int, small: bool) -> None:
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    archive = archive_of(problem, small)
    points = [(c.seconds, c.peak) for c in archive.corners()]
    assert needed(points, every) <= epsilon([archive], points) * (1 + 1e-9)
    assert archive.least_peak() <= min(peak for _, peak, _ in every)


@pytest.mark.slow
@settings(max_examples=4)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_epsilon_speaks_of_the_plans_of_all_problems(one: int, two: int) -> None:
    problems = [ladder(one, 2), ladder(two, 2)]
    every = [costs(p) for p in problems]
    assume(all(every))
    archives = [archive_of(p, False) for p in problems]
    points = [(c.seconds, c.peak) for c in archives[0].corners()]  # as if those were all that fit
    assert needed(points, every[0] + every[1]) <= epsilon(archives, points) * (1 + 1e-9)
    assert least_peak(archives) == min(a.least_peak() for a in archives)


@pytest.mark.slow
@settings(max_examples=6)
@given(st.integers(0, 10**6))
@example(149)
def test_a_program_without_a_solution_bounds_what_is_below(seed: int) -> None:
    """Where an integer program proves that nothing is within a limit, no bound below it is
    finite."""
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    least = min(peak for _, peak, _ in every)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exact, "least_peak", lambda *_: (0.0, False))  # leaves it to the program
        archive = archive_of(problem, True)
    assert archive.bound(least * (1 - 2 * SLIVER), math.inf) == math.inf
    assert archive.bound(least, math.inf) < math.inf


@settings(max_examples=20)
@given(st.integers(0, 10**6), st.integers(0, 10**6))
def test_bytes_alone_bound_every_peak(seed: int, more: int) -> None:
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    weights = np.random.default_rng(more).random(TIMES)
    dual = Dual(problem)
    dual.price(Prices(0.0, weights, 0.0))
    bounds = [dual.sweep().least_peak for _ in range(4)]
    assert max(bounds) <= min(peak for _, peak, _ in every)


def test_where_no_peak_is_proved_nothing_is_said_of_all_plans() -> None:
    """The fastest plan alone says nothing of plans that hold less."""
    problem = ladder(3, 2)
    search = Search(problem, Effort(prices=4, steps=2, seconds=60.0, front=False))
    archive = search.run()
    points = [(c.seconds, c.peak) for c in archive.corners()]
    assert epsilon([archive], points) == math.inf
    assert archive.bound(math.inf, math.inf) > 0.0


def test_a_cut_that_says_that_there_is_nothing() -> None:
    none = Cut(math.inf, 0.0, 0.0, 10.0)
    assert none.at(10.0, 1.0) == none.at(0.0, math.inf) == math.inf
    assert none.at(10.5, 1.0) == 0.0
    archive = Archive([], [Cut(5.0, 1.0, 0.0), none])
    assert archive.least_peak() == 10.0 and archive.bound(11.0, 0.0) == 0.0
