"""Which values lie in tiles along their last two dims."""

from __future__ import annotations

import jax
import jax.numpy as jnp

import tapestry_egg as te
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.tiling import last_in_tiles


def test_what_is_computed_element_by_element_lies_like_what_kernels_read() -> None:
    def fn(x: jax.Array, places: jax.Array, w: jax.Array) -> jax.Array:
        rows = jnp.sin(jnp.tanh(x)[places])  # float32[64, 16]
        sums = jnp.cos(rows @ w)  # float32[64, 4]
        return sums + 1

    args = jnp.ones((8, 16)), jnp.zeros((64,), int), jnp.ones((16, 4))
    program = flatten(te.trace(fn, *args).graph)
    kinds = {
        i.signature.kernel: program.types[i.outputs[0]].shape
        for i in program.instances
        if i.outputs and i.outputs[0] in last_in_tiles(program, Tiles(128, 8, 4, ("gather",)))
    }
    assert kinds.pop("broadcast_in_dim") == (64, 1)  # the places
    assert kinds == {"tanh": (8, 16), "gather": (64, 16), "sin": (64, 16)}
    assert not last_in_tiles(program, Tiles(128, 8, 4))
    assert not last_in_tiles(program, None)
