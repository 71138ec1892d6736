"""What is known of a front, against all answers; weighted sums and limits, against enumeration."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg import pareto
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem
from tapestry_egg.extract.gym.egraph.elimination import eliminate
from tapestry_egg.extract.gym.egraph.form import AndOr, working_form
from tapestry_egg.extract.gym.egraph.node_front import weighted
from tapestry_egg.extract.gym.egraph.reductions import (
    feasible,
    keep_derivable,
    keep_reachable,
    reduce,
)
from tapestry_egg.extract.gym.fronts import Sweep
from tests.gym import and_or
from tests.gym.test_and_or import cases

MOST = 9
NOTHING = Choice(np.zeros(0, dtype=np.int64))
Answer = tuple[int, int]  # cost, count
ANSWERS = st.lists(st.tuples(st.integers(-4, 20), st.integers(1, MOST)), min_size=1, max_size=12)


def least(answers: list[Answer], limit: int) -> float:
    """The least cost of the answers with a count of at most `limit`."""
    return min((cost for cost, count in answers if count <= limit), default=math.inf)


def sweep_of(answers: list[Answer]) -> Sweep:
    """A sweep that has found some answers and proved nothing."""
    found = {(count, cost): NOTHING for cost, count in answers}
    problem = and_or.problem_of([[(1, [])]], [0])
    return Sweep(problem, lambda e: e.nodes, MOST, 1e9, 0.0, found=dict(found))


@st.composite
def known(draw: st.DrawFn) -> tuple[list[Answer], Sweep]:
    """All answers, and a sweep that knows some of them, some lines and some limits."""
    answers = draw(ANSWERS)
    sweep = sweep_of(draw(st.lists(st.sampled_from(answers), max_size=8)))
    for price, slack in draw(st.lists(st.tuples(*[st.integers(0, 5)] * 2), max_size=3)):
        line = min(cost + price * count for cost, count in answers)
        sweep.prove(line - slack, price)
    for limit, slack in draw(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, 3)))):
        sweep.prove(least(answers, limit) - slack, most=limit)
    return answers, sweep


@given(known())
def test_known_answers_grown_by_the_widest_gap_dominate_all(
    case: tuple[list[Answer], Sweep],
) -> None:
    answers, sweep = case
    gaps = sweep.gaps()
    epsilon = gaps[0].epsilon if gaps else 0.0
    for cost, count in answers:
        assert math.isinf(epsilon) or any(
            v <= cost + epsilon * abs(cost) + 1e-9 and k <= count * (1 + epsilon) + 1e-9
            for k, v in sweep.points()
        )


@given(known())
def test_what_is_missing_lies_in_a_gap(case: tuple[list[Answer], Sweep]) -> None:
    answers, sweep = case
    for cost, count in answers:
        if not any(v <= cost and k <= count for k, v in sweep.points()):
            assert any(g.low[0] <= count < g.high[0] and cost < g.low[1] for g in sweep.gaps())


@given(known())
def test_points_have_bounds_below_every_answer_of_no_more(
    case: tuple[list[Answer], Sweep],
) -> None:
    answers, sweep = case
    front = sweep.front(lambda: None, "nodes", "none")
    expected = [(v, k) for k, v in sweep.points()]
    assert [p.values for p in front] == sorted(expected)
    assert len(expected) == len(pareto.non_dominated(expected))
    for p in front:
        assert p.bound <= least(answers, int(p.values[1]))


def test_the_gap_that_is_searched_next_is_the_widest_and_tries_in_vain_count() -> None:
    sweep = sweep_of([(20, 2), (4, 5), (3, 9)])
    sweep.prove(math.inf, most=1)
    sweep.prove(2)
    assert sorted((g.low[0], g.high[0]) for g in sweep.gaps()) == [(2, 5), (5, 9), (9, 10)]
    visited = []

    def visit(gap: object, share: float) -> None:
        limit = gap.limit  # type: ignore[attr-defined]
        visited.append((limit, round(share, 9)))
        sweep.tries[limit] = sweep.tries.get(limit, 0) + 1
        if len(visited) == 6:
            sweep.prove(20, most=4)
            sweep.prove(4, most=8)
            sweep.prove(3)

    sweep.close(visit, 0.1)
    assert visited[0] == (4, 0.1) and len({limit for limit, _ in visited}) > 2
    assert max(share for _, share in visited) > 0.1
    assert not sweep.gaps()


def whole_form(problem: ChoiceProblem) -> AndOr | None:
    """The form of cost and number of nodes; None where a root cannot be had."""
    form = working_form(problem, counted=True)
    keep_derivable(form)
    if not feasible(form):
        return None
    keep_reachable(form)
    return form


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (3, 2), (1, 50)])
@cases(60)
@given(and_or.problems("signed"))
def test_weighted_sums_are_those_of_the_front(
    weights: tuple[int, int], problem: ChoiceProblem
) -> None:
    form = whole_form(problem)
    if form is None or not form.home:
        return
    a, b = weights
    best = min(a * cost + b * count for cost, count in and_or.front(problem))
    found = eliminate(weighted(form, a, b), time.perf_counter() + 60.0, widest=30)
    assert found is not None and found.points[0][0] == (best,)


@cases(200)
@given(and_or.problems("positive"), st.integers(0, 8))
def test_limits_rule_out_only_what_breaks_them(problem: ChoiceProblem, limit: int) -> None:
    form = whole_form(problem)
    if form is None:
        return
    expected = [v for v in and_or.front(problem) if v[1] <= limit]
    end = time.perf_counter() + 60.0
    if not reduce(form, end, None, limit):
        assert not expected
        return
    found = eliminate(form, end, widest=30)
    assert found is not None
    assert [v for v, _ in found.points if v[1] <= limit] == expected
