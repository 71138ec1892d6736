"""Recipes beside a front: which arguments lie how, and what their plans are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import tapestry_egg as te
from tapestry_egg.cli.app import app
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.front.front import Front
from tapestry_egg.why import recipes as module
from tapestry_egg.why.recipes import DATA_PARALLEL, FULLY_SHARDED, Recipes

QUICK = te.Settings(work=0.3, recompute=0, forms=0, workers=1)
FASTEST = te.Settings(work=0.3, front=False, workers=1)


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(w: Any, frozen: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jnp.tanh(x @ frozen) @ w["up"] @ w["down"] + w["bias"] - y) ** 2)


def step(w: Any, frozen: Any, x: Any, y: Any) -> Any:
    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w, frozen, x, y))


def planned(rows: int = 65536, odd: int = 6, fn: Callable[..., Any] = step) -> Front:
    w = {"up": f32(256, 1024), "down": f32(1024, 6), "bias": f32(odd)}
    given = (w, f32(256, 256), f32(rows, 256), f32(rows, 6))
    program = te.trace(fn, *given, donate_argnums=0)
    return te.optimize(program, "h100:8", settings=QUICK)


@pytest.fixture(scope="module")
def found() -> Recipes:
    return planned().recipes(settings=FASTEST)


def test_the_batch_is_cut_and_the_rest_is_whole_or_cut_along_its_largest_dim(
    found: Recipes,
) -> None:
    parallel, sharded = found.recipes
    assert (parallel.name, sharded.name) == (DATA_PARALLEL, FULLY_SHARDED)
    batch = {"[2]": ("x", None), "[3]": ("x", None)}
    # A frozen weight has no rows, though 8 devices divide its dims.
    assert parallel.layouts == {
        "[0]['bias']": (None,),
        "[0]['down']": (None, None),
        "[0]['up']": (None, None),
        "[1]": (None, None),
        **batch,
    }
    assert sharded.layouts == {
        "[0]['bias']": (None,),  # which 8 devices do not divide
        "[0]['down']": ("x", None),
        "[0]['up']": (None, "x"),
        "[1]": ("x", None),
        **batch,
    }


def test_plans_lie_as_the_recipe_says_and_what_leaves_does_too(found: Recipes) -> None:
    for recipe in found.recipes:
        plan = recipe.plan
        assert plan is not None and plan.name == recipe.name and plan.mesh.sizes == (8,)
        names = plan.graph.input_names or ()
        lies = {n: s.show(plan.mesh) for n, s in zip(names, plan.in_shardings, strict=True)}
        for path, dims in recipe.layouts.items():
            assert lies[path] == "[" + ", ".join(d or "." for d in dims) + "]"
        assert plan.origin is not None and plan.origin.feedback
        for out, inp in plan.origin.feedback:
            assert plan.out_shardings[out] == plan.in_shardings[inp]
    parallel = found.recipes[0].plan
    # It sums gradients and moves nothing else.
    assert parallel is not None and {c.kind for c in parallel.collectives} == {"all_reduce"}


def test_no_recipe_beats_the_front_it_stands_beside(found: Recipes) -> None:
    for recipe in found.recipes:
        own = found.beside(recipe)
        assert own is not None and recipe.plan is not None
        assert own.costs.seconds <= recipe.plan.costs.seconds * 1.01
        assert own.costs.peak_bytes <= recipe.plan.costs.peak_bytes * 1.01


def test_the_table_tells_both_and_when_the_front_is_slower(found: Recipes) -> None:
    text = " ".join(str(found).split())
    assert [row["recipe"] for row in found.data()] == [DATA_PARALLEL, FULLY_SHARDED]
    assert "data" in text and "sharded" in text and "more work" not in text
    slow = tuple(
        replace(p, costs=replace(p.costs, seconds=9.0, peak_bytes=1.0)) for p in found.front.plans
    )
    slower = " ".join(str(replace(found, front=replace(found.front, plans=slow))).split())
    assert "had not reached data parallel and fully sharded: give it more work" in slower
    large = tuple(replace(p, costs=replace(p.costs, peak_bytes=1e15)) for p in found.front.plans)
    alone = replace(found, front=replace(found.front, plans=large, usable_bytes=1))
    assert "! more than a device's usable memory" in str(alone)
    assert [row["front"] for row in alone.data()] == [None, None]


@pytest.mark.slow
def test_what_does_not_fit_is_told_all_the_same(found: Recipes) -> None:
    front = found.front
    machine = front.plans[0].origin and front.plans[0].origin.machine
    assert machine is not None
    small = replace(machine, hbm_bytes=100_000)
    origins = tuple(replace(p, origin=replace(p.origin, machine=small)) for p in front.plans)
    cramped = replace(front, plans=origins, usable_bytes=small.usable_bytes)
    assert small.usable_bytes is not None
    for recipe in cramped.recipes(settings=replace(FASTEST, micro_batches=(), recompute=0)).recipes:
        assert recipe.plan is not None and recipe.plan.costs.peak_bytes > small.usable_bytes


@pytest.mark.slow
def test_reasons_where_there_is_no_such_recipe() -> None:
    seven = planned(rows=65535).recipes(settings=FASTEST)
    assert [r.plan for r in seven.recipes] == [None, None]
    assert "8 devices do not divide dim 0 of [2], f32[65535, 256]" in str(seven)

    def scale(w: Any) -> Any:
        return w * (w @ w)

    program = te.trace(scale, f32(64, 64))
    front = te.optimize(program, "h100:8", settings=QUICK)
    assert "no dim of an argument is a batch" in str(front.recipes(settings=FASTEST))

    def scores(x: Any) -> Any:
        return jnp.tanh(x).sum(1)

    front = te.optimize(te.trace(scores, f32(4096, 3)), "h100:8", settings=QUICK)
    parallel, sharded = front.recipes(settings=FASTEST).recipes
    assert parallel.plan is not None and "no other argument has a dim" in sharded.missing


def test_plans_that_know_no_program_are_refused(found: Recipes) -> None:
    bare = tuple(replace(p, program=None) for p in found.front.plans)
    with pytest.raises(ExtractError, match="which program and machine"):
        module.recipes(replace(found.front, plans=bare))


@pytest.mark.slow
def test_the_command_prints_the_table_or_json(found: Recipes, tmp_path: Path) -> None:
    file = tmp_path / "step.front.json"
    found.front.save(file)
    run = CliRunner().invoke(app, ["recipes", str(file), "--work", "0.1"])
    assert run.exit_code == 0 and run.output.startswith("recipes of step on h100:8")
    run = CliRunner().invoke(app, ["recipes", str(file), "--work", "0.1", "--json"])
    rows = json.loads(run.stdout)
    assert [row["recipe"] for row in rows] == [DATA_PARALLEL, FULLY_SHARDED]
    assert all(row["plan"]["seconds"] >= row["front"]["seconds"] / 1.01 for row in rows)
