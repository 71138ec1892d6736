"""What is sent for a rounding alone is rounded before it is sent, where a plan loses nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.merge import rounded_first
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Kept, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.schedule.of_plans import plan_schedule
from tests.plans.plans import plan_by_hand

MESH = MeshShape(("x",), (8,))
CUT, WHOLE = Layout(((0,), ())), Layout.replicated(2)


def gathered(
    fn: Callable[..., jax.Array], outputs: tuple[Layout, ...], kept: bool = False
) -> tuple[Plan, Ground]:
    """A plan that gathers the rows of f32[2048, 256] before all that it computes; once, if they
    are `kept`."""
    x, w = jnp.ones((2048, 256)), jnp.ones((256, 256))
    graph = rounded(te.trace(fn, x, w).graph, {"float32": "bfloat16"})
    last = {0: Kept(WHOLE, len(graph.operations))} if kept else {}
    plan = plan_by_hand(graph, MESH, {}, (CUT, WHOLE), outputs, last)
    ground = Ground(plan_schedule(plan.body, {}), load_target("v5e:2x4"))
    costs = Walk(plan, ground).certificate().costs
    return replace(plan, costs=costs, collectives=planned_collectives(plan)), ground


@pytest.mark.parametrize(
    "fn", [lambda x, w: x @ w, lambda x, w: jnp.tanh(x @ w) + x @ jnp.cos(w)], ids=["one", "two"]
)
def test_rows_are_rounded_and_then_gathered_once(fn: Callable[..., jax.Array]) -> None:
    plan, ground = gathered(fn, (WHOLE,))
    (before,) = plan.collectives
    found = rounded_first(plan, ground)
    (after,) = found.collectives
    assert before.payload_bytes == 2048 * 256 * 4
    assert (after.kind, after.payload_bytes) == ("all_gather", 2048 * 256 * 2)
    assert found.costs.seconds < plan.costs.seconds
    assert found.costs.peak_bytes <= plan.costs.peak_bytes
    assert found.costs == Walk(found, ground).certificate().costs


def test_what_something_else_reads_too_is_sent_as_it_is() -> None:
    plan, ground = gathered(lambda x, w: (x @ w, jnp.sin(x)), (WHOLE, WHOLE), kept=True)
    assert len(plan.collectives) == 1
    assert rounded_first(plan, ground).collectives == plan.collectives


def test_no_plan_takes_less_than_is_proven() -> None:
    plan, ground = gathered(lambda x, w: x @ w, (WHOLE,))
    proven = replace(plan, bound=plan.costs.seconds)
    assert rounded_first(proven, ground) is proven
