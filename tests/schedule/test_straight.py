"""Which kernels want their operands, and leave their results, as dims are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.certify.cost_parts import cost_parts
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.costs import collective_seconds, turning_seconds
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.schedule.lying import made_straight, read_straight
from tests.schedule.test_lifetimes import h100s, made_by, scheduled

IMAGES = jax.ShapeDtypeStruct((16, 32, 32, 64), jnp.float32)
FILTER = jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)
MESH = MeshShape(("x",), (8,))


def convolved(x: jax.Array, k: jax.Array) -> jax.Array:
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)


def test_convolutions_scatters_and_results_take_dims_as_they_are_written() -> None:
    def f(x: jax.Array, k: jax.Array, w: jax.Array, i: jax.Array) -> Any:
        y = convolved(jnp.tanh(x), k).reshape(-1, 64)
        z = jnp.zeros((8, 64)).at[i].add(y @ w)
        return lax.scan(lambda c, r: (jnp.tanh(c * r), None), z[0], jnp.sort(z, axis=0))[0]

    numbers = jax.ShapeDtypeStruct((16 * 32 * 32,), jnp.int32)
    plan = scheduled(f, IMAGES, FILTER, jax.ShapeDtypeStruct((64, 64), jnp.float32), numbers)
    conv, dot, scatter, output = (
        made_by(plan, name) if name != "output" else (len(plan.units) - 1, -1)
        for name in ("conv_general_dilated", "dot_general", "scatter-add", "output")
    )
    read = read_straight(plan)
    assert {v for u, v in read if u == conv[0]} == {v for *_, v in plan.units[conv[0]].reads}
    assert dot[1] in {v for u, v in read if u == scatter[0]}
    assert {u for u, _ in read} == {conv[0], scatter[0], output[0]}
    assert {conv[1], scatter[1]} == made_straight(plan)


@pytest.mark.parametrize(("name", "arrays"), [("convolution", 2), ("product", 1)])
def test_what_is_gathered_along_channels_is_turned_for_a_convolution(
    name: str, arrays: int
) -> None:
    """XLA for H100 holds it twice, and once for a product, as promised."""
    fns: dict[str, Callable[..., Any]] = {
        "convolution": convolved,
        "product": lambda x, k: x.reshape(-1, 64) @ k[0, 0],
    }
    cut = (None, None, None, "x")
    program = te.trace(fns[name], IMAGES, FILTER)
    pins = {"[0]": cut, "[1]": cut}
    front = te.optimize(
        program, "h100:8", mesh_shapes=[MESH], pins=pins, settings=te.Settings(forms=0, work=0.2)
    )
    (plan,) = [p for p in front if p.name == "p0"]
    whole = 4 * 16 * 32 * 32 * 64
    assert any(s.kind == "all_gather" and s.dim == 3 for x in plan.body.copies.values() for s in x)
    assert plan.costs.peak_bytes == pytest.approx((arrays + 2 / 8) * whole, rel=0.1)
    (gather,) = [x for x in cost_parts(plan) if x.kind == "collective" and x.value.startswith("%0")]
    target, turned = te.load_target("h100:8"), arrays - 1
    assert gather.seconds == pytest.approx(
        collective_seconds("all_gather", whole / 8, (0,), MESH, target)
        + turned * turning_seconds(whole, target)
    )
    compiled = hlo_stats(te.compile(plan, h100s()).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.1)
