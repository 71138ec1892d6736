"""Choosing from a front, joining fronts, and what is said where limits leave nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.front import Front, in_order, unmet, value, within
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import BodyPlan, Costs, Plan, Strategy

TYPE = TensorType((4,), "float32")
GRAPH = BlockGraph("g", (TYPE, TYPE), (Operation("neg", (0,), (1,)),), (0,), (1,))
WHOLE = Layout.replicated(1)
BODY = BodyPlan(GRAPH, (WHOLE,), (WHOLE,), (Strategy(((),), (WHOLE,), (WHOLE,)),))


def plan(seconds: float, peak: int, joules: float, mesh: str = "x", bound: float = 0.0) -> Plan:
    costs = Costs(seconds, peak, joules)
    return Plan("p", MeshShape((mesh,), (2,)), "cpu:2", BODY, costs, bound=bound or seconds)


def front(*plans: Plan, epsilon: float = 0.0) -> Front:
    return Front(in_order(plans), target="cpu:2", graph_name="g", epsilon=epsilon)


THREE = front(plan(1, 300, 5), plan(2, 200, 4), plan(9, 100, 3))


def test_the_best_in_any_objective_within_limits_on_any() -> None:
    assert THREE.best().name == "p0"
    assert THREE.best("peak_bytes").name == THREE.best("joules").name == "p2"
    assert THREE.best(limits={"joules": 4.5}).name == "p1"
    assert THREE.best("joules", limits={"seconds": "5 s"}).name == "p1"
    assert THREE.best("devices").name == "p0", "of equal ones the fastest"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"joules": 2.0}, ["joules: asked 2 J, least found 3 J"]),
        ({"seconds": 0.5}, ["seconds: asked 500 ms, least found 1 s"]),
        ({"peak_bytes": 50, "seconds": 5}, ["peak_bytes: asked 50 B, least found 100 B"]),
        (
            {"peak_bytes": 150, "seconds": 5},
            [
                "peak_bytes: asked 150 B, least found 200 B within the other limits",
                "seconds: asked 5 s, least found 9 s within the other limits",
            ],
        ),
    ],
)
def test_limits_that_leave_nothing_say_which_and_what_is_reachable(
    limits: dict[str, float], said: list[str]
) -> None:
    with pytest.raises(ExtractError) as caught:
        THREE.best(limits=limits)
    assert caught.value.what == "no plan meets the limits" and caught.value.where == "limits"
    assert (
        caught.value.hint
        == "; ".join(said) + ". Raise the limit, search longer (work) or use more devices."
    )


def test_an_empty_front_has_no_best_and_no_knee() -> None:
    for ask in (front().best, front().knee):
        with pytest.raises(ExtractError, match="there is no plan"):
            ask()
    assert front().hypervolume() == 0.0


def test_the_knee_is_near_the_least_of_everything() -> None:
    assert THREE.knee().name == "p1"
    assert front(plan(1, 300, 5)).knee().name == "p0"


def test_the_hypervolume_is_the_dominated_volume() -> None:
    pair = replace(THREE, objectives=("seconds", "peak_bytes"))
    # Boxes below (10, 400): 9 x 100, then 8 x 100, then 1 x 100.
    assert pair.hypervolume({"seconds": 10, "peak_bytes": 400}) == pytest.approx(1800)
    assert pair.hypervolume({"seconds": "2 s", "peak_bytes": 400}) == pytest.approx(100)
    assert pair.hypervolume() > 0
    with pytest.raises(ExtractError, match="no amount of peak_bytes"):
        pair.hypervolume({"seconds": 1})


def test_a_merged_front_holds_what_neither_dominates() -> None:
    other = front(plan(3, 150, 4, "y"), plan(1, 350, 6, "y"), plan(9, 100, 3, "y"))
    merged = THREE.merge(other)
    assert [(p.name, p.costs.seconds, str(p.mesh)) for p in merged] == [
        ("p0", 1, "2x"),
        ("p1", 2, "2x"),
        ("p2", 3, "2y"),
        ("p3", 9, "2x"),
        ("p4", 9, "2y"),  # a tie on another mesh is another plan
    ]
    assert THREE.merge(THREE).plans == THREE.plans


@pytest.mark.parametrize("field", ["target", "graph_name", "objectives"])
def test_only_fronts_of_the_same_question_are_merged(field: str) -> None:
    other = replace(THREE, **{field: ("seconds",) if field == "objectives" else "other"})
    with pytest.raises(ExtractError, match="differ in " + field.replace("_", " ")):
        THREE.merge(other)


COSTS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.integers(1, 3))


@pytest.mark.slow
@given(st.lists(st.tuples(COSTS, COSTS), min_size=1, max_size=6), st.sampled_from([0.0, 0.5]))
def test_merged_bounds_hold_for_every_plan_of_either_search(
    pairs: list[tuple[tuple[int, int, int], tuple[int, int, int]]], epsilon: float
) -> None:
    """Each side searched all plans of some snapshot and knows its own best within every limit."""
    sides = []
    for side in range(2):
        every = [plan(*pair[side], mesh="xy"[side]) for pair in pairs]
        shown = [p for p in every if not any(_covers(q, p) for q in every)]
        if epsilon:  # a front that has found only something near
            shown = [
                replace(
                    p,
                    costs=replace(p.costs, seconds=p.costs.seconds * 1.4),
                    bound=float(p.costs.seconds),
                )
                for p in shown
            ]
        sides.append((every, front(*shown, epsilon=epsilon)))
    merged = sides[0][1].merge(sides[1][1])
    everything = [p for every, _ in sides for p in every]
    for p in merged:
        within_costs = [
            q.costs.seconds
            for q in everything
            if q.costs.peak_bytes <= p.costs.peak_bytes and q.costs.joules <= p.costs.joules
        ]
        assert p.bound <= min(within_costs, default=math.inf) + 1e-12
        assert p.bound <= p.costs.seconds
    for q, p in product(merged, merged):
        assert not (_covers(q, p) and q is not p)
    assert merged.epsilon == epsilon


def _covers(a: Plan, b: Plan) -> bool:
    x, y = ([value(p, k) for k in ("seconds", "peak_bytes", "joules")] for p in (a, b))
    return all(i <= j for i, j in zip(x, y, strict=True)) and x != y


def test_nothing_is_proven_of_a_front_without_epsilon() -> None:
    merged = THREE.merge(front(plan(5, 50, 9), epsilon=math.inf))
    assert merged.epsilon == math.inf
    assert {p.costs.peak_bytes: p.bound for p in merged} == {300: 0, 200: 0, 100: 0, 50: 5}


def test_nothing_is_proven_of_a_front_that_left_plans_out_for_their_joules() -> None:
    """A plan that others dominate in other objectives may be the only one of so small a peak."""
    sides = [
        replace(front(p), objectives=("seconds", "joules"))
        for p in (plan(1, 300, 1), plan(2, 9, 2))
    ]
    merged = sides[0].merge(sides[1])
    assert len(merged) == 1 and merged.epsilon == math.inf


def test_the_order_does_not_depend_on_the_order_of_finding() -> None:
    plans = [plan(1, 2, 3, "y"), plan(1, 2, 3, "x"), plan(1, 1, 9), plan(0.5, 5, 5)]
    assert in_order(plans) == in_order(reversed(plans))
    assert unmet(plans, {"joules": 1.0}).hint == unmet(plans[::-1], {"joules": 1.0}).hint
    assert not within(plans[0], {"joules": 1.0})
