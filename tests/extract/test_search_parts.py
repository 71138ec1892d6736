"""One search in parts: each walks some of the prices, together they know what one would."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.problem.problem import Problem, Variable
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.search.messages.dual import Cut
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort
from tapestry_egg.extract.search.worker import search_all

from .test_batches import ladder


def legal(problem: Problem) -> bool:
    every = product(*(range(len(v)) for v in problem.variables))
    return any(np.isfinite(problem.evaluate(np.array(rows))[0]) for rows in every)


@pytest.mark.slow
@settings(max_examples=8)
@given(st.integers(0, 10**6))
def test_parts_join_to_one_true_archive(seed: int) -> None:
    problem = ladder(seed, 2)
    if not legal(problem):
        return
    whole = Archive()
    parts = []
    for part in range(2):
        search = Search(problem, Effort(prices=4, steps=2, seconds=1.0, part=part, parts=2))
        search.small = False  # settled by prices alone
        parts.append(search.run())
        whole.join(parts[-1])
    for rows in product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = problem.evaluate(np.array(rows))
        assert whole.bound(float(profile.max()), joules) <= seconds + 1e-9
    costs = [c.costs for c in whole.candidates]
    for a in (c.costs for p in parts for c in p.candidates):
        assert any(all(x <= y * (1 + 1e-9) for x, y in zip(b, a, strict=True)) for b in costs)
    assert set(whole.cuts) == {cut for p in parts for cut in p.cuts}


def test_a_part_walks_its_own_prices() -> None:
    """Low prices first: the first part knows the fast end, the last the small one, and where one
    ends the next begins."""
    found = []
    for part in range(2):
        search = Search(ladder(3, 2), Effort(prices=6, steps=1, seconds=5.0, part=part, parts=2))
        found.append(search._totals())
    assert len(found[0]) == 4 and len(found[1]) == 3
    assert max(found[0]) == min(found[1])


@pytest.mark.slow
def test_a_large_problem_alone_is_searched_in_parts() -> None:
    """On two processors one problem is two searches; what comes back is checked here."""
    problem = ladder(1, 40)
    problem = replace(
        problem,
        variables=(*problem.variables, Variable("large", np.zeros(4000), np.zeros(4000))),
    )
    said: list[int] = []
    (archive,) = search_all(
        [problem],
        Effort(prices=4, steps=2, seconds=4.0),
        None,
        lambda archives: said.append(len(archives[0].candidates)),
        2,
    ).archives
    assert archive.candidates and said
    for c in archive.candidates:
        seconds, joules, profile = problem.evaluate(c.rows)
        assert c.costs == pytest.approx((seconds, float(profile.max()), joules))
        assert archive.bound(c.peak, c.joules) <= c.seconds * (1 + 1e-6) + 1e-9


def test_a_bound_is_the_best_of_what_every_cut_says() -> None:
    """Also of those that came after it was asked for the first time."""
    rng, archive = np.random.default_rng(0), Archive()
    some = [0.0, 0.0, 1.0, 3.0, np.inf]
    assert archive.bound(1.0, np.inf) == 0.0
    for n in range(60):
        value = np.inf if n % 7 == 6 else float(rng.normal())
        prices = [float(x) for x in rng.choice(some[:4], 2) * rng.random(2)]
        archive.cuts.append(Cut(value, *prices, *(float(x) for x in rng.choice(some[2:], 2))))
        for limits in product((0.5, 2.0, 5.0, np.inf), repeat=2):
            assert archive.bound(*limits) == max(cut.at(*limits) for cut in archive.cuts)
    joined = Archive([], [Cut(1.0, 0.0, 0.0)])
    assert joined.bound(0.5, 0.5) == joined.cuts[0].at(0.5, 0.5)
    joined.join(archive)
    assert joined.bound(0.5, 0.5) == archive.bound(0.5, 0.5) == np.inf
