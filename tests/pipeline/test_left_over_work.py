"""Work that searches leave over is spent where gaps are widest, and never more than was asked."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.extract.search import exact
from tapestry_egg.extract.engine.archive import Archive, Candidate
from tapestry_egg.extract.search.messages.dual import Cut
from tapestry_egg.extract.search.search import Search
from tapestry_egg.extract.search.settling import Effort, Limits
from tapestry_egg.parallel.executors import INTERRUPTED
from tapestry_egg.pipeline import searches
from tapestry_egg.pipeline.searches import _closer, gaps_of
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.progress import Phase
from tests.extract.test_search_parts import ladder

WORK = 0.1


def begun(problem: Problem, work: float) -> Archive:
    search = Search(problem, Effort(prices=2, steps=1, work=work))
    search.small = False  # settled by prices alone
    search.run()
    search.leave()
    return search.archive


def points(archives: Sequence[Archive]) -> Any:
    return np.array([c.costs for a in archives for c in a.candidates])


def closer(
    problems: Sequence[Problem], archives: Sequence[Archive], work: float, limits: Any = None
) -> tuple[str, ...]:
    posed = cast(Any, [SimpleNamespace(problem=p) for p in problems])
    settings = Settings(work=work, gap=1e-3, workers=1)
    nothing = np.zeros((0, 3))
    weights = [1.0] * len(problems)
    return _closer(posed, weights, archives, limits, settings, None, lambda _: None, nothing)


@pytest.mark.slow
def test_gaps_get_narrower_and_bounds_stay_true() -> None:
    problems = [ladder(1, 6)] * 2
    archives = [begun(problems[0], 1e-3), begun(problems[0], 0.02)]
    known = points(archives)
    before = [max(gaps_of(a, known)) for a in archives]
    assert before[0] > 1e-2
    assert closer(problems, archives, WORK) == ()
    after = [max(gaps_of(a, known)) for a in archives]
    assert after[0] < 0.9 * before[0] and after[1] <= before[1]
    # A step that has begun is brought to its end.
    assert sum(a.spent for a in archives) < 2 * WORK
    for problem, archive in zip(problems, archives, strict=True):
        for c in archive.candidates:
            assert problem.evaluate(c.rows)[0] == pytest.approx(c.seconds)
            assert archive.bound(c.peak, c.joules) <= c.seconds * (1 + 1e-9)


def asked_in_turn(
    monkeypatch: pytest.MonkeyPatch, archives: Sequence[Archive], notes: tuple[str, ...] = ()
) -> list[list[tuple[int, float]]]:
    """Which archives each turn goes on with, and with how much work each; it finds nothing."""
    asked: list[list[tuple[int, float]]] = []

    def search(problems: Any, limits: Any, settings: Settings, *_: Any, **given: Any) -> Any:
        begun, weights = given["begun"], given["weights"]
        which = [next(k for k, a in enumerate(archives) if a is b) for b in begun]
        works = [settings.most_work * w / sum(weights) for w in weights]
        asked.append([*zip(which, works, strict=True)])
        return SimpleNamespace(archives=[Archive() for _ in problems], notes=notes)

    monkeypatch.setattr(searches, "search", search)
    return asked


def two_gaps(wide: float, less: float) -> list[Archive]:
    """Archives of two problems, whose bounds leave such gaps below the only plan known."""
    only = [Candidate(np.zeros(1, np.int64), 2.0, 1.0, 1.0)]
    cuts = [Cut(2.0 / (1.0 + gap), 0.0, 0.0) for gap in (wide, less)]
    archives = [Archive(only, cuts[:1], spent=0.01), Archive([], cuts[1:], spent=0.01)]
    gaps = [max(gaps_of(a, points(archives))) for a in archives]
    assert gaps == pytest.approx([wide, less])
    return archives


def test_only_what_is_widest_is_gone_on_with(monkeypatch: pytest.MonkeyPatch) -> None:
    archives, problems = two_gaps(0.25, 0.05), [ladder(1, 6)] * 2
    asked = asked_in_turn(monkeypatch, archives)
    closer(problems, archives, WORK)
    # What did not gain is not tried again, and what is left is for the next.
    assert [[k for k, _ in turn] for turn in asked] == [[0], [1]]
    asked = asked_in_turn(monkeypatch, archives, (INTERRUPTED,))
    assert closer(problems, archives, WORK) == (INTERRUPTED,) and len(asked) == 1
    asked = asked_in_turn(monkeypatch, archives)
    assert closer(problems, archives, 0.02) == () and not asked, "nothing is left over"
    archives[0].by_clock = True
    assert closer(problems, archives, WORK) == () and not asked, "nor is time"


def test_a_turn_has_the_work_for_an_integer_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it has not, it says nothing of what the next may close."""
    archives, problems = two_gaps(0.25, 0.24), [ladder(1, 6)] * 2
    monkeypatch.setattr(exact, "units_below", lambda _: 0.01)
    asked = asked_in_turn(monkeypatch, archives)
    closer(problems, archives, WORK)
    assert [[k for k, _ in turn] for turn in asked] == [[0], [1]]
    assert min(work for turn in asked for _, work in turn) >= 0.02
    monkeypatch.setattr(exact, "COLUMNS", 0)  # prices alone may close gaps with any work
    asked = asked_in_turn(monkeypatch, archives)
    closer(problems, archives, WORK)
    assert [[k for k, _ in turn] for turn in asked] == [[0, 1]]


def test_gaps_count_within_the_limits_alone() -> None:
    problem = ladder(1, 6)
    archive = begun(problem, 1e-3)
    least = min(c.peak for c in archive.candidates)
    before = len(archive.cuts)
    fastest = max(archive.candidates, key=lambda c: c.peak)
    cut = archive.cuts[0]
    archive.cuts.append(type(cut)(fastest.seconds, 0.0, 0.0))  # as if it were proven
    fitting = [c for c in archive.candidates if c.peak <= least]
    assert max(gaps_of(archive, points([Archive(fitting)]))) < 1e-3
    closer([problem, problem], [archive, Archive([], [*archive.cuts])], WORK, Limits(least))
    assert len(archive.cuts) == before + 1


@pytest.mark.parametrize(("small", "work"), [(False, 80.0), (True, 80.0), (False, 8.0)])
@pytest.mark.parametrize("twice", [(True, False, False), (False, False, False)])
def test_some_of_the_work_is_kept_for_where_gaps_are_widest(
    twice: tuple[bool, ...], small: bool, work: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for little work, and for what is small: integer programs are begun only with all the work
    that they take."""
    asked: list[tuple[int, float]] = []

    def search(problems: Any, limits: Any, settings: Settings, *_: Any, **given: Any) -> Any:
        asked.append((len(problems), settings.most_work))
        return SimpleNamespace(archives=[Archive() for _ in problems], notes=(), interrupted=False)

    monkeypatch.setattr(searches, "search", search)
    monkeypatch.setattr(exact, "small", lambda _: small)
    mesh = SimpleNamespace(devices=8)
    rules = [(searches.RULE,) if again else () for again in twice]
    posed = [
        SimpleNamespace(
            problem=ladder(1, 6),
            choices=SimpleNamespace(
                mesh=mesh, schedule=SimpleNamespace(program=SimpleNamespace(rules=own))
            ),
        )
        for own in rules
    ]
    settings = Settings(work=work, workers=1)
    searches.search_in_turn(cast(Any, posed), None, settings, None, lambda _: None)
    all_ = work * (1.0 if small or work < searches._MUCH else searches._FIRST)
    if any(twice):  # a form that computes values twice weighs twice as much
        assert asked == [(1, pytest.approx(all_ / 2)), (2, pytest.approx(all_ / 2))]
    else:
        assert asked == [(3, pytest.approx(all_))]


def test_an_interruption_between_turns_keeps_what_earlier_ones_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = [Candidate(np.zeros(1, np.int64), 2.0, 1.0, 1.0)]
    calls: list[int] = []

    def search(problems: Any, *_: Any, **given: Any) -> Any:
        calls.append(len(problems))
        if len(calls) == fails:
            raise KeyboardInterrupt
        given["take"](SimpleNamespace(archives=[Archive([*only]) for _ in problems], notes=()))

    monkeypatch.setattr(searches, "search", search)
    schedule = SimpleNamespace(program=SimpleNamespace(rules=()))
    choices = SimpleNamespace(schedule=schedule)
    posed = cast(Any, [SimpleNamespace(problem=ladder(1, 6), choices=choices) for _ in range(2)])
    settings, fails = Settings(work=1.0, workers=1), 2
    found = searches.search_in_turn(posed, None, settings, None, lambda _: None, raced=[1])
    assert calls == [1, 1] and found.interrupted
    assert [len(a.candidates) for a in found.archives] == [1, 0]
    calls.clear()
    fails = 1
    with pytest.raises(KeyboardInterrupt):
        searches.search_in_turn(posed, None, settings, None, lambda _: None, raced=[1])


@pytest.mark.slow
def test_what_is_found_is_taken_before_it_is_told() -> None:
    """An interruption that comes while it is told loses nothing."""
    posed = cast(Any, [SimpleNamespace(problem=ladder(1, 6))])
    taken: list[Any] = []

    def tell(phase: Phase) -> None:
        if phase.fraction == 1.0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        searches.search(posed, None, Settings(work=1.0, workers=1), None, tell, take=taken.append)
    assert [len(found.archives) for found in taken] == [1] and taken[0].archives[0].candidates
