"""Extraction from AND-OR problems, against enumeration of all answers."""

from __future__ import annotations

import gc
import itertools
import math
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tapestry_egg.extract.gym.check import evaluate
from tapestry_egg.extract.gym.choices import ChoiceProblem
from tapestry_egg.extract.gym.egraph.closure import closure
from tapestry_egg.extract.gym.egraph.elimination import eliminate
from tapestry_egg.extract.gym.egraph.form import working_form
from tapestry_egg.extract.gym.egraph.greedy import Improvement, acyclic, cost_of, greedy_dag
from tapestry_egg.extract.gym.egraph.program import LinearProgram, Model, dual_bound
from tapestry_egg.extract.gym.egraph.reductions import (
    feasible,
    keep_derivable,
    keep_reachable,
    merge_series,
    reduce,
)
from tapestry_egg.extract.gym.egraph.search import Annealing, Record, Search, split
from tapestry_egg.extract.gym.extraction import Extraction, extract
from tapestry_egg.parallel.deadline import TimeUp, ends_at, held
from tests.gym import and_or

LATER = 1e9  # no deadline


def cases(count: int) -> settings:
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )


def check(problem: ChoiceProblem) -> None:
    """The answer is the best there is, it says so, and it is legal."""
    found = extract(problem, seconds=60.0)
    best = and_or.best(problem)
    if best is None:
        assert not found.feasible and "root" in found.reason
        return
    assert found.choice is not None and found.proven and found.gap == 0.0
    assert found.value == best
    assert found.bound == best
    assert evaluate(problem, found.choice).feasible


def on_problems(costs: str, count: int, checked: Callable[[ChoiceProblem], None]) -> None:
    """Check so many problems with costs of one kind."""

    @cases(count)
    @given(and_or.problems(costs))
    def run(problem: ChoiceProblem) -> None:
        checked(problem)

    run()


# The automatic choice ends in elimination on problems so small.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("costs", "count"),
    [
        ("real", 750),
        *(
            pytest.param(*kind, marks=pytest.mark.long)
            for kind in (("positive", 2250), ("signed", 750), ("huge", 500))
        ),
    ],
)
def test_the_automatic_answer_is_the_best(costs: str, count: int) -> None:
    """Real costs are compared exactly, those below zero are gains, and those near a quintillion are
    told apart."""
    on_problems(costs, count, check)


@pytest.mark.slow
@cases(750)
@given(and_or.problems("positive"))
def test_elimination_without_reductions_is_exact(problem: ChoiceProblem) -> None:
    form = working_form(problem)
    keep_derivable(form)
    if not feasible(form):
        assert and_or.best(problem) is None
        return
    keep_reachable(form)
    found = eliminate(form, LATER, widest=30)
    assert found is not None and found.best is not None
    assert found.best[0] == and_or.best(problem)


def milp(problem: ChoiceProblem) -> tuple[Record, float]:
    """Branch and bound alone: nothing is left to elimination."""
    record = Record(lambda value, picks: None)
    bound = Search(LATER, widest=-1).solve(working_form(problem), record, lambda b: None)
    return record, bound


def check_milp(problem: ChoiceProblem) -> None:
    record, bound = milp(problem)
    best = and_or.best(problem)
    assert record.value == bound == (math.inf if best is None else best)


@pytest.mark.slow
@pytest.mark.parametrize(("costs", "count"), [("positive", 250), ("signed", 150)])
def test_the_mixed_integer_program_is_exact(costs: str, count: int) -> None:
    on_problems(costs, count, check_milp)


@pytest.mark.slow
@cases(200)
@given(and_or.problems("positive", most=7))
def test_every_row_of_the_program_holds_for_a_best_answer(problem: ChoiceProblem) -> None:
    # Rows may cut off answers, as long as a best one stays: its value is the program's at least.
    form = working_form(problem)
    if not reduce(form, LATER) or not form.home:
        return
    best = and_or.best(problem)
    assert best is not None
    model = Model(form, closure(form, LATER))
    solved = model.program.relaxed(60.0)
    for turn in range(3):
        assert solved.x is not None
        rows = model.cuts.separate(solved.x, turn)
        model.program.rows += rows
        solved = model.program.relaxed(60.0)
    value = form.constant + Fraction(solved.value) * model.unit.step
    assert value <= best + Fraction(1, 10**5)


def test_levels_bar_a_cycle() -> None:
    around: list[list[tuple[float | int, list[int]]]]
    around = [[(1, [1]), (9, [])], [(1, [2]), (7, [])], [(1, [0]), (8, [])]]
    model = Model(working_form(and_or.problem_of(around, [0])), None)
    model.program.fix([model.node_at[n] for n in (0, 2, 4)], 1.0)
    assert model.program.relaxed(10.0).x is not None
    model.add_levels()
    assert model.program.relaxed(10.0).infeasible


@pytest.mark.slow
@cases(350)
@given(and_or.problems("positive"))
def test_reductions_keep_the_best_value_with_any_known_answer(problem: ChoiceProblem) -> None:
    best = and_or.best(problem)
    for more in (1, 0):
        form = working_form(problem)
        most = None if best is None else int(best) + more
        alive = reduce(form, LATER, most)
        if best is None:
            assert not alive
            continue
        found = eliminate(form, LATER, widest=30) if alive else None
        values = [found.best[0]] if found and found.best else []
        # With the best value known, nothing better may appear; above it, the best must stay.
        assert values == [best] if more else all(v >= best for v in values)


def test_a_need_that_a_merge_repeats_counts_once() -> None:
    # The first node of class 0 needs class 3 itself and through class 2, and 3 needs 0.
    nodes: list[list[tuple[float | int, list[int]]]]
    nodes = [[(1, [2, 3]), (5, [])], [(1, [2]), (7, [])], [(0, [3])], [(0, [0])]]
    problem = and_or.problem_of(nodes, [0, 1])
    form = working_form(problem)
    merge_series(form)
    found = eliminate(form, LATER)
    assert found is not None and found.best is not None
    assert found.best[0] == and_or.best(problem) == 6


@pytest.mark.slow
@cases(200)
@given(and_or.problems("positive"))
def test_greedy_choices_are_legal_and_no_better_than_the_best(problem: ChoiceProblem) -> None:
    best = and_or.best(problem)
    form = working_form(problem)
    keep_derivable(form)
    if best is None:
        return
    improvement = Improvement(form, seed=1)
    improvement.start(LATER)
    improvement.run(LATER)
    greedy = greedy_dag(form, LATER)
    assert improvement.best is not None and greedy is not None
    assert best <= improvement.value <= cost_of(form, greedy)


def test_parts_that_share_nothing_are_solved_apart() -> None:
    part = [[(3, [1]), (1, [2])], [(1, [])], [(4, [])]]
    twice = part + [[(c, [d + 3 for d in ds]) for c, ds in members] for members in part]
    form = working_form(and_or.problem_of(twice, [0, 3]))
    assert len(split(form)) == 2
    assert extract(and_or.problem_of(twice, [0, 3])).value == 8


def loops() -> ChoiceProblem:
    """Two classes that are cheapest through each other, which would be a cycle."""
    return and_or.problem_of([[(1, [1]), (9, [])], [(1, [0]), (7, [])]], [0, 1])


def test_a_cycle_is_no_answer() -> None:
    assert extract(loops()).value == milp(loops())[1] == 8


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([[]], "root 0 has no nodes"),
        ([[(math.inf, [])]], "every node of root 0 is forbidden"),
        ([[(1, [0])]], "root 0 cannot be had"),
        ([[(1, [1])], [(math.inf, [])]], "root 0 cannot be had"),
        ([[(1, [1])], [(1, [2])], [(1, [1])]], "root 0 cannot be had"),
    ],
)
def test_a_problem_without_answer_says_why(
    nodes: list[list[tuple[float | int, list[int]]]], reason: str
) -> None:
    found = extract(and_or.problem_of(nodes, [0]))
    assert not found.feasible and found.proven and reason in found.reason
    assert math.isinf(found.gap)


def test_nothing_asked_costs_nothing() -> None:
    found = extract(and_or.problem_of([], []))
    assert found.value == 0 and found.proven


def test_what_no_root_needs_is_left_out() -> None:
    found = extract(and_or.problem_of([[(2, [])], [(3, [])]], [0]))
    assert found.choice is not None and found.choice.node.tolist() == [0, -1]


def hard(seed: int) -> ChoiceProblem:
    """Cover 40 elements with sets of three costs: too wide for elimination."""
    draw = np.random.default_rng(seed)
    nodes: list[list[tuple[float | int, list[int]]]] = [[(0, list(range(1, 41)))]]
    nodes += [[(0, [41 + int(s)]) for s in draw.choice(30, 4, replace=False)] for _ in range(40)]
    nodes += [[(int(draw.integers(3, 9)), [])] for _ in range(30)]
    return and_or.problem_of(nodes, [0])


def test_sums_beyond_64_bits_are_exact() -> None:
    large = 10**18 - 1
    nodes: list[list[tuple[float | int, list[int]]]] = [[(large, [c + 1])] for c in range(11)]
    found = extract(and_or.problem_of([*nodes, [(large, [])]], [0]))
    assert found.proven and found.value == 12 * large


@pytest.mark.slow
def test_solvers_in_processes_agree_with_the_program_here() -> None:
    problem = hard(0)
    _, here = milp(problem)
    beside = extract(problem, seconds=60.0)
    assert beside.proven and beside.value == here


def without_timer(problem: ChoiceProblem, seconds: float) -> Extraction:
    """Extract in a thread, where no timer interrupts and methods look at the clock themselves."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(extract, problem, seconds).result()


# No time at all: whether a timer or a look at the clock ends the search, it has ended by the clock.
@pytest.mark.parametrize("run", [extract, without_timer])
def test_the_clock_is_kept_and_what_was_found_is_legal(
    run: Callable[[ChoiceProblem, float], Extraction],
) -> None:
    problem = hard(2)
    found = run(problem, 0.0)
    assert "time was up" in found.notes and not found.proven
    assert found.choice is None or evaluate(problem, found.choice).feasible
    assert found.bound <= milp(problem)[1]


def test_a_search_without_a_timer_ends_by_the_clock_and_says_so() -> None:
    # A solver's process is ended a little before the time that the search was given.
    found = without_timer(hard(2), 0.16)
    assert found.proven or "time was up" in found.notes


def test_an_interruption_keeps_the_best_so_far() -> None:
    def stop(standing: object) -> None:
        raise KeyboardInterrupt

    found = extract(hard(3), told=stop)
    assert "interrupted" in found.notes and found.feasible and not found.proven


def test_the_same_seed_gives_the_same_answer() -> None:
    one, two = (milp(hard(4))[0] for _ in range(2))
    assert one.picks is not None and one.picks == two.picks


def test_the_working_form_scales_real_costs_exactly() -> None:
    problem = and_or.problem_of([[(0.1, []), (0.3, [])]], [0])
    form = working_form(problem)
    assert [Fraction(c, form.scale) for c in form.cost.values()] == [Fraction(0.1), Fraction(0.3)]


@cases(75)
@given(and_or.problems("positive", most=7))
def test_annealing_keeps_count_of_what_it_changes(problem: ChoiceProblem) -> None:
    form = working_form(problem)
    keep_derivable(form)
    if not feasible(form):
        return
    keep_reachable(form)
    improvement = Improvement(form, seed=0)
    improvement.start(LATER)
    assert improvement.best is not None
    annealing = Annealing(form, improvement.best, seed=3)
    value, chosen = annealing.run(seconds=0.003)
    assert acyclic(form, chosen) and acyclic(form, annealing.chosen())
    assert cost_of(form, chosen) == value <= improvement.value
    assert form.trimmed(chosen) == chosen
    assert cost_of(form, annealing.chosen()) == annealing.value + form.constant


@pytest.mark.slow
@cases(100)
@given(st.integers(0, 2**32))
def test_multipliers_prove_the_bound_that_they_prove(seed: int) -> None:
    # Any multipliers give a bound; those of the solver give its value.
    draw = np.random.default_rng(seed)
    cost = draw.integers(-5, 6, 4).astype(float)
    rows = [
        ([0, 1, 2, 3], draw.integers(-3, 4, 4).astype(float).tolist(), low, low + 2.0)
        for low in draw.integers(-4, 1, 3).astype(float)
    ]
    points = [np.array(p, dtype=float) for p in itertools.product((0, 1), repeat=4)]
    legal = [x for x in points if all(lo <= np.dot(a, x) <= hi for _, a, lo, hi in rows)]
    zeros, ones = np.zeros(4), np.ones(4)
    anything = dual_bound(cost, zeros, ones, rows, draw.normal(size=3))
    assert anything is not None and all(anything <= cost @ x + 1e-12 for x in legal)
    solved = LinearProgram(cost, zeros, ones, rows).relaxed(10.0)
    if solved.x is not None:
        assert solved.duals is not None
        best = dual_bound(cost, zeros, ones, rows, solved.duals)
        assert best is not None and abs(best - Fraction(solved.value)) < 1e-9


def test_what_is_held_is_finished_when_time_is_up() -> None:
    done = []
    with pytest.raises(TimeUp), ends_at(time.perf_counter() + 0.02):
        with held():
            time.sleep(0.1)
            done.append("inside")
        time.sleep(5.0)
        done.append("outside")
    assert done == ["inside"]


@pytest.mark.filterwarnings("error")
def test_an_end_is_not_lost_in_a_callback_of_the_garbage_collector() -> None:
    def callback(phase: str, info: dict[str, int]) -> None:
        end = time.perf_counter() + 0.05
        while time.perf_counter() < end:
            pass

    gc.callbacks.append(callback)
    try:
        with pytest.raises(TimeUp), ends_at(time.perf_counter() + 0.02):
            gc.collect()
            time.sleep(2.0)
    finally:
        gc.callbacks.remove(callback)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [weakref.WeakKeyDictionary, weakref.WeakSet])
def test_an_end_is_not_lost_where_a_weak_reference_ends(kind: Any) -> None:
    class Key:
        pass

    keys, known = [Key() for _ in range(200_000)], kind()
    for key in keys:
        known.add(key) if kind is weakref.WeakSet else known.__setitem__(key, 0)
    del key
    with pytest.raises(TimeUp), ends_at(time.perf_counter() + 0.01):
        keys.clear()  # which takes several times as long
        time.sleep(2.0)


def test_an_end_is_not_lost_where_a_library_raises_its_own_error_for_it() -> None:
    """NumPy compares records by a function in Python, and what that raises becomes a TypeError."""
    records = np.zeros(4, dtype=[("a", "i8"), ("b", "i8")])
    for _ in range(20):
        with pytest.raises(TimeUp), ends_at(time.perf_counter() + 0.01):
            while True:
                assert (records[1:] == records[:-1]).all()


def test_an_error_before_the_end_is_raised_as_it_is() -> None:
    with pytest.raises(ZeroDivisionError), ends_at(time.perf_counter() + 10.0):
        _ = 1 // 0
