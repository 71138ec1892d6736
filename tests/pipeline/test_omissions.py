"""What a search leaves out is counted and told, once; where nothing was, nothing is."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.choices import joiner
from tapestry_egg.extract.front.notes import Note, note, notes_text
from tapestry_egg.extract.problem import kept
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import fronts
from tapestry_egg.pipeline.omissions import (
    of_meshes,
    of_opaque,
    of_recomputation,
)
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.pipeline.words import read_words
from tapestry_egg.rewrite import cheapest, extractions, folded_program, forms, recompute
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.fused_forms import batched
from tapestry_egg.rewrite.recompute import Recomputing

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
QUICK = Settings(work=0.1, micro_batches=(), merge=False)
#: Nothing is computed again.
LEAN = replace(QUICK, recompute=0)
#: Forms are chosen by their time on one device alone, and nothing is computed again.
FROZEN = replace(QUICK, forms=0, recompute=0)
SHAPES = [MeshShape(("x",), (4,))]


def front(fn: Any, target: str = "h100:4", **options: Any) -> te.Front:
    options.setdefault("settings", LEAN)
    return te.optimize(te.trace(fn, X, X), target, **options)


def kinds(front: te.Front) -> set[str]:
    return {n.kind for n in front.notes}


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(x @ y) * 2.0 + x


def test_a_search_of_everything_says_nothing() -> None:
    assert front(product).notes == ()


def unsearched(target: str, most: int, **words: Any) -> tuple[Note, ...]:
    """What is said of the meshes that `optimize` does not search."""
    given = {"mesh": None, "pins": None, "in_shardings": None, "out_shardings": None, **words}
    program = te.trace(product, X, X)
    shapes = given.pop("mesh_shapes", None)
    found = read_words(program, load_target(target), mesh_shapes=shapes, max_axes=most, **given)
    return of_meshes(found.unsearched)


def axes(count: int, most: int) -> tuple[Note, ...]:
    return (note("mesh-axes", count, axes=most),)


def test_meshes_of_more_axes_are_counted() -> None:
    assert unsearched("h100:4", 2) == ()
    assert unsearched("h100:8", 2) == axes(1, 2)
    assert unsearched("h100:8", 3) == ()
    found = front(product, "h100:8")
    assert found.notes == unsearched("h100:8", 2)
    assert "1 note on what was not searched" in str(found)
    assert front(product, "h100:8", mesh_shapes=[MeshShape(("x",), (8,))]).notes == ()


def test_meshes_that_differ_in_names_alone_count_once() -> None:
    # 2x×2y×2z and 2x×4y, which is 4x×2y too: on eight devices of one switch names mean nothing.
    assert unsearched("h100:8", 1) == axes(2, 1)
    # Pins give them a meaning.
    assert unsearched("h100:8", 1, pins={"[0]": ("x", None)}) == axes(3, 1)


def test_meshes_that_divide_a_named_one_are_counted() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    assert unsearched("h100:8", 3, mesh=mesh) == ()
    assert unsearched("h100:8", 2, mesh=mesh) == axes(1, 2)
    assert (
        unsearched("h100:8", 2, mesh=mesh, mesh_shapes=[MeshShape(("data", "model"), (4, 2))]) == ()
    )


def test_meshes_of_many_named_axes_are_counted() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), ("a", "b", "c", "d"))
    assert unsearched("h100:2x8", 2, mesh=mesh) == axes(1, 3)


def test_kernels_whose_ways_to_run_were_cut_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    whole = front(product, mesh_shapes=SHAPES)
    monkeypatch.setattr(joiner, "ROWS", 2)
    monkeypatch.setattr(joiner, "_FEWEST", 2)
    cut = front(product, mesh_shapes=SHAPES)
    (said,) = cut.notes
    assert str(said) == (
        "Not searched: more than 2 strategies each of 2 kernels and 3 boundary values on 4x."
    )
    assert whole.notes == ()
    assert said.text in cut.report(tmp_path).read_text()


def test_only_the_fastest_plan_is_said_to_be_looked_for() -> None:
    found = front(product, settings=replace(LEAN, front=False))
    assert found.notes == (note("fastest"),)


@pytest.mark.slow
def test_forms_that_are_not_searched_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    assert "forms" not in kinds(front(shared, mesh_shapes=SHAPES, settings=FROZEN))
    monkeypatch.setattr(forms, "FASTER", 0)
    assert note("forms") in front(shared, mesh_shapes=SHAPES, settings=FROZEN).notes


def test_forms_that_save_little_are_counted() -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    most = replace(FROZEN, least_gain=0.99)
    assert note("forms-slight") in front(shared, mesh_shapes=SHAPES, settings=most).notes


@pytest.mark.slow
def test_forms_that_rules_hold_and_are_not_searched_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ y) @ x

    def forms_of(some: Settings) -> list[Note]:
        found = front(chain, mesh_shapes=SHAPES, settings=some)
        return [n for n in found.notes if n.kind in ("forms", "forms-unseen")]

    assert forms_of(LEAN) == []
    # No other form has room then, and behind one that differs in views alone none is looked for.
    unseen = note("forms-unseen")
    assert forms_of(replace(LEAN, forms=1)) == [unseen]
    (more,) = forms_of(replace(LEAN, forms=2))
    assert more == note("forms", 2)
    monkeypatch.setattr(extractions, "LOOKED_AT", 0)
    assert unseen in forms_of(LEAN)


@pytest.mark.slow
def test_equal_layers_that_the_rules_see_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(24):
            x = jnp.tanh(x @ y) * 2.0
        return x

    assert "equal-layers" not in kinds(front(deep, mesh_shapes=SHAPES))
    monkeypatch.setattr(folded_program, "LEAST_OPERATIONS", 20)
    (said,) = [n for n in front(deep, mesh_shapes=SHAPES).notes if n.kind == "equal-layers"]
    graph = te.trace(deep, X, X).graph
    folded = folded_program.fold(graph)
    assert folded is not None
    left = len(graph.operations) - len(folded.graph.operations)
    assert said.count == left
    assert note("forms-unseen") in front(deep, mesh_shapes=SHAPES, settings=QUICK).notes


def test_budgets_that_end_the_rules_are_told() -> None:
    few = replace(LEAN, algebra=replace(QUICK.algebra, iterations=1))
    told = front(product, mesh_shapes=SHAPES, settings=few).notes
    assert told == (note("rules-budget"),)
    few = replace(LEAN, budget=replace(QUICK.budget, iterations=1))
    told = front(product, mesh_shapes=SHAPES, settings=few).notes
    assert told == (note("layout-rules", networks=1),)


@pytest.mark.slow
@pytest.mark.parametrize(("readers", "small"), [(3, 1 << 20), (5, 0)])
def test_copies_that_may_end_in_fewer_places_are_counted(
    readers: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        h = jnp.tanh(x @ ws[0])
        return [h @ w for w in ws]

    def notes(count: int) -> tuple[Note, ...]:
        program = te.trace(reads, X, *[X] * count)
        return te.optimize(program, "h100:4", mesh_shapes=SHAPES, settings=FROZEN).notes

    monkeypatch.setattr(kept, "_SMALL", 0)
    assert notes(min(readers, 4)) == ()
    monkeypatch.setattr(kept, "_SMALL", small)
    (said,) = notes(readers)
    assert said == note("shared-until")


def test_copies_that_are_not_shared_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_FEW", 0)
    (said,) = front(product, mesh_shapes=SHAPES).notes
    assert said == note("shared-copies")


@pytest.mark.slow
def test_what_a_mesh_costs_is_told_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    (told,) = [n for n in front(product, mesh=mesh).notes if n.kind == "mesh-cost"]
    assert told.text.startswith("The mesh 4data costs")
    monkeypatch.setattr(fronts, "_ROWS", 3)
    (told,) = [n for n in front(product, mesh=mesh).notes if n.kind == "mesh-cost"]
    assert told.text.startswith("The cost of the mesh 4data is not known")
    assert "more than 3" in told.text


@pytest.mark.slow
def test_loops_that_take_next_to_nothing_are_counted() -> None:
    def looped(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(8):
            x = x @ y
        return x * lax.fori_loop(0, 2, lambda _, c: c + 1.0, 0.0)

    big = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    notes = te.optimize(
        te.trace(looped, big, big), "h100:4", mesh_shapes=SHAPES, settings=QUICK
    ).notes
    assert note("bodies") in notes
    assert "bodies" not in kinds(front(product))


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["_TRIALS", "_ROUNDS"])
def test_changes_that_were_not_tried_are_counted(
    limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    assert "untried" not in kinds(front(shared, mesh_shapes=SHAPES, settings=FROZEN))
    monkeypatch.setattr(cheapest, limit, 0)
    found = front(shared, mesh_shapes=SHAPES, settings=FROZEN)
    (said,) = [n for n in found.notes if n.kind == "untried"]
    assert said.text in notes_text(found.notes)
    assert said.text in found.report(tmp_path).read_text()


def test_operations_of_many_operands_are_counted() -> None:
    def joined(count: int) -> tuple[Note, ...]:
        return front(lambda x, y: jnp.concatenate([x, *[y] * count]) * 2.0).notes

    assert joined(3) == ()
    assert joined(4) == (note("many-operands"),)


@pytest.mark.slow
def test_what_is_left_out_inside_a_loop_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(x: jax.Array, y: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            both = jnp.concatenate([c @ y + c @ (y * 2.0), c, c, c, c])
            return jnp.sort(both, axis=0)[:64], None

        return lax.scan(body, x, None, length=4)[0]

    monkeypatch.setattr(cheapest, "_TRIALS", 0)
    found = front(looped, mesh_shapes=SHAPES)
    assert note("many-operands") in found.notes and "untried" in kinds(found)


@pytest.mark.parametrize(
    ("made", "others", "said"),
    [
        (Recomputing(), 2, ()),
        (Recomputing(left=1), 2, (note("recompute"),)),
        (
            Recomputing(prices=4, cuts=5),
            0,
            (
                note(
                    "recompute-where",
                    where="4 prices of memory, 1 of 6 divisions into segments",
                ),
            ),
        ),
        (
            Recomputing(prices=4),
            2,
            (note("recompute-where", where="4 prices of memory, 1 of 3 forms"),),
        ),
        (
            Recomputing(slight=True),
            0,
            (note("recompute-slight", share="3 %"),),
        ),
    ],
)
def test_forms_that_compute_twice_are_counted(
    made: Recomputing, others: int, said: tuple[Note, ...]
) -> None:
    assert of_recomputation(made, others) == said


@pytest.mark.slow
def test_where_values_to_compute_twice_were_looked_for_is_told() -> None:
    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        def loss(y: jax.Array) -> jax.Array:
            h = x
            for _ in range(4):
                h = jnp.tanh(h @ y)
            return jnp.sum(h)

        return y - jax.grad(loss)(y)

    notes = front(step, mesh_shapes=SHAPES, settings=QUICK).notes
    assert any(f"{len(recompute._PRICES)} prices" in each.text for each in notes)
    none = front(step, mesh_shapes=SHAPES, settings=replace(QUICK, recompute=0)).notes
    assert not any("prices" in each.text for each in none)


def test_kernels_of_the_users_own_are_told() -> None:
    from jax.experimental import pallas as pl

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def step(x: jax.Array) -> jax.Array:
        doubled = pl.pallas_call(double, out_shape=x, interpret=True)(x)
        return jax.lax.scan(lambda c, _: (c @ doubled, None), x, None, length=2)[0]

    program = te.trace(step, jnp.ones((16, 16)))
    front = te.optimize(program, "cpu:8", settings=Settings(work=0.2))
    (told,) = [n for n in front.notes if n.kind == "opaque"]
    assert re.search(r"1 operation without a template \(pallas_call at .*\.py:\d+", told.text)
    assert "jax.numpy" in told.setting
    plain = te.trace(lambda x: x @ x, jnp.ones((16, 16))).graph
    assert of_opaque(plain) == ()


@pytest.mark.slow
@pytest.mark.parametrize("front", [False, True])
def test_a_first_call_on_an_explicit_mesh_says_that_it_was_not_divided(front: bool) -> None:
    from jax.sharding import AxisType

    from tapestry_egg.pipeline.jit.planning import Request, plan_program

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    request = Request(mesh=mesh, settings=replace(QUICK, front=front), cache=False)
    notes = plan_program(te.trace(product, X, X), request).notes
    assert (note("named-mesh", mesh="8data") in notes) == (not front)


def test_micro_batches_that_no_limit_asks_for_are_told() -> None:
    def descended(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

    rows = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    program, machine = te.trace(descended, X, rows), load_target("h100:4")
    settings = Settings(work=0.5, recompute=0, front=False)
    found = te.optimize(program, machine, mesh_shapes=SHAPES, settings=settings)
    assert "batch-fits" in kinds(found)
    form = Form(program.graph)
    assert not batched(form, machine, ()).unsplit  # none are wanted
    assert not batched(form, machine, (4,)).unsplit
    assert not batched(form, machine, None, limit=1000.0).unsplit
    same = te.trace(product, X, X)  # no input that the program does not make anew
    assert not batched(Form(same.graph), machine, None).unsplit


def test_operations_that_no_rule_shards_are_named_with_the_reason() -> None:
    found = front(lambda x, y: jnp.sort((x @ y).reshape(-1)))
    (said,) = [n for n in found.notes if n.kind == "unsplit"]
    assert said.count == 1 and re.search(r"\(sort at .*\.py:\d+.*whole dim\)", said.text)
    assert "census" in said.setting and said.effect == "cost"
    assert "unsplit" not in kinds(front(product))
