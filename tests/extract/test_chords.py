"""Prices at which known plans balance: of mixtures, and between neighbours of a convex hull."""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from tapestry_egg.extract.problem.problem import Pair, Problem, Use, Variable
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.search.balance import Pool, hull, slope
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits

seeds = st.integers(0, 10**6)


def pool_of(seed: int, count: int, times: int) -> tuple[Pool, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    seconds, profiles = rng.random(count) + 0.1, 1e9 * rng.random((count, times))
    pool = Pool()
    for s, profile in zip(seconds, profiles, strict=True):
        pool.add(float(s), profile)
    return pool, seconds, profiles


@given(seeds)
def test_two_plans_and_one_time_balance_at_the_slope_between_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fast, small = rng.random() + 1.0, rng.random() + 3.0
    pool = Pool()
    pool.add(fast, np.array([8e9]))
    pool.add(small, np.array([2e9]))
    balance = pool.balance(5e9)
    assert balance is not None
    assert balance.seconds == pytest.approx(0.5 * (fast + small))
    assert balance.bytes[0] == pytest.approx((small - fast) / 6e9)


@settings(max_examples=50)
@given(seeds, st.integers(1, 8), st.integers(1, 30))
def test_prices_prove_that_no_mixture_is_faster(seed: int, count: int, times: int) -> None:
    """Weak duality; and with every time's row in the program there is no less."""
    pool, seconds, profiles = pool_of(seed, count, times)
    peaks = profiles.max(axis=1)
    limit = float(peaks.min() + 0.3 * np.ptp(peaks)) + 1.0
    balance = pool.balance(limit)
    assert balance is not None and (balance.bytes >= 0).all()
    at_prices = (seconds + profiles @ balance.bytes).min() - limit * balance.bytes.sum()
    assert at_prices == pytest.approx(balance.seconds, rel=1e-5)
    assert balance.seconds <= seconds[peaks <= limit].min() + 1e-6
    one = np.ones((1, count))
    whole = linprog(seconds, profiles.T / limit, np.ones(times), one, [1.0])
    assert balance.seconds == pytest.approx(whole.fun, rel=1e-5)


@given(seeds)
def test_no_mixture_is_within_too_small_a_limit(seed: int) -> None:
    pool, _, profiles = pool_of(seed, 4, 6)
    assert pool.balance(0.99 * float(profiles.min())) is None
    assert Pool().balance(1.0) is None and pool.balance(0.0) is None


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=12))
def test_the_hull_has_the_best_at_every_price(points: list[tuple[int, int]]) -> None:
    plans = [Candidate(np.zeros(0, dtype=np.int64), float(s), float(p), 0.0) for s, p in points]
    kept = hull(plans)
    for price in (0.0, *np.geomspace(1e-3, 1e3, 60)):
        assert min(c.seconds + price * c.peak for c in kept) == pytest.approx(
            min(c.seconds + price * c.peak for c in plans)
        )
    slopes = [slope(a, b) for a, b in pairwise(kept)]
    assert all(x < y for x, y in pairwise([0.0, *slopes]))
    assert all(a.seconds < b.seconds and a.peak > b.peak for a, b in pairwise(kept))


def chain(seed: int, length: int, rows: int) -> Problem:
    """Variables in a row, one time: bounds at fixed prices are exact."""
    rng = np.random.default_rng(seed)
    variables = tuple(
        Variable(str(k), rng.random(rows), rng.random(rows), (Use(0, 1, rng.random(rows)),))
        for k in range(length)
    )
    each = np.arange(rows)
    pairs = tuple(
        Pair(k, k + 1, each, each, 0.3 * rng.random((rows, rows)), np.zeros((rows, rows)))
        for k in range(length - 1)
    )
    return Problem(variables, pairs, 1)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(seeds)
def test_the_search_finds_the_whole_hull(seed: int) -> None:
    """From two prices alone, and for every price, the best labelling to within the gap asked for;
    the bound says so at every limit between two plans of the hull."""
    problem = chain(seed, 5, 3)
    search = Search(problem, Effort(prices=2, steps=2, seconds=5.0, gap=0.004))
    search.small = False
    search._narrow = lambda: None  # type: ignore[method-assign]
    archive = search.run()
    costs = []
    for rows in product(range(3), repeat=5):
        seconds, _, profile = problem.evaluate(np.array(rows))
        costs.append((seconds, profile.max()))
    every, known = np.array(costs), np.array([c.costs[:2] for c in archive.candidates])
    for price in np.geomspace(0.02, 20.0, 60):
        best = (every @ (1.0, price)).min()
        assert (known @ (1.0, price)).min() <= best * (1 + 0.004)
    for a, b in pairwise(hull(archive.candidates)):
        middle = 0.5 * (a.seconds + b.seconds)
        assert archive.bound(0.5 * (a.peak + b.peak), np.inf) >= middle * (1 - 0.004)


def crowded(seed: int, length: int, rows: int, times: int) -> Problem:
    """A chain whose rows are in memory for some of several times each."""
    rng = np.random.default_rng(seed)
    variables = []
    for k in range(length):
        start = int(rng.integers(times))
        uses = (Use(start, int(rng.integers(start + 1, times + 1)), rng.random(rows)),)
        variables.append(Variable(str(k), rng.random(rows), rng.random(rows), uses))
    return Problem(tuple(variables), chain(seed, length, rows).pairs, times)


@pytest.mark.parametrize("seed", range(8))
def test_at_a_limit_prices_prove_what_the_best_mixture_of_all_labellings_takes(seed: int) -> None:
    """No prices prove more, within a peak or within a peak and joules; some prove as much."""
    problem = crowded(seed, 5, 3, 8)
    every = [problem.evaluate(np.array(rows)) for rows in product(range(3), repeat=5)]
    seconds, joules, profiles = (np.array(x) for x in zip(*every, strict=True))
    peaks = profiles.max(axis=1)
    limit = float(np.quantile(peaks, 0.1))
    frugal = float(np.quantile(joules[peaks <= limit], 0.5))
    for limits in (Limits(limit), Limits(limit, frugal)):
        legal = (peaks <= limits.peak) & (joules <= limits.joules)
        known = seconds[legal].min()
        rival = np.array([[known, limits.peak, limits.joules]])  # as if found elsewhere
        search = Search(problem, Effort(seconds=20.0, gap=1e-3), rivals=rival)
        search._walk(search.fastest())
        search._toward(limits, search._nearest(limits), 60)
        most = joules / limits.joules if limits.joules < np.inf else 0.0 * joules
        within = np.column_stack((profiles / limit, most)).T
        best = linprog(seconds, within, np.ones(len(within)), np.ones((1, len(seconds))), [1.0])
        bound = search.archive.bound(limits.peak, limits.joules)
        assert bound <= best.fun * (1 + 1e-7)
        # Where no more than a tenth of the gap is left to prove, prices are good enough.
        assert best.fun - bound <= 0.1 * (known - bound) + 1e-3 * best.fun
