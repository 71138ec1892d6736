"""A user's shard_map is planned as a program over whole arrays: the numbers are its own, whatever
devices there are."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec

import tapestry_egg as te
from tapestry_egg.errors import TraceError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.runtime import compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import random_plan, signature_of
from tests.runtime.lowered import MESH, numbers, same

P = PartitionSpec
OURS = jax.make_mesh((2, 4), ("i", "j"), axis_types=(AxisType.Auto,) * 2)
BOTH = ("i", "j")


def mapped(ins: Any, outs: Any, **more: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return functools.partial(jax.shard_map, mesh=OURS, in_specs=ins, out_specs=outs, **more)


@mapped((P("i", "j"), P("j", None)), P("i", None))
def product(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.psum(a @ b, "j")


@mapped((P("i", "j"), P("j", None)), P(BOTH, None))
def scattered(a: jax.Array, b: jax.Array) -> jax.Array:
    return lax.psum_scatter(a @ b, "j", scatter_dimension=0, tiled=True)


@mapped((P("i"), P()), (P("i"), P()))
def softmax(v: jax.Array, _: jax.Array) -> Any:
    m = lax.pmax(v.max(), "i")
    e = jnp.exp(v - m)
    return e / lax.psum(e.sum(), "i"), m


@mapped((P("j"), P()), (P(None), P(None, "j")), check_vma=False)
def exchanged(v: jax.Array, _: jax.Array) -> Any:
    return (
        lax.all_gather(v, "j", tiled=True),
        lax.all_to_all(v, "j", split_axis=1, concat_axis=0, tiled=True),
    )


@mapped((P(BOTH), P()), (P(BOTH), P(None), P(BOTH), P(None, BOTH), P(BOTH)), check_vma=False)
def over_both(v: jax.Array, _: jax.Array) -> Any:
    wide, tall = jnp.concatenate([v] * 8, 1)[:, :16], jnp.stack([v] * 8)
    return (
        lax.ppermute(v, BOTH, [(0, 3), (5, 1)]) + lax.axis_index(BOTH),
        lax.all_gather(v, BOTH, tiled=True),
        lax.psum_scatter(tall, BOTH, scatter_dimension=0) + lax.all_gather(v, BOTH).sum(0),
        lax.all_to_all(wide, BOTH, split_axis=1, concat_axis=0, tiled=True),
        lax.all_to_all(tall, BOTH, 0, 1).reshape(2, -1),
    )


@mapped((P("j"), P("j")), P("j"))
def ring(q: jax.Array, k: jax.Array) -> jax.Array:
    """Attention over keys that go round."""
    n = lax.axis_size("j")

    def step(c: Any, _: None) -> Any:
        k, num, den = c
        s = jnp.exp(q @ k.T / 16)
        num, den = num + s @ k, den + s.sum(1, keepdims=True)
        return (lax.ppermute(k, "j", [(a, (a + 1) % n) for a in range(n)]), num, den), None

    (_, num, den), _ = lax.scan(step, (k, q * 0, q[:, :1] * 0), None, length=n)
    return num / den


@mapped((P("i"), P()), P("i"))
def controlled(v: jax.Array, _: jax.Array) -> jax.Array:
    first = lax.axis_index("i") == 0
    v = lax.cond(first, lambda v: v * 2, lambda v: v, v)
    own = jax.random.fold_in(jax.random.key(0), lax.axis_index("i"))
    v = lax.while_loop(lambda v: lax.psum(v.sum(), "i") < 1e3, lambda v: v * v + 1, v)
    return v + jax.random.normal(own, v.shape)


@functools.partial(
    jax.shard_map, mesh=OURS, in_specs=(P("i"), P()), out_specs=P("i"), axis_names={"i"}
)
def over_one(v: jax.Array, _: jax.Array) -> jax.Array:
    return lax.pmean(v, "i") + v * 2


@mapped((P("i"), P()), P("i"))
def several(v: jax.Array, _: jax.Array) -> jax.Array:
    """Loops run together that end after different numbers of rounds."""

    def one(x: jax.Array) -> jax.Array:
        return lax.while_loop(lambda x: x < 8, lambda x: x * x + 1, x)

    return jax.vmap(jax.vmap(one))(v)


PROGRAMS = (product, scattered, softmax, exchanged, over_both, ring, controlled, over_one, several)


def gradient(a: jax.Array, b: jax.Array) -> Any:
    return jax.grad(lambda a, b: (product(a, b) ** 2).sum() + ring(a, b).sum(), (0, 1))(a, b)


ARGS = (numbers(16, 16) / 4, numbers(16, 16, seed=1) / 4)


def kernels(graph: BlockGraph) -> set[str]:
    found = {op.kernel for op in graph.operations}
    return found.union(*(kernels(r) for op in graph.operations for r in op.regions))


@pytest.mark.parametrize(
    "fn",
    [PROGRAMS[0], *(pytest.param(f, marks=pytest.mark.slow) for f in (*PROGRAMS[1:], gradient))],
    ids=lambda f: f.__name__,
)
def test_the_numbers_are_those_of_the_users_devices(fn: Callable[..., Any]) -> None:
    program = trace(fn, *ARGS)
    assert not {"shard_map", "axis_index", "ppermute", "all_gather"} & kernels(program.graph)
    same(jax.jit(program)(*ARGS), jax.tree.map(np.asarray, jax.jit(fn)(*ARGS)), 1e-3)


def test_no_operation_of_it_is_opaque() -> None:
    for fn in (*PROGRAMS, gradient):
        graph = trace(fn, *ARGS).graph
        for op in graph.operations:
            assert op.regions or not signature_of(graph, op).opaque, (fn.__name__, op.kernel)


@pytest.mark.slow
def test_random_plans_on_another_mesh() -> None:
    def everything(a: jax.Array, b: jax.Array) -> Any:
        return product(a, b), softmax(a, b), ring(a, b), over_one(a, b)

    program = trace(everything, *ARGS)
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    same(compile(plan)(*ARGS), jax.tree.map(np.asarray, jax.jit(everything)(*ARGS)), 1e-3)


@mapped((P("j"),), P("j"), check_vma=False)
def grouped(v: jax.Array) -> jax.Array:
    return lax.psum(v, "j", axis_index_groups=[[0, 1], [2, 3]])


def test_what_vmap_cannot_map_is_refused_with_its_place() -> None:
    with pytest.raises(TraceError, match="a shard_map cannot be planned") as caught:
        trace(lambda v: grouped(v) + 1, ARGS[0])
    assert "test_shard_maps.py" in caught.value.where


def test_what_vmap_cannot_map_runs_as_it_is_written_and_one_warning_says_so() -> None:
    run = te.jit(lambda v: grouped(v) + 1)
    wanted = np.asarray(grouped(ARGS[0]) + 1)
    with pytest.warns(UserWarning, match="runs as it is written"):
        same(run(ARGS[0]), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        same(run(ARGS[0]), wanted)


@pytest.mark.slow
def test_it_is_planned_for_a_number_of_devices_that_the_user_did_not_have() -> None:
    args = (numbers(64, 64), numbers(64, 64))
    run = te.jit(product, mesh=jax.devices()[:4])
    same(run(*args), np.asarray(args[0] @ args[1]), 1e-3)
    assert run.plan(*args).mesh.devices == 4
