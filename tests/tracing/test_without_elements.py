"""Tensors without elements keep nothing whole, and programs with them give what `jax.jit` gives."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import tapestry_egg as te
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.runtime import compile
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import legal_dims, random_plan, signature_of
from tests.runtime.lowered import MESH, numbers, same


def recurrence(a: jax.Array, x: jax.Array) -> Any:
    """h[t] = a[t] h[t - 1] + x[t], in a logarithm of steps."""

    def both(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    return lax.associative_scan(both, (a, x))[1]


def empties(x: jax.Array, w: jax.Array) -> Any:
    none = x[:0]
    last, steps = lax.scan(lambda c, row: (c + row, c * row), x[0], none)
    return {
        "joined": jnp.concatenate([none, x, none]) * 2,
        "only": jnp.concatenate([none, none]),
        "set": x.at[jnp.zeros((0,), jnp.int32)].set(3.0) + 1,
        "added": x.at[jnp.zeros((0, 2), jnp.int32)].add(3.0) + 1,
        "updated": lax.dynamic_update_slice(x, none, (1, 0)) + 1,
        "padded": jnp.pad(none, ((4, 4), (0, 0)), constant_values=2.0),
        "products": (none @ w, none.T @ none),
        "sums": (none.sum(0), jnp.max(x[:, :0], initial=0.0, axis=1)),
        "sorted": jnp.sort(none, 0),
        "loop": (last, steps),
        "branch": lax.cond(x[0, 0] > 0, lambda e: e * 2, lambda e: e, none),
        "keys": jax.random.split(jax.random.key(0), (0, 2)).size + x,
    }


def without_elements(graph: BlockGraph) -> list[str]:
    return [
        op.kernel
        for op in graph.operations
        if any(graph.values[v].size == 0 for v in (*op.inputs, *op.outputs))
    ]


@pytest.mark.parametrize("length", [2, 3, 16])
def test_an_associative_scan_is_cut_along_every_other_dim(length: int) -> None:
    graph = trace(recurrence, numbers(length, 8), numbers(length, 8)).graph
    assert graph.operations and not without_elements(graph)
    for op in graph.operations:
        assert 1 in legal_dims(signature_of(graph, op), 8), op.kernel


@pytest.mark.slow
def test_an_associative_scan_under_random_plans() -> None:
    args = (numbers(8, 8), numbers(8, 8, seed=1))
    program = trace(recurrence, *args)
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    same(compile(plan)(*args), jax.jit(recurrence)(*args))


@pytest.mark.slow
def test_what_is_without_elements_is_a_constant() -> None:
    args = (numbers(8, 8), numbers(8, 8))
    program = trace(empties, *args)
    assert set(without_elements(program.graph)) <= {
        *("scan", "pad", "reduce_max", "random_split", "random_wrap")
    }
    wanted = jax.tree.map(np.asarray, jax.jit(empties)(*args))
    same(program(*args), wanted)
    for seed in range(2):
        plan = random_plan(program.graph, MESH, random.Random(seed))
        same(compile(replace(plan, program=program))(*args), wanted)


def test_constants_without_elements_leave_a_program_whose_arguments_have_none() -> None:
    def f(x: jax.Array) -> Any:
        return jnp.sort(x, 0), jnp.max(x, 1, initial=0.0), jnp.cumsum(x, 1)

    none = jnp.zeros((8, 0))
    program = trace(f, none)
    assert len([v for v, a in program.graph.constants.items() if not a.size]) == 2
    plan = replace(random_plan(program.graph, MESH, random.Random(0)), program=program)
    same(compile(plan)(none), jax.jit(f)(none))


def test_what_calls_out_is_kept() -> None:
    def f(x: jax.Array) -> jax.Array:
        jax.debug.print("{}", x[:0])
        return x

    assert [op.kernel for op in trace(f, numbers(8)).graph.operations] == ["debug_print"]


def test_what_goes_over_no_elements_is_a_constant() -> None:
    """XLA computes neither, and sends nothing for them."""

    def f(none: jax.Array, x: jax.Array) -> Any:
        return (none @ none.T) @ x, none.sum(1), none.prod(1), (none > 0).any(1), (none > 0).all(1)

    none, x = jnp.zeros((8, 0)), numbers(8, 4)
    program = trace(f, none, x)
    # The other product is of numbers, though they are zeros.
    kernels = [op.kernel for op in program.graph.operations if op.kernel != "broadcast_in_dim"]
    assert kernels == ["dot_general"]
    same(program(none, x), jax.jit(f)(none, x))


def test_layouts_bind_nothing_that_has_no_elements() -> None:
    """A sharding may stand for all leaves of an argument, some of which have no elements."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rows = NamedSharding(mesh, PartitionSpec("x"))

    def f(batch: dict[str, jax.Array]) -> Any:
        none = jax.lax.with_sharding_constraint(batch["none"], rows)
        return {"x": batch["x"] * 2, "none": none, "sum": none.sum(1)}

    batch = {"x": numbers(8, 4), "none": np.zeros((8, 0), np.float32)}
    step = te.jit(
        f, in_shardings=(rows,), out_shardings=rows, settings=te.Settings(work=0.1, forms=0)
    )
    found = step(batch)
    assert found["x"].sharding.is_equivalent_to(rows, 2)
    same(found, jax.jit(f)(batch))
    pins = {"[0]['none']": ("x", None), "result['none']": ("y", None)}
    te.optimize(trace(f, batch), "cpu:8", pins=pins, settings=te.Settings(work=0.1, forms=0))
