"""Fronts of cost against memory: what is there, and what is proven of what is not."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.__main__ import main
from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import Choice, Usage
from tapestry_egg.extract.gym.formats import iopddl
from tapestry_egg.extract.gym.fronts import Sweep
from tapestry_egg.extract.gym.memory_front import _Work, memory_front, most_peak
from tapestry_egg.parallel.executors import INTERRUPTED
from tests.gym import and_or, networks

NOTHING = np.zeros(0, dtype=np.int64)


def every(document: dict[str, Any]) -> list[tuple[int, int]]:
    """Cost and peak of all answers, whatever the limit."""
    found = networks.answers(document, 10**30)
    return [(networks.cost(document, x), networks.peak(document, x)) for x in found]


def true_front(values: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that no other dominates, each once, by rising cost."""
    return sorted(
        {a for a in values if not any(b[0] <= a[0] and b[1] <= a[1] and b != a for b in values)}
    )


def covers(points: list[tuple[int, int]], value: tuple[int, int], epsilon: float) -> bool:
    """Whether a point dominates a value once both its numbers grow by a share."""
    share = 1 + epsilon + 1e-9
    return any(c <= share * value[0] and m <= share * value[1] for c, m in points)


def joined_and_forbidden() -> dict[str, Any]:
    """Two nodes that one table makes one, while another forbids a row of what they make."""
    never = networks.INFINITE
    edges = [(0, 1, [never, 0, never, 0, 0, never]), (0, 1, [0, never, never, never, 0, never])]
    return networks.document([[0, 0], [0, 0]], [[0, 0], [0, 0, 0]], [[0, 0], [0, 0, 0]], edges, 0)


@pytest.mark.slow
@example(document=networks.document([], [], [], [], 3))
@example(document=joined_and_forbidden())
@given(networks.problems())
@settings(max_examples=40, deadline=None)
def test_small_fronts_are_whole(document: dict[str, Any]) -> None:
    front = memory_front(iopddl.read(document, ""), 20.0)
    values = every(document)
    assert [p.values for p in front] == true_front(values)
    if values:
        assert front.exact and all(p.gap == 0.0 for p in front)
        for p in front:
            rows = tuple(iopddl.answer(iopddl.read(document, ""), p.answer))
            assert p.values == (networks.cost(document, rows), networks.peak(document, rows))
    else:
        assert front.reason


def ladder(count: int, seed: int) -> dict[str, Any]:
    """Nodes in two rows, joined along and across, whose cheap strategies are the heavy ones."""
    rng = np.random.default_rng(seed)
    ends = [(i, i + 2) for i in range(count - 2)] + [(i, i + 1) for i in range(0, count - 1, 2)]
    edges = [(a, b, rng.integers(0, 30, 16).tolist()) for a, b in ends]
    usages = np.sort(rng.integers(1, 40, (count, 4)), axis=1)
    costs = np.sort(rng.integers(0, 90, (count, 4)), axis=1)[:, ::-1]
    spans = [[i // 2, i // 2 + 3] for i in range(count)]
    return networks.document(spans, costs.tolist(), usages.tolist(), edges, 150)


@pytest.mark.slow
def test_what_a_cut_front_says_of_others_holds() -> None:
    document = ladder(7, 5)
    values = every(document)
    for seconds in (0.0, 0.15, 0.4, 20.0):
        front = memory_front(iopddl.read(document, ""), seconds)
        points = [p.values for p in front]
        # A machine that stands still meanwhile finds nothing in time, and says so.
        assert set(points) <= set(values)  # type: ignore[arg-type]
        assert points or (front.reason and seconds < 1.0)
        for p in front:
            assert p.bound <= min(c for c, m in values if m <= p.values[1])
        if front.epsilon < float("inf"):
            assert all(covers(points, v, front.epsilon) for v in values)  # type: ignore[arg-type]


@pytest.mark.slow
def test_a_large_front_goes_from_the_least_memory_to_the_least_cost() -> None:
    document = ladder(120, 1)
    problem = iopddl.read(document, "")
    front = memory_front(problem, 4.5)
    usages = document["problem"]["nodes"]["usages"]
    lightest = networks.peak(document, tuple(int(np.argmin(u)) for u in usages))
    peaks = [p.values[1] for p in front]
    assert min(peaks) == lightest
    assert len(front) > 2 and front.epsilon < float("inf")
    for p in front:
        rows = tuple(iopddl.answer(problem, p.answer))
        assert p.values == (networks.cost(document, rows), networks.peak(document, rows))


def test_a_problem_without_a_limit_has_no_such_front() -> None:
    document = networks.document([[0, 2]], [[1, 2]], [[5, 6]], [], 12)
    problem = replace(iopddl.read(document, ""), usage=Usage())
    with pytest.raises(ExtractError, match="needs a limit"):
        memory_front(problem, 1.0)


@pytest.mark.slow
def test_an_interrupted_front_keeps_its_points(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, limits = _Work.visit, []

    def visit(self: _Work, limit: int, share: float) -> None:
        limits.append(limit)
        if len(limits) == 3:
            raise KeyboardInterrupt
        whole(self, limit, 0.01)

    monkeypatch.setattr(_Work, "visit", visit)
    front = memory_front(iopddl.read(ladder(60, 2), ""), 60.0)
    assert front.notes == (INTERRUPTED,)
    assert len(limits) == 3 and len(front) > 1


def test_the_most_that_can_be_used_is_summed_exactly() -> None:
    document = networks.document(
        [[0, 2], [1, 3], [1, 2]], [[0, 0]] * 3, [[1, 9], [2**62, 3], [2**62, 5]], [], 1
    )
    problem = iopddl.read(document, "")
    assert most_peak(problem) == 2**63 + 9
    assert evaluate(problem, Choice(np.array([0, 2, 5]))).peak == 2**62 + 6


@pytest.mark.slow
def test_the_command_prints_the_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = networks.document([[0, 3], [1, 4]], [[9, 0]] * 2, [[1, 10]] * 2, [], 20)
    (tmp_path / "two.json").write_text(json.dumps(document))
    arguments = [str(tmp_path / "two.json"), "--front", "--json", "--progress", "--seconds", "3"]
    assert main([*arguments, "-o", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    front = json.loads(printed.out)
    assert front["objectives"] == ["cost", "peak"] and front["exact"]
    points = [(p["values"], p["choices"]) for p in front["points"]]
    assert [v for v, _ in points] == [[0, 20], [9, 11], [18, 2]]
    assert sorted(points[1][1]) == [0, 1]
    assert "gap" in printed.err
    assert json.loads((tmp_path / "small.front.json").read_text())["points"] == front["points"]


# What is known of a front, against all answers.


MOST = 9
NO_CHOICE = Choice(np.zeros(0, dtype=np.int64))
Answer = tuple[int, int]  # cost, peak
ANSWERS = st.lists(st.tuples(st.integers(-4, 20), st.integers(1, MOST)), min_size=1, max_size=12)


def least(answers: list[Answer], limit: int) -> float:
    """The least cost of the answers with a peak of at most `limit`."""
    return min((cost for cost, peak in answers if peak <= limit), default=math.inf)


def sweep_of(answers: list[Answer]) -> Sweep:
    """A sweep that has found some answers and proved nothing."""
    found = {(peak, cost): NO_CHOICE for cost, peak in answers}
    problem = and_or.problem_of([[(1, [])]], [0])
    return Sweep(problem, MOST, 1e9, found=dict(found))


@st.composite
def known(draw: st.DrawFn) -> tuple[list[Answer], Sweep]:
    """All answers, and a sweep that knows some of them and some limits."""
    answers = draw(ANSWERS)
    sweep = sweep_of(draw(st.lists(st.sampled_from(answers), max_size=8)))
    for limit, slack in draw(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, 3)))):
        sweep.prove(least(answers, limit) - slack, limit)
    return answers, sweep


@given(known())
def test_known_answers_grown_by_the_widest_gap_dominate_all(
    case: tuple[list[Answer], Sweep],
) -> None:
    answers, sweep = case
    gaps = sweep.gaps()
    epsilon = gaps[0].epsilon if gaps else 0.0
    for cost, peak in answers:
        assert math.isinf(epsilon) or any(
            v <= cost + epsilon * abs(cost) + 1e-9 and k <= peak * (1 + epsilon) + 1e-9
            for k, v in sweep.points()
        )


@given(known())
def test_what_is_missing_lies_in_a_gap(case: tuple[list[Answer], Sweep]) -> None:
    answers, sweep = case
    for cost, peak in answers:
        if not any(v <= cost and k <= peak for k, v in sweep.points()):
            assert any(g.low[0] <= peak < g.high[0] and cost < g.low[1] for g in sweep.gaps())


@given(known())
def test_points_have_bounds_below_every_answer_of_no_more(
    case: tuple[list[Answer], Sweep],
) -> None:
    answers, sweep = case
    front = sweep.front(lambda: None)
    expected = [(v, k) for k, v in sweep.points()]
    assert [p.values for p in front] == sorted(expected)
    assert len(expected) == len(pareto.non_dominated(expected))
    for p in front:
        assert p.bound <= least(answers, int(p.values[1]))


def test_the_gap_that_is_searched_next_is_the_widest_and_tries_in_vain_peak() -> None:
    sweep = sweep_of([(20, 2), (4, 5), (3, 9)])
    sweep.prove(math.inf, 1)
    sweep.prove(2, MOST)
    assert sorted((g.low[0], g.high[0]) for g in sweep.gaps()) == [(2, 5), (5, 9), (9, 10)]
    visited = []

    def visit(gap: object, share: float) -> None:
        limit = gap.limit  # type: ignore[attr-defined]
        visited.append((limit, round(share, 9)))
        sweep.tries[limit] = sweep.tries.get(limit, 0) + 1
        if len(visited) == 6:
            sweep.prove(20, 4)
            sweep.prove(4, 8)
            sweep.prove(3, MOST)

    sweep.close(visit, 0.1)
    assert visited[0] == (4, 0.1) and len({limit for limit, _ in visited}) > 2
    assert max(share for _, share in visited) > 0.1
    assert not sweep.gaps()


def test_knee_and_hypervolume() -> None:
    front = sweep_of([(3, 3), (5, 2), (9, 1)]).front(lambda: None)
    assert front.knee().values == (5, 2)
    # Below (10, 4): 7*1 + 5*1 + 1*1.
    assert front.hypervolume((10.0, 4.0)) == 13.0


@given(st.lists(st.tuples(*[st.integers(0, 6)] * 3), max_size=8))
def test_hypervolume_counts_the_cells_below_the_reference(
    values: list[tuple[int, int, int]],
) -> None:
    cells = itertools.product(range(5), repeat=3)
    covered = sum(
        any(all(v <= c for v, c in zip(value, cell, strict=True)) for value in values)
        for cell in cells
    )
    assert pareto.hypervolume(values, (5, 5, 5)) == covered


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8))
def test_of_equal_values_the_first_is_kept_and_none_dominated(
    values: list[tuple[int, int]],
) -> None:
    kept = pareto.non_dominated(values)
    for i, v in enumerate(values):
        beaten = any(pareto.dominates(u, v) for u in values) or v in values[:i]
        assert (i in kept) == (not beaten)
