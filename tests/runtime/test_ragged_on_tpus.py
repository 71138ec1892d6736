"""What XLA's TPU compiler makes of products by groups of rows, and of rows that are gathered for
them. It needs no TPU, only `pip install libtpu`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.runtime import compare, hlo_stats

pytest.importorskip("libtpu")

GROUPS, ROWS, WIDTH, HIDDEN = 8, 16384, 256, 1024
QUICK = te.Settings(work=0.3, forms=0, recompute=0, workers=1)
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


@pytest.fixture(scope="module")
def devices() -> Sequence[Any]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to be asked
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to be locked
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


SIZES = array(GROUPS, dtype=jnp.int32)


def free(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(jnp.sin(x), jnp.cos(w), sizes)


def contracted(x: jax.Array, y: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot_general(jnp.sin(x), jnp.cos(y), sizes, CONTRACTED)


@pytest.mark.parametrize(
    ("fn", "arguments"),
    [
        (free, (array(4096, HIDDEN), array(GROUPS, HIDDEN, 512), SIZES)),
        (contracted, (array(4096, HIDDEN), array(4096, 512), SIZES)),
    ],
)
def test_a_kernel_for_groups_of_rows_repeats_none(
    devices: Sequence[Any], fn: Callable[..., Any], arguments: Any
) -> None:
    """It holds a byte for every row and group beside what it reads, rounded, and makes."""
    plan = te.optimize(te.trace(fn, *arguments), "v5e:1", settings=QUICK).best("peak_bytes")
    found = te.compile(plan, devices[:1]).lower().compile({"xla_msa_enable": "false"})
    assert plan.costs.peak_bytes == pytest.approx(hlo_stats(found).reported_peak_bytes, rel=0.01)


def mixture(x: Any, up: Any, down: Any, order: Any, sizes: Any) -> Any:
    """Rows in some order through two products; the columns of both ends are cut in less than a
    tile's lanes."""
    hidden = jnp.tanh(lax.ragged_dot(x[order], up, sizes))
    return lax.ragged_dot(hidden, down, sizes)


def test_plans_of_products_by_groups_send_and_hold_what_they_promise(
    devices: Sequence[Any],
) -> None:
    """Operands are sent rounded; what is gathered along lanes in less than whole tiles is turned
    for the kernel, and so is what it makes before that is scattered."""
    shapes = (ROWS // 2, WIDTH), (GROUPS, WIDTH, HIDDEN), (GROUPS, HIDDEN, WIDTH)
    arguments = [array(*s) for s in shapes] + [array(ROWS, dtype=jnp.int32), SIZES]
    pins = {
        "[0]": (None, "x"),
        "[1]": (None, None, "x"),
        "[2]": (None, "x", None),
        "result": (None, "x"),
    }
    front = te.optimize(
        te.trace(mixture, *arguments),
        "v5e:2x4",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins=pins,
        settings=QUICK,
    )
    for plan in front:
        lowered = te.compile(plan, devices).lower()
        found = hlo_stats(lowered.compile({"xla_msa_enable": "false"}))
        moved = compare(plan, found)
        assert moved.equal, str(moved)
        assert plan.costs.peak_bytes == pytest.approx(found.reported_peak_bytes, rel=0.1)


def test_gathered_rows_are_stored(devices: Sequence[Any]) -> None:
    """By a kernel of their own, which no reader computes again."""

    def weighted(x: jax.Array, y: jax.Array, order: jax.Array) -> Any:
        rows = x[order]
        return jnp.sum(jnp.square(rows), axis=1), jnp.sum(rows * y)

    arguments = array(ROWS // 2, WIDTH), array(ROWS, WIDTH), array(ROWS, dtype=jnp.int32)
    plan = te.optimize(te.trace(weighted, *arguments), "v5e:1", settings=QUICK).best("peak_bytes")
    found = te.compile(plan, devices[:1]).lower().compile({"xla_msa_enable": "false"})
    assert plan.costs.peak_bytes == pytest.approx(hlo_stats(found).reported_peak_bytes, rel=0.03)
