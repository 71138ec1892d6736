"""Objectives: one record each, which costs, searches, limits and words agree with."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

import tapestry_egg as te
from models import mlp
from tapestry_egg.errors import ExtractError, PlanError
from tapestry_egg.extract.certify.verdict import Certificate
from tapestry_egg.extract.engine.archive import Candidate, Limits
from tapestry_egg.machine.objectives import (
    COSTS,
    OBJECTIVES_BY_NAME,
    SEARCHED,
    Objective,
    objective,
)
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.plans.plan import Costs

BRIEF = Settings(work=0.1, workers=1, recompute=0, forms=0, micro_batches=())


ONE = [te.MeshShape(("x",), (8,))]


@pytest.fixture(scope="module")
def program() -> te.Program:
    step, args = mlp.example()
    return te.trace(step, *args)


@pytest.fixture(scope="module")
def front(program: te.Program) -> te.Front:
    return te.optimize(program, "h100:8", ("seconds", "joules"), mesh_shapes=ONE, settings=BRIEF)


def test_costs_are_the_objectives_that_they_are_read_by() -> None:
    assert [*(o.name for o in COSTS), "serial_seconds"] == [f.name for f in fields(Costs)]
    assert {o.name for o in COSTS} <= {f.name for f in fields(Certificate)}
    recounted = Certificate(
        **{o.name: k for k, o in enumerate(COSTS)},  # type: ignore[arg-type]
        profile=(),
        serial_seconds=6,
        step=None,  # type: ignore[arg-type]
    )
    assert recounted.costs == Costs(0, 1, 2, 3, 4, 5, 6)


def test_a_search_counts_them_in_the_order_of_the_table(front: te.Front) -> None:
    plan = replace(front.plans[0], costs=Costs(1.0, 2, 3.0))
    candidate = Candidate(rows=None, seconds=1.0, peak=2.0, joules=3.0)  # type: ignore[arg-type]
    assert candidate.costs == tuple(o.value(plan) for o in SEARCHED)


@pytest.mark.parametrize("name", OBJECTIVES_BY_NAME)
def test_every_objective_orders_a_front(front: te.Front, name: str) -> None:
    values = [objective(name).value(p) for p in front.ranked(name)]
    assert values == sorted(values)
    assert all(type(v) is float for v in values)


def test_an_objective_of_ones_own_is_the_named_one_where_it_says_the_same(
    program: te.Program, front: te.Front
) -> None:
    energy = Objective("energy", lambda plan: plan.costs.joules)
    own = te.optimize(program, "h100:8", ("seconds", energy), mesh_shapes=ONE, settings=BRIEF)
    assert own.objectives == ("seconds", energy)
    # The search knows joules, and not what a user's function is of.
    assert own.best(energy).costs.joules == pytest.approx(front.best("joules").costs.joules, 1e-5)
    assert own.best("seconds").costs.seconds == front.best("seconds").costs.seconds
    assert front.best(energy) == front.best("joules")
    assert own.hypervolume() > 0.0


@pytest.mark.slow
def test_plans_are_kept_that_only_an_objective_of_ones_own_prefers(program: te.Program) -> None:
    """The slowest plan is best in it: no named objective but this one keeps it."""
    slow = Objective("haste", lambda plan: 1.0 / plan.costs.seconds)
    fastest = te.optimize(program, "h100:8", ("seconds",), settings=BRIEF)
    both = te.optimize(program, "h100:8", ("seconds", slow), settings=BRIEF)
    assert both.best(slow).costs.seconds > fastest.best(slow).costs.seconds
    (note,) = [n for n in both.notes if n.kind == "own-objective"]
    assert "plans for haste" in str(note)
    assert not any(n.kind == "own-objective" for n in fastest.notes)


def test_a_front_of_ones_own_objective_is_not_saved(front: te.Front, tmp_path: Path) -> None:
    own = replace(front, objectives=("seconds", Objective("area", lambda plan: 1.0)))
    with pytest.raises(PlanError, match="area"):
        own.save(tmp_path / "front.json")


@pytest.mark.parametrize("given", [-1.0, math.nan, math.inf, None, "many"])
def test_what_is_no_amount_is_refused(front: te.Front, given: object) -> None:
    with pytest.raises(ExtractError, match="is not an amount") as caught:
        front.best(Objective("odd", lambda plan: given))  # type: ignore[arg-type, return-value]
    assert caught.value.where == f"objective odd of plan {front.plans[0].name}"


@pytest.mark.parametrize("name", ["speed", "", None, 3, ("seconds",)])
def test_unknown_objectives_are_refused_with_the_known_ones(front: te.Front, name: object) -> None:
    with pytest.raises(ExtractError, match="unknown objective") as caught:
        front.best(name)  # type: ignore[arg-type]
    assert all(known in caught.value.hint for known in OBJECTIVES_BY_NAME)


def test_limits_are_on_named_objectives(front: te.Front) -> None:
    own = Objective("area", lambda plan: 1.0)
    with pytest.raises(ExtractError, match="unknown objective"):
        front.best(limits={own: 1.0})  # type: ignore[dict-item]


def test_a_search_heeds_limits_on_what_speed_is_exchanged_for() -> None:
    assert Limits.of({"peak_bytes": 5.0, "wire_bytes": 1.0}) == Limits(5.0)
    assert Limits.of({"joules": 2.0}) == Limits(math.inf, 2.0)
    assert Limits.of({"seconds": 1.0, "devices": 8.0}) is None


@pytest.mark.slow
def test_dollars_need_a_price(program: te.Program) -> None:
    with pytest.raises(te.TapestryError, match="nothing is known of the price of cpu"):
        te.optimize(program, "cpu:4", ("dollars", "peak_bytes"), settings=BRIEF)
    front = te.optimize(program, "cpu:4", ("dollars", "peak_bytes"), price=3.6, settings=BRIEF)
    for plan in front:
        assert plan.costs.dollars == pytest.approx(plan.costs.seconds * plan.mesh.devices * 0.001)
        assert plan.origin is not None and plan.origin.machine.price is not None
    for n in {plan.mesh.devices for plan in front}:  # on as many devices the fastest is cheapest
        own = [plan.costs for plan in front if plan.mesh.devices == n]
        assert min(own, key=lambda c: c.dollars) == min(own, key=lambda c: c.seconds)
    assert front.best("dollars").mesh.devices <= front.best("seconds").mesh.devices
    least = front.best("dollars").costs.dollars
    with pytest.raises(ExtractError, match="no plan meets the limits"):
        front.best("peak_bytes", limits={"dollars": least / 2})


def test_a_formula_is_the_function_that_it_says(front: te.Front) -> None:
    said = "0.7 * seconds / 4ms + 0.3 * max(joules, 2) / 6.5 J - 0 * peak_bytes / 1GiB"

    def meant(plan: te.Plan) -> float:
        return 0.7 * plan.costs.seconds / 0.004 + 0.3 * max(plan.costs.joules, 2.0) / 6.5

    found = objective(said)
    assert [found.value(p) for p in front] == pytest.approx([meant(p) for p in front])
    assert front.best(said) == front.best(Objective("meant", meant))
    least = objective("min(seconds, 1ns) + max(0, 1 - 2)")
    assert least.value(front.plans[0]) == pytest.approx(1e-9)
    assert objective("seconds**2 / (joules + 1)").value(front.plans[0]) == pytest.approx(
        front.plans[0].costs.seconds ** 2 / (front.plans[0].costs.joules + 1)
    )


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("seconds *", "is not a formula"),
        ("haste + 1", "'haste' is no objective"),
        ("__import__('os').getcwd()", "cannot stand in a formula"),
        ("seconds.__class__", "cannot stand in a formula"),
        ("(lambda: seconds)()", "cannot stand in a formula"),
        ("seconds" + " + 1" * 200, "characters"),
        ("-" * 99 + "seconds", "cannot stand in a formula"),
    ],
)
def test_what_is_no_formula_is_refused(front: te.Front, said: str, why: str) -> None:
    with pytest.raises(ExtractError, match=why):
        front.best(said)


def test_amounts_that_are_none_are_refused_of_formulas_too(front: te.Front) -> None:
    for said in ("seconds - 100", "1 / (seconds - seconds)", "(0 - seconds) ** 0.5"):
        with pytest.raises(ExtractError, match="is not an amount"):
            front.best(said)


def test_objectives_of_a_file_are_lines_of_formulas(front: te.Front, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("energy_delay: seconds * joules\nbill: seconds + peak_bytes / 1TiB\n")
    found = te.load_objectives(file)
    assert list(found) == ["energy_delay", "bill"]
    assert front.best(found["bill"]) == front.best("seconds + peak_bytes / 1TiB")
    for text, line in (("a: 1\nb: haste\n", 2), ("a: [1]\n", 1), ("seconds: joules\n", 1)):
        file.write_text(text)
        with pytest.raises(ExtractError) as caught:
            te.load_objectives(file)
        assert caught.value.where.rpartition(":")[0].endswith(f"mine.yaml:{line}")


def test_a_limit_may_be_a_share_of_the_least(program: te.Program) -> None:
    front = te.optimize(program, "h100:8", mesh_shapes=ONE, settings=BRIEF)
    fastest = front.best("seconds").costs.seconds
    for share in (100, 110, 150):
        best = front.best("joules", {"seconds": f"{share}%"})
        within = [p for p in front if p.costs.seconds <= fastest * share / 100]
        assert best.costs.joules == min(p.costs.joules for p in within)
    small = {"peak_bytes": front.best("peak_bytes").costs.peak_bytes}
    assert (
        front.best("joules", {**small, "seconds": "100%"}).costs.peak_bytes == small["peak_bytes"]
    )
    with pytest.raises(ExtractError, match="no plan meets the limits"):
        front.best("joules", {"seconds": "90%"})
    with pytest.raises(ExtractError, match="110% is a share of the least"):
        te.optimize(program, "h100:8", limits={"seconds": "110%"}, settings=BRIEF)


def test_a_front_of_formulas_is_saved_and_read(program: te.Program, tmp_path: Path) -> None:
    given = ("seconds", "seconds * joules")
    made = te.optimize(program, "h100:8", given, mesh_shapes=ONE, settings=BRIEF)
    made.save(tmp_path / "front.json")
    read = te.load(tmp_path / "front.json")
    assert read.objectives == ("seconds", "seconds * joules")
    assert read.best("seconds * joules").name == made.best("seconds * joules").name
    assert read.hypervolume() == made.hypervolume()
