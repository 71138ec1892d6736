"""What compilers are modelled to do with a kernel is said by its template: under another name, with
a template that says the same, a program runs in the same units, and values lie as they did."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.runtime.lower.host_calls import Caller
from tapestry_egg.runtime.lower.lower import LocalBody
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.inlining import fusion, read_by_products
from tapestry_egg.schedule.lying import renewed, turned_while_renewed
from tapestry_egg.schedule.own_arrays import stored_once
from tapestry_egg.schedule.repeated import repeat_cheap
from tapestry_egg.schedule.schedules import Schedule, schedule
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import random_plan
from tests.schedule.other_names import add_under_other_names, under_other_names

X = jax.ShapeDtypeStruct((128, 128), jnp.float32)
ALONE = MeshShape((), ())
STACK = jax.ShapeDtypeStruct((4, 128, 128), jnp.float32)
ROW = jax.ShapeDtypeStruct((128,), jnp.float32)


def updated(x: Any, stack: Any, row: Any) -> Any:
    def step(c: Any, old: Any) -> Any:
        new = lax.dynamic_update_slice(old, c[:1], (2, 0))
        return jnp.tanh(c @ new), new

    return lax.scan(step, x, stack)


def carried(x: Any, stack: Any, row: Any) -> Any:
    def step(c: Any, one: Any) -> Any:
        c = lax.dynamic_update_slice(c, jnp.tanh(one)[None], (1, 0, 0))
        return c, jnp.einsum("hkb,hjb->bkj", c, c)

    return lax.scan(step, stack, stack)


def turned(x: Any, stack: Any, row: Any) -> Any:
    return lax.scan(lambda c, s: (jnp.tanh(c @ s.T @ s), None), x, jnp.swapaxes(stack, 0, 1))[0]


def scattered(x: Any, stack: Any, row: Any) -> Any:
    at = jnp.arange(16) * 3
    return jnp.zeros_like(x).at[at].add(x[:16]) + x


#: Kernels that are called otherwise, and a program that they are told by.
TOLD: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "dilates": (
        lambda x, *_: jnp.tanh(lax.pad(jnp.sin(x), 0.0, ((0, 0, 1), (1, 1, 0)))),
        ("pad",),
    ),
    "repeats": (
        lambda x, _, row: ((y := x @ x) + jnp.broadcast_to(row, y.shape)) @ x,
        ("broadcast_in_dim",),
    ),
    "stored": (
        lambda x, *_: jnp.tanh(lax.optimization_barrier((jnp.exp(x),))[0]),
        ("optimization_barrier",),
    ),
    "writes": (updated, ("dynamic_update_slice",)),
    "writes a carry": (carried, ("dynamic_update_slice",)),
    "in_products": (
        lambda x, *_: (a := jnp.concatenate([x, jnp.sin(x)])) @ a.T,
        ("concatenate",),
    ),
    "moves": (lambda x, *_: (a := jnp.split(x @ x, 2))[0] @ a[1].T, ("slice",)),
    "transposes": (turned, ("transpose",)),
    "adds": (scattered, ("scatter-add", "add", "add_any")),
    "adds element by element": (scattered, ("add", "add_any")),
}


def scheduled(graph: BlockGraph) -> Schedule:
    return schedule(flatten(repeat_cheap(graph), {}))


def modelled(plan: Schedule) -> Any:
    """What is modelled of a schedule, without the names of kernels."""
    units = [(u.members, u.reads, u.outputs) for u in plan.units]
    ways = [[fusion(plan, epilogues=e).within, renewed(plan, e)] for e in (False, True)]
    return (
        units,
        ways,
        read_by_products(plan),
        stored_once(plan.program),
        turned_while_renewed(plan),
    )


def lowered(graph: BlockGraph, platform: str) -> Any:
    """What lowering decides of the operations of a graph, and of the first of its regions."""
    plan = random_plan(graph, ALONE, random.Random(0))
    of = LocalBody(plan.body, plan.mesh, Caller(), platform)
    inner = [r for regions in of.regions for r in regions]
    return (
        [(b.made_whole, b.turned, b.stored, b.fills, b.updates, b.repeats) for b in (of, *inner)],
        [b.renewed(1, 1) for b in inner],
    )


@pytest.mark.parametrize("name", TOLD)
def test_a_kernel_by_another_name_is_modelled_and_lowered_alike(name: str, tmp_path: Path) -> None:
    fn, kernels = TOLD[name]
    graph = trace(fn, X, STACK, ROW).graph
    add_under_other_names(kernels, tmp_path)
    other = under_other_names(graph, kernels)
    assert other != graph
    assert modelled(scheduled(other)) == modelled(scheduled(graph))
    for platform in ("cuda", "tpu"):
        assert lowered(other, platform) == lowered(graph, platform)
