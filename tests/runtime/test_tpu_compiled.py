"""What XLA's TPU compiler makes of plans. It needs no TPU, only `pip install libtpu`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tapestry_egg as te
from models import mlp
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tiles import stored_bytes
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
    [
        ((1024, 512), 0),
        ((1024, 512), 1),
        ((4, 256, 8, 128), 1),
        ((64, 8, 128), 0),
        ((65536,), 0),
        ((4096, 32), 1),  # blocks of four columns
        ((16, 256, 32), 1),  # narrow matrices
        ((16, 4096), 0),  # blocks of two rows
    ],
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


@pytest.mark.parametrize(
    ("shape", "dim"), [((4096, 512), 1), ((2, 512, 8, 64), 2), ((16, 64, 256), 2), ((96, 64), 0)]
)
def test_sums_of_blocks_that_fill_no_tiles_are_scattered_beside_others(
    devices: Sequence[Any], shape: tuple[int, ...], dim: int
) -> None:
    """XLA would make one all-reduce of such a sum and of what else is reduced."""
    mesh = Mesh(np.array(devices).reshape(2, 4), ("x", "y"))
    step = Change("reduce_scatter", (1,), dim, monoid="sum")

    def local(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = apply(jnp.tanh(x), step, MeshShape(("x", "y"), (2, 4)), "tpu")
        return 2 * part, jax.lax.psum(x.reshape(-1)[:512] + 1, "y")

    specs = PartitionSpec(*[None] * dim, "y"), PartitionSpec()
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(), out_specs=specs, check_vma=False
    )
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec()))
    moved = hlo_stats(jax.jit(mapped).lower(x).compile()).by_kind()
    whole = 4 * int(np.prod(shape))
    assert moved["all_reduce", 4] == 4 * 512
    assert whole <= moved["reduce_scatter", 4] <= 4 / 3 * whole  # some are padded


@pytest.mark.parametrize(("count", "dim"), [(2, 0), (32, 1)])
def test_few_matrices_are_scattered_with_their_blocks_first(
    devices: Sequence[Any], count: int, dim: int
) -> None:
    """Gradients of two stacked layers lie in tiles of two rows, of which XLA scatters none."""
    mesh = Mesh(np.array(devices), ("x",))
    step = Change("reduce_scatter", (0,), 1, monoid="sum")
    mapped = jax.shard_map(
        lambda x: apply(x, step, MeshShape(("x",), (8,)), "tpu"),
        mesh=mesh,
        in_specs=PartitionSpec(),
        out_specs=PartitionSpec(None, "x"),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((count, 512, 256), jnp.float32)
    assert f"scatter_dimension={dim} " in str(jax.make_jaxpr(mapped)(x)).replace("\n", " ")


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((16, 64, 2048), "bfloat16"),  # 9 times, as XLA lays it out
        ((2, 64, 128, 4, 64), "float32"),  # 18 times, with blocks of 8 lanes last
    ],
)
def test_exchanges_that_split_lanes_take_no_more_than_two_arrays(
    devices: Sequence[Any], shape: tuple[int, ...], dtype: str
) -> None:
    mesh, last = Mesh(np.array(devices), ("x",)), len(shape) - 1
    step = Change("all_to_all", (0,), 1, last)

    def local(x: jax.Array) -> jax.Array:
        return jnp.sin(apply(jnp.tanh(x), step, MeshShape(("x",), (8,)), "tpu"))

    leaving = PartitionSpec(*[None] * last, "x")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(None, "x"), out_specs=leaving, check_vma=False
    )
    entering = NamedSharding(mesh, PartitionSpec(None, "x"))
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=entering)
    compiled = jax.jit(mapped).lower(x).compile(compiler_options={"xla_msa_enable": "false"})
    stats = hlo_stats(compiled)
    block = x.dtype.itemsize * int(np.prod(shape)) // 8
    assert stats.by_kind() == {("all_to_all", 8): block}
    assert stats.temp_bytes <= 2 * block


@pytest.mark.parametrize(
    "shape",
    [
        (16, 256, 32),  # blocks of four columns
        (16384, 256),  # of 32
        (16, 1024, 96),  # of twelve
        (8, 512, 4, 128),  # of matrices that fill no tiles themselves
        (128, 16, 16, 8),  # images
    ],
)
def test_sums_that_are_scattered_in_a_few_columns_are_not_padded_to_all_lanes(
    devices: Sequence[Any], shape: tuple[int, ...]
) -> None:
    """32 times, where the columns of blocks come last before rows of lanes are made of them."""
    mesh, dim = Mesh(np.array(devices), ("x",)), len(shape) - 1
    step = Change("reduce_scatter", (0,), dim, monoid="sum")

    def local(x: jax.Array) -> jax.Array:
        return jnp.sin(apply(jnp.tanh(x), step, MeshShape(("x",), (8,)), "tpu"))

    leaving = PartitionSpec(*[None] * dim, "x")
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=PartitionSpec(), out_specs=leaving, check_vma=False
    )
    whole = NamedSharding(mesh, PartitionSpec())
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=whole)
    compiled = jax.jit(mapped).lower(x).compile(compiler_options={"xla_msa_enable": "false"})
    stats = hlo_stats(compiled)
    whole_bytes = 4 * int(np.prod(shape))
    assert stats.by_kind() == {("reduce_scatter", 8): whole_bytes}
    assert stats.temp_bytes <= 3 * whole_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_arguments_lie_in_the_tiles_of_the_target(devices: Sequence[Any], dtype: str) -> None:
    shapes = [(), (3,), (200,), (1000,), (5000,), (1, 1000), (5, 1000), (9, 1000), (1000, 3)]
    shapes += [(1000, 64), (4, 1000, 3), (64, 8, 8, 32), (256, 8, 256, 64), (4096, 1, 1)]
    one = jax.sharding.SingleDeviceSharding(devices[0])
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=one) for shape in shapes]
    compiled = jax.jit(lambda *xs: [~x if dtype == "bool" else x + x for x in xs]).lower(*args)
    tiles, item = te.load_target("v5e:2x4").tiles, np.dtype(jnp.dtype(dtype)).itemsize
    expected = sum(stored_bytes(shape, item, tiles) for shape in shapes)
    memory = compiled.compile().memory_analysis()
    assert memory is not None and memory.argument_size_in_bytes == expected


#: Of an array of exponentials, that a sum reads, too: arrays as large that the compiler stores.
STORED = {
    "all of it": (lambda y: y, 0),
    "every other row": (lambda y: y[::2], 1),
    "two parts": (lambda y: y[:400] * y[624:], 1),
    "padded": (lambda y: jnp.pad(y, ((1, 0), (0, 0))), 1),
}


@pytest.mark.parametrize("name", STORED)
def test_what_is_moved_elsewhere_is_stored(devices: Sequence[Any], name: str) -> None:
    """As `schedule/inlining.py` has it, and lowering: parts are taken in one step."""
    moves, count = STORED[name]

    def fn(x: jax.Array) -> Any:
        y = jnp.exp(x)
        return jnp.sum(2 * moves(y), 1), jnp.sum(y, 0)

    one = jax.sharding.SingleDeviceSharding(devices[0])
    x = jax.ShapeDtypeStruct((1024, 2048), jnp.float32, sharding=one)
    compiled = jax.jit(fn).lower(x).compile(compiler_options={"xla_msa_enable": "false"})
    assert hlo_stats(compiled).temp_bytes // (4 * x.size) == count


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


@pytest.mark.long
def test_the_fastest_plan_s_peak_is_what_the_compiler_holds(devices: Sequence[Any]) -> None:
    """With nothing on the chip, by XLA's own count, in which holes between arrays are none."""
    fn, args = mlp.example((256, 1024, 32, 1024, 256), 4096)
    program = te.trace(fn, *args, donate_argnums=(0,))
    mesh = [MeshShape(("x",), (8,))]
    front = te.optimize(program, "v5e:2x4", settings=Settings(work=1.0), mesh_shapes=mesh)
    lowered = te.compile(front[0], devices).lower()
    stats = hlo_stats(lowered.compile(compiler_options={"xla_msa_enable": "false"}))
    assert stats.reported_peak_bytes is not None
    assert 0.9 < stats.reported_peak_bytes / front[0].costs.peak_bytes < 1.1


SGD = {
    "one step": (lambda w, x: w - 0.1 * (x @ x), 1, 2),
    "with momentum": (lambda w, m, x: (w - (new := 0.9 * m + x @ x), new), 2, 3),
    "turned beside": (lambda w, a, x: (w - 0.1 * (x @ x), a.T), 2, 4),
}


@pytest.mark.parametrize("name", SGD)
def test_the_kernel_of_a_gradient_goes_on_with_its_update(
    devices: Sequence[Any], name: str
) -> None:
    """A state that waits for its gradient would have that stored, and another array held."""
    fn, states, arrays = SGD[name]
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    donated = tuple(range(states))
    program = te.trace(fn, *[square] * (states + 1), donate_argnums=donated)
    settings = Settings(work=0.1, front=False, workers=1)
    plan = te.optimize(program, "v5e:1", settings=settings).best()
    lowered = te.compile(plan, devices[:1]).lower()
    stats = hlo_stats(lowered.compile(compiler_options={"xla_msa_enable": "false"}))
    assert plan.costs.peak_bytes == pytest.approx(arrays * square.size * 4, rel=0.01)
    assert stats.reported_peak_bytes == pytest.approx(plan.costs.peak_bytes, rel=0.01)


SORTS = {
    "columns": (lambda x: jnp.sort(x, 0), (), 3),
    "columns in place": (lambda x: jnp.sort(x, 0), (0,), 3),
    "what a kernel made": (lambda x: jnp.sort(jnp.tanh(x) @ x, 1), (), 4),
    "not stable, in place": (lambda x: jax.lax.sort(x, is_stable=False), (0,), 2),
    "places": (lambda x: jnp.argsort(x, 1), (), 4),
}


@pytest.mark.parametrize("name", SORTS)
def test_a_stable_sort_of_one_array_takes_places_with_it(devices: Sequence[Any], name: str) -> None:
    fn, donated, arrays = SORTS[name]
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = te.trace(fn, square, donate_argnums=donated)
    settings = Settings(work=0.1, front=False, workers=1)
    plan = te.optimize(program, "v5e:1", settings=settings).best()
    lowered = te.compile(plan, devices[:1]).lower()
    stats = hlo_stats(lowered.compile(compiler_options={"xla_msa_enable": "false"}))
    assert plan.costs.peak_bytes == pytest.approx(arrays * square.size * 4, rel=0.01)
    assert stats.reported_peak_bytes == pytest.approx(plan.costs.peak_bytes, rel=0.01)


# What XLA's TPU compiler makes of products by groups of rows, and of rows that are gathered for
# them. It needs no TPU, only `pip install libtpu`.

pytest.importorskip("libtpu")

GROUPS, ROWS, WIDTH, HIDDEN = 8, 16384, 256, 1024
QUICK = te.Settings(work=0.3, forms=0, recompute=0, workers=1)
CONTRACTED = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])


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
