"""Second instances in a whole search: which programs are offered any, and what a front says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.front.notes import note
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import passes
from tapestry_egg.pipeline.settings import Settings
from tapestry_egg.rewrite.recompute import RULE

QUICK = Settings(work=0.5, micro_batches=())
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
    monkeypatch.setattr(passes, "_SECOND", 1)
    found = front(sums)
    assert all(plan.rules == () for plan in found)
    assert note("recompute-readers") in found.notes
