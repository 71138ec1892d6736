"""The extraction problem and its search, against enumeration of all labellings."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import cast

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.merge import MeshResult, worth_a_plan
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Pair, Problem, Use, Variable, label, merge_parallel
from tapestry_egg.extract.search.archive import Archive, Candidate, shown
from tapestry_egg.extract.search.descent import Descent
from tapestry_egg.extract.search.dual import Dual, Prices
from tapestry_egg.extract.search.elimination import Elimination
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits
from tapestry_egg.extract.search.transport import (
    archive_arrays,
    archive_from,
    problem_arrays,
    problem_from,
)

# What random problems look like


@dataclass(frozen=True)
class Shape:
    """Sizes of random problems."""

    variables: int = 5
    rows: int = 4
    pairs: int = 7
    times: int = 4
    forbidden: float = 0.15


def random_problem(seed: int, shape: Shape = Shape(), tree: bool = False) -> Problem:
    """Costs with ties and zeros, labels that group rows, forbidden pairs, bytes over time."""
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, shape.variables + 1))
    variables = []
    for i in range(n):
        rows = int(rng.integers(1, shape.rows + 1))
        uses = tuple(random_use(rng, (rows,), shape.times) for _ in range(rng.integers(0, 3)))
        variables.append(
            Variable(f"v{i}", random_costs(rng, (rows,)), random_costs(rng, (rows,)), uses)
        )
    ends = [(int(rng.integers(0, b)), b) for b in range(1, n)] if tree else []
    if not tree and n > 1:
        for _ in range(rng.integers(0, shape.pairs + 1)):
            a, b = rng.choice(n, 2, replace=False)
            ends.append((int(a), int(b)))
    pairs = []
    for a, b in ends:
        label_a, label_b = (random_labels(rng, len(variables[x])) for x in (a, b))
        size = (int(label_a.max()) + 1, int(label_b.max()) + 1)
        seconds = random_costs(rng, size)
        seconds[rng.random(size) < shape.forbidden] = np.inf
        uses = tuple(random_use(rng, size, shape.times) for _ in range(rng.integers(0, 2)))
        pairs.append(Pair(a, b, label_a, label_b, seconds, random_costs(rng, size), uses))
    if variables:
        variables[0] = whatever(variables[0], rng.integers(0, 3, shape.times).astype(float))
    return Problem(tuple(variables), tuple(pairs), shape.times)


def whatever(v: Variable, amounts: np.ndarray) -> Variable:
    """The variable, with bytes that it holds at each time whatever row is chosen."""
    uses = (Use(t, t + 1, np.full(len(v), b)) for t, b in enumerate(amounts))
    return replace(v, uses=(*v.uses, *uses))


def random_costs(rng: np.random.Generator, size: tuple[int, ...]) -> np.ndarray:
    return rng.integers(0, 6, size) * rng.choice([1e-3, 0.25])


def random_use(rng: np.random.Generator, size: tuple[int, ...], times: int) -> Use:
    start = int(rng.integers(0, times))
    return Use(start, int(rng.integers(start + 1, times + 1)), rng.integers(0, 5, size) * 1.0)


def random_labels(rng: np.random.Generator, rows: int) -> np.ndarray:
    labels, _ = label(rng.integers(0, rows, rows).tolist())
    return labels


seeds = st.integers(0, 10**6)


# The oracle


def cost(problem: Problem, rows: tuple[int, ...]) -> tuple[float, float, list[float]]:
    """Seconds, joules and bytes at each time of one labelling, entry by entry."""
    seconds = joules = 0.0
    profile = [0.0] * problem.times

    def occupy(use: Use, amount: float) -> None:
        for t in range(use.start, use.end):
            profile[t] += amount

    for v, r in zip(problem.variables, rows, strict=True):
        seconds, joules = seconds + float(v.seconds[r]), joules + float(v.joules[r])
        for use in v.uses:
            occupy(use, float(use.amount[r]))
    for p in problem.pairs:
        at = int(p.label_a[rows[p.a]]), int(p.label_b[rows[p.b]])
        seconds, joules = seconds + float(p.seconds[at]), joules + float(p.joules[at])
        for use in p.uses:
            occupy(use, float(use.amount[at]))
    return seconds, joules, profile


def labellings(problem: Problem) -> list[tuple[tuple[int, ...], float, float, list[float]]]:
    """Every labelling that is not forbidden, with its costs."""
    every = product(*(range(len(v)) for v in problem.variables))
    found = ((rows, *cost(problem, rows)) for rows in every)
    return [x for x in found if np.isfinite(x[1])]


def optimum(
    found: list[tuple[tuple[int, ...], float, float, list[float]]], peak: float, joules: float
) -> float:
    """The least seconds within the limits."""
    fitting = [s for _, s, j, p in found if max(p, default=0.0) <= peak and j <= joules]
    return min(fitting, default=np.inf)


def priced(prices: Prices, x: tuple[tuple[int, ...], float, float, list[float]]) -> float:
    return x[1] + prices.joule * x[2] + float(np.dot(prices.bytes, x[3]))


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
    back = archive_from(archive_arrays(Archive(found, [], unsettled=(4.0, np.inf))))
    assert [c.costs for c in back.candidates] == [(1.0, 2.0, 3.0)] and back.cuts == []
    assert back.unsettled == (4.0, np.inf)


# Bounds


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


# The search


def searched(problem: Problem, peak: float | None = None, seconds: float = 2.0) -> Archive:
    return Search(problem, Effort(prices=4, steps=3, seconds=seconds)).run(
        None if peak is None else Limits(peak)
    )


@given(seeds)
@settings(max_examples=40)
def test_the_archive_is_the_front_within_its_gaps(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=5, rows=3, pairs=6))
    found = labellings(problem)
    assume(found)
    archive = searched(problem)
    assert archive.candidates
    for c in archive.candidates:
        at = tuple(int(r) for r in c.rows)
        seconds, joules, profile = cost(problem, at)
        assert c.costs == pytest.approx((seconds, max(profile), joules), abs=1e-9)
        covered = [
            o
            for o in archive.candidates
            if o is not c and all(x <= y for x, y in zip(o.costs, c.costs, strict=True))
        ]
        assert not covered
        least = optimum(found, c.peak, np.inf)
        assert archive.bound(c.peak, np.inf) <= least * (1 + 1e-6) + 1e-9
        assert archive.bound(c.peak, c.joules) <= optimum(found, c.peak, c.joules) + 1e-9
        best = archive.best(c.peak)
        assert best is not None
        assert best.seconds <= least * (1 + 0.0041) + 1e-9
    fastest = min(s for _, s, _, _ in found)
    assert min(c.seconds for c in archive.candidates) <= fastest * (1 + 0.0041) + 1e-9
    for _, _, joules, profile in found[:: max(1, len(found) // 50)]:
        peak = max(profile)
        assert archive.bound(peak, np.inf) <= optimum(found, peak, np.inf) * (1 + 1e-6) + 1e-9
        assert archive.bound(peak, joules) <= optimum(found, peak, joules) * (1 + 1e-6) + 1e-9


@given(seeds)
@settings(max_examples=15)
def test_a_memory_limit_of_interest_is_met(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=4, rows=4, pairs=4, forbidden=0.0))
    found = labellings(problem)
    peaks = sorted({max(p) for *_, p in found})
    limit = peaks[len(peaks) // 2]
    best = searched(problem, limit).best(limit)
    if best is None:  # no plan of the search is so small
        return
    assert best.peak <= limit
    assert best.seconds >= optimum(found, limit, np.inf) - 1e-9


def test_small_amounts_are_told_apart() -> None:
    """Microseconds and gigabytes: what solvers with absolute tolerances would round away."""
    for seed in range(8):
        problem = random_problem(seed, Shape(variables=5, rows=4, pairs=5))
        small = Problem(
            tuple(
                replace(
                    v,
                    seconds=v.seconds * 1e-6,
                    uses=tuple(replace(u, amount=u.amount * 1e9) for u in v.uses),
                )
                for v in problem.variables
            ),
            tuple(
                replace(
                    p,
                    seconds=p.seconds * 1e-6,
                    uses=tuple(replace(u, amount=u.amount * 1e9) for u in p.uses),
                )
                for p in problem.pairs
            ),
            problem.times,
        )
        found = labellings(small)
        if not found:
            continue
        archive = searched(small)
        for c in archive.candidates:
            least = optimum(found, c.peak * (1 + 1e-9), np.inf)
            assert archive.bound(c.peak, np.inf) <= least * (1 + 1e-6)
            best = archive.best(c.peak)
            assert best is not None and best.seconds <= least * (1 + 0.0041) + 1e-15


def test_a_search_that_forgets_messages_proves_no_less_truly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tapestry_egg.extract.search.settling._REMEMBERED", 1)
    monkeypatch.setattr("tapestry_egg.extract.search.exact.COLUMNS", 0)
    looked = 0
    for seed in range(8):
        problem = random_problem(seed, Shape(variables=5, rows=3, pairs=6))
        found = labellings(problem)
        if not found:
            continue
        search = Search(problem, Effort(prices=4, steps=3, seconds=2.0))
        archive = search.run()
        looked += sum(place.messages is None for place in search.visited)
        assert sum(place.messages is not None for place in search.visited) == 1
        for c in archive.candidates:
            least = optimum(found, c.peak * (1 + 1e-9), np.inf)
            assert archive.bound(c.peak, np.inf) <= least * (1 + 1e-6)
    assert looked


# Corners


def single(rows: int, seconds: float = 1.0) -> Variable:
    return Variable("v", np.full(rows, seconds), np.zeros(rows))


def test_an_empty_problem_has_one_plan() -> None:
    archive = searched(Problem((), (), 0))
    assert [c.costs for c in archive.candidates] == [(0.0, 0.0, 0.0)]
    assert archive.bound(np.inf, np.inf) == 0.0


def test_a_problem_without_memory() -> None:
    cheap = Variable("v", np.array([3.0, 1.0]), np.zeros(2))
    archive = searched(Problem((cheap, single(1)), (), 3))
    assert [c.costs for c in archive.candidates] == [(2.0, 0.0, 0.0)]


def test_single_rows_leave_nothing_to_choose() -> None:
    pair = Pair(
        0, 1, np.zeros(1, np.int64), np.zeros(1, np.int64), np.ones((1, 1)), np.ones((1, 1))
    )
    problem = Problem((whatever(single(1), np.array([5.0, 7.0])), single(1)), (pair,), 2)
    archive = searched(problem)
    assert [c.costs for c in archive.candidates] == [(3.0, 7.0, 1.0)]
    assert archive.bound(7.0, 1.0) == pytest.approx(3.0)


def test_forbidden_pairs_are_never_chosen() -> None:
    """The rows that look best alone exclude each other."""
    seconds = np.array([[np.inf, 0.0], [0.0, np.inf]])
    pair = Pair(0, 1, np.arange(2), np.arange(2), seconds, np.zeros((2, 2)))
    v = Variable("v", np.array([0.0, 10.0]), np.zeros(2))
    archive = searched(Problem((v, v), (pair,), 1))
    assert min(c.seconds for c in archive.candidates) == 10.0
    assert archive.bound(np.inf, np.inf) <= 10.0 + 1e-9


def test_no_legal_labelling_is_said() -> None:
    pair = Pair(
        0, 1, np.zeros(2, np.int64), np.arange(2), np.full((1, 2), np.inf), np.zeros((1, 2))
    )
    with pytest.raises(ExtractError, match="no legal combination"):
        searched(Problem((single(2), single(2)), (pair,), 1))


def test_an_archive_keeps_only_what_nothing_covers() -> None:
    def candidate(*costs: float) -> Candidate:
        return Candidate(np.zeros(1, np.int64), *costs)

    archive = Archive()
    assert archive.add(candidate(2.0, 2.0, 2.0))
    assert not archive.add(candidate(2.0, 3.0, 2.0))
    assert not archive.add(candidate(2.0, 2.0, 2.0))
    assert not archive.add(candidate(np.inf, 0.0, 0.0))
    assert archive.add(candidate(3.0, 1.0, 2.0))
    assert archive.add(candidate(2.0, 1.0, 1.0))
    assert [c.costs for c in archive.candidates] == [(2.0, 1.0, 1.0)]
    assert archive.best(0.5) is None


def test_candidates_close_to_a_limit_on_either_side_become_plans() -> None:
    """A plan may need less than its candidate: copies are held no longer than they are read. But
    what may turn out too large is no reason to leave out what surely fits."""

    def worth(limit: float, *peaks_and_seconds: tuple[float, float]) -> list[tuple[float, float]]:
        candidates = [Candidate(np.zeros(1, np.int64), s, p, 1.0) for p, s in peaks_and_seconds]
        results = [MeshResult(cast(PlanProblem, None), Archive(candidates))]
        limits = {"peak_bytes": limit}
        found = worth_a_plan(results, ("seconds", "peak_bytes"), limits)
        return [(c.peak, c.seconds) for _, c in found]

    fits, just, far = (100.0, 1.009), (100.5, 1.0), (150.0, 0.5)
    assert worth(100.0, fits, just, far) == [fits, just]
    assert worth(99.8, fits, far) == [fits]
    assert worth(1.0, fits, far) == [fits]  # the nearest, to say what can be reached
    assert worth(200.0, fits, just, far) == [far, just]


def test_a_front_shows_the_fastest_however_close_another_is() -> None:
    """A plan of nearly the same seconds and half the memory takes no place but the fastest's."""
    points = np.array([[1.0, 100.0, 1.0], [1.005, 50.0, 1.0], [1.01, 49.9, 1.0]])
    assert shown(points) == [0, 1]
    assert shown(points[1:]) == [0]


@pytest.mark.parametrize("seed", range(3))
def test_a_minimisation_is_over_distinct_rows(seed: int) -> None:
    dual = Dual(random_problem(seed))
    rng = np.random.default_rng(seed)
    sizes = [len(v) for v in dual.problem.variables]
    known = [rng.integers(0, sizes) for _ in range(2)]
    domains, counts = Elimination(dual)._domains([*known, known[0]], 2)
    for i, (rows, count) in enumerate(zip(domains.tolist(), counts.tolist(), strict=True)):
        assert len(set(rows[:count])) == count
        assert {int(k[i]) for k in known} <= set(rows[:count])


def test_the_best_within_limits_is_within_both() -> None:
    rows = np.zeros(1, dtype=np.int64)
    fast, lean, cool = (
        Candidate(rows, *costs) for costs in ((1.0, 9.0, 9.0), (2.0, 3.0, 9.0), (3.0, 9.0, 3.0))
    )
    archive = Archive([cool, lean, fast])
    assert archive.best(9.0) is archive.best(9.0, 9.0) is fast
    assert archive.best(3.0) is lean and archive.best(9.0, 3.0) is cool
    assert archive.best(3.0, 3.0) is None
