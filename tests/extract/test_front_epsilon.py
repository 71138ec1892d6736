"""What a front claims of all plans together, held against every labelling of small problems."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.engine import search as engine_search
from tapestry_egg.extract.engine import sweeps
from tapestry_egg.extract.engine.archive import SLIVER, Archive, Cut, Limits, bounds_at
from tapestry_egg.extract.engine.network import network_of, state_of
from tapestry_egg.extract.engine.race import Effort, race
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.front.merge import epsilon, least_peak
from tapestry_egg.extract.problem.problem import Problem
from tests.extract.random_problems import labellings, ladder, seeds


def costs(problem: Problem) -> list[tuple[float, float, float]]:
    """Seconds, peak and joules of every labelling that is not forbidden."""
    return [(s, max(profile), j) for _, s, j, profile in labellings(problem)]


def needed(points: list[tuple[float, float]], every: list[tuple[float, float, float]]) -> float:
    """By which share the points must grow to dominate every labelling in seconds and peak."""
    return max(
        min(max(seconds / s, peak / p) for seconds, peak in points) - 1.0 for s, p, _ in every
    )


def in_bytes(problem: Problem) -> Problem:
    """The same with whole numbers of bytes, whose sums are exact in any order."""

    def whole(part: Any) -> Any:
        uses = tuple(replace(u, amount=np.round(1e6 * u.amount)) for u in part.uses)
        return replace(part, uses=uses)

    variables, pairs = (tuple(map(whole, x)) for x in (problem.variables, problem.pairs))
    return replace(problem, variables=variables, pairs=pairs)


def archive_of(problem: Problem, small: bool) -> Archive:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_search, "SMALL", engine_search.SMALL if small else 0)
        (archive,) = race([problem], Effort(work=20.0, gap=0.05))
    return archive


@pytest.mark.slow
@settings(max_examples=40)
@given(seeds, st.booleans())
def test_every_labelling_is_dominated_within_epsilon(seed: int, small: bool) -> None:
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    archive = archive_of(problem, small)
    points = [(c.seconds, c.peak) for c in archive.corners()]
    assert needed(points, every) <= epsilon([archive], points) * (1 + 1e-9)
    assert archive.least_peak() <= min(peak for _, peak, _ in every)


@pytest.mark.slow
@settings(max_examples=10)
@given(seeds, seeds)
def test_epsilon_speaks_of_the_plans_of_all_problems(one: int, two: int) -> None:
    problems = [ladder(one, 2), ladder(two, 2)]
    every = [costs(p) for p in problems]
    assume(all(every))
    archives = [archive_of(p, False) for p in problems]
    points = [(c.seconds, c.peak) for c in archives[0].corners()]  # as if those were all that fit
    assert needed(points, every[0] + every[1]) <= epsilon(archives, points) * (1 + 1e-9)
    assert least_peak(archives) == min(a.least_peak() for a in archives)


@pytest.mark.slow
@settings(max_examples=20)
@given(seeds)
def test_where_nothing_is_within_a_limit_that_is_proven(seed: int) -> None:
    problem = in_bytes(ladder(seed, 2))
    every = costs(problem)
    assume(every)
    least = min(peak for _, peak, _ in every)
    search = Search(problem, 0.05)
    for limit in (least * (1 - 2 * SLIVER), least):
        search.close(Limits(limit), math.inf, 2000)
    assert search.archive.bound(least * (1 - 2 * SLIVER), math.inf) == math.inf
    assert search.archive.bound(least, math.inf) < math.inf


@settings(max_examples=30)
@given(seeds, seeds)
def test_bytes_alone_bound_every_peak(seed: int, more: int) -> None:
    """As much as the sum of what is there at some times, weighted to one."""
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    weights = np.random.default_rng(more).random(problem.times)
    net = network_of(problem)
    state = state_of(net)
    until = np.concatenate(([0.0], np.cumsum(weights / weights.sum())))
    sweeps.price(net, state, 0.0, 0.0, until, 1e4)
    bounds = sweeps.sweep(net, state, 4, -1.0, np.inf)
    assert bounds.max() <= min(peak for _, peak, _ in every) * (1 + 1e-9)


def test_where_no_peak_is_proved_nothing_is_said_of_all_plans() -> None:
    """The fastest plan alone says nothing of plans that hold less."""
    (archive,) = race([ladder(3, 2)], Effort(front=False))
    points = [(c.seconds, c.peak) for c in archive.corners()]
    assert epsilon([archive], points) == math.inf
    assert archive.bound(math.inf, math.inf) > 0.0


def test_a_cut_that_says_that_there_is_nothing() -> None:
    none = Cut(math.inf, 0.0, 0.0, 10.0)
    said = np.array([none.numbers])
    assert bounds_at(said, 10.0, 1.0) == bounds_at(said, 0.0, math.inf) == math.inf
    assert bounds_at(said, 10.5, 1.0) == 0.0
    archive = Archive([], [Cut(5.0, 1.0, 0.0), none])
    assert archive.least_peak() == 10.0 and archive.bound(11.0, 0.0) == 0.0
