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
from tapestry_egg.graph.layout import Layout
from tapestry_egg.plans.plan import Change, Kept, Plan, Strategy
from tapestry_egg.runtime import compare, compile, planned_collectives
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.tracing.trace import trace
from tests.plans.plans import finish, make_plan, plan_by_hand, random_plan
from tests.runtime.lowered import MESH, X, Y, check, cut, integers, moved, numbers, same


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
        steps = (Change("reduce_scatter", (Y,), 0, monoid="sum"),)
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


def test_a_late_copy_waits_for_what_is_kept_of_what_is_computed_on_the_fly() -> None:
    """And not for what that is computed of, which the reader does not read."""

    def f(x: jax.Array, y: jax.Array, w: jax.Array) -> Any:
        u, v = -(x @ w), y @ w
        return jnp.exp(u), jnp.tanh(v), v + u

    arguments = numbers(16, 8), numbers(16, 8, seed=1), numbers(8, 8, seed=2)
    program = trace(f, *arguments)
    graph = program.graph
    rows, whole = cut((X, Y), ()), cut((), ())
    (k,) = [k for k, op in enumerate(graph.operations) if op.kernel == "neg"]
    cuts = {n: {"m": (X, Y)} for n, op in enumerate(graph.operations) if op.kernel == "dot_general"}
    cuts[k] = {"i0": (X, Y)}
    (u,) = graph.operations[k].outputs
    plan = plan_by_hand(graph, MESH, cuts, (rows, rows, whole), (whole,) * 3, {u: Kept(whole, 9)})
    assert len(moved(plan)) == 3
    check(replace(plan, program=program), *arguments)


def test_a_late_copy_does_not_wait_for_what_its_reader_is_yet_to_keep() -> None:
    def f(x: jax.Array, w: jax.Array) -> Any:
        y = x @ w
        return jnp.exp(x), lax.clamp(y, x, y), jnp.tanh(y)

    arguments = numbers(16, 8), numbers(8, 8, seed=2)
    program = trace(f, *arguments)
    graph = program.graph
    rows, whole = cut((X, Y), ()), cut((), ())
    kernels = [op.kernel for op in graph.operations]
    assert kernels == ["dot_general", "exp", "clamp", "tanh"]
    (y,) = graph.operations[0].outputs
    plan = plan_by_hand(
        graph, MESH, {0: {"m": (X, Y)}}, (rows, whole), (whole,) * 3, {y: Kept(whole, 3)}
    )
    assert len(moved(plan)) == 3  # x for exp and for clamp, y once
    check(replace(plan, program=program), *arguments)


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


def test_late_copies_are_kept_apart_where_what_they_wait_for_is_alike() -> None:
    """Each waits for zeros that its reader adds to, of which a compiler makes one array."""

    rows = lax.ScatterDimensionNumbers((1,), (0,), (0,))

    def f(i: jax.Array, *updates: jax.Array) -> list[jax.Array]:
        return [lax.scatter_add(jnp.zeros((4, 8)), i, u, rows) for u in updates]

    arguments = integers(0, 4, 16, 1), *(numbers(16, 8, seed=n) for n in range(3))
    program = trace(f, *arguments)
    whole = cut((), ())
    inputs = cut((X, Y), ()), *(whole,) * 3
    plan = plan_by_hand(program.graph, MESH, {}, inputs, (whole,) * 3)
    assert moved(plan) == [("all_gather", 8, 16 * 4, 1)] * 3
    check(replace(plan, program=program), *arguments)


@pytest.mark.parametrize("read", [False, True])
def test_copies_of_results_that_begin_alike_are_kept_apart(read: bool) -> None:
    def f(x: jax.Array) -> tuple[jax.Array, ...]:
        h = jnp.tanh(x)
        return h, h, h, jnp.cumsum(h, 0) if read else h

    program = trace(f, numbers(8, 8))
    outputs = (cut((Y,), (X,)), cut((), (X,)), cut((Y,), ()), cut((), ()))
    inner = {0: {"i0": (X, Y)}}
    plan = plan_by_hand(program.graph, MESH, inner, (cut((X, Y), ()),), outputs)
    plan = replace(plan, program=program)
    assert [m[0] for m in moved(plan)] == ["all_gather"] * 4
    check(plan, numbers(8, 8))
    assert compile(plan).lower().as_text().count("stablehlo.all_gather") == 4


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


def test_a_recomputed_region_computes_again_what_is_not_stored() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        z = x @ w
        gate = jax.nn.sigmoid(z)  # fused into what reads it
        return (gate * z) @ w + (z * gate) @ w

    args = (numbers(8, 8), numbers(8, 8))
    program = trace(f, *args)
    second = max(k for k, op in enumerate(program.graph.operations) if op.kernel == "mul")
    operations = tuple(
        replace(op, remat=0) if k == second else op for k, op in enumerate(program.graph.operations)
    )
    graph = replace(program.graph, operations=operations)
    layouts = tuple(cut((), ()) for _ in graph.inputs)
    plan = plan_by_hand(graph, MESH, {}, layouts, (cut((), ()),))
    np.testing.assert_allclose(compile(plan)(*args)[0], jax.jit(f)(*args), rtol=1e-4)
    text = compile(plan).lower().as_text()
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count("tensor<") == 2  # z, and the product of the first reader: no gate
    assert text.count("stablehlo.exponential") == 2


def test_a_kernel_waits_for_results_that_are_read_later_through_what_is_not_stored() -> None:
    def f(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.tanh(x @ w)  # fused into both of its readers
        b = x @ v
        return h.sum(0), h + b

    args = tuple(numbers(128, 128, seed=k) for k in range(3))
    program = trace(f, *args)
    layouts = tuple(cut((), ()) for _ in program.graph.inputs)
    outputs = (cut(()), cut((), ()))
    plan = replace(plan_by_hand(program.graph, MESH, {}, layouts, outputs), program=program)
    check(plan, *args)
    text = compile(plan).lower().as_text()
    (barrier,) = [line for line in text.splitlines() if "optimization_barrier" in line]
    assert barrier.count("tensor<") == 2  # what the second product reads, and the first product
    # The readers after the barrier read the first product behind it.
    assert text.index("optimization_barrier") < text.rindex("stablehlo.tanh")


def test_a_result_that_leaves_in_two_layouts_is_on_its_way_in_both() -> None:
    def f(x: jax.Array, w: jax.Array) -> tuple[jax.Array, ...]:
        h = x @ w
        return h, h, h @ w

    args = numbers(128, 128), numbers(128, 128, seed=1)
    program = trace(f, *args)
    whole, outputs = cut((), ()), (cut((X,), ()), cut((), (Y,)), cut((), ()))
    plan = plan_by_hand(program.graph, MESH, {1: {"m": (X,)}}, (whole, whole), outputs)
    check(replace(plan, program=program), *args)


# Plans that do not fit


def test_missing_and_misleading_steps_are_refused() -> None:
    plan = twice_plan()
    missing = replace(plan, body=replace(plan.body, copies={}))
    with pytest.raises(PlanError, match="no steps between them"):
        planned_collectives(missing)
    ((key, _),) = plan.body.copies.items()
    wrong = {key: (Change("all_gather", (Y,), 0), Change("slice", (X,), 1))}
    with pytest.raises(PlanError, match="lead from"):
        planned_collectives(replace(plan, body=replace(plan.body, copies=wrong)))


def test_an_operand_that_does_not_hold_what_the_block_reads_is_refused() -> None:
    plan = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    first, *rest = plan.body.strategies
    bad = replace(first, cuts=((X,), (), ()), needs=(cut((), (Y,)), first.needs[1]))
    copies = {(plan.graph.inputs[0], cut((), ()), cut((), (Y,))): (Change("slice", (Y,), 1),)}
    body = replace(plan.body, strategies=(bad, *rest), copies=copies)
    with pytest.raises(PlanError, match="outside the block"):
        compile(replace(plan, body=body))(*MLP)


def test_an_output_in_another_layout_than_stated_is_refused() -> None:
    plan = mlp_plan({}, (cut((), ()), cut((), ()), cut((), ())), cut((), ()))
    first, *rest = plan.body.strategies
    bad = replace(first, cuts=((X,), (), ()))
    with pytest.raises(PlanError, match="output 0 has local shape"):
        compile(replace(plan, body=replace(plan.body, strategies=(bad, *rest))))(*MLP)


def test_channels_of_a_group_are_cut_while_several_groups_are_left() -> None:
    x, k = numbers(8, 8, 9), numbers(8, 4, 3)
    program = trace(
        lambda x, k: lax.conv_general_dilated(x, k, (1,), "VALID", feature_group_count=2), x, k
    )
    layouts = (cut((), (), ()), cut((), (), ()))
    plan = plan_by_hand(program.graph, MESH, {0: {"k": (Y,)}}, layouts, layouts[:1])
    check(replace(plan, program=program), x, k)


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


# Loops, branches and whole programs under plans made by hand and at random.


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "seed"),
    [("rnn", 0), ("branches", 0), ("branches", 1), ("embedding", 1)],
)
def test_random_plans_give_the_original_numbers(name: str, seed: int) -> None:
    fn, args = PROGRAMS[name]
    program = trace(fn, *args)
    plan = random_plan(program.graph, MESH, random.Random(seed))
    same(compile(replace(plan, program=program))(*args), fn(*args), 1e-3)


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
