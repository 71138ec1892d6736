"""What is known of a front, against all answers."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg import pareto
from tapestry_egg.extract.gym.choices import Choice
from tapestry_egg.extract.gym.fronts import Sweep
from tests.gym import and_or

MOST = 9
NOTHING = Choice(np.zeros(0, dtype=np.int64))
Answer = tuple[int, int]  # cost, peak
ANSWERS = st.lists(st.tuples(st.integers(-4, 20), st.integers(1, MOST)), min_size=1, max_size=12)


def least(answers: list[Answer], limit: int) -> float:
    """The least cost of the answers with a peak of at most `limit`."""
    return min((cost for cost, peak in answers if peak <= limit), default=math.inf)


def sweep_of(answers: list[Answer]) -> Sweep:
    """A sweep that has found some answers and proved nothing."""
    found = {(peak, cost): NOTHING for cost, peak in answers}
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
