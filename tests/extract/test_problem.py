"""The extraction problem: what its tables add up to, and what travels of it and its archive."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given

from tapestry_egg.extract.engine.archive import Archive, Candidate, Cut, Prices
from tapestry_egg.extract.engine.transport import (
    archive_arrays,
    archive_from,
    problem_arrays,
)
from tapestry_egg.extract.problem.problem import merge_parallel
from tests.extract.random_problems import (
    Shape,
    cost,
    labellings,
    problem_from,
    random_problem,
    seeds,
)


@given(seeds)
def test_evaluate_adds_up_what_the_tables_say(seed: int) -> None:
    problem = random_problem(seed)
    for rows in product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = problem.evaluate(np.array(rows, dtype=np.int64))
        expected = cost(problem, rows)
        assert seconds == pytest.approx(expected[0], abs=1e-12)
        assert joules == pytest.approx(expected[1], abs=1e-12)
        assert profile.tolist() == pytest.approx(expected[2])


@given(seeds)
def test_merging_parallel_pairs_changes_no_cost(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=3, pairs=8))
    merged = replace(problem, pairs=merge_parallel(problem.pairs))
    ends = [frozenset((p.a, p.b)) for p in merged.pairs]
    assert len(set(ends)) == len(ends)
    for rows in product(*(range(len(v)) for v in problem.variables)):
        seconds, joules, profile = cost(problem, rows)
        again = cost(merged, rows)
        assert again[0] == pytest.approx(seconds) and again[1] == pytest.approx(joules)
        assert again[2] == pytest.approx(profile)


@given(seeds)
def test_problems_and_archives_travel_as_arrays(seed: int) -> None:
    problem = random_problem(seed)
    again = problem_from(problem_arrays(problem))
    for rows, *expected in labellings(problem)[:20]:
        seconds, joules, profile = again.evaluate(np.array(rows, dtype=np.int64))
        assert (seconds, joules) == (pytest.approx(expected[0]), pytest.approx(expected[1]))
        assert profile.tolist() == pytest.approx(expected[2])
    rows = np.zeros(len(problem.variables), np.int64)
    cut = Cut(1.0, 3.0, 2.0)
    places = [
        (cut, Prices(np.array([1.0, 2.0]), 2.0)),
        (Cut(0.5, 4.0, 0.0), Prices(np.array([0.0, 4.0]), 0.0, 0.5, np.array([1.0, 0.5]))),
    ]
    away = Archive([Candidate(rows, 1.0, 2.0, 3.0, 1.5)], [], places=places, spent=0.25)
    back = archive_from(archive_arrays(away))
    assert [place[0] for place in back.places] == [place[0] for place in places]
    for (_, a), (_, b) in zip(back.places, places, strict=True):
        assert (a.joule, a.bytes.tolist(), a.second) == (b.joule, b.bytes.tolist(), b.second)
        assert (a.events is None) == (b.events is None)
        assert a.events is None or a.events.tolist() == [1.0, 0.5]
    back.join(away)  # what is known already is not there twice
    assert (len(back.places), back.spent) == (2, 0.5)
    assert [(c.costs, c.unmerged) for c in back.candidates] == [((1.0, 2.0, 3.0), 1.5)]
    assert back.cuts == []
