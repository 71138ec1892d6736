"""Kernels and fills as XLA's compiler for GPUs takes them, run here on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import numbers, same

ALONE = MeshShape(("x",), (1,))
ROWS, MATRICES = numbers(12, 5), numbers(4, 5, 3, seed=1)
#: An empty group, and rows that belong to none.
SIZES = np.array([3, 0, 7, 1], np.int32)


def _contracted(batch: bool) -> Callable[..., Any]:
    b = ([0], [0]) if batch else ([], [])
    k = ([1], [1]) if batch else ([0], [0])
    numbers = lax.RaggedDotDimensionNumbers((k, b), k[0], [])
    return lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers)


def _grouped(x: Any, y: Any, n: Any) -> Any:
    """The groups in the middle of the second operand, the batch dim last."""
    numbers = lax.RaggedDotDimensionNumbers((([2], [0]), ([0], [3])), [1], [1])
    return lax.ragged_dot_general(x, y, n, numbers)


RAGGED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "free": (lax.ragged_dot, (ROWS, MATRICES, SIZES)),
    "free, batched": (_grouped, (numbers(2, 12, 5), numbers(5, 4, 3, 2, seed=2), SIZES)),
    "contracted": (_contracted(False), (ROWS, numbers(12, 3, seed=3), SIZES)),
    "contracted, batched": (
        _contracted(True),
        (numbers(2, 12, 5), numbers(2, 12, 3, seed=4), SIZES),
    ),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), ((2, 1), (0, 0)), lhs_dilation=(2, 1)),
        (numbers(2, 4, 6, 5), numbers(3, 4, 3, 2)),
    ),
}


def _local(fn: Callable[..., Any], arguments: Any, platform: str) -> Callable[..., Any]:
    graph = trace(fn, *arguments).graph
    sides = [
        [Layout.replicated(graph.values[v].rank) for v in vs]
        for vs in (graph.inputs, graph.outputs)
    ]
    inputs, outputs = map(tuple, sides)
    return lower(plan_by_hand(graph, ALONE, {}, inputs, outputs), platform=platform)


@pytest.mark.parametrize("name", RAGGED)
def test_numbers_are_those_of_the_primitive(name: str) -> None:
    fn, arguments = RAGGED[name]
    same(jax.jit(_local(fn, arguments, "cuda"))(*arguments)[0], fn(*arguments))


@pytest.mark.parametrize("name", [n for n in RAGGED if n != "convolution"])
def test_ragged_products_hold_one_group_at_a_time(name: str) -> None:
    fn, arguments = RAGGED[name]
    for platform, loops in (("cuda", 1), ("tpu", 0)):
        text = str(jax.make_jaxpr(_local(fn, arguments, platform))(*arguments))
        assert (text.count("scan["), text.count("ragged_dot_general")) == (loops, 1 - loops)


def test_a_convolution_of_a_dilated_operand_reads_a_reversed_window() -> None:
    fn, arguments = RAGGED["convolution"]
    jaxpr = jax.make_jaxpr(_local(fn, arguments, "cuda"))(*arguments)
    maker = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    (convolution,) = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert maker[convolution.invars[1]] == "rev"  # and not through a barrier


def test_arrays_are_filled_when_the_results_before_them_are_there() -> None:
    """Filled at the start, both would be in memory at once."""
    rows = np.arange(256) % 7

    def fn(x: Any) -> Any:
        for _ in range(2):
            y = x @ x
            x = jnp.zeros_like(y).at[rows].add(y)
        return x

    text = str(jax.make_jaxpr(_local(fn, (numbers(256, 256),), "cuda"))(numbers(256, 256)))
    lines = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert len([line for line in lines if "f32[]" in line]) == 2


def _barriers(fn: Callable[..., Any], arguments: Any, platform: str) -> list[Any]:
    jaxpr = jax.make_jaxpr(_local(fn, arguments, platform))(*arguments)
    return [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]


def test_what_is_joined_for_several_readers_is_joined_once() -> None:
    """Else each product joins for itself, and what is joined is in memory besides the whole."""

    def fn(x: Any, y: Any) -> Any:
        whole = jnp.concatenate([x, y])
        return whole @ whole.T

    def once(x: Any, y: Any) -> Any:
        return jnp.concatenate([x, y]) @ x.T

    arguments = (numbers(8, 4), numbers(8, 4, seed=1))
    (barrier,) = _barriers(fn, arguments, "cuda")
    assert [v.aval.shape for v in barrier.outvars] == [(16, 4)]
    assert not _barriers(fn, arguments, "cpu") and not _barriers(once, arguments, "cuda")
    same(_local(fn, arguments, "cuda")(*arguments)[0], fn(*arguments))


def test_what_is_split_is_split_at_once() -> None:
    """Else the whole is in memory until the last part is read."""

    def fn(x: Any) -> Any:
        first, second = jnp.split(x @ x, 2)
        return first @ second.T, second

    (barrier,) = _barriers(fn, (numbers(8, 8),), "cuda")
    assert [v.aval.shape for v in barrier.outvars] == [(4, 8), (4, 8)]
    assert not _barriers(fn, (numbers(8, 8),), "cpu")
    same(_local(fn, (numbers(8, 8),), "cuda")(numbers(8, 8))[0], fn(numbers(8, 8))[0])
