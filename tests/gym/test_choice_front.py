"""Fronts of cost and number of selected nodes, against enumeration."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg import pareto
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import Choice, ChoiceProblem, Pairs
from tapestry_egg.extract.gym.egraph.node_front import node_front
from tests.gym import and_or
from tests.gym.test_and_or import cases, hard
from tests.tiers import tiers


def check(problem: ChoiceProblem, widest: int) -> None:
    """All non-dominated values, each with an answer that has them."""
    found = node_front(problem, seconds=60.0, widest=widest)
    assert [p.values for p in found] == and_or.front(problem)
    if not len(found):
        assert found.reason
        return
    assert found.exact
    for p in found:
        again = evaluate(problem, p.answer)
        assert again.feasible and (again.cost, again.nodes) == p.values and p.gap == 0.0


@pytest.mark.slow
@cases(400)
@given(and_or.problems("positive"))
def test_elimination_finds_the_whole_front(problem: ChoiceProblem) -> None:
    check(problem, widest=30)


@pytest.mark.slow
@cases(200)
@given(st.one_of(and_or.problems("real"), and_or.problems("signed"), and_or.problems("huge")))
def test_the_front_of_other_costs(problem: ChoiceProblem) -> None:
    check(problem, widest=30)


@pytest.mark.slow
@cases(150)
@given(and_or.problems("positive", most=5))
def test_programs_under_limits_find_the_whole_front(problem: ChoiceProblem) -> None:
    check(problem, widest=-1)


@pytest.mark.slow
@cases(75)
@given(and_or.problems("signed", most=5))
def test_programs_under_limits_find_the_front_below_zero(problem: ChoiceProblem) -> None:
    check(problem, widest=-1)


def rich(size: int, seed: int, back: float) -> ChoiceProblem:
    """Every class has a dear node that needs nothing and cheap ones that need others, a share
    `back` of them any and the rest later ones: the front has many points."""
    draw = random.Random(seed)

    def others(c: int, count: int) -> list[int]:
        return [
            draw.randint(1, size) if draw.random() < 0.1 else min(size, c + 1 + draw.randrange(5))
            for _ in range(count)
        ]

    nodes: list[list[tuple[float | int, list[int]]]] = [
        [
            (draw.randint(2, 4) * (size - c) + draw.randint(0, 5), []),
            (draw.randint(1, 6), others(c + 1, 1)),
            (draw.randint(0, 3), others(c + 1, 2)),
        ]
        for c in range(size)
    ]
    return and_or.problem_of([[(0, [1, 2, 3])], *nodes], [0])


@pytest.mark.parametrize("back", [0.1, 0.6])
@pytest.mark.parametrize("seed", tiers(range(18), usual=2, fast=6))
def test_programs_agree_with_elimination(seed: int, back: float) -> None:
    problem = rich(14, seed, back)
    by_tables = node_front(problem, seconds=60.0, widest=30)
    by_programs = node_front(problem, seconds=60.0, widest=-1)
    assert by_tables.exact and by_programs.exact
    assert [p.values for p in by_programs] == [p.values for p in by_tables]


def example() -> ChoiceProblem:
    """Cheap with many nodes, or dear with few: (3, 3), (5, 2), (9, 1)."""
    return and_or.problem_of(
        [[(1, [1, 2]), (4, [2]), (9, [])], [(1, [])], [(1, [])]],
        [0],
    )


def test_a_front_without_answers_says_why() -> None:
    front = node_front(and_or.problem_of([[(1, [1])], [(math.inf, [])]], [0]))
    assert front.exact and not front.points and "root 0 cannot be had" in front.reason
    with pytest.raises(ExtractError, match="root 0 cannot be had"):
        front.knee()


def test_knee_and_hypervolume() -> None:
    front = node_front(example())
    assert [p.values for p in front] == [(3, 3), (5, 2), (9, 1)]
    assert front.knee().values == (5, 2)
    # Below (10, 4): 7*1 + 5*1 + 1*1.
    assert front.hypervolume((10.0, 4.0)) == 13.0


def test_a_front_as_data_says_values_bounds_and_choices() -> None:
    def chosen(answer: Choice) -> dict[str, object]:
        return {"choices": answer.names(example())}

    document = json.loads(json.dumps(node_front(example()).document(chosen)))
    assert document["exact"] and document["epsilon"] == 0.0
    assert document["points"][1] == {
        "values": [5, 2],
        "bound": 5,
        "choices": {"0": "0.1", "2": "2.0"},
    }


@pytest.mark.slow
def test_a_front_cut_short_certifies_its_distance() -> None:
    exact = node_front(hard(7), seconds=60.0)
    assert exact.exact and exact.method == "milp" and len(exact) > 1
    short = node_front(hard(7), seconds=0.3)
    for point in exact:
        cost, count = (float(v) for v in point.values)
        # Some point here is as good, when the exact one's values grow by epsilon.
        assert math.isinf(short.epsilon) or any(
            p.values[0] <= cost * (1 + short.epsilon) + 1e-9
            and p.values[1] <= count * (1 + short.epsilon) + 1e-9
            for p in short
        )
    for p in short:
        better = [q.values[0] for q in exact if q.values[1] <= p.values[1]]
        assert not better or p.bound <= min(better)


def test_fronts_are_for_problems_without_pairs() -> None:
    problem = example()
    table = np.zeros(3, dtype=np.int64)
    pairs = Pairs(np.array([0]), np.array([1]), np.array([0, 3]), table, np.ones(3, dtype=np.bool_))
    with pytest.raises(ExtractError, match="without pairs"):
        node_front(replace(problem, pairs=pairs))


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
