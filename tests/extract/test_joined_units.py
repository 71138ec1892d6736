"""Forms of a program: what they have in common is derived and joined once, and as if alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tapestry_egg.extract.choices.once import JoinedUnits, Once
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, saturate
from tests.extract.test_front import RULES, scheduled, traced

SHAPES = ((64, 32), (32, 64), (64, 32))


def given(x: jax.Array, u: jax.Array, w: jax.Array) -> Any:
    return jnp.tanh(x @ (u @ w)), x.max(0)


def turned(x: jax.Array, u: jax.Array, w: jax.Array) -> Any:
    """The same in another form: other products, in front of what is the same."""
    return jnp.tanh((x @ u) @ w), x.max(0)


def without(x: jax.Array, u: jax.Array, w: jax.Array) -> Any:
    """No maximum: partial values are of sums alone, and layouts have other numbers."""
    return jnp.tanh(x @ (u @ w)), x + x


FORMS: tuple[Callable[..., Any], ...] = (turned, without, given, given)
MESHES = (MeshShape(("x",), (4,)), MeshShape(("x", "y"), (2, 2)))


def test_forms_together_have_the_strategies_rows_and_problems_that_each_has_alone() -> None:
    books, target = load_books(RULES), load_target("h100:4")
    derived: list[Saturated] = []
    joined, once = JoinedUnits(), Once()
    ran = []
    for form in FORMS:
        plan_schedule = scheduled(traced(form, SHAPES, {}))
        for mesh in MESHES:
            encoding = encode(plan_schedule.program, mesh)
            alone, found = saturate(encoding, books), saturate(encoding, books, None, derived)
            derived.append(found)
            assert found.strategies == alone.strategies and found.changes == alone.changes
            assert found.saturated
            ran.append((alone.rows, found.rows))
            own = unit_choices(plan_schedule, alone, mesh, target)
            every = unit_choices(plan_schedule, found, mesh, target, known=joined)
            assert every.truncated == own.truncated
            _same(assemble(every, once=once), assemble(own))
    first, again = ran[: len(MESHES)], ran[-len(MESHES) :]
    assert all(mine == its for mine, its in first)
    assert all(not its for _, its in again), "a form like one before derives nothing"
    given_rows = ran[2 * len(MESHES) : 3 * len(MESHES)]
    assert all(0 < its < mine for mine, its in given_rows), "one of them derives what is new"


def _same(made: PlanProblem, alone: PlanProblem) -> None:
    mine, its = made.problem, alone.problem
    assert made.sharing == alone.sharing and mine.times == its.times
    for a, b in zip(mine.variables, its.variables, strict=True):
        assert a.name == b.name
        np.testing.assert_array_equal(a.seconds, b.seconds)
        np.testing.assert_array_equal(a.joules, b.joules)
        assert [(u.start, u.end) for u in a.uses] == [(u.start, u.end) for u in b.uses]
        for u, v in zip(a.uses, b.uses, strict=True):
            np.testing.assert_array_equal(u.amount, v.amount)
    assert len(mine.pairs) == len(its.pairs)
    for p, q in zip(mine.pairs, its.pairs, strict=True):
        assert (p.a, p.b) == (q.a, q.b)
        for name in ("label_a", "label_b", "seconds", "joules"):
            np.testing.assert_array_equal(getattr(p, name), getattr(q, name))
        for u, v in zip(p.uses, q.uses, strict=True):
            np.testing.assert_array_equal(u.amount, v.amount)
