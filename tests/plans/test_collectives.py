"""Every step on eight devices against NumPy, which nests cuts instead of numbering blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tapestry_egg.errors import PlanError
from tapestry_egg.extract.certify.legality import Illegal, check_permute
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape, permuted_axes, pieces_moved
from tapestry_egg.graph.layout_algebra import LayoutAlgebra
from tapestry_egg.plans.collectives import after, apply, traffic
from tapestry_egg.plans.plan import Change
from tapestry_egg.runtime.measure.hlo import hlo_stats

FLAT = MeshShape(("a", "b"), (2, 4))
CUBE = MeshShape(("a", "b", "c"), (2, 2, 2))
SHAPE = (16, 8, 16)
COMBINE = {
    "sum": np.add,
    "prod": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
}


def values(layout: Layout, mesh: MeshShape, dtype: str) -> np.ndarray:
    """One array per coordinate of the partial axes (other axes have extent 1)."""
    lead = [n if a in layout.partial else 1 for a, n in enumerate(mesh.sizes)]
    rng = np.random.default_rng(0)
    if dtype == "bool":
        return rng.random((*lead, *SHAPE)) < 0.5
    if layout.monoid == "prod":
        return rng.integers(1, 3, (*lead, *SHAPE)).astype(dtype)
    return rng.integers(-40, 40, (*lead, *SHAPE)).astype(dtype)


def block(array: np.ndarray, layout: Layout, mesh: MeshShape, at: tuple[int, ...]) -> np.ndarray:
    """What the device at mesh coordinates `at` holds."""
    n = len(mesh.sizes)
    array = array[tuple(at[a] if array.shape[a] > 1 else 0 for a in range(n))]
    for dim, axes in enumerate(layout.dims):
        for a in axes:
            array = np.split(array, mesh.sizes[a], dim)[at[a]]
    return array


def devices(mesh: MeshShape) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.sizes)))


def run(step: Change, blocks: list[np.ndarray], mesh: MeshShape) -> np.ndarray:
    grid = Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    over_all = PartitionSpec(mesh.names)
    mapped = jax.shard_map(
        lambda x: apply(x[0], step, mesh, "cpu")[None],
        mesh=grid,
        in_specs=over_all,
        out_specs=over_all,
        check_vma=False,
    )
    return np.asarray(jax.jit(mapped)(np.stack(blocks)))


def check(step: Change, source: Layout, mesh: MeshShape, dtype: str = "float32") -> None:
    array = values(source, mesh, dtype)
    got = run(step, [block(array, source, mesh, at) for at in devices(mesh)], mesh)
    target = after(step, source)
    if step.kind in ("all_reduce", "reduce_scatter"):
        for a in step.axes:
            pieces = np.split(array, array.shape[a], a)
            array = reduce(COMBINE[step.monoid or ""], pieces)
    if step.kind == "to_partial":  # any parts will do that combine to the value
        wanted = [block(array, source, mesh, at) for at in devices(mesh)]
        table = got.reshape(*mesh.sizes, *got.shape[1:])
        for a in step.axes:
            combined = COMBINE[step.monoid or ""].reduce(table, axis=a, keepdims=True)
            table = np.broadcast_to(combined, table.shape)
        np.testing.assert_array_equal(table.reshape(got.shape), np.stack(wanted))
        return
    expected = np.stack([block(array, target, mesh, at) for at in devices(mesh)])
    np.testing.assert_array_equal(got, expected)


def cut(*dims: tuple[int, ...], partial: tuple[int, ...] = (), monoid: str | None = None) -> Layout:
    return Layout(dims, partial, monoid)


ORDERS = [(0,), (1,), (0, 1), (1, 0)]
NESTED = [(2, (0, 1)), (2, (1, 0)), (0, (2, 1)), (0, (1, 2)), (1, (0, 2)), (1, (2, 0))]


@pytest.mark.parametrize(
    "axes", [*(pytest.param(a, marks=pytest.mark.slow) for a in ORDERS[:3]), ORDERS[3]]
)
def test_gather_and_slice_and_exchange(axes: tuple[int, ...]) -> None:
    check(Change("all_gather", axes, 0), cut(axes, (), ()), FLAT)
    check(Change("slice", axes, 2), cut((), (), ()), FLAT)
    if len(axes) == 2:
        dims = (axes[:1], (), axes[1:])
        check(Change("slice", axes, dims=dims), cut((), (), ()), FLAT)
    check(Change("all_to_all", axes, 0, 2), cut(axes, (), ()), FLAT)
    check(Change("all_to_all", axes, 2, 1), cut((), (), axes), FLAT)


@pytest.mark.slow
@pytest.mark.parametrize(("outer", "axes"), NESTED)
def test_the_minor_cut_moves_and_the_major_cut_stays(outer: int, axes: tuple[int, ...]) -> None:
    check(Change("all_gather", axes, 0), cut((outer, *axes), (), ()), CUBE)
    check(Change("slice", axes, 0), cut((outer,), (), ()), CUBE)
    check(Change("all_to_all", axes, 0, 1), cut((outer, *axes), (), ()), CUBE)
    check(Change("all_to_all", axes, 0, 2), cut(axes, (), (outer,)), CUBE)
    sums = cut((outer,), (), (), partial=tuple(sorted(axes)), monoid="sum")
    check(Change("reduce_scatter", axes, 0, monoid="sum"), sums, CUBE)


@pytest.mark.parametrize("axes", [(1,), pytest.param((1, 0), marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("monoid", "dtype"),
    [("sum", "float32"), ("sum", "int32"), ("max", "float32"), ("min", "int32"), ("prod", "int32"),
     ("and", "bool"), ("or", "bool"), ("and", "uint8"), ("max", "bool")],
)  # fmt: skip
def test_reductions(axes: tuple[int, ...], monoid: str, dtype: str) -> None:
    source = cut((), (), (), partial=tuple(sorted(axes)), monoid=monoid)
    check(Change("all_reduce", axes, monoid=monoid), source, FLAT, dtype)
    check(Change("reduce_scatter", axes, 2, monoid=monoid), source, FLAT, dtype)
    check(Change("to_partial", axes, monoid=monoid), cut((), (), ()), FLAT, dtype)


def permuted(source: Layout, target: Layout, mesh: MeshShape) -> Change:
    return Change("permute", permuted_axes(source, target, mesh), dims=target.dims)


def assert_compiled(step: Change, source: Layout, target: Layout, mesh: MeshShape) -> None:
    """XLA sends what is counted."""
    tensor = TensorType(SHAPE, "float32")
    planned = traffic(step, source, tensor, mesh)
    assert planned is not None
    grid = Mesh(np.array(jax.devices()[: mesh.devices]).reshape(mesh.sizes), mesh.names)
    specs = [
        PartitionSpec(*[tuple(mesh.names[a] for a in d) for d in x.dims]) for x in (source, target)
    ]
    mapped = jax.shard_map(
        partial(apply, step=step, mesh=mesh, platform="cpu"),
        mesh=grid,
        in_specs=specs[0],
        out_specs=specs[1],
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct(SHAPE, "float32")).compile()
    assert hlo_stats(compiled).by_kind() == {
        ("permute", planned.group): planned.count * planned.payload_bytes
    }


PERMUTES = [
    (FLAT, cut((0, 1), (), ()), cut((1, 0), (), ()), ("a", "b")),
    (CUBE, cut((0, 2), (1,), ()), cut((1, 2), (0,), ()), ("a", "b")),  # c keeps its place
    (CUBE, cut((0,), (), ()), cut((2,), (), ()), ("a", "c")),  # among replicas of blocks
    (CUBE, cut((0,), (1,), (2,)), cut((1,), (2,), (0,)), ("a", "b", "c")),
    (MeshShape(("a", "b", "c"), (2, 4, 2)), cut((0, 2), (1,), ()), cut((1,), (2, 0), ()), None),
]


@pytest.mark.parametrize(("mesh", "source", "target", "axes"), PERMUTES)
def test_one_permute_changes_the_order_of_axes(
    mesh: MeshShape, source: Layout, target: Layout, axes: tuple[str, ...] | None
) -> None:
    if mesh.devices <= len(jax.devices()):
        check(permuted(source, target, mesh), source, mesh)
    step = permuted(source, target, mesh)
    check_permute(step, source, target, mesh)
    assert axes is None or sorted(mesh.names[a] for a in step.axes) == list(axes)
    wrong = replace(step, axes=step.axes[1:] + step.axes[:1])
    with pytest.raises((Illegal, PlanError)):
        check_permute(wrong, source, after(wrong, source), mesh)


WIDE = MeshShape(("a", "b", "c"), (2, 1, 4))
PIECES = [
    (FLAT, cut((1,), (0,), ()), cut((0,), (1,), ()), 2),
    (FLAT, cut((1,), (), (0,)), cut((0,), (), (1,)), 2),
    (
        WIDE,
        cut((2,), (1,), (0,)),
        cut(
            (
                1,
                0,
            ),
            (),
            (2,),
        ),
        2,
    ),
    (MeshShape(("a", "b"), (4, 2)), cut((0,), (1,), ()), cut((1,), (0,), ()), 2),
]


@pytest.mark.parametrize(("mesh", "source", "target", "pieces"), PIECES)
def test_permutes_of_pieces_move_a_part_of_an_axis(
    mesh: MeshShape, source: Layout, target: Layout, pieces: int
) -> None:
    dims, axes = pieces_moved(source, target, mesh), permuted_axes(source, target, mesh)
    assert dims is not None
    step = Change("permute", axes, *dims, dims=target.dims, pieces=pieces)
    check(step, source, mesh)
    check_permute(step, source, target, mesh)
    with pytest.raises(Illegal):
        check_permute(replace(step, pieces=2 * pieces), source, target, mesh)
    assert_compiled(step, source, target, mesh)


@pytest.mark.slow
def test_every_permute_moves_whole_blocks() -> None:
    algebra = LayoutAlgebra(CUBE, (3,), ())
    for a, b, *_ in random.Random(0).sample(algebra.facts()["same-blocks"], 12):
        source, target = algebra.layouts[a], algebra.layouts[b]
        check(permuted(source, target, CUBE), source, CUBE)


def test_permutes_are_compiled_as_they_are_counted() -> None:
    for mesh, source, target, _ in PERMUTES[:4]:
        assert_compiled(permuted(source, target, mesh), source, target, mesh)


def test_floats_of_four_bits_are_exchanged() -> None:
    blocks = np.random.default_rng(0).normal(size=(8, 8, 2)).astype("float4_e2m1fn")
    got = run(Change("all_to_all", (0, 1), 1, 0), list(blocks), FLAT)
    np.testing.assert_array_equal(got, blocks.transpose(1, 0, 2).reshape(8, 1, 16))


@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e5m2fnuz"]
)
@pytest.mark.parametrize(("monoid", "most"), [("max", np.max), ("min", np.min)])
def test_the_greatest_is_nan_where_there_is_one(
    monoid: str, most: Callable[..., np.ndarray], dtype: str
) -> None:
    blocks = np.full((8, 12), -1.0).astype(dtype)
    for device in range(8):  # the NaN of another device in each column
        blocks[device, device] = -np.nan if device % 2 else np.nan
    blocks[3, 8:] = np.inf, -np.inf, 0.0, 1e-39
    blocks[4, 8:] = -np.inf, 3e38, -3e38, -1e-39
    got = run(Change("all_reduce", (0, 1), monoid=monoid), list(blocks), FLAT).astype(np.float32)
    assert np.isnan(got[:, :8]).all()
    wanted = most(blocks.astype(np.float32), 0)
    np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


@pytest.mark.parametrize("dtype", ["float8_e4m3", "float8_e4m3fnuz", "float8_e4m3b11fnuz"])
def test_the_greatest_of_every_two_floats_of_eight_bits_is_as_on_one_device(dtype: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(dtype)
    pairs = [np.tile(every, 256), np.repeat(every, 256)]
    flat = MeshShape(("a", "b"), (2, 1))
    for monoid, most in (("max", np.maximum), ("min", np.minimum)):
        got = run(Change("all_reduce", (0, 1), monoid=monoid), pairs, flat).astype(np.float32)
        wanted = most(*(x.astype(np.float32) for x in pairs))
        np.testing.assert_array_equal(got, np.broadcast_to(wanted, got.shape))


def test_some_axes_of_several_partial_ones() -> None:
    source = cut((), (2,), (), partial=(0, 1), monoid="sum")
    check(Change("all_reduce", (1,), monoid="sum"), source, CUBE)
    check(Change("reduce_scatter", (0,), 1, monoid="sum"), source, CUBE)


@pytest.mark.parametrize(
    ("step", "source"),
    [
        (Change("all_gather", (1,), 0), cut((1, 0), ())),  # not the minor-most
        (Change("all_gather", (0,), 1), cut((0,), ())),
        (Change("all_to_all", (0,), 0, 0), cut((0,), ())),
        (Change("all_reduce", (0,), monoid="max"), cut((), (), partial=(0,), monoid="sum")),
        (Change("reduce_scatter", (0,), 5, monoid="sum"), cut((), (), partial=(0,), monoid="sum")),
        (Change("slice", (0,), 1), cut((0,), ())),
        (Change("to_partial", (0,), monoid="sum"), cut((0,), ())),
        (Change("to_partial", (0,), monoid="sum"), cut((), (), partial=(1,), monoid="max")),
        (Change("teleport", (0,), 0), cut((0,), ())),
    ],
)
def test_steps_that_do_not_apply_are_refused(step: Change, source: Layout) -> None:
    with pytest.raises(PlanError):
        after(step, source)


def test_random_keys_do_not_add_up() -> None:
    with pytest.raises(PlanError, match="keys"):
        apply(
            jax.random.split(jax.random.key(0), 8), Change("all_reduce", (0,), monoid="sum"), FLAT
        )


@pytest.mark.parametrize(
    ("step", "source", "dtype"),
    [
        (Change("all_gather", (1, 0), 0), cut((1, 0), (), ()), "float32"),
        (Change("all_gather", (1, 0), 2), cut((), (), (1, 0)), "bfloat16"),
        (Change("all_gather", (1,), 0), cut((1,), (), ()), "float8_e4m3fn"),
        (Change("all_to_all", (1,), 0, 1), cut((1,), (), ()), "int32"),
        (Change("all_to_all", (1,), 0, 1), cut((1,), (), ()), "float8_e5m2"),
        (Change("all_reduce", (1,), monoid="max"), cut((), (), (), partial=(1,), monoid="max"),
         "float32"),
        (Change("all_reduce", (1,), monoid="max"), cut((), (), (), partial=(1,), monoid="max"),
         "float8_e4m3fn"),
        (Change("all_reduce", (0, 1), monoid="sum"), cut((), (), (), partial=(0, 1), monoid="sum"),
         "float32"),
        (Change("all_reduce", (1,), monoid="prod"), cut((0,), (), (), partial=(1,), monoid="prod"),
         "float32"),
        (Change("all_reduce", (1,), monoid="or"), cut((), (), (), partial=(1,), monoid="or"),
         "bool"),
        (Change("reduce_scatter", (0, 1), 0, monoid="sum"),
         cut((), (), (), partial=(0, 1), monoid="sum"), "float32"),
        (Change("reduce_scatter", (1,), 0, monoid="max"),
         cut((), (), (), partial=(1,), monoid="max"), "float32"),
        (Change("slice", (1,), 0), cut((), (), ()), "float32"),
    ],
)  # fmt: skip
def test_traffic_is_what_xla_compiles(step: Change, source: Layout, dtype: str) -> None:
    grid = Mesh(np.array(jax.devices()).reshape(FLAT.sizes), FLAT.names)
    local = source.local_shape(SHAPE, FLAT)
    mapped = jax.shard_map(
        lambda x: apply(x[0], step, FLAT, "cpu")[None],
        mesh=grid,
        in_specs=PartitionSpec(FLAT.names),
        out_specs=PartitionSpec(FLAT.names),
        check_vma=False,
    )
    compiled = jax.jit(mapped).lower(jax.ShapeDtypeStruct((8, *local), dtype)).compile()
    moved = traffic(step, source, TensorType(SHAPE, dtype), FLAT)
    expected = {(moved.kind, FLAT.parts(moved.axes)): moved.payload_bytes} if moved else {}
    assert hlo_stats(compiled).by_kind() == expected


def test_axes_of_one_device_move_nothing() -> None:
    mesh = MeshShape(("a", "b"), (1, 8))
    type_ = TensorType(SHAPE, "float32")
    assert traffic(Change("all_gather", (0,), 0), cut((0,), (), ()), type_, mesh) is None
    moved = traffic(Change("all_gather", (0, 1), 0), cut((0, 1), (), ()), type_, mesh)
    assert moved is not None and (moved.axes, moved.payload_bytes) == ((1,), type_.nbytes)
    check(Change("all_gather", (0, 1), 0), cut((0, 1), (), ()), mesh)
