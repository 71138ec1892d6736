"""Nested graphs fit their operations: what `verify_graph` says of scan, while and cond."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tapestry_egg.errors import GraphError
from tapestry_egg.graph.blockgraph import BlockGraph, Operation, TensorType, verify_graph
from tapestry_egg.tracing.trace import trace


def program(x: Any, w: Any) -> Any:
    carried, ys = jax.lax.scan(lambda c, v: (c + v @ w, c), jnp.zeros(4), x)
    chosen = jax.lax.cond(carried[0] > 0, jnp.sin, jnp.cos, carried)
    return jax.lax.while_loop(lambda c: c[0] < w[0, 0], lambda c: c * 2 + w[0], chosen), ys


@pytest.fixture(scope="module")
def graph() -> BlockGraph:
    return trace(program, jnp.ones((3, 4)), jnp.ones((4, 4))).graph


def changed(graph: BlockGraph, kernel: str, change: Callable[[Operation], Operation]) -> BlockGraph:
    operations = tuple(change(op) if op.kernel == kernel else op for op in graph.operations)
    return replace(graph, operations=operations)


def retyped(op: Operation, region: int, side: str, k: int, type_: TensorType) -> Operation:
    """One input or output value of a region with another type."""
    inner = op.regions[region]
    values = list(inner.values)
    values[getattr(inner, side)[k]] = type_
    regions = list(op.regions)
    regions[region] = replace(inner, values=tuple(values))
    return replace(op, regions=tuple(regions))


def with_params(**params: Any) -> Callable[[Operation], Operation]:
    return lambda op: replace(op, params={**op.params, **params})


def test_what_was_traced_is_well_formed(graph: BlockGraph) -> None:
    verify_graph(graph)


@pytest.mark.parametrize(
    ("kernel", "change", "what"),
    [
        ("scan", with_params(length=4), "is streamed in 4 steps"),
        ("scan", with_params(num_consts=None), "missing or wrong"),
        ("scan", with_params(num_carry=9), "more than there are values"),
        ("scan", with_params(num_consts=0, num_carry=2), r"regions take|streamed|output|input"),
        ("while", with_params(cond_nconsts=99), "missing or wrong"),
        ("while", with_params(body_nconsts=0), "expected"),
        ("cond", lambda op: replace(op, regions=()), "no branches"),
        ("cond", lambda op: replace(op, inputs=op.inputs[1:]), "no scalar"),
        ("cond", lambda op: replace(op, kernel="sin"), "only scan, while and cond"),
        (
            "cond",
            lambda op: retyped(op, 1, "inputs", 0, TensorType((5,), "float32")),
            r"input 0 of region 1 is f32\[5\], expected f32\[4\]",
        ),
        (
            "cond",
            lambda op: retyped(op, 0, "outputs", 0, TensorType((4,), "float16")),
            r"output 0 of region 0 is f16\[4\], expected f32\[4\]",
        ),
        (
            "while",
            lambda op: retyped(op, 0, "outputs", 0, TensorType((1,), "bool")),
            r"output 0 of region 0 is bool\[1\], expected bool\[\]",
        ),
        (
            "scan",
            lambda op: retyped(op, 0, "inputs", 2, TensorType((3, 4), "float32")),
            r"input 2 of region 0 is f32\[3, 4\], expected f32\[4\]",
        ),
    ],
)
def test_what_does_not_fit_is_said(
    graph: BlockGraph, kernel: str, change: Callable[[Operation], Operation], what: str
) -> None:
    with pytest.raises(GraphError, match=what):
        verify_graph(changed(graph, kernel, change))


def test_a_loop_gives_what_it_takes(graph: BlockGraph) -> None:
    """The value that leaves the loop has another type than the one that entered."""
    (loop,) = (op for op in graph.operations if op.kernel == "while")
    values = list(graph.values)
    values[loop.outputs[0]] = TensorType((4,), "float16")
    with pytest.raises(GraphError, match="differs in type from what comes out"):
        verify_graph(replace(graph, values=tuple(values)))


def test_graphs_are_equal_if_their_constants_are() -> None:
    """Bit by bit, in regions too, and without a complaint of arrays."""

    def shifted(by: np.ndarray) -> BlockGraph:
        def step(x: Any) -> Any:
            return jax.lax.scan(lambda c, _: (c + by, None), x + by, None, 2)[0]

        return trace(step, jnp.ones(3)).graph

    ones = np.ones(3, np.float32)
    assert shifted(ones) == shifted(ones.copy())
    other = ones.copy()
    other[1] = np.nan
    assert shifted(ones) != shifted(other) and shifted(other) == shifted(other.copy())
    assert shifted(np.zeros(3, np.float32)) != shifted(-np.zeros(3, np.float32))
