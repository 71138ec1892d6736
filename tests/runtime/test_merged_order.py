"""The order of a plan where several copies are one collective, and where what is collected is gone
once its rows are taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import tapestry_egg as te
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import Change, Plan
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand, signature_of
from tests.runtime.lowered import MESH, X, Y, check, cut, integers, moved, numbers


def products(ws: Sequence[jax.Array], xs: Sequence[jax.Array]) -> list[jax.Array]:
    """Of which none waits for another."""
    return [x @ w for w, x in zip(ws, xs, strict=True)]


def gathered_at_once() -> Plan:
    """The plan that gathers all weights in one collective."""
    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 3
    rows = [jax.ShapeDtypeStruct((8192, 256), jnp.float32)] * 3
    names = ("[0]", "[1]", *(f"result[{k}]" for k in range(3)))
    front = te.optimize(
        te.trace(products, weights, rows),
        "h100:8",
        settings=te.Settings(work=0.2, recompute=0),
        books=["sharding", "collectives"],
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={name: ("x", None) for name in names},
    )
    plan = front.best("seconds")
    assert [(c.kind, c.merged) for c in plan.collectives] == [("all_gather", 1)] * 3
    return plan


def test_a_product_of_what_was_gathered_with_others_waits_for_the_one_before_it() -> None:
    """What it reads waits, not the block that was gathered long before."""
    traced = te.compile(gathered_at_once()).trace().jaxpr
    (mapped,) = [e for e in traced.eqns if e.primitive.name == "shard_map"]
    before: dict[Any, set[Any]] = {}  # variable -> all that it is made of, itself included
    found = []
    for e in mapped.params["jaxpr"].eqns:
        read = [before.get(x, set()) for x in e.invars if not hasattr(x, "val")]
        before |= {v: set().union({v}, *read) for v in e.outvars}
        found += e.outvars if e.primitive.name == "dot_general" else []
    assert len(found) == 3
    assert all(one in before[other] for one, other in pairwise(found))


def looked_up(table: Any, i: Any) -> Any:
    """Rows that two kernels read, neither of which waits for the other."""
    rows = table[i] + 1.0
    return jnp.sort(rows, axis=-1), jnp.sin(rows)


def looked_up_once(table: Any, i: Any) -> Any:
    """Rows that one kernel reads."""
    return jnp.sort(table[i] + 1.0, axis=-1)


@pytest.mark.parametrize(
    ("fn", "size", "each", "lies", "whole"),
    [
        (looked_up, 512, 1, cut((X, Y), ()), {"add"}),
        (looked_up, 512, 1, cut((), ()), set()),  # nothing is collected
        (looked_up, 72, 1, cut((X, Y), ()), set()),  # little is
        (looked_up, 512, 128, cut((X, Y), ()), set()),  # less than the rows
        (looked_up_once, 512, 1, cut((X, Y), ()), set()),
    ],
)
def test_rows_of_a_table_that_is_collected_are_made_once(
    fn: Callable[..., Any], size: int, each: int, lies: Layout, whole: set[str]
) -> None:
    """XLA for GPUs takes them again for each reader, and holds the table for that."""
    graph = te.trace(fn, numbers(size, 32), integers(0, size, 64, each)).graph
    cuts: dict[int, dict[str, tuple[int, ...]]] = {}
    for k, op in enumerate(graph.operations):
        dims = signature_of(graph, op).index
        cuts[k] = {d.name: (X, Y) for d in dims if d.size == 64}
    rows = cut((X, Y), (), ())
    plan = plan_by_hand(graph, MESH, cuts, (lies, cut((X, Y), ())), (rows,) * len(graph.outputs))
    kernels = [op.kernel for op in graph.operations]
    body = lower(plan, platform="cuda")
    assert {kernels[k] for k in body.made_whole} == whole
    assert not lower(plan, platform="cpu").made_whole


def twice_read(layers: int) -> Any:
    """A train step whose products read each weight as it is, and turned."""

    def step(ws: list[jax.Array], x: jax.Array) -> list[jax.Array]:
        def loss(ws: list[jax.Array]) -> jax.Array:
            h = x
            for w in ws:
                h = h + jnp.tanh(h @ w) @ w.T
            return jnp.mean(h**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, ws, jax.grad(loss)(ws))

    return step


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 3])
def test_what_is_gathered_again_with_others_waits_for_what_is_read(layers: int) -> None:
    """Of a barrier nothing is left but what something reads, or what leaves: two such copies would
    be one."""
    ws = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * layers
    front = te.optimize(
        te.trace(twice_read(layers), ws, jax.ShapeDtypeStruct((64, 256), jnp.float32)),
        "h100:8",
        settings=te.Settings(work=0.3, recompute=0),
        state={"": "[0]"},
        books=["sharding", "collectives"],
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={"[0]": ("x", None), "[1]": ("x", None)},
    )
    tried = 0
    for plan in front:
        tried += any(f.again and f.merged for reads in lower(plan).reads for f in reads)
        traced = te.compile(plan).trace().jaxpr
        (mapped,) = [e for e in traced.eqns if e.primitive.name == "shard_map"]
        body = mapped.params["jaxpr"]
        equations = body.eqns
        read = {x for e in equations for x in e.invars if not hasattr(x, "val")}
        read.update(body.outvars)  # a new weight leaves, and nothing else reads it
        made = {v: e for e in equations for v in e.outvars}
        for e in equations:
            late = made.get(e.invars[0]) if e.primitive.name == "all_gather" else None
            if late and late.primitive.name == "optimization_barrier" and len(late.outvars) == 2:
                assert read.issuperset(late.outvars), plan.name
    assert tried


def test_one_value_gathered_three_times_at_once_is_sent_three_times() -> None:
    """Nothing that is made before keeps the second gather of an argument from being the third."""

    def read_thrice(x: jax.Array) -> list[jax.Array]:
        return [x.max(0), x.min(0), x.sum(0)]

    x = numbers(16, 8)
    program = trace(read_thrice, x)
    plan = plan_by_hand(program.graph, MESH, {}, (cut((X,), ()),), (cut(()),) * 3)
    whole = cut((), ())
    merged = (tuple((0, whole, time) for time in range(3)),)
    plan = replace(plan, body=replace(plan.body, merged=merged), program=program)
    assert moved(plan) == [("all_gather", 2, 16 * 8 * 4, 1)] * 3
    check(plan, x)


def added(x: Any, y: Any, w: Any) -> Any:
    """Two products, added as they are."""
    return x @ w + y @ w


def added_turned(x: Any, y: Any, w: Any) -> Any:
    """Two products, added as they are turned."""
    return (x @ w).T + (y @ w).T


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize(("fn", "dim"), [(added, "i0"), (added_turned, "i1")])
def test_sums_that_are_sent_apart_are_added_behind_barriers(
    fn: Callable[..., Any], dim: str, kind: str
) -> None:
    """XLA for GPUs would add first, and send once."""
    arguments = (numbers(16, 8), numbers(16, 8, seed=1), numbers(8, 16, seed=2))
    program = trace(fn, *arguments)
    graph, rows = program.graph, (X,) if kind == "reduce_scatter" else ()
    named = {"dot_general": {"k": (X,)}, "transpose": {"i1": rows}, "add": {dim: rows}}
    cuts = {k: named[op.kernel] for k, op in enumerate(graph.operations)}
    lies = (cut((), (X,)), cut((), (X,)), cut((X,), ()))
    plan = plan_by_hand(graph, MESH, cuts, lies, (cut(rows, ()) if dim == "i0" else cut((), rows),))
    change = Change(kind, (X,), 0 if rows else None, monoid="sum")
    copies = {key: (change,) if key[1].partial else c for key, c in plan.body.copies.items()}
    plan = replace(plan, body=replace(plan.body, copies=copies), program=program)
    assert [sent for sent, *_ in moved(plan)] == [kind] * 2
    check(plan, *arguments)
    assert barred(plan, arguments, "cuda") and not barred(plan, arguments, "cpu")


def barred(plan: Plan, arguments: Any, platform: str) -> bool:
    """Whether barriers alone read what reductions give, each its own."""
    mapped = jax.shard_map(
        lower(plan, platform=platform),
        mesh=Mesh(np.array(jax.devices("cpu")[:8]).reshape(MESH.sizes), MESH.names),
        in_specs=(PartitionSpec(None, "x"), PartitionSpec(None, "x"), PartitionSpec("x")),
        out_specs=(PartitionSpec(*("x" if axes else None for axes in plan.body.outputs[0].dims)),),
        check_vma=False,
    )
    (local,) = jax.make_jaxpr(mapped)(*arguments).jaxpr.eqns
    equations = local.params["jaxpr"].eqns
    sent = ("psum", "psum_invariant", "reduce_scatter")
    reduced = {v for e in equations if e.primitive.name in sent for v in e.outvars}
    readers = [e.primitive.name for e in equations if reduced & {*e.invars}]
    assert len(reduced) == 2
    return readers == ["optimization_barrier"] * 2
