"""What XLA's TPU compiler makes of plans. It needs no TPU, only `pip install libtpu`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tapestry_egg as te
from models import mlp
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.plans.collectives import apply
from tapestry_egg.plans.plan import Change
from tapestry_egg.runtime import compare, hlo_stats

pytest.importorskip("libtpu")


@pytest.fixture(scope="module")
def devices() -> Sequence[Any]:
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to be asked
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to be locked
    return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices


@pytest.mark.parametrize(
    ("shape", "dim"),
    [((1024, 512), 0), ((1024, 512), 1), ((4, 256, 8, 128), 1), ((64, 8, 128), 0), ((65536,), 0)],
)
def test_sums_are_scattered_along_any_dim(
    devices: Sequence[Any], shape: tuple[int, ...], dim: int
) -> None:
    mesh = Mesh(np.array(devices), ("x",))
    step = Change("reduce_scatter", (0,), dim, monoid="sum")

    def local(x: jax.Array) -> jax.Array:
        return 2 * apply(jnp.tanh(x), step, MeshShape(("x",), (8,)), "tpu")

    spec = PartitionSpec(*[None] * dim, "x")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(), out_specs=spec, check_vma=False
    )
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    stats = hlo_stats(jax.jit(mapped).lower(x).compile())
    assert stats.by_kind() == {("reduce_scatter", 8): 4 * int(np.prod(shape))}


def test_float32_plans_move_the_planned_bytes(devices: Sequence[Any]) -> None:
    fn, args = mlp.example((1024, 2048, 2048, 1024), 8192)
    program = te.trace(fn, *args, donate_argnums=(0,))
    front = te.optimize(
        program, "v5e:2x4", settings=Settings(work=4.0), mesh_shapes=[MeshShape(("x",), (8,))]
    )
    comparison = compare(front[0], te.compile(front[0], devices).compile())
    large = [r for r in comparison.rows if max(r.planned_bytes, r.compiled_bytes) > 2**20]
    assert large
    assert all(row.equal for row in large), str(comparison)
