"""What a search leaves out is counted and told, once; where nothing was, nothing is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.problem import joiner
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.omissions import of_forms, of_meshes, of_opaque, of_recomputation
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.rewrite import forms, recompute

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
QUICK = Settings(work=0.5, workers=1)
SHAPES = [MeshShape(("x",), (4,))]


def front(fn: Any, target: str = "h100:4", **options: Any) -> te.Front:
    options.setdefault("settings", QUICK)
    return te.optimize(te.trace(fn, X, X), target, **options)


def product(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.tanh(x @ y) * 2.0 + x


def test_a_search_of_everything_says_nothing() -> None:
    assert front(product).notes == ()


def test_meshes_of_more_axes_are_counted() -> None:
    assert of_meshes(load_target("h100:4"), 2) == ()
    assert of_meshes(load_target("h100:8"), 2) == (
        "1 mesh shape of more than 2 axes was not searched",
    )
    assert of_meshes(load_target("h100:8"), 1) == (
        "3 mesh shapes of more than 1 axis were not searched",
    )
    assert of_meshes(load_target("h100:8"), 3) == ()
    found = front(product, "h100:8")
    assert found.notes == of_meshes(load_target("h100:8"), 2)
    assert found.notes[0] in str(found)
    assert front(product, "h100:8", mesh_shapes=[MeshShape(("x",), (8,))]).notes == ()


def test_kernels_whose_ways_to_run_were_cut_are_counted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    whole = front(product, mesh_shapes=SHAPES)
    monkeypatch.setattr(joiner, "ROWS", 2)
    monkeypatch.setattr(joiner, "_FEWEST", 2)
    cut = front(product, mesh_shapes=SHAPES)
    (said,) = cut.notes
    assert said == "of 5 kernels on 4x, no more than 2 ways to run each were searched"
    assert whole.notes == ()
    assert said in cut.report(tmp_path).read_text()


def test_only_the_fastest_plan_is_said_to_be_looked_for() -> None:
    found = front(product, settings=Settings(work=0.5, workers=1, front=False))
    assert found.notes == ("only the fastest plan within the limits was looked for",)


def test_forms_that_are_not_searched_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def shared(x: jax.Array, y: jax.Array) -> jax.Array:
        return x @ y + x @ (y * 2.0)

    assert not any("form" in note for note in front(shared, mesh_shapes=SHAPES).notes)
    monkeypatch.setattr(forms, "MOST_FORMS", 1)
    (said,) = front(shared, mesh_shapes=SHAPES).notes
    assert said == "1 more form of the program was not searched"


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


@pytest.mark.parametrize(("others", "said"), [(0, ()), (1, ("1 more form that computes",))])
def test_forms_that_compute_twice_are_counted(others: int, said: Sequence[str]) -> None:
    form = forms.Form(te.trace(product, X, X).graph, (recompute.RULE,), others=others)
    found = of_recomputation([form])
    assert len(found) == len(said) and all(
        a.startswith(b) for a, b in zip(found, said, strict=True)
    )
    assert of_forms([form], 1) == of_forms([form, form], 2)


def test_kernels_of_the_users_own_are_told() -> None:
    from jax.experimental import pallas as pl

    def double(x: Any, out: Any) -> None:
        out[...] = x[...] * 2

    def step(x: jax.Array) -> jax.Array:
        doubled = pl.pallas_call(double, out_shape=x, interpret=True)(x)
        return jax.lax.scan(lambda c, _: (c @ doubled, None), x, None, length=2)[0]

    program = te.trace(step, jnp.ones((16, 16)))
    front = te.optimize(program, "cpu:8", settings=Settings(seconds=0.2))
    (told,) = [n for n in front.notes if "template" in n]
    assert told.startswith("1 operation without a template (pallas_call) runs whole")
    plain = te.trace(lambda x: x @ x, jnp.ones((16, 16))).graph
    assert of_opaque(plain) == ()
