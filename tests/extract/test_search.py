"""Races of searches and their archives, against enumeration of all labellings."""

from __future__ import annotations

import threading
from dataclasses import replace
from itertools import product
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.engine import search as engine_search
from tapestry_egg.extract.engine.archive import Archive, Candidate, Limits, Prices, shown
from tapestry_egg.extract.engine.race import Effort, Race, Task, race, searches_of
from tapestry_egg.extract.engine.search import Search
from tapestry_egg.extract.engine.transport import archive_arrays, archive_from
from tapestry_egg.extract.front.merge import NetworkResult, worth_a_plan
from tapestry_egg.extract.problem.assemble import PlanProblem
from tapestry_egg.extract.problem.problem import Pair, Problem, Variable
from tests.extract.random_problems import (
    Shape,
    cost,
    labellings,
    ladder,
    optimum,
    random_problem,
    seeds,
    single,
    whatever,
)


def searched(problem: Problem, peak: float | None = None, gap: float = 0.004) -> Archive:
    (archive,) = race([problem], Effort(work=20.0, gap=gap), None if peak is None else Limits(peak))
    return archive


@pytest.fixture(params=["closed by branch and bound", "bounded by prices"])
def method(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Small networks are closed; large ones are bounded by prices alone."""
    if request.param != "closed by branch and bound":
        monkeypatch.setattr(engine_search, "SMALL", 0)
    return str(request.param)


@pytest.mark.parametrize("seed", range(40))
def test_the_archive_is_the_front_within_its_bounds(seed: int, method: str) -> None:
    problem = random_problem(seed, Shape(variables=5, rows=3, pairs=6))
    found = labellings(problem)
    if not found:
        return
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
    fastest = min(s for _, s, _, _ in found)
    assert min(c.seconds for c in archive.candidates) <= fastest * (1 + 0.0041) + 1e-9
    for _, _, joules, profile in found[:: max(1, len(found) // 50)]:
        peak = max(profile)
        assert archive.bound(peak, np.inf) <= optimum(found, peak, np.inf) * (1 + 1e-6) + 1e-9
        assert archive.bound(peak, joules) <= optimum(found, peak, joules) * (1 + 1e-6) + 1e-9


@pytest.mark.parametrize("seed", range(30))
def test_small_problems_are_closed_at_every_corner(seed: int) -> None:
    """What a front shows is the fastest within its peak, and within its joules too."""
    problem = random_problem(seed, Shape(variables=6, rows=4, pairs=8))
    found = labellings(problem)
    if not found:
        return
    archive = searched(problem, gap=0.001)
    for c in archive.corners():
        for limits in (Limits(c.peak), Limits(c.peak, c.joules)):
            least = optimum(found, limits.peak * (1 + 1e-9), limits.joules * (1 + 1e-9))
            bound = archive.bound(limits.peak, limits.joules)
            assert least * (1 - 0.0011) - 1e-6 <= bound <= least * (1 + 1e-6) + 1e-9
            best = archive.best(limits.peak, limits.joules)
            assert best is not None and best.seconds <= least * (1 + 0.0011) + 1e-6
    peaks = sorted({max(profile) for *_, profile in found})
    assert min(c.peak for c in archive.candidates) <= peaks[0] * 1.011 + 1e-9


@given(seeds)
@settings(max_examples=15)
def test_a_memory_limit_of_interest_is_met(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=4, rows=4, pairs=4, forbidden=0.0))
    found = labellings(problem)
    peaks = sorted({max(p) for *_, p in found})
    limit = peaks[len(peaks) // 2]
    best = searched(problem, limit).best(limit)
    assert best is not None and best.peak <= limit
    assert best.seconds <= optimum(found, limit, np.inf) * (1 + 0.0041) + 1e-9


def test_small_amounts_are_told_apart(method: str) -> None:
    """Microseconds and gigabytes: what absolute tolerances would round away."""
    for seed in range(8):
        problem = random_problem(seed, Shape(variables=5, rows=4, pairs=5))

        def scaled(part: Variable | Pair) -> Variable | Pair:
            uses = tuple(replace(u, amount=u.amount * 1e9) for u in part.uses)
            return replace(part, seconds=part.seconds * 1e-6, uses=uses)

        small = Problem(
            tuple(cast(Variable, scaled(v)) for v in problem.variables),
            tuple(cast(Pair, scaled(p)) for p in problem.pairs),
            problem.times,
        )
        found = labellings(small)
        if not found:
            continue
        archive = searched(small)
        for c in archive.candidates:
            least = optimum(found, c.peak * (1 + 1e-9), np.inf)
            assert archive.bound(c.peak, np.inf) <= least * (1 + 1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_a_search_that_forgets_messages_proves_no_less_truly(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_search, "_REMEMBERED", 1)
    monkeypatch.setattr(engine_search, "SMALL", 0)
    problem = random_problem(seed, Shape(variables=5, rows=3, pairs=6))
    found = labellings(problem)
    if not found:
        return
    searches = searches_of([problem], 0.004)
    Race(searches, Effort(work=5.0)).run()
    assert sum(place.messages is not None for place in searches[0].places) == 1
    for c in searches[0].archive.candidates:
        least = optimum(found, c.peak * (1 + 1e-9), np.inf)
        assert searches[0].archive.bound(c.peak, np.inf) <= least * (1 + 1e-6)


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


@pytest.mark.filterwarnings("error::RuntimeWarning")
@pytest.mark.parametrize("seed", range(20))
def test_forbidden_labellings_are_repaired_at_finite_prices(seed: int) -> None:
    """A search that stands at one, where memory costs nothing yet, proves nothing false."""
    problem = random_problem(seed, Shape(variables=5, rows=3, pairs=6))
    found = labellings(problem)
    legal = {rows for rows, *_ in found}
    every = product(*(range(len(v)) for v in problem.variables))
    outside = next((rows for rows in every if rows not in legal), None)
    if outside is None or not found:
        return
    search = Search(problem, 0.004)
    search.fastest()
    forbidden = search.consider(np.array(outside))
    assert forbidden.seconds == np.inf
    limit = 0.5 * forbidden.peak
    search._repair(Prices(np.zeros(search.all.net.moments)), forbidden, limit)
    for c in search.archive.cuts:
        assert np.isfinite([c.value, c.bytes_price]).all()
    assert search.archive.bound(limit, np.inf) <= optimum(found, limit, np.inf) + 1e-9


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


def test_of_plans_that_look_the_same_a_front_shows_one() -> None:
    """Also beside the fastest, of which the other differs in the fourth digit."""
    points = np.array(
        [[1.0, 100.0, 1.0], [1.0001, 99.9, 1.0], [1.5, 20.0, 1.0], [1.501, 20.0, 0.9999]]
    )
    assert shown(points) == [0, 2]


def test_the_best_within_limits_is_within_both() -> None:
    rows = np.zeros(1, dtype=np.int64)
    fast, lean, cool = (
        Candidate(rows, *costs) for costs in ((1.0, 9.0, 9.0), (2.0, 3.0, 9.0), (3.0, 9.0, 3.0))
    )
    archive = Archive([cool, lean, fast])
    assert archive.best(9.0) is archive.best(9.0, 9.0) is fast
    assert archive.best(3.0) is lean and archive.best(9.0, 3.0) is cool
    assert archive.best(3.0, 3.0) is None


# Several networks


@pytest.mark.parametrize("seed", range(6))
def test_several_networks_make_one_front(seed: int) -> None:
    """Of all of them the least is found within every peak, and proven."""
    problems = [
        random_problem(10 * seed + k, Shape(variables=5, rows=3, pairs=6)) for k in range(4)
    ]
    every = [x for p in problems for x in labellings(p)]
    assert every
    problems = [p for p in problems if labellings(p)]
    archives = race(problems, Effort(work=20.0))
    points = np.array([c.costs for a in archives for c in a.candidates])
    for k in shown(points):
        _, peak, _ = points[k]
        least = optimum(every, peak * (1 + 1e-9), np.inf)
        proven = min(a.bound(peak, np.inf) for a in archives)
        assert proven <= least * (1 + 1e-6) + 1e-9
        known = points[points[:, 1] <= peak, 0].min()
        assert known <= least * 1.0041 + 1e-9 and known <= proven * 1.0041 + 1e-6


def test_networks_of_one_form_may_differ_in_moments() -> None:
    """As where results of more sizes are counted on a mesh of more devices."""
    problems = [random_problem(1, Shape(times=t, forbidden=0.0)) for t in (4, 6)]
    archives = race(problems, Effort(work=1.0), forms=[0, 0])
    assert all(archive.candidates for archive in archives)


def test_networks_without_a_plan_do_not_end_a_race() -> None:
    pair = Pair(
        0, 1, np.zeros(2, np.int64), np.arange(2), np.full((1, 2), np.inf), np.zeros((1, 2))
    )
    none = Problem((single(2), single(2)), (pair,), 1)
    first, second = race([none, random_problem(1)], Effort(work=1.0))
    assert not first.candidates and second.candidates


def test_any_number_of_threads_finds_the_same() -> None:
    """Networks of one form learn from each other, in the same order whoever is ready first."""
    problems = [random_problem(k, Shape(variables=9, rows=6, pairs=14)) for k in (3, 3, 4, 5)]
    forms = [0, 0, 1, 2]

    def found(threads: int) -> list[list[tuple[float, ...]]]:
        searches = searches_of(problems, 0.0, forms)
        Race(searches, Effort(work=0.5, gap=0.0, threads=threads)).run()
        return [[(*c.costs, *c.rows) for c in s.archive.candidates] for s in searches] + [
            [cut.numbers for cut in s.archive.cuts] for s in searches
        ]

    assert found(1) == found(4) == found(1)


def test_fewer_devices_are_no_rivals_of_more() -> None:
    """A plan on one device that is slower than one on two is searched for all the same."""
    fast, slow = (
        Problem((Variable("v", np.array([s, 2 * s]), np.zeros(2)),), (), 1) for s in (1.0, 5.0)
    )
    searches = searches_of([fast, slow], 0.0)
    Race(searches, Effort(work=1.0), devices=[2, 1]).run()
    assert [min(c.seconds for c in s.archive.candidates) for s in searches] == [1.0, 5.0]


def test_work_ends_a_race_and_the_clock_says_so() -> None:
    problem = random_problem(3, Shape(variables=12, rows=8, pairs=30))
    searches = searches_of([problem], 0.0)
    little = Race(searches, Effort(work=1e-9))
    little.run()
    assert not little.late and searches[0].archive.candidates
    late = Race(searches_of([problem], 0.0), Effort(seconds=0.0))
    late.run()
    assert late.late and late.searches[0].archive.by_clock


@pytest.mark.slow
@pytest.mark.parametrize("work", [0.05, 0.2])
def test_a_race_keeps_to_its_work(work: float, method: str) -> None:
    """But for what each network takes to begin with; no task overruns the rest."""
    problems = [random_problem(k, Shape(variables=30, rows=30, pairs=90)) for k in range(3)]
    begun = searches_of(problems, 0.0)
    Race(begun, Effort(work=1e-9)).run()
    searches = searches_of(problems, 0.0)
    Race(searches, Effort(work=work)).run()
    first, every = (sum(s.work.units for s in some) for some in (begun, searches))
    assert work <= every <= first + 1.3 * work


def test_every_network_has_a_turn_before_one_is_searched_in_depth() -> None:
    problem = random_problem(1, Shape(variables=10, rows=8, pairs=24))
    searches = searches_of([problem] * 3, 0.0)
    turns: list[tuple[float, float, int]] = []
    for k, s in enumerate(searches):

        def close(limits: Limits, known: float, nodes: int, most: float, k: int = k) -> bool:
            turns.append((limits.peak, nodes, k))
            return False  # nothing comes of it: the first stays as promising as the others

        s.close = close  # type: ignore[method-assign]
    Race(searches, Effort(work=0.5)).run()
    deep = next(n for n, (_, nodes, _) in enumerate(turns) if nodes > turns[0][1])
    assert {k for _, _, k in turns[:deep]} == {0, 1, 2}


@pytest.mark.parametrize("seed", range(4))
def test_what_one_network_proves_begins_the_search_of_another_of_its_form(seed: int) -> None:
    """The same rows twice: at the prices of the first one step proves nearly as much."""
    problem = ladder(seed, 20)
    first, second = searches_of([problem] * 2, 1e-4, [0, 0])
    (alone,) = searches_of([problem], 1e-4)
    first.fastest()
    first.leanest()
    peaks = [c.peak for c in first.archive.candidates]
    limits = Limits(0.5 * (min(peaks) + min(first.archive.candidates, key=lambda c: c.costs).peak))
    for _ in range(4):
        first.approach(limits, np.inf)
    for other in (second, alone):
        other.fastest()
        other.approach(limits, np.inf, 0.0)
    shared, own, proven = (s.archive.bound(limits.peak, np.inf) for s in (second, alone, first))
    assert shared >= 0.98 * proven
    assert shared >= own


def test_limits_below_all_plans_wait_where_no_smaller_peak_is_possible(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_search, "SMALL", 0)
    searches = searches_of([ladder(2, 12)], 0.0)
    found = Race(searches, Effort(work=1.0))
    searches[0].fastest()

    def weight() -> float:
        least = min(c.peak for c in searches[0].archive.candidates)
        (below,) = [w for x, known, w in found._open(0, [0]) if x.peak < least and known == np.inf]
        return below

    before = weight()
    searches[0].leanest()
    assert weight() < 1e-3 < before


def test_an_interruption_keeps_what_was_found() -> None:
    problem = random_problem(3, Shape(variables=8, rows=6, pairs=12))
    searches = searches_of([problem], 0.0)

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Race(searches, Effort(), report=interrupt).run()
    assert searches[0].archive.candidates
    assert threading.active_count() < 20


@pytest.mark.parametrize("seed", range(6))
def test_a_search_goes_on_from_what_was_kept(seed: int, method: str) -> None:
    """It knows the plans and bounds, through a file's arrays, and proves no less."""
    problem = random_problem(seed, Shape(variables=7, rows=5, pairs=10))
    if not labellings(problem):
        return
    (before,) = race([problem], Effort(work=1e-3, gap=0.0))
    kept = archive_from(archive_arrays(before))
    again = Search(problem, 0.0)
    again.take_up(kept)
    Race([again], Effort(work=2.0, gap=0.0)).run()
    for c in before.candidates:
        best = again.archive.best(c.peak, c.joules)
        assert best is not None and best.seconds <= c.seconds
    for _, _, joules, profile in labellings(problem):
        known = before.bound(max(profile), joules)
        assert known <= again.archive.bound(max(profile), joules)


@pytest.mark.parametrize("seed", range(12))
def test_only_the_fastest_within_limits_is_asked_for(seed: int) -> None:
    problem = random_problem(seed, Shape(variables=5, rows=4, pairs=6, forbidden=0.0))
    found = labellings(problem)
    peaks = sorted({max(p) for *_, p in found})
    limit = Limits(peaks[len(peaks) // 3])
    searches = searches_of([problem], 0.004)
    Race(searches, Effort(work=5.0, front=False), limit).run()
    best = searches[0].archive.best(limit.peak)
    assert best is not None and best.peak <= limit.peak


def test_the_fastest_plans_leave_work_for_plans_of_less_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each network may take its share of two fifths; all of it, if nothing else is asked for."""
    monkeypatch.setattr(engine_search, "SMALL", 0)
    given: list[float] = []

    def fastest(search: Search, known: float = np.inf, most: float = np.inf) -> None:
        given.append(most)

    monkeypatch.setattr(Search, "fastest", fastest)
    for front in (True, False):
        searches = searches_of([ladder(k, 12) for k in range(4)], 0.0)
        for network in range(4):
            Race(searches, Effort(work=20.0, front=front))._fastest(network)()
    assert given[:4] == pytest.approx([2.0] * 4) and given[4:] == pytest.approx([5.0] * 4)


def test_a_network_of_a_form_begins_its_smallest_peak_where_another_ended() -> None:
    """One core of one network is searched; the other network finds a small peak at its prices."""
    first, second = searches_of([ladder(3, 20)] * 2, 1e-4, [0, 0])
    for s in (first, second):
        s.fastest()
    before = [s.work.units for s in (first, second)]
    first.leanest()
    second.leanest()
    spent = [s.work.units - b for s, b in zip((first, second), before, strict=True)]
    assert spent[1] < 0.5 * spent[0]
    least = [min(c.peak for c in s.archive.candidates) for s in (first, second)]
    assert least[1] <= 1.05 * least[0]
    assert least[1] < min(second.archive.candidates, key=lambda c: c.costs).peak


def test_limits_close_to_vain_ones_are_not_tried(method: str) -> None:
    """In large networks, where cuts hold for all limits; small ones are closed at each."""
    race = Race(searches_of([ladder(3, 12)] * 2, 0.0), Effort(work=1.0))
    race._vain = {Task(0, Limits(100.0, np.inf), 0, 1.0)}
    vain = [
        race._is_vain(Task(network, Limits(peak, joules), 0, 1.0))
        for network, peak, joules in (
            (0, 100.0, np.inf),
            (0, 101.0, np.inf),
            (0, 103.0, np.inf),
            (0, 101.0, 5.0),
            (1, 100.0, np.inf),
        )
    ]
    assert vain == [True, method == "bounded by prices", False, False, False]
