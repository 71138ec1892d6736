"""Small random programs that may compute values a second time: what is searched of all that they
make, as networks, against every plan of every one of them.

The programs are listed reader by reader (`every_second.py`), their plans by tables (`tables.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.extract.problem.problem import Problem
from tapestry_egg.pipeline import Settings
from tapestry_egg.pipeline.passes import _second_instances
from tapestry_egg.rewrite.derivation import digest
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.recomputation.second_places import second_places
from tapestry_egg.rewrite.recompute import RULE
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.tracing.constants import prepare
from tests.extract.every_form import every_form
from tests.extract.every_second import every_second
from tests.extract.random_programs import (
    Drawn,
    algebra,
    drawn,
    graph_of,
    products,
    schedule_of,
)
from tests.extract.tables import Point
from tests.extract.test_random_forms import CHOICES, RULES, best_of, every_one
from tests.extract.test_random_programs import apart_of, network, tables_of
from tests.rewrite.replay import replay

#: Programs that are listed of one, and combinations of each.
PROGRAMS, MOST = 200, 200_000


def every_front(plan: Schedule, most: int = MOST) -> list[Point] | None:
    """The front of all plans of a program and of all that compute values of it a second time; None
    where there are too many. Raises TooMany where there are too many programs."""
    given, feedback = plan.program.bodies[0].graph, plan.program.feedback
    front: list[Point] = []
    others = [scheduled(g, feedback) for g in every_second(given, PROGRAMS)]
    for one in (plan, *others):
        tables = tables_of(one)
        if tables.rows > most:
            return None
        front += tables.front()
    return best_of(front)


def second(plan: Schedule, form: Form | None = None) -> list[Schedule]:
    """What is searched of a program beside it."""
    graph = plan.program.bodies[0].graph
    question: Any = SimpleNamespace(settings=Settings(), wide=True, pairs=plan.program.feedback)
    found, left = _second_instances(question, form or Form(graph), plan)
    assert not left
    return [schedule for _, schedule in found]


def searched(plan: Schedule) -> list[Problem]:
    """The networks of a program and of those that compute values of it a second time."""
    return [network(one) for one in (plan, *second(plan))]


def apart(seed: int, draw: Callable[[int], Drawn], frozen: bool = False) -> float:
    """How far what is searched is from the front of all plans, where nothing is computed a second
    time if that is `frozen`."""
    plan = schedule_of(seed, draw)
    front = every_front(plan)
    assert front is not None, f"seed {seed} has more plans"
    return apart_of(front, [network(plan)] if frozen else searched(plan))


@pytest.mark.parametrize(
    ("draw", "seed", "faster"),
    [
        (drawn, 49, 0.1),
        pytest.param(products, 239, 0.1, marks=pytest.mark.slow),
        pytest.param(products, 64, 1e-3, marks=pytest.mark.slow),
        pytest.param(drawn, 54, 1e-3, marks=pytest.mark.slow),
    ],
)
def test_second_instances_make_plans_faster_and_are_searched(
    draw: Callable[[int], Drawn], seed: int, faster: float
) -> None:
    """Of a value that two read one keeps a kernel of its own, or each has it in its own; also
    within less memory, and in layouts of their own, products among them."""
    assert apart(seed, draw) < 1e-6
    assert apart(seed, draw, frozen=True) > faster


@pytest.mark.long
@pytest.mark.parametrize(("draw", "end"), [(drawn, 100), (products, 100)])
def test_many_more_programs_have_it(draw: Callable[[int], Drawn], end: int) -> None:
    tried = 0
    for seed in range(end):
        plan = schedule_of(seed, draw)
        front = every_front(plan)
        if front is not None:
            tried += 1
            assert apart_of(front, searched(plan)) < 1e-6, f"seed {seed}"
    assert tried > 80


@pytest.mark.slow
@pytest.mark.parametrize("seed", [2, 15, 31])
def test_the_front_of_all_forms_and_their_second_instances_is_searched(seed: int) -> None:
    graph = graph_of(seed, algebra)
    front: list[Point] = []
    for form in every_form(graph, RULES, CHOICES):
        own = every_front(scheduled(prepare(form), {}))
        assert own is not None, f"seed {seed} has more plans"
        front += own
    forms = every_one(graph)
    schedules = [scheduled(prepare(form.graph), {}) for form in forms]
    again = [one for k in (0, 1) for one in second(schedules[k], forms[k])]
    assert again or seed != 31
    problems = [network(one) for one in (*schedules, *again)]
    assert apart_of(best_of(front), problems) < 1e-6


@pytest.mark.slow
def test_a_plan_with_second_instances_runs_is_written_and_derived_again(tmp_path: Path) -> None:
    """Each of two results is one kernel, the sum's argument computed in both."""

    def function(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        z = jnp.tanh(y)
        return jnp.tanh(z), x + z

    eager = replace(te.load_target("h100:4"), fuses=False)  # XLA itself would compute it twice
    program = te.trace(function, *[jax.ShapeDtypeStruct((512, 512), jnp.float32)] * 2)
    quick = te.Settings(work=2.0, max_axes=1, workers=1)
    front = te.optimize(program, eager, settings=quick)
    once = te.optimize(program, eager, settings=replace(quick, recompute=0))
    plan = front.best("seconds")
    assert plan.rules == (RULE,)
    assert plan.costs.seconds < 0.8 * once.best("seconds").costs.seconds
    assert plan.gap < 1e-6 and "1 value computed twice" in plan.explain()
    assert digest(replay(program.graph, plan.steps, {})[-1]) == digest(plan.graph)
    te.save(plan, tmp_path / "plan.json")
    loaded = te.load(tmp_path / "plan.json")
    arguments = np.random.default_rng(0).standard_normal((2, 512, 512)).astype(np.float32)
    found = te.compile(loaded, jax.devices()[:4])(*arguments)
    for one, other in zip(found, function(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def test_the_network_of_a_program_in_which_nothing_has_two_readers_is_its_own() -> None:
    plan = schedule_of(0, products)
    assert every_front(plan) == tables_of(plan).front()
    assert second_places(plan.program.bodies[0].graph, {}, 60).places == ()
