"""Conditionals that platforms decide: one branch where all take the same, else JAX's own choice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import PartitionSpec

import tapestry_egg as te
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime.measure.float64 import in_float64

X = np.arange(128, dtype=np.float32).reshape(16, 8)


def doubled(x: jax.Array) -> jax.Array:
    """Twice the numbers, by a kernel that JAX lowers for GPUs alone, and elsewhere without it."""

    def kernel(read: Any, written: Any) -> None:
        written[...] = read[...] * 2

    call = pallas.pallas_call(kernel, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    given: jax.Array = lax.platform_dependent(x, cuda=call, default=lambda x: x * 2)
    return given


@pytest.mark.parametrize("make", [lambda f: f, jax.grad], ids=["forward", "gradient"])
def test_what_is_the_same_everywhere_is_no_conditional(make: Callable[..., Any]) -> None:
    def diagonal(x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.diagonal(x) ** 2)

    square = X[:8]
    graph = te.trace(make(diagonal), square).graph
    kernels = {op.kernel for op in graph.walk()}
    assert "gather" in kernels
    assert not kernels & {"cond", "platform_index"}
    found = te.jit(make(diagonal), settings=Settings(work=0.2))(square)
    np.testing.assert_array_equal(found, jax.jit(make(diagonal))(square))


def test_a_kernel_of_another_platform_is_not_lowered() -> None:
    def f(x: jax.Array) -> jax.Array:
        return doubled(x).sum(0)

    assert "cond" in {op.kernel for op in te.trace(f, X).graph.operations}
    found = te.jit(f, settings=Settings(work=0.2))(X)
    np.testing.assert_array_equal(found, jax.jit(f)(X))
    (wide,) = in_float64(f, [X])
    assert wide.dtype == np.float64
    np.testing.assert_array_equal(wide, found)


def test_nor_within_a_shard_map() -> None:
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = PartitionSpec("x")
    f = jax.shard_map(doubled, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False)
    found = te.jit(f, settings=Settings(work=0.2))(X)
    np.testing.assert_array_equal(found, X * 2)


def test_a_value_decides_as_before() -> None:
    def f(i: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(i, [jnp.sin, jnp.cos], x)

    compiled = te.jit(f, settings=Settings(work=0.2))
    for i in (0, 1):
        np.testing.assert_allclose(compiled(i, X), f(jnp.int32(i), X), rtol=1e-6)
