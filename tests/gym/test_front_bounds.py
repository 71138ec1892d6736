"""What is known of a front, against all answers; weighted sums and limits, against enumeration."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg import pareto
from tapestry_egg.extract.gym.choice_front import with_node_count
from tapestry_egg.extract.gym.choices.choices import ChoiceProblem
from tapestry_egg.extract.gym.dag.egraph.form import AndOr, working_form
from tapestry_egg.extract.gym.dag.egraph.greedy import Improvement
from tapestry_egg.extract.gym.dag.egraph.reductions import (
    feasible,
    keep_derivable,
    keep_reachable,
    reduce,
)
from tapestry_egg.extract.gym.dag.egraph.tree_elimination import eliminate
from tapestry_egg.extract.gym.dag.front_bounds import FrontBounds, Point
from tapestry_egg.extract.gym.dag.lazy_milp import Record
from tapestry_egg.extract.gym.dag.weighted_sum import Relaxation, weighted
from tests.gym import and_or
from tests.gym.test_and_or import cases

MOST = 9
POINTS = st.lists(st.tuples(st.integers(-4, 20), st.integers(0, MOST)), min_size=1, max_size=12)


def least(answers: list[Point], limit: int) -> float:
    """The least cost of the answers with a count of at most `limit`."""
    return min((cost for cost, count in answers if count <= limit), default=math.inf)


@st.composite
def known(draw: st.DrawFn) -> tuple[list[Point], FrontBounds]:
    """All answers, and bounds that know some of them, some lines and some limits."""
    answers = draw(POINTS)
    bounds = FrontBounds(MOST)
    for point in draw(st.lists(st.sampled_from(answers), max_size=8)):
        bounds.offer(point)
    for a, b, slack in draw(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=3)):
        if a or b:
            bounds.line(a, b, min(a * cost + b * count for cost, count in answers) - slack)
    for limit, slack in draw(st.lists(st.tuples(st.integers(0, MOST), st.integers(0, 3)))):
        bounds.limited(limit, least(answers, limit) - slack)
    return answers, bounds


@pytest.mark.slow
@given(known())
def test_bounds_are_below_every_answer(case: tuple[list[Point], FrontBounds]) -> None:
    answers, bounds = case
    assert all(bounds.lower[k] <= least(answers, k) for k in range(MOST + 1))
    assert sorted(bounds.lower, reverse=True) == bounds.lower


@given(known())
def test_what_is_missing_lies_in_a_region(case: tuple[list[Point], FrontBounds]) -> None:
    answers, bounds = case
    regions = bounds.regions()
    for cost, count in answers:
        if not any(v <= cost and k <= count for v, k in bounds.points):
            (region,) = [r for r in regions if r.first <= count <= r.last]
            assert region.left is None or (cost < region.left[0] and count >= region.left[1])
            assert region.right is None or count < region.right[1]


@given(known())
def test_known_answers_grown_by_epsilon_dominate_all(
    case: tuple[list[Point], FrontBounds],
) -> None:
    answers, bounds = case
    epsilon = bounds.epsilon()
    for cost, count in answers:
        assert math.isinf(epsilon) or any(
            v <= cost + epsilon * abs(cost) + 1e-9 and k <= count + epsilon * max(count, 1) + 1e-9
            for v, k in bounds.points
        )


@given(known())
def test_epsilon_is_the_least_that_the_bounds_allow(
    case: tuple[list[Point], FrontBounds],
) -> None:
    _, bounds = case

    def share(point: Point, k: int) -> float:
        bound = bounds.lower[k]
        if bound <= 0 < point[0]:
            return math.inf
        return max(0.0, (point[1] - k) / max(k, 1), pareto.excess(point[0], bound))

    limits = [k for k in range(MOST + 1) if bounds.lower[k] < math.inf]
    expected = max(
        (min((share(p, k) for p in bounds.points), default=math.inf) for k in limits), default=0.0
    )
    if not bounds.points:
        expected = math.inf
    assert bounds.epsilon() == expected


@given(POINTS)
def test_offered_points_stay_where_none_is_as_good(answers: list[Point]) -> None:
    bounds = FrontBounds(MOST)
    for point in answers:
        seen = bounds.dominated(point)
        assert bounds.offer(point) is not seen
    kept = [answers[i] for i in pareto.non_dominated(answers)]
    assert sorted(bounds.points) == kept
    assert [count for _, count in bounds.points] == sorted({count for _, count in kept})


@given(POINTS)
def test_a_closed_front_is_open_nowhere(answers: list[Point]) -> None:
    bounds = FrontBounds(MOST)
    bounds.close(answers)
    assert bounds.lower == [least(answers, k) for k in range(MOST + 1)]
    for point in answers:
        bounds.offer(point)
    assert bounds.regions() == [] and bounds.epsilon() == 0.0


def test_bounds_round_up_to_what_costs_can_be() -> None:
    bounds = FrontBounds(4, step=10, offset=3)
    bounds.limited(2, 14)
    assert bounds.lower == [23, 23, 23, -math.inf, -math.inf]
    bounds.line(2, 10, 60)  # at 0 and 1: 30 and 25
    assert bounds.lower == [33, 33, 23, 23, 13]
    whole = FrontBounds(2)
    whole.line(2, 1, 4)  # 2, 1.5 and 1
    assert whole.lower == [2, 2, 1]


def test_where_ends_are_missing_one_objective_counts() -> None:
    bounds = FrontBounds(6)
    assert [r.weights for r in bounds.regions()] == [(0, 1)]
    bounds.offer((9, 2))
    bounds.offer((3, 5))
    assert [r.weights for r in bounds.regions()] == [(0, 1), (1, 2), (1, 0)]


def whole_form(problem: ChoiceProblem) -> AndOr | None:
    """The form of cost and number of nodes; None where a root cannot be had."""
    form = working_form(with_node_count(problem))
    keep_derivable(form)
    if not feasible(form):
        return None
    keep_reachable(form)
    return form


@pytest.mark.slow
@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (3, 2), (1, 50)])
@cases(60)
@given(and_or.problems("signed"))
def test_relaxations_of_weighted_sums_are_bounds(
    weights: tuple[int, int], problem: ChoiceProblem
) -> None:
    """One relaxation, under several weights; what it says is too dear is in no better answer."""
    form = whole_form(problem)
    if form is None or not form.home:
        return
    a, b = weights
    best = min(a * cost + b * count for cost, count in and_or.front(problem))
    end = time.perf_counter() + 60.0
    relaxation = Relaxation(form, end)
    for turn in (weights, (b, a), weights):
        sums = weighted(form, turn)
        found = relaxation.solve(Improvement(sums, 0), Record(lambda v, p: None), end, 0)
    assert found.bound <= best
    for value in (best + 1, best + 5):
        rest = weighted(form, weights)
        rest.remove(relaxation.dear(found, value))
        left = eliminate(rest, end, widest=30)
        assert left is not None and left.points[0][0] == (best,)


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
