"""Kernels that read the same and are one, against what XLA compiles for H100."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.traffic import Traffic
from tests.schedule.test_lifetimes import scheduled
from tests.schedule.test_traffic import COLUMNS, Program, W, X, compiled_bytes, moved

SMALL = jax.ShapeDtypeStruct((4096, COLUMNS), jnp.float32)


def squared(x: Any, y: Any) -> Any:
    return jax.value_and_grad(lambda x: jnp.mean((x - y) ** 2))(x)


def gated(a: Any, b: Any) -> Any:
    return jax.nn.silu(a) * b


def gradients(a: Any, b: Any, g: Any) -> Any:
    return jax.vjp(gated, a, b)[1](g)


def and_gradients(a: Any, b: Any, g: Any) -> Any:
    made, backwards = jax.vjp(gated, a, b)
    return made, *backwards(g)


def of_a_product(x: Any, w: Any) -> Any:
    made = x @ w
    return jnp.tanh(made) + 1, jnp.sin(made) + 1


def bias(x: Any, g: Any) -> Any:
    made = g * jnp.cos(x)
    return made, made.sum(0), g.sum(0)


#: Programs, and how often an array of 16384 x 1024 floats goes to or from memory.
MERGED: dict[str, tuple[Program, tuple[Any, ...], float]] = {
    "two": (lambda x: (x + 1, x * 2), (X,), 3),
    "three": (lambda x: (x + 1, x * 2, jnp.tanh(x)), (X,), 4),
    "seen as a vector": (lambda x: (x.reshape(-1) + 1, x * 2), (X,), 3),
    "a mean squared error and its gradient": (squared, (X, X), 3),
    "a sum and what is made": (lambda x: (x + 1, (x * x).sum(1)), (X,), 2),
    "a sum of columns and what is made": (lambda x: (x + 1, (x * x).sum(0)), (X,), 2),
    "a sum of all and what is made": (lambda x: (x + 1, (x * x).sum()), (X,), 2),
    "two sums": (lambda x: (x.sum(1), (x * x).sum(1)), (X,), 1),
    "gradients of a gated unit": (gradients, (X, X, X), 5),
    "a gated unit and its gradients": (and_gradients, (X, X, X), 6),
    "sums of a bias": (bias, (X, X), 3),
    # Sums of other dims are another kernel; so is what reads a part, and what goes along rows.
    "two sums of other dims": (lambda x: (x.sum(1), (x * x).sum(0)), (X,), 2),
    "a part": (lambda x: (x[:, :512] + 1, x * 2), (X,), 3.5),
    "a softmax": (lambda x: (jax.nn.softmax(x, -1), x * 2), (X,), 4),
    # A product of XLA's own; a library's leads from one to the other (below).
    "what is made of a product": (of_a_product, (SMALL, W), 6 + 1 / 4),
    # One operation alone joins what is more, and no other that is alone.
    "two operations": (lambda x, w: (jnp.tanh(m := x @ w), jnp.sin(m)), (X, W), 6 + 1 / 16),
    "one alone, of other arrays": (lambda x, y: (x + y, x * 2, jnp.sin(y)), (X, X), 6),
}


@pytest.mark.parametrize("name", MERGED)
def test_kernels_that_read_the_same_are_one(name: str) -> None:
    fn, types, arrays = MERGED[name]
    assert moved(fn, types) == pytest.approx(arrays * 4 * types[0].size, rel=0.02)


@pytest.mark.parametrize("name", MERGED)
def test_xla_for_h100_makes_one_of_them(name: str) -> None:
    fn, types, arrays = MERGED[name]
    assert compiled_bytes(fn, types) == pytest.approx(arrays * 4 * types[0].size, rel=0.035)


def test_what_needs_what_the_other_makes_is_another_kernel() -> None:
    """A sum that the second kernel needs reads all before that begins."""

    def scaled(x: Any) -> Any:
        total = (x * x).sum()
        return x * jnp.sqrt(total)

    assert moved(scaled, (X,)) == pytest.approx(3 * 4 * X.size, rel=0.02)
    assert compiled_bytes(scaled, (X,)) == pytest.approx(3 * 4 * X.size, rel=0.02)


def test_what_a_library_s_product_makes_is_read_once() -> None:
    """Compiled with `--xla_gpu_enable_triton_gemm=false`, the module has one kernel behind it."""
    h100 = load_target("h100:1")
    assert h100.fusing is not None
    own = replace(h100, fusing=replace(h100.fusing, library_bytes=None))
    for target, arrays in ((h100, 5 + 1 / 16), (own, 6 + 1 / 16)):
        found = moved(of_a_product, (X, W), target)
        assert found == pytest.approx(arrays * 4 * X.size, rel=0.02)


@pytest.mark.parametrize("target", ["v5e:1", "cpu:1"])
def test_other_compilers_are_not_known_to(target: str) -> None:
    plan = scheduled(MERGED["two"][0], X)
    traffic = Traffic(plan, load_target(target))
    assert not any(traffic.shared(u) for u in range(len(plan.units)))


def test_what_lies_otherwise_is_read_again() -> None:
    """Two kernels read one array, the second as the first does, or its columns and not its rows."""
    x = jax.ShapeDtypeStruct((8192, 8192), jnp.float32)
    graph = te.trace(lambda x: (x + 1, x * 2), x)
    seconds = {}
    for first, second in ((("x", None), ("x", None)), (("x", None), (None, "x"))):
        plan = te.optimize(
            graph,
            target="h100:4",
            pins={"[0]": (None, None)},
            out_shardings=(P(*first), P(*second)),
            mesh_shapes=[MeshShape(("x",), (4,))],
        ).best("seconds")
        parts = plan.costs_by("kernel").parts
        assert sum(p.seconds for p in parts) == pytest.approx(plan.costs.seconds)
        seconds[second] = sum(p.seconds for p in parts if p.kind == "kernel")
    block = x.size * 4 / 4
    again = seconds[None, "x"] - seconds["x", None]
    assert again == pytest.approx(block / load_target("h100:4").hbm_bytes_per_second)
