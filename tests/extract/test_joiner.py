"""Rows of units and their problem, whatever is chosen: not only what good plans take."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.extract.certify.certificate import certify
from tapestry_egg.extract.choices.inner_copies import InnerCopies
from tapestry_egg.extract.choices.joiner import Joiner
from tapestry_egg.extract.choices.once import JoinedUnits, Once
from tapestry_egg.extract.choices.unit_choices import unit_choices
from tapestry_egg.extract.engine.archive import Candidate
from tapestry_egg.extract.front.plans import make_plan
from tapestry_egg.extract.problem.assemble import PlanProblem, assemble
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import Saturated, StrategyRow, saturate
from tapestry_egg.shard.way_costs import WayCosts
from tests.extract.test_front import RULES, branches, fan, recurrence, scheduled, traced


def read_as_made(x: jax.Array, w: jax.Array, u: jax.Array) -> tuple[jax.Array, ...]:
    """A value that one reader takes as it was made after others have copies of it."""
    y = x @ w
    return y * 2.0, y @ u, y.T @ y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (fan, ((256, 512), (512, 512))),
        (read_as_made, ((512, 64), (64, 512), (512, 64))),
        (recurrence, ((64, 64), (64, 64), (16, 32, 64))),
        (branches, ((64, 64), (64, 64))),
    ],
)
@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_any_labelling_costs_what_the_certificate_finds(
    function: Callable[..., Any], shapes: tuple[tuple[int, ...], ...], sizes: tuple[int, ...]
) -> None:
    """Not only good plans: rows at random, and copies kept wherever they can be."""
    plan_schedule = scheduled(traced(function, shapes, {}))
    target, mesh = load_target("h100:4"), MeshShape(("x", "y")[: len(sizes)], sizes)
    found = saturate(encode(plan_schedule.program, mesh), load_books(RULES))
    assembled = assemble(unit_choices(plan_schedule, found, mesh, target))
    rng, tried, kept = np.random.default_rng(0), 0, 0
    keeping = {s.variable: s for s in assembled.sharing}
    for _ in range(600):  # in many, what holds one number lies so that only sending it would serve
        if tried == 25:
            break
        rows = np.array([rng.integers(len(v)) for v in assembled.problem.variables])
        for variable, s in keeping.items():
            if rng.random() < 0.8:
                options = [r for r, (_, k) in enumerate(s.rows) if k is not None]
                rows[variable] = rng.choice(options) if options else rows[variable]
        seconds, joules, profile = assembled.problem.evaluate(rows)
        if not np.isfinite(seconds):
            continue
        plan = make_plan(assembled, Candidate(rows, seconds, profile.max(), joules), "any", 0.0)
        certify(plan, plan_schedule, target)
        tried += 1
        kept += len(plan.body.kept)
    assert tried == 25
    assert kept or function is not fan


def test_of_strategies_of_the_same_layouts_the_one_of_least_work_is_taken() -> None:
    plan_schedule = scheduled(traced(lambda x, w: x @ w, ((64, 64), (64, 64)), {}))
    mesh, target = MeshShape(("x",), (4,)), load_target("h100:4")
    found = saturate(encode(plan_schedule.program, mesh), load_books(RULES))
    instances = plan_schedule.program.instances
    (product,) = {u.root for u in plan_schedule.units if not instances[u.root].port}
    number = found.encoding.signature_of[product]
    # As a rule could say it that computes on every device what one alone has to.
    lazy = [replace(s, cuts=tuple(() for _ in s.cuts)) for s in found.strategies[number]]
    both = [*lazy, *found.strategies[number], *lazy]

    def work(given: Sequence[StrategyRow]) -> dict[Any, float]:
        every = [given if k == number else s for k, s in enumerate(found.strategies)]
        told = replace(found, strategies=tuple(map(tuple, every)))
        sums = InnerCopies(plan_schedule, told, {})
        ways = Joiner(plan_schedule, told, mesh, target, sums)._giving(product)
        return {(out, s.operands): s.flops for out, some in ways.items() for s in some}

    assert work(both) == work(found.strategies[number]) != work(lazy)


def test_of_ways_that_read_and_give_the_same_all_stay_that_no_other_beats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan_schedule = scheduled(traced(lambda x, w: x @ w, ((64, 64), (64, 64)), {}))
    mesh, target = MeshShape(("x",), (4,)), load_target("h100:4")
    found = saturate(encode(plan_schedule.program, mesh), load_books(RULES))
    made = plan_schedule.program.instances
    ((number, unit),) = [(n, u) for n, u in enumerate(plan_schedule.units) if not made[u.root].port]

    def joiner() -> Joiner:
        return Joiner(plan_schedule, found, mesh, target, InnerCopies(plan_schedule, found, {}))

    plain = joiner().rows(number, unit)
    # As if every way came four times: slower for fewer joules, with less memory, and worse in all.
    finish, kernel, split = Joiner._finish, WayCosts.kernel, WayCosts.split

    def fourfold(self: Joiner, unit: Any, ways: Any, inner: Any) -> Any:
        return finish(self, unit, [w for w in ways for _ in range(4)], inner)

    def costly(self: WayCosts, *args: Any) -> Any:
        seconds, joules = kernel(self, *args)
        kind = np.arange(len(seconds)) % 4
        return seconds * (1 + kind), np.where(kind == 1, 0.5, 1.0) * joules

    def spacious(self: WayCosts, unit: Any, gemm: Any, ways: int) -> Any:
        return split(self, unit, gemm, ways) + np.where(np.arange(ways) % 4 == 2, 0.0, 1e6)

    monkeypatch.setattr(Joiner, "_finish", fourfold)
    monkeypatch.setattr(WayCosts, "kernel", costly)
    monkeypatch.setattr(WayCosts, "split", spacious)
    rows = joiner().rows(number, unit)
    assert len(rows) == 3 * len(plain)
    assert {*zip(rows.needs, rows.gives, strict=True)} == {
        *zip(plain.needs, plain.gives, strict=True)
    }


def outer(x: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    """Units of several members whose operands need not lie alike, one of which is read twice."""
    return jnp.tanh(x)[:, None] * jnp.exp(b)[None, :] * c + jnp.sin(c) * x[:, None]


@pytest.mark.parametrize("sizes", [(4,), (2, 2)])
def test_rows_are_the_ways_of_least_work_among_all_combinations(sizes: tuple[int, ...]) -> None:
    """Where the layouts of what is made inside agree with those in which it is read."""
    plan_schedule = scheduled(traced(outer, ((8,), (4,), (8, 4)), {}))
    mesh, target = MeshShape(("x", "y")[: len(sizes)], sizes), load_target("h100:4")
    found = saturate(encode(plan_schedule.program, mesh), load_books(RULES))
    inside = InnerCopies(plan_schedule, found, {})
    joiner = Joiner(plan_schedule, found, mesh, target, inside)
    instances, looked = plan_schedule.program.instances, 0
    for number, unit in enumerate(plan_schedule.units):
        if instances[unit.root].port or inside.of(number):
            continue
        looked += len(unit.members) > 2
        # Whatever the members before it chose: of equal layouts the least work.
        ways: dict[tuple[tuple[Any, Any], ...], float] = {(): 0.0}
        for i in unit.members:
            x, signature = instances[i], found.encoding.signature_of[i]
            flops = joiner.costs.work(signature)[0]
            longer: dict[tuple[tuple[Any, Any], ...], float] = {}
            for before, work in ways.items():
                known = dict(before)
                for row, own in zip(found.strategies[signature], flops, strict=True):
                    ports = [*zip(x.inputs, row.layouts, strict=False)]
                    made = [*zip(x.outputs, row.layouts[len(x.inputs) :], strict=True)]
                    agree = all(known.get(v, layout) == layout for v, layout in ports)
                    read = [((i, p), layout) for p, (_, layout) in enumerate(ports)]
                    if agree:
                        key = (*before, *read, *made)
                        longer[key] = min(longer.get(key, np.inf), work + float(own))
            ways = longer
        least: dict[tuple[Any, Any], float] = {}
        for way, work in ways.items():
            lie = dict(way)
            needs = tuple(lie[i, p] for i, p, _ in unit.reads)
            shown = needs, tuple(lie[v] for v in unit.outputs)
            least[shown] = min(least.get(shown, np.inf), work)
        rows = joiner.rows(number, unit)
        told: dict[tuple[Any, Any], float] = {}
        for needs, gives, work in zip(rows.needs, rows.gives, rows.flops.tolist(), strict=True):
            told[needs, gives] = min(told.get((needs, gives), np.inf), work)
        assert told == pytest.approx(least)
    assert looked


# Forms of a program: what they have in common is derived and joined once, and as if alone.


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
