"""What the tests of lowering share: a mesh of eight virtual devices, numbers, and comparisons with
the unsharded function."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime import CompiledPlan, compare, compile, planned_collectives
from tapestry_egg.tracing.trace import Program, trace
from tests.plans.plans import (
    all_cuts,
    finish,
    make_plan,
    signature_of,
)

MESH = MeshShape(("x", "y"), (2, 4))
X, Y = 0, 1
F32 = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def integers(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(np.int32)


def cut(*dims: tuple[int, ...], partial: tuple[int, ...] = (), monoid: str | None = None) -> Layout:
    return Layout(dims, partial, monoid)


def same(got: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def moved(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(c.kind, c.group, c.payload_bytes, c.count) for c in planned_collectives(plan)]


def check(plan: Plan, *args: Any) -> None:
    """The plan gives the right numbers, and XLA moves what it plans to move."""
    as_planned(plan, args, plan.program(*args) if plan.program else None)


def as_planned(
    plan: Plan, arguments: Sequence[Any], wanted: Any, tolerance: float = 1e-4
) -> CompiledPlan:
    """The compiled plan, which gives these numbers and moves what it plans to move."""
    run = compile(plan, jax.devices()[: plan.mesh.devices])
    same(run(*arguments), wanted, tolerance)
    comparison = compare(plan, run.compile())
    assert comparison.equal, f"\n{comparison}"
    return run


def repeated(fn: Callable[..., Any], times: int, *args: Any) -> Program:
    """A program of one operation so many times, each for results of its own; traced, it is one,
    unless it reads constants alone."""
    program = trace(lambda *a: [fn(*a) for _ in range(times)], *args)
    graph = program.graph
    if len(graph.operations) == times:
        return program
    (op,) = graph.operations
    values, operations, outputs = list(graph.values), [op], list(graph.outputs)
    each = len(outputs) // times
    for k in range(1, times):
        number = {v: len(values) + q for q, v in enumerate(op.outputs)}
        values += [graph.values[v] for v in op.outputs]
        operations.append(replace(op, outputs=tuple(number.values())))
        outputs[k * each : (k + 1) * each] = [number[v] for v in outputs[:each]]
    made = replace(
        graph, values=tuple(values), operations=tuple(operations), outputs=tuple(outputs)
    )
    return replace(program, graph=made)


def each_strategy(fn: Callable[..., Any], *args: Any, least: int = 2, most: int = 8) -> None:
    """Run `fn`, one operation, under many of its strategies at once, and compare."""
    graph = trace(fn, *args).graph
    (op,) = graph.operations
    strategies = all_cuts(signature_of(graph, op), MESH)
    assert len(strategies) >= least
    random.Random(0).shuffle(strategies)
    strategies = strategies[:most]
    program = repeated(fn, len(strategies), *args)
    graph = program.graph
    inputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.inputs)
    outputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.outputs)
    body = finish(graph, MESH, inputs, outputs, tuple(strategies))
    wanted = jax.tree.map(np.asarray, fn(*args))
    for got in compile(replace(make_plan(body, MESH), program=program))(*args):
        same(got, wanted, 1e-5)


def equations(jaxpr: Any) -> list[Any]:
    """Those of a jaxpr in their order, of loops and calls those inside."""
    found = []
    for e in jaxpr.eqns:
        inner = e.params.get("jaxpr") if e.primitive.name in ("scan", "jit") else None
        found += equations(inner.jaxpr) if inner is not None else [e]
    return found
