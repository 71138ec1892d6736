"""Fronts of cost against memory: every point is the best within its limit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.cfn.tradeoff import Point, _bound_at, _mended, memory_front, peak, sweep
from tapestry_egg.extract.check_choices import evaluate
from tapestry_egg.extract.choices import Choice, Usage
from tapestry_egg.extract.formats import iopddl
from tests import networks


@given(networks.problems())
@settings(max_examples=25)
def test_every_point_is_the_best_within_its_limit(document: dict[str, Any]) -> None:
    problem = iopddl.read(document, "")
    limits = [3, 9, 14, 200]
    points = sweep(problem, 40.0, limits=limits, processes=1)
    assert [p.limit for p in points] == sorted(limits, reverse=True)
    for point in points:
        least = networks.least(document, point.limit)
        assert point.proven
        assert (point.value if point.choice is not None else None) == least
        if point.choice is not None:
            rows = tuple(iopddl.answer(problem, point.choice))
            assert point.peak == networks.peak(document, rows) <= point.limit
            assert point.gap == 0.0
        else:
            assert point.reason


def test_by_default_limits_go_from_the_least_reachable_to_what_never_binds() -> None:
    spans = [[0, 3], [1, 4], [2, 5]]
    document = networks.document(spans, [[9, 0]] * 3, [[1, 10]] * 3, [], 20)
    *points, below = sweep(iopddl.read(document, ""), 5.0, processes=1)
    assert points[0].limit == points[0].peak == 30
    assert [(p.limit, p.value) for p in points] == [
        (30, 0), (25, 9), (22, 9), (20, 18), (18, 18), (16, 18), (14, 18), (3, 27),
    ]  # fmt: skip
    assert (below.limit, below.choice, below.proven) == (2, None, True)
    assert "less than 3" in below.reason


def test_answers_of_smaller_limits_count_for_larger_ones() -> None:
    choice = Choice(np.zeros(1, dtype=np.int64))
    far = Point(20, choice, 9.0, 15, 5.0, False)
    near = Point(10, choice, 7.0, 8, 6.0, False)
    high, low = _mended([far, near])
    assert low == near
    assert (high.limit, high.value, high.peak, high.bound) == (20, 7.0, 8, 5.0)


def test_a_bound_at_a_smaller_limit_holds_for_an_answer_that_keeps_it() -> None:
    choice = Choice(np.zeros(1, dtype=np.int64))
    wide, near = Point(20, choice, 7.0, 8, 5.0, False), Point(10, choice, 7.0, 8, 6.0, False)
    low = Point(7, None, float("inf"), 0, float("inf"), True)
    assert _bound_at([wide, near, low], wide) == 6.0


def test_infeasible_limits_say_when_and_how_much() -> None:
    document = networks.document([[0, 2], [1, 4]], [[1, 2], [0]], [[5, 6], [7]], [], 12)
    problem = iopddl.read(document, "")
    low = sweep(problem, 2.0, limits=[11], processes=1)[0]
    assert low.choice is None and low.proven
    assert "time 1" in low.reason and "12" in low.reason
    high = sweep(problem, 2.0, limits=[12], processes=1)[0]
    assert high.choice is not None
    assert evaluate(problem, high.choice).feasible
    assert peak(problem, None) == 13


def test_a_problem_without_a_limit_has_no_such_front() -> None:
    document = networks.document([[0, 2]], [[1, 2]], [[5, 6]], [], 12)
    problem = replace(iopddl.read(document, ""), usage=Usage())
    with pytest.raises(ExtractError, match="one limit"):
        sweep(problem, 1.0)


@pytest.mark.slow
@given(networks.problems())
@settings(max_examples=25)
def test_a_front_of_cost_and_peak_has_no_dominated_point(document: dict[str, Any]) -> None:
    problem = iopddl.read(document, "")
    front = memory_front(problem, 40.0, processes=1)
    every = [
        (networks.cost(document, x), networks.peak(document, x))
        for x in networks.answers(document, 10**9)
    ]
    assert all(p.values in every for p in front)
    assert all(p.values[0] == min(c for c, m in every if m <= p.values[1]) for p in front)
    costs = [p.values[0] for p in front]
    peaks = [p.values[1] for p in front]
    assert costs == sorted(set(costs)) and peaks == sorted(set(peaks), reverse=True)
    if front.epsilon < float("inf"):
        share = 1 + front.epsilon + 1e-9
        for c, m in every:
            assert any(p.values[0] <= share * c and p.values[1] <= share * m for p in front)


def test_a_front_down_to_the_least_memory_says_how_near_it_is_to_all() -> None:
    document = networks.document([[0, 3], [1, 4]], [[9, 1]] * 2, [[1, 10]] * 2, [], 20)
    front = memory_front(iopddl.read(document, ""), 5.0, processes=1)
    assert [p.values for p in front] == [(2, 20), (10, 11), (18, 2)]
    assert front.epsilon < float("inf")


def test_an_interrupted_sweep_keeps_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    from tapestry_egg.extract.cfn import tradeoff

    whole, calls = tradeoff.solve, iter(range(9))

    def interrupted(*given: Any, **named: Any) -> Any:
        if next(calls) == 2:
            raise KeyboardInterrupt
        return whole(*given, **named)

    monkeypatch.setattr(tradeoff, "solve", interrupted)
    document = networks.document([[0, 3]] * 3, [[9, 1]] * 3, [[1, 10]] * 3, [], 30)
    points = sweep(iopddl.read(document, ""), 5.0, limits=[30, 21, 12, 3], processes=1)
    assert [(p.limit, p.value) for p in points] == [(30, 3), (21, 11)]


def test_the_command_prints_the_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = networks.document([[0, 3], [1, 4]], [[9, 0]] * 2, [[1, 10]] * 2, [], 20)
    (tmp_path / "two.json").write_text(json.dumps(document))
    assert main([str(tmp_path / "two.json"), "--front", "--json", "--seconds", "3"]) == 0
    front = json.loads(capsys.readouterr().out)
    assert front["objectives"] == ["cost", "peak"]
    assert [p["values"] for p in front["points"]] == [[0, 20], [9, 11], [18, 2]]
