"""What fronts say of bounds: which gaps are proven, and fronts of programs that cost nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.files.files import load, save
from tapestry_egg.show.text import plan_text

ROWS = jax.ShapeDtypeStruct((8192, 1024), jnp.float32)
WEIGHTS = (
    jax.ShapeDtypeStruct((1024, 4096), jnp.float32),
    jax.ShapeDtypeStruct((4096, 1024), jnp.float32),
)


def step(w: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(w: Any) -> jax.Array:
        return jnp.mean((jax.nn.relu(x @ w[0]) @ w[1] - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, w, jax.grad(loss)(w))


@pytest.mark.slow
def test_bounds_of_merged_plans_are_proven(tmp_path: Path) -> None:
    """As they hold however collectives are merged; one that does not has its mark."""
    front = te.optimize(
        te.trace(step, WEIGHTS, ROWS, ROWS), "h100:8", settings=te.Settings(work=0.5)
    )
    assert all(p.is_proven for p in front)
    (first, *others) = front.plans
    front = replace(front, plans=(replace(first, merged_too=False), *others))
    lines = {line.split()[0]: line for line in str(front).splitlines() if line}
    assert first.body.merged and any(p.body.merged for p in others)
    save(front, tmp_path / "step.front.json")
    again = load(tmp_path / "step.front.json")
    assert isinstance(again, te.Front)
    assert [p.is_proven for p in again] == [p.is_proven for p in front]
    # What is less may be of the other front's, which does not know of merging.
    assert [p.is_proven for p in front.merge(again)] == [not p.body.merged for p in front]
    for plan in front:
        open_ = plan is front.plans[0]
        assert plan.is_proven != open_
        assert lines[plan.name].split()[-1] == f"{'~' if open_ else ''}{plan.gap:.2%}"
        said = " ".join(plan_text(plan).split())
        assert ("no proof" in said) == open_


@pytest.mark.parametrize("fn", [lambda a: a, lambda a: None])
def test_a_program_that_costs_nothing_has_a_front(fn: Callable[..., Any]) -> None:
    given = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    program = te.trace(fn, given, donate_argnums=0)
    front = te.optimize(program, "h100:8", settings=te.Settings(work=0.2))
    assert front.best().costs.seconds == 0 and front.best().gap_shown in ("-", "0.00%")
