"""Searches and their archives, against enumeration of all labellings."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import assume, given, settings

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.merge import NetworkResult, worth_a_plan
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Pair, Problem, Variable
from tapestry_egg.extract.search import exact
from tapestry_egg.extract.engine.archive import Archive, Candidate, shown
from tapestry_egg.extract.search.elimination import Elimination
from tapestry_egg.extract.search.exact import solve
from tapestry_egg.extract.search.messages.dual import Dual
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits
from tests.extract.random_problems import (
    Shape,
    cost,
    labellings,
    optimum,
    random_problem,
    seeds,
    single,
    whatever,
)


def searched(problem: Problem, peak: float | None = None, seconds: float = 2.0) -> Archive:
    return Search(problem, Effort(prices=4, steps=3, seconds=seconds)).run(
        None if peak is None else Limits(peak)
    )


@pytest.mark.slow
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
        results = [NetworkResult(cast(PlanProblem, None), Archive(candidates))]
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


def test_a_plan_within_a_tight_limit_is_looked_for_however_little_work_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def within(limits: int = 0) -> int:
        """In how many problems something is within a limit that something can be within."""
        for seed in range(60):
            problem = random_problem(seed)
            peaks = sorted({max(profile) for *_, profile in labellings(problem)})
            if len(peaks) < 3:
                continue
            search = Search(problem, Effort(work=1e-6, ends=True))
            search.small = False  # no integer programs
            limit = Limits(peaks[0] * 1.0001)
            limits += any(limit.hold(c) for c in search.run(limit).candidates)
        return limits

    most = within()
    monkeypatch.setattr(Search, "_squeezed", lambda self, fastest, least, limits: least)
    assert within() < most


@pytest.mark.slow
@given(seeds)
@settings(max_examples=40)
def test_programs_have_limits_on_memory_and_joules_together(seed: int) -> None:
    """With all columns; and where a plan is known, with those alone that may be in a faster one."""
    problem = random_problem(seed, Shape(variables=5, rows=4, pairs=6))
    found = labellings(problem)
    assume(found)
    for _, known, joules, profile in found[:: max(1, len(found) // 6)]:
        peak = max(profile)
        least = optimum(found, peak, joules)
        for faster_than in (np.inf, known):
            told = solve(problem, peak, 20.0, 1e-6, joules=joules, known=faster_than)
            assert told.bound == pytest.approx(least, rel=1e-4, abs=1e-6)
            if told.rows is not None:
                seconds, spent, held = problem.evaluate(told.rows)
                assert seconds == pytest.approx(least, rel=1e-4, abs=1e-6)
                assert spent <= joules * (1 + 1e-8) and held.max() <= peak * (1 + 1e-8)


def test_what_is_known_leaves_most_columns_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And they are in nothing faster: the least is found, and less is proven to be impossible."""
    problem = random_problem(5, Shape(variables=8, rows=6, pairs=10, forbidden=0.0))
    seen: list[int] = []
    real = exact.milp

    def counted(cost: Any, **asked: Any) -> Any:
        seen.append(len(cost))
        return real(cost, **asked)

    monkeypatch.setattr(exact, "milp", counted)
    whole = solve(problem, 30.0, 20.0)
    assert whole.rows is not None
    least = problem.evaluate(whole.rows)[0]
    before = max(seen)
    seen.clear()
    below = solve(problem, 30.0, 20.0, known=1.1 * least)
    assert below.rows is not None
    assert problem.evaluate(below.rows)[0] == pytest.approx(least)
    assert below.bound == pytest.approx(least, rel=1e-3)
    assert max(seen) < 0.8 * before
    assert solve(problem, 30.0, 20.0, known=0.9 * least).bound == pytest.approx(0.9 * least)


def test_where_the_relaxation_is_not_solved_the_whole_program_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem = random_problem(5, Shape(variables=8, rows=6, pairs=10, forbidden=0.0))
    whole = solve(problem, 30.0, 20.0)
    lost = SimpleNamespace(status=4, x=None)  # for numerical difficulties
    monkeypatch.setattr("scipy.optimize.linprog", lambda *_, **__: lost)
    below = solve(problem, 30.0, 20.0, known=2.0 * whole.bound)
    assert below.bound == pytest.approx(whole.bound, rel=1e-3) and not below.by_clock


@pytest.mark.parametrize("seed", [2, 29, 55])
def test_small_problems_are_settled_at_limits_on_joules_too(seed: int) -> None:
    """Where prices leave 8 to 33 % open."""
    problem = random_problem(seed, Shape(variables=6, rows=5, pairs=8))
    found = labellings(problem)
    archive = Search(problem, Effort(prices=4, steps=3, work=20.0, gap=0.001)).run()
    for c in archive.corners():
        least = optimum(found, c.peak, c.joules * (1 + 1e-9))
        assert archive.bound(c.peak, c.joules) >= least * (1 - 0.0011) - 1e-6


@pytest.mark.parametrize("proofs", [True, False])
def test_a_search_for_plans_alone_solves_no_programs(
    proofs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = random_problem(2, Shape(variables=6, rows=5, pairs=8))
    solved: list[float] = []
    real = exact.solve

    def counted(problem: Any, limit: float, *rest: Any) -> Any:
        solved.append(limit)
        return real(problem, limit, *rest)

    monkeypatch.setattr(exact, "solve", counted)
    effort = Effort(prices=4, steps=3, work=20.0, gap=0.001, proofs=proofs)
    archive = Search(problem, effort).run()
    assert archive.candidates
    assert bool(solved) == proofs
