"""Searches by executors: what workers share, what the loss of one costs, what an end keeps."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tapestry_egg.extract.problem.problem import Pair, Problem, Variable
from tapestry_egg.extract.search import worker
from tapestry_egg.extract.engine.archive import Archive
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits
from tapestry_egg.extract.search.worker import search_all, so_far
from tapestry_egg.parallel.executors import INTERRUPTED, Processes
from tests.extract.random_problems import Shape, random_problem, single
from tests.extract.test_search_parts import ladder
from tests.parallel.worker_calls import Inline

BRIEF = Effort(prices=2, steps=1, moves=2, seconds=0.6)


def endless(seed: int) -> Problem:
    """A ladder too long to be solved exactly, so that a search takes the time it is given."""
    problem = ladder(seed, 40)
    large = Variable("large", np.zeros(4000), np.zeros(4000))
    return replace(problem, variables=(*problem.variables, large))


def sound(problem: Problem, archive: Archive) -> bool:
    """Whether an archive's plans cost what they say, and its bounds lie below them."""
    for c in archive.candidates:
        seconds, joules, profile = problem.evaluate(c.rows)
        assert c.costs == pytest.approx((seconds, float(profile.max()), joules))
        assert archive.bound(c.peak, c.joules) <= c.seconds * (1 + 1e-6) + 1e-9
    return bool(archive.candidates)


@pytest.mark.slow
def test_searches_side_by_side_find_what_is_true_here() -> None:
    """In processes of their own, large problems give what they give here."""
    shape = Shape(variables=40, rows=60, pairs=60, forbidden=0.0)
    problems = [random_problem(seed, shape) for seed in (5, 6)]
    problems = [replace(p, variables=(*p.variables, single(4000))) for p in problems]
    archives = search_all(problems, replace(BRIEF, moves=3, seconds=1.0), workers=2).archives
    for problem, archive in zip(problems, archives, strict=True):
        sound(problem, archive)


@pytest.mark.slow
def test_every_problem_is_searched_in_parts_and_from_all_seeds() -> None:
    problems = [ladder(k, 6) for k in (1, 2)]
    inline = Inline()
    found = search_all(problems, BRIEF, executor=inline, seeds=2)
    assert inline.calls == 4 and found.notes == ()
    assert all(map(sound, problems, found.archives))
    inline = Inline()
    search_all([endless(1)], BRIEF, executor=inline)
    assert inline.calls == 2, "a large problem is two parts, however many workers there are"
    inline = Inline()
    search_all(problems[:1], BRIEF, executor=inline)
    assert inline.calls == 1, "a small one is not"


@pytest.mark.parametrize(("seeds", "work"), [(1, [3.0, 3.0, 2.0]), (2, [3.0, 3.0, 1.0, 1.0])])
def test_parts_and_seeds_of_a_problem_share_its_weight(
    seeds: int, work: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large problem is searched in two parts, or from two seeds, a small one in one part."""
    efforts: list[Effort] = []

    def noted(p: Problem, effort: Effort, *rest: object) -> Archive:
        efforts.append(effort)
        return Archive()

    monkeypatch.setattr(worker, "_here", noted)
    problems = [endless(1), ladder(2, 6)]
    brief = replace(BRIEF, work=8.0)
    search_all(problems, brief, workers=1, seeds=seeds, weights=[3.0, 1.0])
    assert [e.work for e in efforts] == pytest.approx(work)


@pytest.mark.slow
def test_a_lost_worker_costs_its_own_search_which_is_done_again() -> None:
    problems = [ladder(k, 6) for k in (1, 2)]
    inline = Inline(0)
    found = search_all(problems, BRIEF, executor=inline)
    assert inline.calls == 3 and len(found.notes) == 1 and "gone" in found.notes[0]
    assert all(map(sound, problems, found.archives))
    inline = Inline(0, 2)  # and the second time too: it is done here
    found = search_all(problems, BRIEF, executor=inline)
    assert inline.calls == 3 and all(map(sound, problems, found.archives))


@pytest.mark.slow
def test_the_others_go_on_where_a_process_is_killed() -> None:
    problems = [endless(k) for k in (1, 2)]
    killed: list[int] = []

    with Processes(2) as pool:

        def report(archives: Sequence[Archive]) -> None:
            if all(a.candidates for a in archives) and not killed:
                child = min(pool._children, key=lambda c: c.process.pid)
                killed.append(child.process.pid)
                os.kill(child.process.pid, signal.SIGKILL)

        effort = Effort(prices=4, steps=2, seconds=4.0, gap=0.0)
        found = search_all(problems, effort, report=report, executor=pool)
    assert killed and len(found.notes) == 1 and "code -9" in found.notes[0]
    assert all(map(sound, problems, found.archives))


@pytest.mark.slow
@pytest.mark.child
def test_an_interruption_of_processes_keeps_what_they_have() -> None:
    problem = endless(3)

    def report(archives: Sequence[Archive]) -> None:
        if not begun:
            begun.append(time.monotonic())
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()

    begun: list[float] = []
    found = search_all([problem], Effort(seconds=600.0, gap=0.0), report=report, workers=2)
    assert found.interrupted and time.monotonic() - begun[0] < 300
    assert sound(problem, found.archives[0])
    assert found.archives[0].cuts, "bounds come back as well"


def test_an_interruption_here_keeps_what_was_found() -> None:
    problems = [ladder(1, 6), ladder(2, 6)]

    def stop(archives: Sequence[Archive]) -> None:
        raise KeyboardInterrupt

    found = search_all(problems, BRIEF, report=stop, workers=1)
    assert found.notes == (INTERRUPTED,) and found.interrupted
    assert sound(problems[0], found.archives[0]) and not found.archives[1].candidates


def test_an_interruption_before_the_first_plan_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "run", stop)
    with pytest.raises(KeyboardInterrupt):
        search_all([ladder(1, 6)], BRIEF, workers=1)


@pytest.mark.slow
def test_workers_tell_of_improvements_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan and no cut travels twice, and together they are what the search gives."""
    said: list[Archive] = []

    def hear(data: bytes) -> None:
        said.append(worker.archive_from(worker.unpacked(data)))

    monkeypatch.setattr(worker, "tell", hear)
    monkeypatch.setattr(worker, "_OFTEN", 0.0)
    problem = ladder(1, 6)
    sent = worker.packed(worker.problem_arrays(problem))
    final = worker.archive_from(
        worker.unpacked(worker.search_part(sent, {"prices": 2, "seconds": 1.0}, None))
    )
    rows = [tuple(c.rows) for a in said for c in a.candidates]
    assert len(rows) == len(set(rows)) and len(said) > 1
    assert {tuple(c.rows) for c in final.candidates} <= set(rows)
    cuts = [cut for a in said for cut in a.cuts]
    assert cuts == final.cuts[: len(cuts)]


@pytest.mark.slow
def test_a_search_ends_where_nothing_is_gained() -> None:
    problem = endless(1)
    begun = time.perf_counter()
    search = Search(problem, Effort(seconds=600.0, gap=0.0, patience=0.3))
    search.run()
    assert time.perf_counter() - begun < 300
    assert sound(problem, search.archive)


def test_a_search_ends_where_the_gap_is_small() -> None:
    class GoesOn(Exception):
        pass

    class Watched(Search):
        def _balance(self) -> None:
            """Leaves the gaps that there are after the walk."""

        def approach(self, limits: Limits, steps: int) -> None:
            raise GoesOn

    effort = Effort(prices=2, steps=1, seconds=120.0, gap=10.0)
    Watched(ladder(1, 12), effort).run()
    with pytest.raises(GoesOn):
        Watched(ladder(1, 12), replace(effort, gap=0.0)).run()


@pytest.mark.slow
def test_a_limit_on_joules_is_searched_for() -> None:
    problem = ladder(3, 12)
    free = Search(problem, BRIEF).run()
    fastest = min(free.candidates, key=lambda c: c.seconds)
    least = min(c.joules for c in free.candidates)
    limits = Limits(np.inf, 0.5 * (least + fastest.joules))
    assert not limits.hold(fastest)
    asked: list[Limits] = []

    class Watched(Search):
        def approach(self, limits: Limits, steps: int) -> None:
            asked.append(limits)
            super().approach(limits, steps)

    archive = Watched(problem, BRIEF).run(limits)
    assert asked[0] == limits
    assert any(limits.hold(c) for c in archive.candidates)


@pytest.mark.slow
def test_a_limit_that_nothing_meets_has_finite_prices() -> None:
    problem = ladder(3, 12)
    archive = Search(problem, BRIEF).run(Limits(np.inf, 1.0))
    assert sound(problem, archive)
    assert all(np.isfinite(cut.joule_price) for cut in archive.cuts)


@pytest.mark.slow
def test_the_progress_line_tells_best_bound_gap_and_front() -> None:
    archive = Search(ladder(1, 6), BRIEF).run()
    line = so_far([archive])
    assert [word for word in line.split() if word.isalpha()][:1] == ["front"]
    for word in ("front", "best", "bound", "gap"):
        assert f"{word} " in line
    assert "bound -  gap -" in so_far([archive, Archive()])
    assert so_far([Archive()]) == ""


def table(rows: int, variables: int = 2) -> Problem:
    """A problem of one pair with tables of rows × rows entries."""
    rest = [Variable(str(k), np.zeros(1), np.zeros(1)) for k in range(variables - 2)]
    ends = [Variable(end, np.zeros(rows), np.zeros(rows)) for end in "ab"]
    label, costs = np.arange(rows), np.zeros((rows, rows))
    pair = Pair(0, 1, label, label, costs, costs)
    return Problem((*ends, *rest), (pair,), 1)


def test_workers_are_busy_to_the_end() -> None:
    effort = Effort(seconds=12.0)
    assert worker.shares([9.0] * 3, 2, effort) == [6.0, 12.0, 6.0]
    assert worker.shares([9.0] * 2, 2, effort) == [12.0, 12.0]
    large, small, alone = worker.shares([30.0, 10.0, 40.0], 2, effort)
    assert alone == 12.0 and large + small == pytest.approx(12.0) and large > small


def test_time_goes_by_variables_as_well_as_by_entries() -> None:
    """Passes go from variable to variable, however few rows these have."""
    assert worker.weight(table(50)) > worker.weight(table(10)) < worker.weight(table(10, 50))
    assert worker.weight(table(10, 1000)) > 0.9 * worker.weight(table(50, 1000))


def test_large_problems_are_searched_in_parts_beside_small_ones() -> None:
    large, small = table(100), table(40)
    assert worker.divided([large], 2) == [2] and worker.divided([large], 5) == [5]
    assert worker.divided([large, small], 2) == [2, 1]
    assert worker.divided([large, large, small], 2) == [1, 1, 1]
    assert worker.divided([large, large], 8) == [4, 4]
    assert worker.divided([large] * 9, 0.5) == [1] * 9
    once = worker.beginning(large)  # is all that a part would come to
    assert worker.divided([large], 5, 3.5 * once) == [3]
    assert worker.divided([large], 5, 0.5 * once) == [1]


@pytest.mark.slow
def test_what_was_begun_is_gone_on_with_here_or_elsewhere() -> None:
    """Both find the same, the more the larger their share; a lost worker costs nothing known."""
    problems = [ladder(k, 6) for k in (1, 2)]
    effort = replace(BRIEF, seconds=600.0, work=0.02, gap=1e-6)
    begun = search_all(problems, effort, workers=1).archives
    more = replace(effort, work=0.2)
    shares = [3.0, 1.0]
    here = search_all(problems, more, workers=1, begun=begun, weights=shares).archives
    inline = Inline(0)
    there = search_all(problems, more, executor=inline, begun=begun, weights=shares)
    assert inline.calls == 3 and len(there.notes) == 1
    for problem, old, a, b in zip(problems, begun, here, there.archives, strict=True):
        assert sound(problem, a) and a.cuts == b.cuts and len(a.cuts) > len(old.cuts)
        assert a.spent == b.spent > 0
