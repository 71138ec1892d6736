"""Second instances in a whole search: which programs are offered any, and what a front says."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.places import patched
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import fronts, patching
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.rewrite.recompute import RULE

QUICK = Settings(work=0.5, workers=1, micro_batches=())
# XLA for GPUs computes values within their readers itself, all of them.
EAGER = replace(te.load_target("h100:4"), fuses=False)
X = jax.ShapeDtypeStruct((8192, 512), jnp.float32)


def front(fn: Any, **settings: Any) -> te.Front:
    shapes = [MeshShape(("x",), (4,))]
    quick = replace(QUICK, **settings)
    return te.optimize(te.trace(fn, X, X), EAGER, mesh_shapes=shapes, settings=quick)


def sums(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    z = jnp.tanh(x)
    return jnp.sum(z * y, 0), jnp.sum(z, 0), jnp.sum(jnp.sin(y), 0)


def products(x: jax.Array, y: jax.Array) -> tuple[jax.Array, ...]:
    z = jnp.tanh(x)
    return z.T @ y, jnp.sum(z, 0), jnp.sum(y, 0)


def test_what_makes_a_value_may_run_in_the_kernels_of_both_its_readers() -> None:
    found = front(sums)
    (plan,) = found
    assert plan.rules == (RULE,) and plan.is_proven and not found.notes
    once = front(sums, recompute=0)
    assert plan.costs.seconds < 0.75 * once[0].costs.seconds
    assert plan.bound <= plan.costs.seconds < once[0].bound


@pytest.mark.parametrize("settings", [{"recompute": 0}, {"forms": 0}])
def test_who_wants_no_other_forms_is_offered_no_second_instances(settings: Any) -> None:
    assert all(plan.rules == () for plan in front(sums, **settings))


def test_where_there_is_no_room_none_are_offered_and_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patching, "FEW", 1)
    found = front(sums)
    assert all(plan.rules == () for plan in found)
    said = "1 value that several read was not tried as made again for some of their readers alone"
    assert said in found.notes


def test_where_values_apart_make_many_programs_these_are_one_problem(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three values with a second instance each are eight programs, of which seven are too many."""

    def apart(*given: jax.Array) -> list[jax.Array]:
        z = [jnp.tanh(x) for x in given]
        return [f(x, 0) for x in z for f in (jnp.sum, jnp.max)]

    def best() -> float:
        shapes = [MeshShape(("x",), (4,))]
        program = te.trace(apart, *[X] * 3)
        found = te.optimize(program, EAGER, mesh_shapes=shapes, settings=QUICK)
        return found.best("seconds").costs.seconds

    asked: list[int] = []
    real = patched.patched

    def joined(pose: Any, counts: Any, names: Any) -> Any:
        asked.append(prod(counts))
        return real(pose, counts, names)

    monkeypatch.setattr(patched, "patched", joined)
    few = best()
    assert asked == []
    monkeypatch.setattr(patching, "FEW", 7)
    assert best() == pytest.approx(few)
    assert asked == [8]


@pytest.mark.slow
def test_what_no_plan_takes_less_than_however_merged_is_of_all_programs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those, too, in which nothing was found that is better: they are asked for their fastest."""
    real = fronts.search_in_turn

    def nothing_better(*given: Any) -> Any:
        found = real(*given)
        for k, archive in enumerate(found.archives[1:], 1):
            found.archives[k] = replace(archive, candidates=[])
        return found

    monkeypatch.setattr(fronts, "search_in_turn", nothing_better)
    said = "however collectives are merged, no plan takes less than"
    assert any(said in note for note in front(products).notes)
    monkeypatch.setattr(fronts, "FEW", 0)
    assert not any(said in note for note in front(products).notes)
