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
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.lying import made_straight, read_straight, window_dims
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


# Along which dims of values windows move, so that tiles lie otherwise.


Dims = dict[str, set[int]]


def pooled(x: jax.Array) -> jax.Array:
    y = lax.reduce_window(jnp.tanh(jnp.sin(x)), -jnp.inf, lax.max, *WINDOW) + 1
    return jnp.exp(jnp.cos(y))


def of_arguments(x: jax.Array) -> jax.Array:
    return lax.reduce_window(x, -jnp.inf, lax.max, *WINDOW)


def convolved_twice(x: jax.Array) -> jax.Array:
    kernel = jnp.sin(x[0, :3, :, None] + x[0, :1, 0])  # as many windows as channels
    return jnp.cos(lax.conv_general_dilated(jnp.tanh(x), kernel, (1,), "SAME", None, None, NLC))


def rows_added(x: jax.Array) -> jax.Array:
    y, where = jnp.tanh(x[0]), jnp.argmax(x[0], axis=1)
    return jnp.sin(y.at[where].add(jnp.cos(x[1, :, :])) + 1)


def one_number_added(x: jax.Array) -> jax.Array:
    y, where = jnp.tanh(x[0]), jnp.argmax(x[0], axis=1)[:, None]
    return jnp.put_along_axis(y, where, 1.0, axis=1, inplace=False) + 1


#: Sizes, strides and padding.
WINDOW = (1, 3, 1), (1, 1, 1), "SAME"
NLC = lax.ConvDimensionNumbers((0, 2, 1), (2, 1, 0), (0, 2, 1))

WINDOWS: dict[str, tuple[Callable[[jax.Array], jax.Array], Dims]] = {
    "pooling": (
        pooled,
        {"sin": {1}, "tanh": {1}, "reduce_window_max": {1}, "add": {1}, "cos": {1}, "exp": set()},
    ),
    "pooling of what enters, for what leaves": (of_arguments, {"reduce_window_max": set()}),
    "convolution": (convolved_twice, {"tanh": {1}, "conv_general_dilated": {1}}),
    "rows that are added": (
        rows_added,
        {"tanh": {0}, "cos": {0}, "scatter-add": {0}, "add": set(), "sin": set()},
    ),
    "products": (lambda x: jnp.sin(jnp.tanh(x[0]) @ x[0].T), {"tanh": set(), "dot_general": set()}),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_what_is_computed_element_by_element_lies_like_what_windows_move_over(name: str) -> None:
    fn, expected = WINDOWS[name]
    program = flatten(te.trace(fn, jnp.ones((2, 16, 8))).graph)
    found: Any = window_dims(program, Tiles(128, 8, 4))
    made = {i.signature.kernel: i.outputs[0] for i in program.instances if i.outputs}
    assert {k: set(found.get(made[k], ())) for k in expected} == expected
    assert not window_dims(program, None)
