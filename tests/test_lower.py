"""Plans on eight virtual devices against the unsharded function."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tapestry_egg.errors import PlanError
from tapestry_egg.layout import Layout, MeshShape
from tapestry_egg.plan import Kept, Plan, Step, Strategy
from tapestry_egg.runtime import compare, compile, planned_collectives
from tapestry_egg.runtime.hlo import hlo_stats
from tapestry_egg.trace import trace
from tests.plans import (
    Illegal,
    all_cuts,
    finish,
    make_plan,
    plan_by_hand,
    random_plan,
    signature_of,
)

MESH = MeshShape(("x", "y"), (2, 4))
X, Y = 0, 1
F32 = np.float32


def numbers(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(F32)


def integers(low: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(1).integers(low, high, shape).astype(np.int32)


def cut(*dims: tuple[int, ...], partial: tuple[int, ...] = (), monoid: str | None = None) -> Layout:
    return Layout(dims, partial, monoid)


def same(got: Any, wanted: Any, tolerance: float = 1e-4) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def moved(plan: Plan) -> list[tuple[str, int, int, int]]:
    return [(c.kind, c.group, c.payload_bytes, c.count) for c in planned_collectives(plan)]


def mlp(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
    return jnp.maximum(x @ w1, 0) @ w2  # operations: dot_general, max, dot_general


MLP = (numbers(16, 8), numbers(8, 32), numbers(32, 8))


def mlp_plan(
    cuts: Mapping[int, Mapping[str, tuple[int, ...]]],
    inputs: tuple[Layout, ...],
    output: Layout,
    kept: Mapping[int, Kept] | None = None,
) -> Plan:
    program = trace(mlp, *MLP)
    assert [op.kernel for op in program.graph.operations] == ["dot_general", "max", "dot_general"]
    plan = plan_by_hand(program.graph, MESH, cuts, inputs, (output,), kept)
    return replace(plan, program=program)


def check(plan: Plan, *args: Any) -> None:
    """The plan gives the right numbers, and XLA moves what it plans to move."""
    run = compile(plan)
    same(run(*args), plan.program(*args) if plan.program else None)
    comparison = compare(plan, run.compile())
    assert comparison.equal, f"\n{comparison}"


def test_data_parallel_moves_nothing() -> None:
    rows = {"m": (X, Y)}
    plan = mlp_plan(
        {0: rows, 1: {"i0": (X, Y)}, 2: rows},
        (cut((X, Y), ()), cut((), ()), cut((), ())),
        cut((X, Y), ()),
    )
    assert moved(plan) == []
    check(plan, *MLP)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (cut((X,), ()), [("all_reduce", 4, 8 * 8 * 4, 1)]),
        (cut((X, Y), ()), [("reduce_scatter", 4, 8 * 8 * 4, 1)]),
    ],
)
def test_tensor_parallel_reduces_once(output: Layout, expected: Any) -> None:
    plan = mlp_plan(
        {0: {"m": (X,), "n": (Y,)}, 1: {"i0": (X,), "i1": (Y,)}, 2: {"m": (X,), "k": (Y,)}},
        (cut((X,), ()), cut((), (Y,)), cut((Y,), ())),
        output,
    )
    if output.dims[0] == (X, Y):
        key = next(iter(plan.body.copies))
        steps = (Step("reduce_scatter", (Y,), 0, monoid="sum"),)
        plan = replace(plan, body=replace(plan.body, copies={key: steps}))
    assert moved(plan) == expected
    check(plan, *MLP)


def test_sums_that_the_cpu_compiler_widens_compare_as_planned() -> None:
    program = trace(jnp.matmul, jnp.ones((16, 8), jnp.bfloat16), jnp.ones((8, 8), jnp.bfloat16))
    whole = (cut((), ()),)
    plan = plan_by_hand(program.graph, MESH, {0: {"k": (Y,)}}, whole * 2, whole)
    comparison = compare(plan, compile(plan).compile())
    assert comparison.equal and comparison.promoted_bytes == 16 * 8 * 2
    assert "widened" in str(comparison)


def test_sharded_weights_are_gathered_at_their_reader() -> None:
    rows = {"m": (X, Y)}
    plan = mlp_plan(
        {0: rows, 1: {"i0": (X, Y)}, 2: rows},
        (cut((X, Y), ()), cut((X,), (Y,)), cut((Y, X), ())),
        cut((X, Y), ()),
    )
    assert moved(plan) == [
        ("all_gather", 2, 8 * 8 * 4, 1),
        ("all_gather", 4, 8 * 32 * 4, 1),
        ("all_gather", 8, 32 * 8 * 4, 1),
    ]
    check(plan, *MLP)


def test_the_order_of_two_axes_on_one_dim_matters() -> None:
    plan = mlp_plan(
        {0: {"m": (Y, X)}, 1: {"i0": (X, Y)}, 2: {"m": (Y, X)}},
        (cut((X, Y), ()), cut((), ()), cut((), ())),
        cut((X, Y), ()),
    )
    assert [m[:2] for m in moved(plan)] == [("all_gather", 8)] * 4
    check(plan, *MLP)


# Kept and transient copies


def twice(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.tanh(jnp.tanh(x @ w) @ w)  # dot_general, tanh, dot_general, tanh


def twice_plan(*kept: Kept) -> Plan:
    program = trace(twice, numbers(16, 8), numbers(8, 8))
    graph = program.graph
    rows = {"m": (X, Y)}
    plan = plan_by_hand(
        graph,
        MESH,
        {0: rows, 1: {"i0": (X, Y)}, 2: rows, 3: {"i0": (X, Y)}},
        (cut((X, Y), ()), cut((Y,), ())),
        (cut((X, Y), ()),),
        dict.fromkeys(graph.inputs[1:], *kept) if kept else {},
    )
    return replace(plan, program=program)


def test_a_kept_copy_is_made_once() -> None:
    plan = twice_plan(Kept(cut((), ()), 2))
    assert moved(plan) == [("all_gather", 4, 8 * 8 * 4, 1)]
    check(plan, numbers(16, 8), numbers(8, 8))
    assert "optimization_barrier" not in compile(plan).lower().as_text()


@pytest.mark.parametrize("kept", [(), (Kept(cut((), ()), 1),)])
def test_a_copy_that_was_not_kept_is_made_again_behind_a_barrier(kept: Any) -> None:
    plan = twice_plan(*kept)
    assert moved(plan) == [("all_gather", 4, 8 * 8 * 4, 1)] * 2
    check(plan, numbers(16, 8), numbers(8, 8))
    text = compile(plan).lower().as_text()
    assert text.count('"stablehlo.all_gather"') == 2
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count("tensor<") == 2  # the weights, and what the second product waits for


def test_one_reader_copies_once_for_two_operands() -> None:
    program = trace(lambda x: x * x, numbers(8, 8))
    plan = plan_by_hand(program.graph, MESH, {}, (cut((X,), ()),), (cut((), ()),))
    assert len(moved(plan)) == 1
    check(replace(plan, program=program), numbers(8, 8))


def test_two_copies_that_begin_alike_are_kept_apart() -> None:
    def f(x: jax.Array) -> Any:
        return jnp.tanh(x), jnp.exp(x)

    program = trace(f, numbers(8, 8))
    plan = plan_by_hand(
        program.graph, MESH, {1: {"i1": (X,)}}, (cut((X,), ()),), (cut((), ()), cut((), (X,)))
    )
    assert [m[0] for m in moved(plan)] == ["all_gather", "all_gather"]
    check(replace(plan, program=program), numbers(8, 8))


def test_recomputed_regions_read_their_inputs_through_a_barrier() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda w, x: jnp.sin(jnp.sin(x @ w)))
        return layer(w, layer(w, x)).sum()

    args = (numbers(8, 8), numbers(16, 8))
    program = trace(jax.grad(loss), *args)
    regions = {op.remat for op in program.graph.operations} - {None}
    layouts = tuple(cut((), ()) for _ in program.graph.inputs)
    plan = replace(plan_by_hand(program.graph, MESH, {}, layouts, (cut((), ()),)), program=program)
    check(plan, *args)
    text = compile(plan).lower().as_text()
    assert len(regions) == 2 and text.count("optimization_barrier") == 2


# Every kernel under every cut of its index space


def each_strategy(fn: Callable[..., Any], *args: Any, least: int = 2) -> None:
    """Run `fn`, one operation, under many of its strategies at once, and compare."""
    graph = trace(fn, *args).graph
    (op,) = graph.operations
    strategies = all_cuts(signature_of(graph, op), MESH)
    assert len(strategies) >= least
    random.Random(0).shuffle(strategies)
    strategies = strategies[:8]
    program = trace(lambda *a: [fn(*a) for _ in strategies], *args)
    graph = program.graph
    assert len(graph.operations) == len(strategies)
    inputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.inputs)
    outputs = tuple(Layout.replicated(graph.values[v].rank) for v in graph.outputs)
    body = finish(graph, MESH, inputs, outputs, tuple(strategies))
    wanted = jax.tree.map(np.asarray, fn(*args))
    for got in compile(replace(make_plan(body, MESH), program=program))(*args):
        same(got, wanted, 1e-5)


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


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32"])
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
    [("add", "clip"), ("add", "drop"), ("sub", "drop"), ("mul", "drop"), ("min", "clip"),
     ("max", "drop")],
)  # fmt: skip
def test_scatters_into_rows_that_other_devices_hold(kind: str, mode: str) -> None:
    each_strategy(
        lambda x, i, u: SCATTERS[kind](x, i, u, SCATTER, mode=mode),
        numbers(16, 8),
        WILD,
        numbers(8, 8, seed=1),
        least=8,
    )


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


# Loops and branches


def test_a_copy_inside_a_scan_counts_by_its_length() -> None:
    def f(w: jax.Array, c: jax.Array, xs: jax.Array) -> Any:
        def step(c: jax.Array, x: jax.Array) -> Any:
            c = jnp.tanh(c @ w + x)
            return c, c * 2

        return lax.scan(step, c, xs, reverse=True)

    args = (numbers(8, 8), numbers(16, 8), numbers(5, 16, 8))
    program = trace(f, *args)
    (scan,) = program.graph.operations
    (inner,) = scan.regions
    rows, whole = cut((X,), ()), cut((), ())
    body = plan_by_hand(
        inner,
        MESH,
        {k: {"m" if op.kernel == "dot_general" else "i0": (X,)}
         for k, op in enumerate(inner.operations)},
        (cut((Y,), ()), rows, rows),
        (rows, rows),
    ).body  # fmt: skip
    stack = cut((), (X,), ())
    outer = Strategy((), (cut((Y,), ()), rows, stack), (rows, stack), (body,))
    plan = make_plan(
        finish(
            program.graph, MESH, (cut((Y,), ()), whole, cut((), (), ())), (rows, stack), (outer,)
        ),
        MESH,
    )
    assert moved(plan) == [("all_gather", 4, 8 * 8 * 4, 5)]
    run = compile(replace(plan, program=program))
    same(run(*args), f(*args))
    # XLA may lift the copy out of the loop; what it then moves is a single trip's bytes.
    assert hlo_stats(run.compile()).by_kind()[("all_gather", 4)] in (256, 5 * 256)


def rnn(w: jax.Array, x: jax.Array, c: jax.Array) -> Any:
    def loss(w: jax.Array) -> jax.Array:
        def step(c: jax.Array, x: jax.Array) -> Any:
            c = jnp.tanh(c @ w + x)
            return c, c * 2

        last, all_ = lax.scan(step, c, x)
        return jnp.sum(last * last) + jnp.sum(all_)

    return jax.value_and_grad(loss)(w)


def branches(x: jax.Array, w: jax.Array) -> Any:
    def more(s: Any) -> jax.Array:
        return (s[0] < 5) & (jnp.sum(s[1]) < 100)

    n, x = lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))
    return lax.cond(n > 3, lambda x: x @ w, lambda x: x * 2, x), n


def embedding(table: jax.Array, w: jax.Array, tokens: jax.Array, labels: jax.Array) -> Any:
    def loss(table: jax.Array, w: jax.Array) -> jax.Array:
        logits = jax.nn.log_softmax(jnp.take(table, tokens, axis=0) @ w)
        return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], 1))

    return jax.value_and_grad(loss, (0, 1))(table, w)


PROGRAMS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rnn": (rnn, (numbers(8, 8) / 4, numbers(4, 8, 8), numbers(8, 8))),
    "branches": (branches, (numbers(8, 8), numbers(8, 8) / 3)),
    "embedding": (
        embedding,
        (numbers(32, 16), numbers(16, 32), integers(0, 32, 16), integers(0, 32, 16)),
    ),
}


@pytest.mark.parametrize(
    ("name", "seed"), [("rnn", 0), ("branches", 0), ("branches", 1), ("embedding", 1)]
)
def test_random_plans_give_the_original_numbers(name: str, seed: int) -> None:
    fn, args = PROGRAMS[name]
    program = trace(fn, *args)
    plan = random_plan(program.graph, MESH, random.Random(seed))
    same(compile(replace(plan, program=program))(*args), fn(*args), 1e-3)


# Plans that do not fit


def test_missing_and_misleading_steps_are_refused() -> None:
    plan = twice_plan()
    missing = replace(plan, body=replace(plan.body, copies={}))
    with pytest.raises(PlanError, match="no steps between them"):
        planned_collectives(missing)
    ((key, _),) = plan.body.copies.items()
    wrong = {key: (Step("all_gather", (Y,), 0), Step("slice", (X,), 1))}
    with pytest.raises(PlanError, match="lead from"):
        planned_collectives(replace(plan, body=replace(plan.body, copies=wrong)))


def test_an_operand_that_does_not_hold_what_the_block_reads_is_refused() -> None:
    plan = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    first, *rest = plan.body.strategies
    bad = replace(first, cuts=((X,), (), ()), needs=(cut((), (Y,)), first.needs[1]))
    copies = {(plan.graph.inputs[0], cut((), ()), cut((), (Y,))): (Step("slice", (Y,), 1),)}
    body = replace(plan.body, strategies=(bad, *rest), copies=copies)
    with pytest.raises(PlanError, match="outside the block"):
        compile(replace(plan, body=body))(*MLP)


def test_an_output_in_another_layout_than_stated_is_refused() -> None:
    plan = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    first, *rest = plan.body.strategies
    bad = replace(first, cuts=((X,), (), ()))
    with pytest.raises(PlanError, match="output 0 has local shape"):
        compile(replace(plan, body=replace(plan.body, strategies=(bad, *rest))))(*MLP)


def test_a_cut_that_mixes_in_what_other_devices_reduce_is_refused() -> None:
    program = trace(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=2),
        numbers(8, 8, 9),
        numbers(8, 4, 3),
    )
    layouts = (cut((), (), ()), cut((), (), ()))
    try:
        plan = plan_by_hand(program.graph, MESH, {0: {"k": (Y,)}}, layouts, layouts[:1])
    except Illegal:
        return
    with pytest.raises(PlanError, match="cannot run on the blocks"):
        compile(plan).lower()


def test_strategies_that_do_not_fit_the_graph_are_refused() -> None:
    plan = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    with pytest.raises(PlanError, match="strategies for"):
        compile(replace(plan, body=replace(plan.body, strategies=())))(*MLP)


# The comparison


def test_the_comparison_prints_as_a_table() -> None:
    plan = mlp_plan({2: {"k": (Y,)}}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    comparison = compare(plan, compile(plan).compile())
    assert comparison.equal and [r.kind for r in comparison.rows] == ["all_reduce"]
    lines = str(comparison).splitlines()
    assert lines[1].split() == ["all_reduce", "4", "512", "512", "1×", "1×", "equal"]
    other = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    unequal = compare(other, compile(plan).compile())
    assert not unequal.equal and "unequal" in str(unequal)


def test_the_dearest_branch_of_a_conditional_is_planned() -> None:
    def f(n: jax.Array, x: jax.Array) -> jax.Array:
        return lax.switch(n, [jnp.sin, jnp.cos, jnp.tanh], x)

    args = (np.int32(1), numbers(8, 8))
    program = trace(f, *args)
    graph = program.graph
    at = next(k for k, op in enumerate(graph.operations) if op.kernel == "cond")
    rows, columns, whole = cut((X,), ()), cut((), (X,)), cut((), ())
    bodies = tuple(
        plan_by_hand(region, MESH, cuts, (rows,), (rows,)).body
        for region, cuts in zip(
            graph.operations[at].regions, ({0: {"i0": (X,)}}, {}, {0: {"i1": (X,)}}), strict=True
        )
    )
    strategies = [
        Strategy((), (cut(), rows), (rows,), bodies)
        if op.kernel == "cond"
        else Strategy((), (cut(),) * len(op.inputs), (cut(),) * len(op.outputs))
        for op in graph.operations
    ]
    body = finish(graph, MESH, (cut(), whole), (columns,), tuple(strategies))
    plan = replace(make_plan(body, MESH), program=program)
    gather = ("all_gather", 2, 256, 1)
    # Branch 1 gathers to run whole, branch 2 gathers twice; then the result is gathered.
    assert moved(plan) == [gather, gather, gather]
    same(compile(plan)(*args), f(*args))
