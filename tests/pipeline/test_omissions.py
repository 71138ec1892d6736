"""What a search leaves out is counted and told, once; where nothing was, nothing is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.choices import joiner
from tapestry_egg.extract.front import contract_cost
from tapestry_egg.extract.problem import kept
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.omissions import (
    of_meshes,
    of_opaque,
    of_recomputation,
)
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.pipeline.words import read_words
from tapestry_egg.rewrite import choose, extractions, folded_program, forms, recompute
from tapestry_egg.rewrite.form import Form
from tapestry_egg.rewrite.fused_forms import batched
from tapestry_egg.rewrite.recompute import Recomputing

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
QUICK = Settings(work=0.5, micro_batches=())
#: Forms are chosen by their time on one device alone, and nothing is computed again.
FROZEN = replace(QUICK, forms=0, recompute=0)
SHAPES = [MeshShape(("x",), (4,))]


def front(fn: Any, target: str = "h100:4", **options: Any) -> te.Front:
    options.setdefault("settings", QUICK)
    return te.optimize(te.trace(fn, X, X), target, **options)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(x @ y) * 2.0 + x


def test_a_search_of_everything_says_nothing() -> None:
    assert front(product).notes == ()


def unsearched(target: str, most: int, **words: Any) -> tuple[str, ...]:
    """What is said of the meshes that `optimize` does not search."""
    given = {"mesh": None, "pins": None, "in_shardings": None, "out_shardings": None, **words}
    program = te.trace(product, X, X)
    shapes = given.pop("mesh_shapes", None)
    found = read_words(program, load_target(target), mesh_shapes=shapes, max_axes=most, **given)
    return of_meshes(found.unsearched)


def test_meshes_of_more_axes_are_counted() -> None:
    assert unsearched("h100:4", 2) == ()
    assert unsearched("h100:8", 2) == ("1 mesh shape of more than 2 axes was not searched",)
    assert unsearched("h100:8", 3) == ()
    found = front(product, "h100:8")
    assert found.notes == unsearched("h100:8", 2)
    assert found.notes[0] in str(found)
    assert front(product, "h100:8", mesh_shapes=[MeshShape(("x",), (8,))]).notes == ()


def test_meshes_that_differ_in_names_alone_count_once() -> None:
    # 2x×2y×2z and 2x×4y, which is 4x×2y too: on eight devices of one switch names mean nothing.
    assert unsearched("h100:8", 1) == ("2 mesh shapes of more than 1 axis were not searched",)
    # Pins give them a meaning.
    assert unsearched("h100:8", 1, pins={"[0]": ("x", None)}) == (
        "3 mesh shapes of more than 1 axis were not searched",
    )


def test_meshes_that_divide_a_named_one_are_counted() -> None:
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    assert unsearched("h100:8", 3, mesh=mesh) == ()
    (said,) = unsearched("h100:8", 2, mesh=mesh)
    assert said == "1 mesh shape of more than 2 axes was not searched"
    assert (
        unsearched("h100:8", 2, mesh=mesh, mesh_shapes=[MeshShape(("data", "model"), (4, 2))]) == ()
    )


def test_meshes_of_many_named_axes_are_counted() -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), ("a", "b", "c", "d"))
    assert unsearched("h100:2x8", 2, mesh=mesh) == (
        "1 mesh shape of more than 3 axes was not searched",
    )


def test_kernels_whose_ways_to_run_were_cut_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    whole = front(product, mesh_shapes=SHAPES)
    monkeypatch.setattr(joiner, "ROWS", 2)
    monkeypatch.setattr(joiner, "_FEWEST", 2)
    cut = front(product, mesh_shapes=SHAPES)
    (said,) = cut.notes
    assert said == (
        "of 2 kernels and 3 values at boundaries on 4x, no more than 2 ways each were searched"
    )
    assert whole.notes == ()
    assert said in cut.report(tmp_path).read_text()


def test_only_the_fastest_plan_is_said_to_be_looked_for() -> None:
    found = front(product, settings=Settings(work=0.5, front=False))
    assert found.notes == ("only the fastest plan within the limits was looked for",)


@pytest.mark.slow
def test_forms_that_are_not_searched_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    assert not any(
        "form" in note for note in front(shared, mesh_shapes=SHAPES, settings=FROZEN).notes
    )
    monkeypatch.setattr(forms, "FASTER", 0)
    (said,) = [n for n in front(shared, mesh_shapes=SHAPES, settings=FROZEN).notes if "form" in n]
    assert said == "1 more form of the program was not searched"


def test_forms_that_save_little_are_counted() -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    most = replace(FROZEN, least_gain=0.99)
    (said,) = [n for n in front(shared, mesh_shapes=SHAPES, settings=most).notes if "form" in n]
    assert said == (
        "1 form of the program that saves next to nothing on one device was not searched"
    )


@pytest.mark.slow
def test_forms_that_rules_hold_and_are_not_searched_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        return (x @ y) @ x

    def forms_of(some: Settings) -> list[str]:
        found = front(chain, mesh_shapes=SHAPES, settings=some)
        return [n for n in found.notes if "form" in n and "bounds" not in n and "views" not in n]

    assert forms_of(QUICK) == []
    # No other form has room then, and behind one that differs in views alone none is looked for.
    unseen = "of the forms that the rules hold, not all were looked at"
    more, rest = forms_of(replace(QUICK, forms=1))
    assert more == "1 more form of the program was not searched" and rest == unseen
    (more,) = forms_of(replace(QUICK, forms=2))
    assert more == "2 more forms of the program were not searched"
    monkeypatch.setattr(extractions, "LOOKED_AT", 0)
    assert unseen in forms_of(QUICK)


@pytest.mark.slow
def test_equal_layers_that_the_rules_see_once_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def deep(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(24):
            x = jnp.tanh(x @ y) * 2.0
        return x

    assert not any("equal layers" in note for note in front(deep, mesh_shapes=SHAPES).notes)
    monkeypatch.setattr(folded_program, "LEAST_OPERATIONS", 20)
    (said,) = [n for n in front(deep, mesh_shapes=SHAPES).notes if "equal layers" in n]
    graph = te.trace(deep, X, X).graph
    folded = folded_program.fold(graph)
    assert folded is not None
    left = len(graph.operations) - len(folded.graph.operations)
    assert said.startswith(f"{left} operations of equal layers were rewritten like")
    unseen = "of the forms that the rules hold, not all were looked at"
    assert unseen in front(deep, mesh_shapes=SHAPES, settings=QUICK).notes


def test_budgets_that_end_the_rules_are_told() -> None:
    few = replace(QUICK, algebra=replace(QUICK.algebra, iterations=1))
    told = front(product, mesh_shapes=SHAPES, settings=few).notes
    assert told == ("a budget ended the rules on the program before they had nothing more to say",)
    few = replace(QUICK, budget=replace(QUICK.budget, iterations=1))
    told = front(product, mesh_shapes=SHAPES, settings=few).notes
    assert told == ("a budget ended the rules on layouts of 1 of 1 problem",)


@pytest.mark.slow
@pytest.mark.parametrize(("readers", "small"), [(3, 1 << 20), (5, 0)])
def test_copies_that_may_end_in_fewer_places_are_counted(
    readers: int, small: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reads(x: jax.Array, *ws: jax.Array) -> list[jax.Array]:
        h = jnp.tanh(x @ ws[0])
        return [h @ w for w in ws]

    def notes(count: int) -> tuple[str, ...]:
        program = te.trace(reads, X, *[X] * count)
        return te.optimize(program, "h100:4", mesh_shapes=SHAPES, settings=FROZEN).notes

    monkeypatch.setattr(kept, "_SMALL", 0)
    assert notes(min(readers, 4)) == ()
    monkeypatch.setattr(kept, "_SMALL", small)
    (said,) = notes(readers)
    assert said.startswith("of 1 value, small or of many readers, not every reader was tried")


def test_copies_that_are_not_shared_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "_FEW", 0)
    (said,) = front(product, mesh_shapes=SHAPES).notes
    assert said.startswith("of 1 value no copies were tried as shared ones but those")


@pytest.mark.slow
def test_what_a_mesh_costs_is_told_or_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = jax.sharding.AbstractMesh((4,), ("data",))
    (told,) = [n for n in front(product, mesh=mesh).notes if "the mesh" in n]
    assert told.startswith("the mesh 4data costs")
    monkeypatch.setattr(contract_cost, "_ROWS", 3)
    (told,) = [n for n in front(product, mesh=mesh).notes if "the mesh" in n]
    assert told.startswith("what the mesh 4data costs was not looked for") and "more than 3" in told


@pytest.mark.slow
def test_loops_that_take_next_to_nothing_are_counted() -> None:
    def looped(x: jax.Array, y: jax.Array) -> jax.Array:
        for _ in range(20):
            x = x @ y
        return x * lax.fori_loop(0, 2, lambda _, c: c + 1.0, 0.0)

    big = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    notes = te.optimize(
        te.trace(looped, big, big), "h100:4", mesh_shapes=SHAPES, settings=QUICK
    ).notes
    (said,) = [note for note in notes if "next to no time" in note]
    assert said.endswith("left as written")
    assert not any("next to no time" in note for note in front(product).notes)


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["_TRIALS", "_ROUNDS"])
def test_changes_that_were_not_tried_are_counted(
    limit: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    assert not any(
        "not tried" in note for note in front(shared, mesh_shapes=SHAPES, settings=FROZEN).notes
    )
    monkeypatch.setattr(choose, limit, 0)
    found = front(shared, mesh_shapes=SHAPES, settings=FROZEN)
    (said,) = [note for note in found.notes if "not tried" in note]
    assert said[0].isdigit()
    assert "of change to the program that looked worth a trial" in said
    assert said in str(found)
    assert said in found.report(tmp_path).read_text()


def test_operations_of_many_operands_are_counted() -> None:
    def joined(count: int) -> tuple[str, ...]:
        return front(lambda x, y: jnp.concatenate([x, *[y] * count]) * 2.0).notes

    assert joined(3) == ()
    assert joined(4) == ("1 operation of more operands than rules see was left as written",)


@pytest.mark.slow
def test_what_is_left_out_inside_a_loop_is_counted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def looped(x: jax.Array, y: jax.Array) -> jax.Array:
        def body(c: jax.Array, _: None) -> tuple[jax.Array, None]:
            both = jnp.concatenate([c @ y + c @ (y * 2.0), c, c, c, c])
            return both[:64], None

        return lax.scan(body, x, None, length=4)[0]

    monkeypatch.setattr(choose, "_TRIALS", 0)
    notes = front(looped, mesh_shapes=SHAPES).notes
    assert any("1 operation of more operands than rules see" in note for note in notes)
    assert any("looked worth a trial" in note for note in notes)


@pytest.mark.parametrize(
    ("made", "others", "said"),
    [
        (Recomputing(), 2, ()),
        (Recomputing(left=1), 2, ("1 more form that computes values twice was not searched",)),
        (
            Recomputing(prices=4, cuts=5),
            0,
            (
                "values to compute twice were looked for at 4 prices of memory, in 1 of 6 "
                "divisions into segments",
            ),
        ),
        (
            Recomputing(prices=4),
            2,
            ("values to compute twice were looked for at 4 prices of memory, for 1 of 3 forms",),
        ),
        (
            Recomputing(slight=True),
            0,
            (
                "values to compute twice were not looked for: on one device all that are kept past "
                "the peak are no more than 3% of it",
            ),
        ),
    ],
)
def test_forms_that_compute_twice_are_counted(
    made: Recomputing, others: int, said: tuple[str, ...]
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

    notes = front(step, mesh_shapes=SHAPES).notes
    assert any(f"looked for at {len(recompute._PRICES)} prices" in note for note in notes)
    none = front(step, mesh_shapes=SHAPES, settings=replace(QUICK, recompute=0)).notes
    assert not any("prices" in note for note in none)


def test_kernels_of_the_users_own_are_told() -> None:
    from jax.experimental import pallas as pl

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def step(x: jax.Array) -> jax.Array:
        doubled = pl.pallas_call(double, out_shape=x, interpret=True)(x)
        return jax.lax.scan(lambda c, _: (c @ doubled, None), x, None, length=2)[0]

    program = te.trace(step, jnp.ones((16, 16)))
    front = te.optimize(program, "cpu:8", settings=Settings(work=0.2))
    (told,) = [n for n in front.notes if "template" in n]
    assert told.startswith("1 operation without a template (pallas_call) runs whole")
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
    said = "only the mesh 8data as it is named was searched, none that divides its axes"
    assert (said in notes) == (not front)


def test_micro_batches_that_no_limit_asks_for_are_told() -> None:
    def descended(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w)))(w)

    rows = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
    program, machine = te.trace(descended, X, rows), load_target("h100:4")
    settings = Settings(work=0.5, recompute=0, front=False)
    found = te.optimize(program, machine, mesh_shapes=SHAPES, settings=settings)
    assert any("micro-batches were not looked for" in note for note in found.notes)
    form = Form(program.graph)
    assert not batched(form, machine, ()).unsplit  # none are wanted
    assert not batched(form, machine, (4,)).unsplit
    assert not batched(form, machine, None, limit=1000.0).unsplit
    same = te.trace(product, X, X)  # no input that the program does not make anew
    assert not batched(Form(same.graph), machine, None).unsplit
