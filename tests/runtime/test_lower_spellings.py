"""Kernels and fills as XLA's compiler for GPUs takes them, run here on CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.pipeline import Settings, optimize
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.lower.host_calls import Caller
from tapestry_egg.runtime.lower.kernels import spellings
from tapestry_egg.runtime.lower.kernels.kernels import run_kernel
from tapestry_egg.runtime.lower.kernels.pooling import lie_side_by_side, unpooled, unpooled_over
from tapestry_egg.runtime.lower.lower import LocalBody, lower
from tapestry_egg.runtime.lower.order import stored
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import plan_by_hand
from tests.runtime.lowered import equations, numbers, same
from tests.schedule.test_lifetimes import h100s

ALONE = MeshShape(("x",), (1,))
ROWS, MATRICES = numbers(12, 5), numbers(4, 5, 3, seed=1)
#: An empty group, and rows that belong to none.
SIZES = np.array([3, 0, 7, 1], np.int32)


def _contracted(batch: bool) -> Callable[..., Any]:
    b = ([0], [0]) if batch else ([], [])
    k = ([1], [1]) if batch else ([0], [0])
    numbers = lax.RaggedDotDimensionNumbers((k, b), k[0], [])
    return lambda x, y, n: lax.ragged_dot_general(x, y, n, numbers)


def _grouped(x: Any, y: Any, n: Any) -> Any:
    """The groups in the middle of the second operand, the batch dim last."""
    numbers = lax.RaggedDotDimensionNumbers((([2], [0]), ([0], [3])), [1], [1])
    return lax.ragged_dot_general(x, y, n, numbers)


RAGGED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "free": (lax.ragged_dot, (ROWS, MATRICES, SIZES)),
    "free, batched": (_grouped, (numbers(2, 12, 5), numbers(5, 4, 3, 2, seed=2), SIZES)),
    "contracted": (_contracted(False), (ROWS, numbers(12, 3, seed=3), SIZES)),
    "contracted, batched": (
        _contracted(True),
        (numbers(2, 12, 5), numbers(2, 12, 3, seed=4), SIZES),
    ),
    "convolution": (
        lambda x, k: lax.conv_general_dilated(x, k, (1, 1), ((2, 1), (0, 0)), lhs_dilation=(2, 1)),
        (numbers(2, 4, 6, 5), numbers(3, 4, 3, 2)),
    ),
}


def _local(fn: Callable[..., Any], arguments: Any, platform: str) -> Callable[..., Any]:
    graph = trace(fn, *arguments).graph
    sides = [
        [Layout.replicated(graph.values[v].rank) for v in vs]
        for vs in (graph.inputs, graph.outputs)
    ]
    inputs, outputs = map(tuple, sides)
    return lower(plan_by_hand(graph, ALONE, {}, inputs, outputs), platform=platform)


@pytest.mark.parametrize("name", RAGGED)
def test_numbers_are_those_of_the_primitive(name: str) -> None:
    fn, arguments = RAGGED[name]
    same(jax.jit(_local(fn, arguments, "cuda"))(*arguments)[0], jax.jit(fn)(*arguments))


@pytest.mark.parametrize("name", [n for n in RAGGED if n != "convolution"])
def test_ragged_products_hold_one_group_at_a_time(name: str) -> None:
    fn, arguments = RAGGED[name]
    for platform, loops in (("cuda", 1), ("tpu", 0)):
        text = str(jax.make_jaxpr(_local(fn, arguments, platform))(*arguments))
        assert (text.count("scan["), text.count("ragged_dot_general")) == (loops, 1 - loops)


def test_a_convolution_of_a_dilated_operand_reads_a_reversed_window() -> None:
    fn, arguments = RAGGED["convolution"]
    jaxpr = jax.make_jaxpr(_local(fn, arguments, "cuda"))(*arguments)
    maker = {v: e.primitive.name for e in jaxpr.eqns for v in e.outvars}
    (convolution,) = [e for e in jaxpr.eqns if e.primitive.name == "conv_general_dilated"]
    assert maker[convolution.invars[1]] == "rev"  # and not through a barrier


def test_gradients_of_transposed_convolutions_hold_what_is_promised() -> None:
    """Their windows are larger than what they go over. Compiled for H100."""

    def loss(w: Any, x: Any) -> Any:
        y = lax.conv_transpose(x, w, (2, 2), "SAME")
        return jnp.sum(jnp.concatenate([y, y * y], -1) ** 2)

    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 64, 64, 64), (2, 2, 64, 64)))
    fast, *_ = optimize(trace(jax.grad(loss, (0, 1)), w, x), "h100:8")
    compiled = hlo_stats(compile(fast, h100s()).compile())
    assert compiled.peak_bytes == pytest.approx(fast.costs.peak_bytes, rel=0.03)


def test_cpus_multiply_bfloat16_into_float32_in_any_order_of_dims() -> None:
    """XLA for CPU says of this product that it is not implemented."""
    x, y = (jnp.asarray(numbers(384, *n), jnp.bfloat16) for n in ((16,), (4, 8)))

    def fn(x: Any, y: Any) -> Any:
        over = (((0,), (0,)), ((), ()))
        return lax.dot_general(x, y, over, preferred_element_type=jnp.float32)

    (got,) = jax.jit(_local(fn, (x, y), "cpu"))(x, y)
    same(got, np.einsum("ki,kjl->ijl", np.asarray(x, np.float32), np.asarray(y, np.float32)))


@pytest.mark.parametrize(("padding", "waits"), [((0, 1), True), ((1, 1), False)])
def test_operands_padded_on_one_side_are_padded_by_each_convolution(
    padding: tuple[int, int], waits: bool
) -> None:
    """cuDNN pads both sides alike, so XLA pads: once for a convolution and its gradient, and holds
    the padded operand in between, were it the same for both."""

    def fn(x: Any, k: Any) -> Any:
        def total(k: Any) -> Any:
            y = lax.conv_general_dilated(x, k, (2, 2), (padding, padding))
            return (y * y).sum()

        return jax.grad(total)(k)

    arguments = (numbers(2, 4, 8, 8), numbers(3, 4, 3, 3, seed=1))
    jaxpr = jax.make_jaxpr(_local(fn, arguments, "cuda"))(*arguments).jaxpr
    maker = {v: e.primitive.name for e in equations(jaxpr) for v in e.outvars}
    read = [e.invars[0] for e in equations(jaxpr) if e.primitive.name == "conv_general_dilated"]
    assert len(read) == 2
    assert [maker.get(v) == "optimization_barrier" for v in read] == [waits, waits]
    same(jax.jit(_local(fn, arguments, "cuda"))(*arguments)[0], jax.jit(fn)(*arguments), 1e-3)


def test_arrays_are_filled_when_the_results_before_them_are_there() -> None:
    """Filled at the start, both would be in memory at once."""
    rows = np.arange(256) % 7

    def fn(x: Any) -> Any:
        for _ in range(2):
            y = x @ x
            x = jnp.zeros_like(y).at[rows].add(y)
        return x

    text = str(jax.make_jaxpr(_local(fn, (numbers(256, 256),), "cuda"))(numbers(256, 256)))
    lines = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert len([line for line in lines if "f32[]" in line]) == 2


def test_zeros_are_seen_where_sums_are_scattered_into_them_and_added_to_something() -> None:
    """XLA then fills none of them, but scatters into what is added: the gradient of logits."""

    def loss(x: Any, w: Any, targets: Any) -> Any:
        logits = x @ w
        picked = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)

    fn, targets = jax.grad(loss, (0, 1)), np.arange(256, dtype=np.int32)
    arguments = numbers(256, 64), numbers(64, 1024), targets
    jaxpr = jax.make_jaxpr(_local(fn, arguments, "cuda"))(*arguments)
    (scatter,) = [e for e in jaxpr.eqns if e.primitive.name == "scatter-add"]
    (fill,) = [e for e in jaxpr.eqns if scatter.invars[0] in e.outvars]
    assert fill.primitive.name == "broadcast_in_dim"
    assert isinstance(fill.invars[0], Literal)  # behind a barrier it would be a variable
    local = _local(fn, arguments, "cuda")
    for given, wanted in zip(jax.jit(local)(*arguments), jax.jit(fn)(*arguments), strict=True):
        same(given, wanted, 1e-3)
    assert isinstance(local, LocalBody)
    zeros, sums = next(
        (op.inputs[0], op.outputs[0])
        for op in local.body.graph.operations
        if op.kernel == "scatter-add"
    )
    assert zeros not in stored(local.schedule, local.reads)
    cut = Layout(((0,), ()))  # where devices exchange the sums first, zeros are filled
    reads = [[replace(f, have=cut) if f.value == sums else f for f in x] for x in local.reads]
    assert zeros in stored(local.schedule, reads)


ZEROS: dict[str, tuple[Callable[..., Any], bool]] = {
    "added to something": (lambda sums, zeros, x: sums + x, False),
    "added, and read again": (lambda sums, zeros, x: (sums + x, sums * x), True),
    "added, and given": (lambda sums, zeros, x: (sums + x, sums), True),
    "added, beside the zeros": (lambda sums, zeros, x: (sums + x, zeros), True),
    "multiplied": (lambda sums, zeros, x: sums * x, True),
}


@pytest.mark.parametrize("name", ZEROS)
def test_zeros_are_filled_unless_their_sums_are_only_added(name: str) -> None:
    made, filled = ZEROS[name]

    def fn(x: Any) -> Any:
        zeros = jnp.zeros_like(x)
        return made(zeros.at[np.arange(256) % 7].add(x), zeros, x)

    local = _local(fn, (numbers(256, 64),), "cuda")
    assert isinstance(local, LocalBody)
    graph = local.body.graph
    (zeros,) = [op.inputs[0] for op in graph.operations if op.kernel == "scatter-add"]
    assert (zeros in stored(local.schedule, local.reads)) == filled


@pytest.mark.parametrize("waits", [True, False])
def test_zeros_are_filled_where_a_kernel_waits_for_their_sums(waits: bool) -> None:
    """XLA sees no addition behind a barrier; it would hold such zeros and all others as one."""

    def fn(x: Any, w: Any) -> Any:
        sums = jnp.zeros_like(x).at[np.arange(256) % 7].add(x)
        return sums + (x @ w if waits else x)

    local = _local(fn, (numbers(256, 64), numbers(64, 64, seed=1)), "cuda")
    assert isinstance(local, LocalBody)
    (zeros,) = [op.inputs[0] for op in local.body.graph.operations if op.kernel == "scatter-add"]
    filled = {v for k in local.fills for v in local.body.graph.operations[k].outputs}
    assert (zeros in filled) is waits
    assert zeros not in local.stored


def test_what_a_recomputed_region_reads_is_read_from_there_on() -> None:
    """What the first sum reads on the fly, the product at the end computes of what passed the last
    barrier: else XLA may store it for the sum, and holds it until the end."""

    def fn(x: Any, w: Any) -> Any:
        p = x @ w
        shifted = p + 1.0
        y, back = jax.vjp(jax.checkpoint(lambda p: jnp.sin(jnp.sin(p))), p)
        return shifted.sum(0), (back(y @ w)[0] @ w) * shifted

    arguments = numbers(256, 256) / 16, numbers(256, 256, seed=1) / 16
    local = _local(fn, arguments, "cuda")
    jaxpr = jax.make_jaxpr(local)(*arguments).jaxpr
    maker = {v: k for k, e in enumerate(jaxpr.eqns) for v in e.outvars}
    barriers = [k for k, e in enumerate(jaxpr.eqns) if e.primitive.name == "optimization_barrier"]
    shifted = maker[jaxpr.eqns[maker[jaxpr.outvars[1]]].invars[1]]
    assert jaxpr.eqns[shifted].primitive.name == "add"
    assert maker[jaxpr.eqns[shifted].invars[0]] == barriers[-1]
    for got, want in zip(local(*arguments), fn(*arguments), strict=True):
        same(got, want, 1e-3)


def _barriers(fn: Callable[..., Any], arguments: Any, platform: str) -> list[Any]:
    jaxpr = jax.make_jaxpr(_local(fn, arguments, platform))(*arguments)
    return [e for e in jaxpr.eqns if e.primitive.name == "optimization_barrier"]


def test_what_is_joined_for_several_readers_is_joined_once() -> None:
    """Else each product joins for itself, and what is joined is in memory besides the whole."""

    def fn(x: Any, y: Any) -> Any:
        whole = jnp.concatenate([x, y])
        return whole @ whole.T

    def once(x: Any, y: Any) -> Any:
        return jnp.concatenate([x, y]) @ x.T

    arguments = (numbers(8, 4), numbers(8, 4, seed=1))
    (barrier,) = _barriers(fn, arguments, "cuda")
    assert [v.aval.shape for v in barrier.outvars] == [(16, 4)]
    assert not _barriers(fn, arguments, "cpu") and not _barriers(once, arguments, "cuda")
    same(jax.jit(_local(fn, arguments, "cuda"))(*arguments)[0], jax.jit(fn)(*arguments))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8"])
@pytest.mark.parametrize("turned", [False, True])
def test_the_largest_element_is_found_in_one_pass(dtype: str, turned: bool) -> None:
    """In the order of `top_k`: -0 before 0, NaN of either sign at the ends, the first of equals."""
    ends = [0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1.0, -1.0]
    if dtype in ("int32", "uint8"):
        ends = [0, 3, 255, 7, 255, 1, 2, 0]
    x = np.random.default_rng(0).choice(np.asarray(ends), (64, 6)).astype(jnp.dtype(dtype))

    def fn(x: Any, k: int = 1) -> Any:
        return lax.top_k(x.T if turned else x, k)

    for made, wanted in zip(_local(fn, (x,), "cuda")(x), fn(x), strict=True):
        np.testing.assert_array_equal(made.astype(float), wanted.astype(float))
    found = {k: str(jax.make_jaxpr(_local(partial(fn, k=k), (x,), "cuda"))(x)) for k in (1, 2)}
    assert "top_k" not in found[1] and "top_k" in found[2]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_the_largest_element_of_a_cut_dim_is_that_of_the_whole(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device finds its own as GPUs do, and then the first of the greatest among these."""
    ends = [0.0, -0.0, -np.inf, -np.nan, 1.0, -1.0] if dtype != "int8" else [-128, -127]
    x = np.random.default_rng(0).choice(np.asarray(ends), 4096).astype(jnp.dtype(dtype))
    program = trace(lambda x: lax.top_k(x, 1), x)
    front = optimize(
        program,
        "cpu:8",
        pins={"[0]": ("x",)},
        mesh_shapes=[MeshShape(("x",), (8,))],
        settings=Settings(work=0.1, forms=0, recompute=0),
    )
    monkeypatch.setattr(spellings, "GPUS", ("cpu",))
    for plan in front.plans:
        run = compile(plan)
        assert "top_k" not in str(jax.make_jaxpr(run)(x))
        for made, wanted in zip(run(x), lax.top_k(x, 1), strict=True):
            assert np.asarray(made).tobytes() == np.asarray(wanted).tobytes()


def test_gradients_of_overlapping_windows_are_not_scattered() -> None:
    """XLA would fill an array for it, the same as a rectifier compares with, and hold that long."""

    def fn(x: Any) -> Any:
        def total(x: Any) -> Any:
            y = lax.reduce_window(x, -jnp.inf, lax.max, (3, 3), (2, 2), "SAME")
            return (y * y).sum()

        return jax.grad(total)(x)

    arguments = (numbers(9, 8),)
    for platform, scattered in (("cuda", False), ("cpu", True)):
        text = str(jax.make_jaxpr(_local(fn, arguments, platform))(*arguments))
        assert ("select_and_scatter_add" in text) == scattered
    same(jax.jit(_local(fn, arguments, "cuda"))(*arguments)[0], jax.jit(fn)(*arguments))


@pytest.mark.parametrize(
    ("platform", "states", "waits"),
    [("tpu", {0}, True), ("tpu", set(), False), ("cpu", {0}, False)],
)
def test_a_state_is_there_for_its_update_when_what_is_before_that_is_made(
    platform: str, states: set[int], waits: bool
) -> None:
    """XLA's TPU compiler would turn states at the program's start for updates that are computed of
    what lies turned, and hold both, weights and moments, until then."""

    def fn(w: Any, x: Any) -> Any:
        return w - (jnp.tanh(x @ w).T @ x).T

    arguments = (numbers(64, 64), numbers(32, 64, seed=1))
    graph = trace(fn, *arguments).graph
    entering, leaving = [
        tuple(Layout.replicated(graph.values[v].rank) for v in vs)
        for vs in (graph.inputs, graph.outputs)
    ]
    plan = plan_by_hand(graph, ALONE, {}, entering, leaving)
    local = LocalBody(plan.body, ALONE, Caller(), platform, states=frozenset(states))
    jaxpr = jax.make_jaxpr(local)(*arguments).jaxpr
    maker = {v: e.primitive.name for e in equations(jaxpr) for v in e.outvars}
    (update,) = [e for e in equations(jaxpr) if e.primitive.name == "sub"]
    assert (maker.get(update.invars[0]) == "optimization_barrier") is waits
    first = next(e for e in equations(jaxpr) if e.primitive.name == "dot_general")
    assert not {maker.get(v) for v in first.invars} & {"optimization_barrier"}
    same(jax.jit(local)(*arguments)[0], jax.jit(fn)(*arguments))


@pytest.mark.slow
def test_transforms_on_a_cpu_lie_row_major() -> None:
    """What is gathered into columns would lie by columns, which XLA for CPU does not transform."""
    x = numbers(64, 64)
    transformed = _local(lambda x: jnp.fft.fft2(x).real, (x,), "cpu")

    def columns(x: Any) -> Any:
        return lax.all_gather(transformed(x)[0], "x", axis=1, tiled=True)

    mesh, whole = jax.make_mesh((8,), ("x",)), jax.sharding.PartitionSpec()
    mapped = jax.shard_map(columns, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    same(jax.jit(mapped)(x), np.tile(np.fft.fft2(x).real.astype(np.float32), 8), 1e-3)


@pytest.mark.parametrize("cut", [(), (0,)])
def test_parts_of_a_dim_that_is_not_cut_are_taken_in_one_step(cut: tuple[int, ...]) -> None:
    """Where another dim is cut. XLA for TPUs would store what a second slice reads."""
    graph = trace(lambda x: lax.slice(x, (0, 1), (8, 14), (1, 3)), numbers(8, 16)).graph
    (op,) = graph.operations
    layout = Layout((cut, ()))
    strategy = Strategy((cut, ()), (layout,), (layout,))
    mesh = MeshShape(("x",), (4,))
    block = numbers(8, 16)[: 8 // mesh.parts(cut)]

    def local(x: jax.Array) -> list[jax.Array]:
        types = tuple(graph.values[v] for v in (*op.inputs, *op.outputs))
        return run_kernel(op, types[:1], types[1:], strategy, (x,), mesh, "here")

    (found,) = local(jnp.asarray(block))
    assert np.array_equal(found, block[:, 1:14:3])
    assert [e.primitive.name for e in jax.make_jaxpr(local)(block).eqns] == ["slice"]


# Gradients of pooling, as they are said to compilers for GPUs.


#: Compiled as a whole, as it is in plans.
gradient = jax.jit(unpooled_over, static_argnums=(2, 3, 4, 5))

SELECTS = {"ge": lax.ge_p, "le": lax.le_p}


def example(dtype: str, shape: tuple[int, ...], window: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """A source and an operand with many ties, and with what compares oddly."""
    rng = np.random.default_rng(0)
    x = rng.integers(-2, 3, size=shape).astype(np.float32)
    if dtype != "int32":
        odd = rng.permutation(x.size)[: x.size // 4].reshape(3, -1)
        x.flat[odd[0]], x.flat[odd[1]], x.flat[odd[2]] = np.nan, np.inf, -np.inf
    tiles = [n // w for n, w in zip(shape, window, strict=True)]
    source = rng.integers(1, 9, size=tiles)
    return jnp.asarray(source, dtype), jnp.asarray(x, dtype)


@pytest.mark.parametrize("select", SELECTS)
@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(d, marks=pytest.mark.slow) for d in ("bfloat16", "int32"))]
)
def test_every_window_gives_its_gradient_to_what_it_chose(dtype: str, select: str) -> None:
    """Rows and columns that no window covers, ties, infinities and what is no number among them."""
    window = (1, 2, 3, 1)
    source, operand = example(dtype, (3, 7, 11, 4), window)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        operand,
        select_prim=SELECTS[select],
        window_dimensions=window,
        window_strides=window,
        padding=((0, 0),) * 4,
    )
    found = jax.jit(partial(unpooled, select=select, window=window))(source, operand)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(
    ("window", "strides", "padding", "they_do"),
    [
        ((1, 2), (1, 2), ((0, 0), (0, 0)), True),
        ((1, 3), (1, 2), ((0, 0), (0, 0)), False),  # overlap
        ((1, 2), (1, 3), ((0, 0), (0, 0)), False),  # gaps
        ((1, 2), (1, 2), ((0, 0), (1, 1)), False),  # reach outside
    ],
)
def test_windows_lie_side_by_side(
    window: tuple[int, ...], strides: tuple[int, ...], padding: tuple, they_do: bool
) -> None:
    assert lie_side_by_side(window, strides, padding) == they_do


@pytest.mark.parametrize(
    ("window", "strides", "padding"),
    [
        ((1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (0, 1), (0, 0))),  # overlap, reach outside
        ((1, 2, 3, 1), (1, 3, 1, 1), ((0, 0), (0, 0), (2, 2), (0, 0))),  # gaps
        ((2, 2, 1, 1), (1, 1, 2, 1), ((0, 1), (0, 0), (0, 0), (0, 0))),
    ],
)
@pytest.mark.parametrize("select", SELECTS)
def test_windows_that_overlap_add_up_what_they_give_an_element(
    select: str, window: tuple[int, ...], strides: tuple[int, ...], padding: tuple
) -> None:
    x = example("float32", (3, 7, 11, 4), (1, 1, 1, 1))[1]
    x = jnp.where(jnp.isnan(x), 0.0, x)  # XLA for CPUs loses what a window with one gives at edges
    low, high = zip(*padding, strict=True)
    sizes = [
        (n + a + b - w) // s + 1
        for n, a, b, w, s in zip(x.shape, low, high, window, strides, strict=True)
    ]
    source = jnp.asarray(np.random.default_rng(1).integers(1, 9, size=sizes), jnp.float32)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        x,
        select_prim=SELECTS[select],
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    found = gradient(source, x, select, window, strides, padding)
    np.testing.assert_array_equal(found, wanted)


def test_of_equals_the_first_in_a_window_is_chosen() -> None:
    """A compiler may reduce a window's columns before its rows, and then meets others first."""
    x = jnp.asarray(
        [[1, 0, 0, 0, 0, 1, 0], [0, 0, 1, 1, 1, 1, 0], [1, 0, 1, 0, 0, 1, 0]], jnp.float32
    )
    window, strides, padding = (2, 2), (2, 1), ((0, 1), (0, 2))
    source = jnp.arange(1.0, 17.0).reshape(2, 8)
    wanted = lax.select_and_scatter_add_p.bind(
        source,
        x,
        select_prim=lax.le_p,
        window_dimensions=window,
        window_strides=strides,
        padding=padding,
    )
    assert wanted[0, 1] == 1.0 + 2.0, "the first of the first two windows"
    found = gradient(source, x, "le", window, strides, padding)
    np.testing.assert_array_equal(found, wanted)
