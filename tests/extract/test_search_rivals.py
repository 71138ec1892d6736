"""A search that knows what other problems have found: it proves the same, and looks for less."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits

from .test_batches import ladder


def costs(problem: Problem) -> list[tuple[float, float, float]]:
    """Seconds, peak and joules of every labelling that is legal."""
    found = []
    for rows in product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = problem.evaluate(np.array(rows))
        if np.isfinite(seconds):
            found.append((seconds, float(profile.max()), joules))
    return found


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([0.5, 0.9, 1.0, 2.0]))
@example(149, 1.0)  # no price leads to its smallest peak
@example(508, 0.9)  # its smallest peak is below those of rivals, which are below what prices find
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_no_plan_is_below_the_bounds_and_none_is_missed(seed: int, scale: float) -> None:
    """Whatever the rivals cost: cuts stay below every labelling, and what beats all rivals by far
    is found or beaten by what is."""
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    few = [every[k] for k in {0, len(every) // 2, len(every) - 1}]
    rivals = scale * np.array(few)
    search = Search(problem, Effort(prices=4, steps=2, seconds=60.0, gap=0.05), None, rivals)
    archive = search.run()
    for seconds, peak, joules in every:
        assert archive.bound(peak, joules) <= seconds + 1e-9
        known = [c.costs for c in archive.candidates] + rivals.tolist()
        within = [s for s, p, _ in known if p <= peak * (1 + 1e-9)]
        assert within and min(within) <= seconds * 1.25 + 1e-9


@pytest.mark.slow
def test_where_rivals_are_better_in_everything_nothing_is_left_to_do() -> None:
    problem = ladder(3, 2)
    best = [[0.0, 0.0, 0.0]]
    search = Search(problem, Effort(prices=4, steps=2, seconds=5.0), None, np.array(best))
    search.run()
    assert search._widest({}) is None
    assert search._gap(Limits(np.inf)) == 0.0
    alone = Search(problem, Effort(prices=4, steps=2, seconds=5.0))
    alone.run()
    assert len(search.archive.cuts) < len(alone.archive.cuts)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10**6), st.sampled_from([0.9, 1.0, 2.0]))
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_search_that_goes_on_keeps_what_was_found_and_proves_no_less(
    seed: int, scale: float
) -> None:
    problem = ladder(seed, 2)
    every = costs(problem)
    assume(every)
    first = Search(problem, Effort(prices=2, steps=1, work=1e-4, gap=0.05))
    first.small = False
    before = first.run()
    first.leave()
    rivals = scale * np.array([every[0], every[-1]])
    again = Search(problem, Effort(prices=4, steps=2, seconds=60.0, gap=0.05), None, rivals)
    after = again.go_on(before)
    again.leave()
    assert again.archive.spent > 0 and after.cuts[: len(before.cuts)] == before.cuts
    for c in before.candidates:
        best = after.best(c.peak, c.joules)
        assert best is not None and best.seconds <= c.seconds
    for seconds, peak, joules in every:
        assert before.bound(peak, joules) <= after.bound(peak, joules) <= seconds + 1e-9
        known = [c.costs for c in after.candidates] + rivals.tolist()
        within = [s for s, p, _ in known if p <= peak * (1 + 1e-9)]
        assert within and min(within) <= seconds * 1.25 + 1e-9


def test_a_search_goes_on_from_the_prices_that_proved_most() -> None:
    problem = ladder(5, 6)
    first = Search(problem, Effort(prices=3, steps=2, work=0.02))
    first.small = False
    archive = first.run()
    first.leave()
    assert archive.places and archive.spent == first.work.units
    again = Search(problem, Effort(prices=3, steps=2, work=0.05))
    again.small = False
    again.go_on(archive)
    for c in archive.corners():
        limits = Limits(c.peak)
        known = max(cut.at(c.peak, np.inf) for cut, _ in archive.places)
        assert again._nearest(limits).cut.at(c.peak, np.inf) >= known
