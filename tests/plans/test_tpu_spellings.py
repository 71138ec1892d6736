"""Sums that are spelled for XLA's TPU compiler are the same sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.collectives import apply, turns
from tapestry_egg.plans.plan import Change


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "dim"),
    [
        ((16, 256, 32), 2),  # blocks of four columns
        ((4096, 32), 1),
        ((1024, 256), 1),  # of 32, whole rows of a tile
        ((4, 32, 2, 128), 3),
        ((16, 64, 96), 2),  # of twelve
        ((128, 4, 4, 16), 3),  # another dim along lanes
        ((4, 128, 8, 64), 3),
        ((65536,), 0),
        ((16, 64, 128), 1),
        ((4, 64, 8), 2),  # too few for rows of lanes
        ((16, 4096), 0),  # blocks of two rows
        ((32, 393), 0),  # filled up to whole tiles
        ((16, 24), 0),  # too few to be
        ((3, 16, 512), 1),
    ],
)
def test_scattered_sums_are_what_all_devices_add_up(shape: tuple[int, ...], dim: int) -> None:
    x = jnp.asarray(np.random.default_rng(0).integers(-9, 9, size=(8, *shape)), jnp.float32)
    step = Change("reduce_scatter", (0,), dim, monoid="sum")

    def local(x: jax.Array) -> jax.Array:
        return apply(x[0], step, MeshShape(("x",), (8,)), "tpu")

    mesh = Mesh(np.array(jax.devices("cpu")[:8]), ("x",))
    leaving = PartitionSpec(*[None] * dim, "x")
    found = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=leaving, check_vma=False
    )(x)
    np.testing.assert_array_equal(found, x.sum(0))


@pytest.mark.parametrize(
    ("dim", "block", "turned"),
    [(3, 128, False), (3, 96, True), (2, 8, False), (2, 4, True), (1, 1, False), (0, 1, False)],
)
def test_whole_tiles_are_gathered_where_they_lie(dim: int, block: int, turned: bool) -> None:
    """Of f32[4, 16, 64, 512], as modules for v5e have it; where rows lie one by one, only what is
    cut along the first dim."""
    step, shape = Change("all_gather", (0,), dim), (4, 16, 64, 512)
    tiles = load_target("v5e:2x4").tiles
    assert turns(step, shape, block=block, tiles=tiles) is turned
    assert turns(step, shape, block=block) is (dim > 0)
