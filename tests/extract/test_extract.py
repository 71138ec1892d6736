"""The extraction problem and its search, against enumeration of all labellings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tapestry_egg.extract.problem.problem import merge_parallel
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.search.descent import Descent
from tapestry_egg.extract.search.elimination import Elimination
from tapestry_egg.extract.search.messages.dual import Cut, Dual, Prices
from tapestry_egg.extract.engine.transport import (
    archive_arrays,
    archive_from,
    problem_arrays,
    problem_from,
)
from tests.extract.random_problems import (
    Shape,
    cost,
    labellings,
    optimum,
    priced,
    random_problem,
    seeds,
)

# The problem


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
    found = [Candidate(np.zeros(len(problem.variables), np.int64), 1.0, 2.0, 3.0)]
    cut = Cut(1.0, 3.0, 2.0)
    places = [
        (cut, Prices(2.0, np.array([1.0, 2.0]))),
        (Cut(0.5, 4.0, 0.0), Prices(0.0, np.array([0.0, 4.0]), 0.5)),
    ]
    away = Archive(found, [], unsettled=(4.0, np.inf), places=places, spent=0.25)
    back = archive_from(archive_arrays(away))
    assert [place[0] for place in back.places] == [place[0] for place in places]
    for (_, a), (_, b) in zip(back.places, places, strict=True):
        assert (a.joule, a.bytes.tolist(), a.second) == (b.joule, b.bytes.tolist(), b.second)
        assert a.events is None
    back.join(away)  # what is known already is not there twice
    assert (len(back.places), back.unsettled, back.spent) == (2, (4.0, np.inf), 0.5)
    assert [c.costs for c in back.candidates] == [(1.0, 2.0, 3.0)] and back.cuts == []
    assert back.unsettled == (4.0, np.inf)


# Bounds


@pytest.mark.slow
@given(seeds, seeds)
@settings(max_examples=150)
def test_every_cut_is_below_every_labelling(seed: int, more: int) -> None:
    problem, rng = random_problem(seed), np.random.default_rng(more)
    found = labellings(problem)
    assume(found)
    dual = Dual(problem)
    for _ in range(3):
        scale = rng.choice([0.0, 0.01, 1.0])
        prices = Prices(
            float(rng.choice([0.0, 0.3, 2.0])), rng.random(problem.times).round(3) * scale
        )
        dual.price(prices)
        least = min(priced(prices, x) for x in found)
        for _ in range(4):
            cut = dual.sweep()
            assert cut.value <= least * (1 + 1e-9) + 1e-9
            for _ in range(4):
                _, _, joules, profile = found[rng.integers(len(found))]
                peak, joules = max(profile) * rng.choice([1, 1.1]), joules * rng.choice([1, 1.2])
                assert cut.at(peak, joules) <= optimum(found, peak, joules) + 1e-9


@given(seeds)
def test_on_trees_the_bound_is_the_optimum(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=6), tree=True)
    found = labellings(problem)
    assume(found)
    prices = Prices(0.5, np.linspace(0.0, 0.1, problem.times))
    dual = Dual(problem)
    dual.price(prices)
    values = [dual.sweep().value for _ in range(30)]
    least = min(priced(prices, x) for x in found)
    assert max(values) == pytest.approx(least, abs=1e-9)
    rows = dual.decode()
    at = tuple(int(r) for r in rows)
    assert priced(prices, (at, *cost(problem, at))) == pytest.approx(least, abs=1e-9)


# Labellings


@dataclass
class Swept:
    """A random problem at random prices after one sweep, and what labellings cost there."""

    seed: int
    more: int

    def __post_init__(self) -> None:
        self.problem, self.rng = random_problem(self.seed), np.random.default_rng(self.more)
        self.prices = Prices(0.5, self.rng.random(self.problem.times) * 0.1)
        self.dual = Dual(self.problem)
        self.dual.price(self.prices)
        self.dual.sweep()

    def anything(self) -> np.ndarray:
        rows = [self.rng.integers(len(v)) for v in self.problem.variables]
        return np.array(rows, dtype=np.int64)

    def value(self, rows: np.ndarray) -> float:
        at = tuple(int(r) for r in rows)
        assert all(0 <= r < len(v) for r, v in zip(at, self.problem.variables, strict=True))
        return priced(self.prices, (at, *cost(self.problem, at)))


@pytest.mark.slow
@given(seeds, seeds)
@settings(max_examples=150)
def test_elimination_finds_the_best_of_the_rows_that_it_holds(seed: int, more: int) -> None:
    """With all rows kept: the optimum. With few: no worse than what was known."""
    swept = Swept(seed, more)
    swept.value(swept.dual.decode())
    elimination, rows = Elimination(swept.dual), swept.anything()
    for keep in (1, 2):
        before, now = rows.copy(), swept.value(rows)
        better = elimination.improve([rows], keep, swept.rng)
        assert (rows == before).all() and elimination.held
        assert swept.value(better) <= now + 1e-9
        rows = better
    found = labellings(swept.problem)
    assume(found)
    least = min(priced(swept.prices, x) for x in found)
    most = max(len(v) for v in swept.problem.variables)
    best = elimination.improve([rows], most, swept.rng)
    assert swept.value(best) == pytest.approx(least, abs=1e-9)


@given(seeds, seeds)
@settings(max_examples=50)
def test_elimination_in_little_room_is_never_worse(seed: int, more: int) -> None:
    swept = Swept(seed, more)
    elimination, rows = Elimination(swept.dual, cells=4), swept.anything()
    for _ in range(4):
        better = elimination.improve([rows], 3, swept.rng)
        assert swept.value(better) <= swept.value(rows) + 1e-9
        rows = better


@given(seeds, seeds)
@settings(max_examples=100)
def test_descent_moves_into_a_limit_and_then_down(seed: int, more: int) -> None:
    problem, rng = random_problem(seed), np.random.default_rng(more)
    found = labellings(problem)
    assume(found)
    descent = Descent(problem)
    rows, seconds, _, profile = found[rng.integers(len(found))]
    for limit in (max(profile), 0.8 * max(profile)):
        now = descent.into(np.array(rows, dtype=np.int64), limit)
        after, _, peaks = cost(problem, tuple(int(r) for r in now))
        assert np.isfinite(after)
        if max(profile) <= limit:
            assert after <= seconds + 1e-9 and max(peaks) <= limit + 1e-9
        else:
            assert max(peaks) <= max(profile) + 1e-9
