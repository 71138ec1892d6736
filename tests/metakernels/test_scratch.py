"""What kernels take in memory beside their operands and results, as their templates say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.metakernels import registry
from tapestry_egg.metakernels.signatures.signature import OperationSignature


def signature(kernel: str, fn: Callable[..., Any], *shapes: tuple[int, ...]) -> OperationSignature:
    """Of the one operation of this kernel in a program of bfloat16 arrays."""
    graph = te.trace(fn, *(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes)).graph
    (op,) = [op for op in graph.operations if op.kernel == kernel]
    types = [[graph.values[v] for v in vs] for vs in (op.inputs, op.outputs)]
    return registry.signature(op.kernel, op.params, *types)


SIZES = jnp.array([3, 5], jnp.int32)


def rows_by_group(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.ragged_dot(x, w, SIZES)


def groups_of_rows(x: jax.Array, w: jax.Array) -> jax.Array:
    return jax.grad(lambda w: jnp.sum(rows_by_group(x, w)))(w)


def test_a_product_of_ragged_groups_holds_one_more_result() -> None:
    found = signature("ragged_dot_general", rows_by_group, (8, 4), (2, 4, 16))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == 2 * 8 * 16


def test_its_gradient_holds_both_operands_once_more() -> None:
    found = signature("ragged_dot_general", groups_of_rows, (8, 4), (2, 4, 16))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == 2 * 8 * 4 + 2 * 8 * 16
    halved = tuple(n // 2 if n == 16 else n for n in found.extents)
    assert found.scratch.bytes_at(halved) == 2 * 8 * 4 + 2 * 8 * 8


@pytest.mark.parametrize(("stride", "numbers"), [(2, 4.0), (1, 4.0 * 2 + 2.0)])
def test_a_gradient_of_pooling_holds_where_windows_chose(stride: int, numbers: float) -> None:
    """One number for windows side by side; for others one per dim, and the element."""

    def pooled(x: jax.Array) -> jax.Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (stride, 1), "SAME").sum()

    found = signature("select_and_scatter_add", jax.grad(pooled), (8, 4))
    assert found.scratch is not None
    assert found.scratch.bytes_at(found.extents) == numbers * 8 // stride * 4


@pytest.mark.parametrize(
    ("padding", "held"),
    # Nothing where cuDNN pads both sides alike, else the padded operand, 9 × 9.
    [((1, 1), [0, 0, 0]), ((0, 1), [2 * 4 * 81, 2 * 4 * 81, 2 * 4 * 81])],
)
def test_a_convolution_padded_on_one_side_holds_a_padded_operand(
    padding: tuple[int, int], held: list[int]
) -> None:
    """So do both gradients: that by the operand is cut out of a padded one."""

    def total(x: jax.Array, k: jax.Array) -> jax.Array:
        y = lax.conv_general_dilated(x, k, (2, 2), (padding, padding))
        return (y * y).sum()

    shapes = ((2, 4, 8, 8), (3, 4, 3, 3))
    arguments = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes]
    graph = te.trace(jax.grad(total, (0, 1)), *arguments).graph
    found = []
    for op in graph.operations:
        if op.kernel == "conv_general_dilated":
            types = [[graph.values[v] for v in vs] for vs in (op.inputs, op.outputs)]
            made = registry.signature(op.kernel, op.params, *types)
            assert made.scratch is not None
            found.append(made.scratch.bytes_at(made.extents))
    assert found == pytest.approx([4 * n for n in held], rel=0.01)
