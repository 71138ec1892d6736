"""What a compiler would compute twice, rounded in two ways, is computed once."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np

import tapestry_egg as te


def peaks(x: jax.Array, y: jax.Array) -> jax.Array:
    """Where a product and a sum, which one of two kernels may compute as one operation, is the
    greatest of its row."""
    v = x * y + x
    return v == v.max(1, keepdims=True)


def test_what_is_compared_with_its_greatest_is_computed_once() -> None:
    x, y = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 128)), jnp.float32)
    front = te.optimize(
        te.trace(peaks, x, y),
        "cpu:8",
        mesh_shapes=[te.MeshShape(("x",), (8,))],
        pins={"[0]": (None, None), "[1]": (None, None)},
        settings=te.Settings(work=0.05),
    )
    assert len(front) > 1
    for plan in front:
        run = te.compile(plan, jax.devices()[:8])
        np.testing.assert_array_equal(run(x, y).sum(1), 1)
        assert len(re.findall(r"= f32\[\S* add\(", run.compile().as_text())) == 1, plan.name
