"""What compilers are told to lay in some order: what is gathered for convolutions on GPUs, products
that are added to tables, such tables, and stacks of loops on TPUs."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import tapestry_egg as te
from tapestry_egg.errors import TargetError
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.machine.tiles import Tiles
from tapestry_egg.plans.lying import laid_in_order
from tapestry_egg.runtime import hlo_stats
from tapestry_egg.runtime.lower.laid import in_order, laid_tight, turned_back
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import MESH, X, Y, cut, numbers

CUT = PartitionSpec(None, None, None, "x")


def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
    numbers = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)


def rectified(x: jax.Array, w: jax.Array) -> jax.Array:
    return convolve(lax.max(x, lax.full_like(x, 0)), w)


def doubled(x: jax.Array, w: jax.Array) -> jax.Array:
    """With the convolution of something else."""
    return lax.add(lax.add(x, x), convolve(lax.full_like(x, 1), w))


def put_in_order(fn: Any, platform: str) -> list[tuple[int, ...]]:
    """The shapes of what is, in a plan that gathers the first argument's channels."""
    x, w = numbers(2, 8, 8, 16), numbers(3, 3, 16, 16)
    graph, whole = trace(fn, x, w).graph, cut((), (), (), ())
    plan = plan_by_hand(graph, MESH, {}, (cut((), (), (), (X, Y)), whole), (whole,))
    mapped = jax.shard_map(
        lower(plan, platform=platform),
        mesh=Mesh(np.array(jax.devices("cpu")[:8]).reshape(2, 4), ("x", "y")),
        in_specs=(PartitionSpec(None, None, None, ("x", "y")), PartitionSpec()),
        out_specs=(PartitionSpec(),),
        check_vma=False,
    )
    (local,) = jax.make_jaxpr(mapped)(x, w).jaxpr.eqns
    found = local.params["jaxpr"].eqns
    assert any(e.primitive.name == "all_gather" for e in found)
    return [e.outvars[0].aval.shape for e in found if e.primitive.name == "laid_in_order"]


def test_what_a_convolution_reads_something_of_is_put_in_order_once() -> None:
    assert put_in_order(rectified, "cuda") == [(2, 8, 8, 16)]
    assert put_in_order(rectified, "tpu") == put_in_order(doubled, "cuda") == []


def test_a_compiler_for_gpus_holds_one_array_less_then() -> None:
    """XLA lays all that is computed of what is gathered along channels with these outermost."""
    from benchmarks.devices import devices_of

    try:
        mesh = Mesh(np.array(devices_of("h100:8")), ("x",))
    except TargetError as e:
        pytest.skip(str(e))

    def temporaries(order: bool) -> int:
        def local(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
            def loss(w: jax.Array, v: jax.Array, y: jax.Array) -> jax.Array:
                c = convolve(jax.nn.relu(y), w)
                d = c - c.mean((0, 1, 2))
                return jnp.square(y + convolve(jax.nn.relu(d), v)).mean()

            y = lax.all_gather(x, "x", axis=3, tiled=True)
            gw, gv, gy = jax.grad(loss, (0, 1, 2))(w, v, in_order(y) if order else y)
            return gw, gv, lax.psum_scatter(gy, "x", scatter_dimension=3, tiled=True)

        whole = PartitionSpec()
        mapped = jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(CUT, whole, whole),
            out_specs=(whole, whole, CUT),
            check_vma=False,
        )
        shapes = [((128, 32, 32, 32), CUT), *[((3, 3, 32, 32), whole)] * 2]
        arguments = [
            jax.ShapeDtypeStruct(s, jnp.float32, sharding=NamedSharding(mesh, p)) for s, p in shapes
        ]
        return hlo_stats(jax.jit(mapped).lower(*arguments).compile()).temp_bytes

    assert temporaries(False) - temporaries(True) >= 4 * 128 * 32 * 32 * 32


def added(g: jax.Array, w: jax.Array, at: jax.Array, table: jax.Array) -> jax.Array:
    """Rows of a product, added to a table."""
    return table.at[at].add(g @ w)


def plainly_added(g: jax.Array, w: jax.Array, at: jax.Array, table: jax.Array) -> jax.Array:
    return table.at[at].add(2 * (g @ w))


@pytest.mark.parametrize(
    ("fn", "platform", "order"),
    [(added, "tpu", 1), (added, "cuda", 0), (plainly_added, "tpu", 0)],
)
def test_products_that_are_rows_of_a_table_are_made_in_order(
    fn: Any, platform: str, order: int
) -> None:
    at = np.arange(16, dtype=np.int32) % 4
    arguments = numbers(16, 8), numbers(8, 24), at, numbers(4, 24)
    graph = trace(fn, *arguments).graph
    whole = tuple(cut(*[()] * a.ndim) for a in arguments)
    alone = MeshShape(("x",), (1,))
    run = lower(plan_by_hand(graph, alone, {}, whole, (cut((), ()),)), platform=platform)
    found = jax.make_jaxpr(run)(*arguments).jaxpr.eqns
    assert [e.primitive.name for e in found].count("laid_in_order") == order
    np.testing.assert_allclose(run(*arguments)[0], fn(*map(jnp.asarray, arguments)), rtol=1e-2)


def tpu() -> NamedSharding:
    """All of an array on one device."""
    pytest.importorskip("libtpu")
    from jax.experimental import topologies

    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # there is no TPU to be asked
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # nor one to be locked
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())


def held(fn: Any, *types: tuple[tuple[int, ...], str]) -> int:
    """Bytes of temporaries with every array in a TPU's main memory."""
    whole = tpu()
    arguments = [jax.ShapeDtypeStruct(s, d, sharding=whole) for s, d in types]
    lowered = jax.jit(fn).lower(*arguments)
    return hlo_stats(lowered.compile(compiler_options={"xla_msa_enable": "false"})).temp_bytes


def test_a_compiler_for_tpus_would_make_them_turned_and_turn_them_back() -> None:
    def temporaries(order: bool) -> int:
        def step(g: jax.Array, w: jax.Array, at: jax.Array) -> tuple[jax.Array, ...]:
            rows = laid_in_order(g @ w.T) if order else g @ w.T
            rows, at = lax.optimization_barrier((rows, at))
            return jnp.zeros((32, 393)).at[at].add(rows), jnp.cumsum(rows, axis=1)

        return held(step, ((1024, 4), "float32"), ((393, 4), "float32"), ((1024,), "int32"))

    assert temporaries(False) - temporaries(True) > 0.9 * 4 * 1024 * 393


TILES = Tiles(lanes=128, rows=8, word=4)


def add(w: jax.Array, c: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
    return jnp.tanh(c @ w) + (c[0, 0] * y) @ y.T, None


def stacked(x: jax.Array, w: jax.Array) -> jax.Array:
    """Every sixteenth row of few columns in each step."""
    every = x.reshape(256, 16, -1).transpose(1, 0, 2)
    return lax.scan(partial(add, w), jnp.zeros((256, 256)), every)[0]


@pytest.mark.parametrize(("columns", "orders"), [(16, [(0, 2, 1)]), (128, [])])
def test_stacks_of_loops_lie_as_tiles_pad_them_least(
    columns: int, orders: list[tuple[int, ...]]
) -> None:
    arguments = numbers(4096, columns), numbers(256, 256) / 16
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    plan = te.optimize(te.trace(stacked, *arguments), "v5e:1", settings=settings).best("seconds")

    def told(platform: str) -> list[tuple[int, ...]]:
        found = jax.make_jaxpr(lower(plan, platform=platform))(*arguments).jaxpr.eqns
        laid = [e for e in found if e.primitive.name == "laid_in_order"]
        return [e.params["order"] for e in laid]

    assert told("tpu") == orders
    assert told("cpu") == []


def test_a_compiler_for_tpus_would_hold_more_of_such_a_stack() -> None:
    def told(x: jax.Array, w: jax.Array) -> jax.Array:
        every = laid_tight(x.reshape(256, 16, -1).transpose(1, 0, 2), TILES)
        return lax.scan(partial(add, w), jnp.zeros((256, 256)), every)[0]

    types = ((4096, 16), "float32"), ((256, 256), "float32")
    assert held(stacked, *types) - held(told, *types) > 4 * 4096 * 16


@pytest.mark.parametrize(("columns", "order"), [(8, [(1, 0)]), (128, [])])
def test_tables_of_few_columns_are_turned_back_when_rows_are_added(
    columns: int, order: list[tuple[int, ...]]
) -> None:
    at = np.arange(16, dtype=np.int32) % 4
    arguments = numbers(4096, columns), at, numbers(16, columns)
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    program = te.trace(lambda t, i, x: lax.sin(t.at[i].add(x)), *arguments)
    plan = te.optimize(program, "v5e:1", settings=settings).best("seconds")
    found = jax.make_jaxpr(lower(plan, platform="tpu"))(*arguments).jaxpr.eqns
    laid = [e for e in found if e.primitive.name == "laid_in_order"]
    assert [e.params["order"] for e in laid] == order


def test_a_compiler_for_tpus_would_update_states_with_such_a_table_padded() -> None:
    """Sixteen times, and the state and what is computed of both as well."""

    def temporaries(back: bool) -> int:
        def step(t: jax.Array, s: jax.Array, at: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
            g = jnp.zeros_like(t).at[at].add(x)
            g = turned_back(g, TILES) if back else g
            g, s, t = lax.optimization_barrier((g, s, t))  # states wait for what updates them
            s = s + g * g
            return t - g * lax.rsqrt(s + 1e-6), s

        rows = (65536, 8), "float32"
        return held(step, rows, rows, ((1024,), "int32"), ((1024, 8), "float32"))

    padded = 4 * 65536 * 128
    assert temporaries(False) > 1.9 * padded
    assert temporaries(True) < 1.2 * padded


def test_what_is_exported_says_nothing_of_it() -> None:
    """`jax.export` writes nothing that a later compiler may not know."""
    double = jax.jit(lambda x: laid_in_order(2 * x, (1, 0)))
    x = numbers(8, 4)
    assert "LayoutConstraint" in double.lower(x).as_text()
    again = jax.export.deserialize(jax.export.export(double)(x).serialize())
    np.testing.assert_array_equal(again.call(x), 2 * x)
