"""Every kernel under every cut of its index space, on eight virtual devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from tapestry_egg.graph.layout import Layout
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.lower.kernels.kernels import _counters
from tapestry_egg.tracing.codec import primitive
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand, signature_of
from tests.runtime.lowered import F32, MESH, X, Y, each_strategy, integers, numbers, same

pytestmark = pytest.mark.slow  # to compile

SINGLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "add a row": (lambda x, y: lax.add(x, y), (numbers(8, 16), numbers(8, 16))),
    "iota": (lambda: lax.broadcasted_iota(np.int32, (8, 16), 1), ()),
    "iota of floats": (lambda: lax.broadcasted_iota(F32, (8, 16), 0), ()),
    "broadcast": (lambda x: lax.broadcast_in_dim(x, (8, 16, 8), (1,)), (numbers(16),)),
    "reshape": (lambda x: lax.reshape(x, (8, 8, 16)), (numbers(64, 16),)),
    "reshape to fewer": (lambda x: lax.reshape(x, (16, 64)), (numbers(16, 8, 8),)),
    "transpose": (lambda x: lax.transpose(x, (1, 2, 0)), (numbers(8, 16, 8),)),
    "reverse": (lambda x: lax.rev(x, (0,)), (numbers(8, 16),)),
    "slice": (lambda x: lax.slice(x, (3, 0), (11, 16), (1, 2)), (numbers(12, 16),)),
    "slice of odd columns": (lambda x: lax.slice(x, (0, 1), (8, 14), (1, 3)), (numbers(8, 16),)),
    "pad": (lambda x: lax.pad(x, F32(2), ((1, 2, 1), (0, 0, 0))), (numbers(4, 16),)),
    "join": (lambda x, y: lax.concatenate([x, y], 1), (numbers(8, 8), numbers(8, 4))),
    "batched product": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        (numbers(8, 8, 16), numbers(8, 16, 8)),
    ),
    "sum": (lambda x: x.sum((0, 2)), (numbers(8, 16, 8),)),
    "maximum": (lambda x: lax.reduce_max(x, (1,)), (numbers(8, 16),)),
    "minimum of integers": (lambda x: lax.reduce_min(x, (0,)), (integers(-50, 50, 8, 16),)),
    "product": (lambda x: lax.reduce_prod(x, (1,)), (numbers(8, 8),)),
    "all": (lambda x: lax.reduce_and(x, (1,)), (numbers(8, 8) > -1,)),
    "position of the maximum": (lambda x: lax.argmax(x, 1, np.int32), (numbers(8, 16),)),
    "running sum": (lambda x: lax.cumsum(x, 0), (numbers(8, 16),)),
    "sort": (lambda x: lax.sort(x, dimension=1), (numbers(8, 16),)),
    "best few": (lambda x: lax.top_k(x, 3), (numbers(8, 16),)),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), ((0, 0), (1, 1))),
        (numbers(8, 4, 10, 6), numbers(8, 4, 3, 3)),
    ),
    "convolution of groups": (
        lambda x, k: lax.conv_general_dilated(x, k, (2,), "VALID", feature_group_count=8),
        (numbers(8, 8, 17), numbers(16, 1, 3)),
    ),
    "convolution of groups of several channels": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=4),
        (numbers(1, 16, 9), numbers(16, 4, 3)),
    ),
    "convolution of batch groups": (
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", batch_group_count=2),
        (numbers(16, 4, 9), numbers(8, 4, 3)),
    ),
    "window sum": (
        lambda x: lax.reduce_window_sum_p.bind(
            x,
            window_dimensions=(1, 3),
            window_strides=(1, 2),
            padding=((0, 0), (0, 0)),
            base_dilation=(1, 1),
            window_dilation=(1, 1),
        ),
        (numbers(8, 17),),
    ),
    "slice at a place": (
        lambda x, i: lax.dynamic_slice_p.bind(x, i, np.int32(0), slice_sizes=(3, 16)),
        (numbers(8, 16), np.int32(7)),
    ),
    "update at a place": (
        lambda x, y, i: lax.dynamic_update_slice_p.bind(x, y, i, np.int32(0)),
        (numbers(8, 16), numbers(3, 16), np.int32(2)),
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_every_strategy_of_a_kernel(name: str) -> None:
    fn, args = SINGLE[name]
    each_strategy(fn, *args)


ROWS = lax.GatherDimensionNumbers((1,), (0,), (0,))
POINTS = lax.GatherDimensionNumbers((), (0, 1), (1, 0))
BATCHED = lax.GatherDimensionNumbers((1,), (1,), (1,), (0,), (0,))
MODES = lax.GatherScatterMode
WILD = integers(-3, 19, 8, 1)  # some indices lie outside the 16 rows


@pytest.mark.parametrize("mode", [MODES.CLIP, MODES.FILL_OR_DROP, MODES.PROMISE_IN_BOUNDS])
def test_gathers_from_rows_that_other_devices_hold(mode: Any) -> None:
    places = WILD.clip(0, 15) if mode == MODES.PROMISE_IN_BOUNDS else WILD
    each_strategy(
        lambda x, i: lax.gather(x, i, ROWS, (1, 8), mode=mode, fill_value=3.0),
        numbers(16, 8),
        places,
        least=10,
    )


@pytest.mark.parametrize(
    "dtype", ["int8", *(pytest.param(d, marks=pytest.mark.slow) for d in ("uint32", "int32"))]
)
def test_gathers_of_points_fill_once(dtype: str) -> None:
    places = integers(-20, 20, 8, 2).astype(dtype)  # of uint32, the negative ones are far outside
    each_strategy(
        lambda x, i: lax.gather(x, i, POINTS, (1, 1), mode="fill", fill_value=-1.5),
        numbers(16, 8),
        places,
        least=8,
    )


def test_a_gather_of_one_row_per_device() -> None:
    each_strategy(
        lambda x, i: lax.gather(x, i, ROWS, (1, 8), mode="clip"), numbers(4, 8), WILD, least=10
    )


@pytest.mark.slow
def test_gathers_of_flags_and_with_batch_dims() -> None:
    each_strategy(
        lambda x, i: lax.gather(x, i, ROWS, (1, 8), mode="fill", fill_value=True),
        numbers(16, 8) > 0,
        WILD,
    )
    each_strategy(
        lambda x, i: lax.gather(x, i, BATCHED, (1, 1, 8), mode="clip"),
        numbers(8, 16, 8),
        integers(-2, 20, 8, 1),
    )


SCATTER = lax.ScatterDimensionNumbers((1,), (0,), (0,))
SCATTERS = {
    "add": lax.scatter_add,
    "sub": lax.scatter_sub,
    "mul": lax.scatter_mul,
    "min": lax.scatter_min,
    "max": lax.scatter_max,
}


@pytest.mark.parametrize(
    ("kind", "mode"),
    [("add", "clip"), ("min", "drop")]
    + [pytest.param(kind, mode, marks=pytest.mark.slow)
       for kind, mode in zip(("add", "sub", "mul", "min", "max"),
                             ("drop", "drop", "drop", "clip", "drop"), strict=True)],
)  # fmt: skip
def test_scatters_into_rows_that_other_devices_hold(kind: str, mode: str) -> None:
    each_strategy(
        lambda x, i, u: SCATTERS[kind](x, i, u, SCATTER, mode=mode),
        numbers(16, 8),
        WILD,
        numbers(8, 8, seed=1),
        least=8,
    )


@pytest.mark.parametrize("mode", ["clip", "drop"])
def test_scatters_apply_a_computation_to_what_is_there(mode: str) -> None:
    def shifted(x: Any, i: Any) -> Any:
        return lax.scatter_apply(x, i, lambda v: 3 * v + 1, SCATTER, update_shape=(8, 8), mode=mode)

    equation = jax.make_jaxpr(shifted)(numbers(16, 8), WILD).eqns[-1]
    each_strategy(
        lambda *operands: equation.primitive.bind(*operands, **equation.params),
        numbers(16, 8),
        WILD,
        np.zeros((8, 8), np.float32),
        least=4,
    )


@pytest.mark.parametrize("at", [3, 4, 15, 16, -1])
def test_a_single_update_leaves_the_rows_of_other_devices(at: int) -> None:
    element = lax.ScatterDimensionNumbers((), (0, 1), (0, 1))
    each_strategy(
        lambda x, i, u: lax.scatter(x, i, u, element, mode="drop"),
        numbers(16, 8),
        np.array([at, 5], np.int32),
        F32(7),
    )
    each_strategy(
        lambda x, i, u: lax.scatter_add(x, i, u, SCATTER, mode="clip" if at > 9 else "drop"),
        numbers(16, 8),
        np.array([[at]], np.int32),
        numbers(1, 8, seed=1),
    )


@pytest.mark.slow
def test_overwriting_scatters_and_windows() -> None:
    each_strategy(
        lambda x, i, u: lax.scatter(x, i, u, SCATTER, mode="drop", unique_indices=True),
        numbers(16, 8),
        np.random.default_rng(0).permutation(20)[:8, None].astype(np.int32),
        numbers(8, 8, seed=1),
    )
    window = lax.ScatterDimensionNumbers((1, 2), (), (0, 1))
    each_strategy(
        lambda x, i, u: lax.scatter_add(x, i, u, window, mode="clip"),
        numbers(16, 8),
        integers(-2, 17, 8, 2),
        numbers(8, 1, 8, seed=1),
    )


# Kernels whose results depend on where a shard lies: random bits, slices and updates.


Array = Any


@pytest.mark.parametrize("start", [-3, 0, 3, 7, 99])
def test_a_slice_at_a_place_in_parts(start: int) -> None:
    each_strategy(
        lambda x, i: lax.dynamic_slice_p.bind(x, i, np.int32(2), slice_sizes=(8, 4)),
        numbers(12, 8),
        np.int32(start),
        least=7,
    )


@pytest.mark.parametrize("start", [-3, 3, 99])
def test_blocks_of_a_slice_at_a_place_are_of_the_clamped_one(start: int) -> None:
    """XLA makes one slice of a slice's slice, and clamps its start no more than that needs."""

    def f(x: Array, i: Array) -> Array:
        return lax.tanh(lax.dynamic_slice_p.bind(x, np.int32(2), i, slice_sizes=(12, 4)))

    x, i = numbers(12, 8), np.int32(start)
    program = trace(f, x, i)
    at = next(k for k, op in enumerate(program.graph.operations) if op.kernel == "tanh")
    whole, scalar, blocks = Layout(((), ())), Layout(()), Layout(((), (Y,)))
    cuts = {at: {"i1": (Y,)}}
    plan = plan_by_hand(program.graph, MESH, cuts, (whole, scalar), (blocks,))
    same(compile(replace(plan, program=program))(x, i), f(x, i))


@pytest.mark.parametrize("start", [-3, 3, 99])
def test_blocks_of_a_single_window_are_of_the_clamped_one(start: int) -> None:
    """As those of a slice, which XLA makes of a gather at one place."""
    window = lax.GatherDimensionNumbers((0, 1), (), (1,))

    def f(x: Array, i: Array) -> Array:
        return lax.tanh(lax.gather(x, i, window, (12, 4), mode="clip"))

    x, i = numbers(12, 8), np.array([start], np.int32)
    program = trace(f, x, i)
    at = next(k for k, op in enumerate(program.graph.operations) if op.kernel == "tanh")
    whole, place, blocks = Layout(((), ())), Layout(((),)), Layout(((), (Y,)))
    plan = plan_by_hand(program.graph, MESH, {at: {"i1": (Y,)}}, (whole, place), (blocks,))
    same(compile(replace(plan, program=program))(x, i), f(x, i))


@pytest.mark.parametrize("start", [-3, 0, 3, 6, 14, 99])
def test_an_update_at_a_place_that_several_shards_hold(start: int) -> None:
    """Updates of four rows in shards of eight, four and two: all of one, part of two, or more."""
    each_strategy(
        lambda x, u, i: lax.dynamic_update_slice_p.bind(x, u, i, np.int32(0)),
        numbers(16, 8),
        numbers(4, 8, seed=1),
        np.int32(start),
        least=7,
    )


def test_a_cache_cut_along_time_takes_one_new_row() -> None:
    cache, new = numbers(2, 16, 4), numbers(2, 1, 4, seed=1)

    def write(cache: Array, new: Array, t: Array) -> Array:
        return lax.dynamic_update_slice(cache, new, (0, t, 0))

    rows, whole, scalar = Layout(((), (X, Y), ())), Layout(((), (), ())), Layout(())
    program = trace(write, cache, new, np.int32(0))
    at = next(k for k, op in enumerate(program.graph.operations)
              if op.kernel == "dynamic_update_slice")  # fmt: skip
    plan = plan_by_hand(program.graph, MESH, {at: {"i1": (X, Y)}}, (rows, whole, scalar), (rows,))
    run = compile(replace(plan, program=program))
    for t in (0, 1, 7, 15, 40):
        same(run(cache, new, np.int32(t)), write(cache, new, np.int32(t)))


# Random bits


def bits(width: int, shape: tuple[int, ...]) -> Any:
    return lambda key: primitive("random_bits").bind(key, bit_width=width, shape=shape)


@pytest.mark.slow
@pytest.mark.parametrize("width", [8, 32])
def test_random_bits_are_the_same_under_any_cut(width: int) -> None:
    each_strategy(bits(width, (8, 4, 16)), jax.random.key(7), least=13, most=3)


@pytest.mark.slow
def test_bits_of_several_keys() -> None:
    each_strategy(bits(32, (8, 16)), jax.random.split(jax.random.key(0), 3), least=7, most=2)


def test_other_generators_run_whole() -> None:
    key = jax.random.key(0, impl="rbg")
    graph = trace(bits(32, (8, 16)), key).graph
    assert signature_of(graph, graph.operations[0]).opaque


@pytest.mark.slow
def test_dropout_in_shards_drops_what_it_drops_whole() -> None:
    def dropout(key: Array, x: Array) -> Array:
        return x * jax.random.bernoulli(key, 0.5, x.shape)

    args = (jax.random.key(1), numbers(16, 8))
    program = trace(dropout, *args)
    cuts = {}
    for k, op in enumerate(program.graph.operations):
        signature = signature_of(program.graph, op)
        if op.kernel == "random_bits" or program.graph.values[op.outputs[0]].shape == (16, 8):
            rows = next(d.name for d in signature.index if d.size == 16)
            cuts[k] = {rows: (X, Y)}
    assert len(cuts) > 5
    layouts = (Layout(()), Layout(((X, Y), ())))
    plan = plan_by_hand(program.graph, MESH, cuts, layouts, (Layout(((X, Y), ())),))
    same(compile(replace(plan, program=program))(*args), dropout(*args))


def test_counters_of_more_than_32_bits() -> None:
    row = 2**9 * (2**7 + 1)
    carries = -pow(129, -1, 2**23) % 2**23  # row · carries = 2³² - 2⁹ (mod 2³²)
    shape, offsets, local = (2**23 + 2, 2**9, 2**7 + 1), (carries, 500, 60), (2, 3, 4)
    call: Any = SimpleNamespace(params={"shape": local}, output_offset=lambda k: offsets[k])
    high, low = _counters(call, shape, 0)
    at = np.indices(local).astype(object)
    wanted = np.zeros(local, object)
    for k, n in enumerate(shape):
        wanted = wanted * n + at[k] + offsets[k]
    got = np.asarray(high).astype(object) * 2**32 + np.asarray(low).astype(object)
    assert (got == wanted).all() and wanted.max() > 2**33
    assert (row * carries) % 2**32 + offsets[1] * shape[2] > 2**32
