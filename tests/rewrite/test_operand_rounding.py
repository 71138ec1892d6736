"""Operands of contractions are rounded where a target's matrix units do so, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from models import llama, mlp
from tapestry_egg.errors import PlanError
from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline import Settings
from tapestry_egg.rewrite.operand_rounding import rounded, unrounded
from tapestry_egg.runtime import compare
from tapestry_egg.schedule.repeated import repeat_cheap

READS = {"float32": "bfloat16"}


def contractions(graph: BlockGraph) -> list[tuple[str, ...]]:
    """The dtypes of operands and result of every contraction, those of regions too."""
    found = []
    for op in graph.operations:
        if op.kernel in ("dot_general", "conv_general_dilated", "ragged_dot_general"):
            found.append(tuple(graph.values[v].dtype for v in (*op.inputs, *op.outputs)))
        for region in op.regions:
            found += contractions(region)
    return found


def test_operands_are_rounded_once_and_results_are_not() -> None:
    fn, args = mlp.example()
    graph = te.trace(fn, *args).graph
    found = rounded(graph, READS)
    assert set(contractions(found)) == {("bfloat16", "bfloat16", "float32")}
    roundings = [op.inputs[0] for op in found.operations if op.kernel == "round_operand"]
    assert len(roundings) == len(set(roundings))
    assert [found.values[v] for v in found.outputs] == [graph.values[v] for v in graph.outputs]


def test_loops_are_rounded_inside() -> None:
    fn, args = llama.example(remat=True)
    found = contractions(rounded(te.trace(fn, *args).graph, READS))
    assert len(found) > 10
    assert set(found) == {("bfloat16", "bfloat16", "float32")}


@pytest.mark.parametrize("precision", ["highest", "high", jax.lax.Precision.HIGHEST])
def test_a_precision_that_was_asked_for_is_kept(precision: str | jax.lax.Precision) -> None:
    x = jnp.ones((8, 8))
    graph = te.trace(lambda x: jnp.dot(x, x, precision=precision), x).graph
    assert rounded(graph, READS) is graph


def test_products_by_groups_of_rows_read_them_rounded_too() -> None:
    """As XLA for TPUs has it, and files say of such plans what the program said."""
    x, y, n = jnp.ones((8, 4)), jnp.ones((2, 4, 3)), jnp.array([3, 5])
    graph = te.trace(jax.lax.ragged_dot, x, y, n).graph
    found = rounded(graph, READS)
    assert contractions(found) == [("bfloat16", "bfloat16", "int32", "float32")]
    (op,), (back,) = graph.operations, unrounded(found, READS).operations
    assert (back.kernel, back.inputs, back.params) == (op.kernel, op.inputs, op.params)
    asked = te.trace(lambda *a: jax.lax.ragged_dot(*a, precision="highest"), x, y, n).graph
    assert rounded(asked, READS) is asked


def test_other_dtypes_are_as_they_were() -> None:
    x = jnp.ones((8, 8), jnp.bfloat16)
    graph = te.trace(lambda x, n: (x @ x, n @ n), x, jnp.ones((8, 8), jnp.int32)).graph
    assert rounded(graph, READS) is graph
    assert rounded(graph, {}) is graph


def test_targets_say_what_their_units_read() -> None:
    assert dict(load_target("v5e:2x4").operands) == READS
    assert load_target("h100:8").operands == ()
    assert load_target("cpu:8").operands == ()


@pytest.mark.slow
def test_a_plan_for_a_tpu_gathers_rounded_weights_and_keeps_numbers_elsewhere(
    tmp_path: Path,
) -> None:
    """In its file, too."""
    fn, args = mlp.example((256, 1024, 1024, 256), 512)
    settings = Settings(work=0.3, recompute=0, forms=0)
    mesh = te.MeshShape(("x",), (8,))
    front = te.optimize(te.trace(fn, *args), "v5e:2x4", mesh_shapes=[mesh], settings=settings)
    found = [
        (p, [c for c in p.collectives if c.reader.startswith("dot_general")])
        for p in front
        if any(c.reader.startswith("dot_general") for c in p.collectives)
    ]
    plan, gathers = found[0]
    assert all("bf16" in c.value for c in gathers), gathers
    devices = jax.devices("cpu")
    wanted = jax.jit(fn)(*args)
    got = te.compile(plan, devices)(*args)  # a CPU rounds nothing
    for a, b, old in zip(*map(jax.tree.leaves, (got[0], wanted[0], args[0])), strict=True):
        off = np.linalg.norm(np.asarray(a) - np.asarray(b))
        assert off < 1e-4 * np.linalg.norm(np.asarray(b) - np.asarray(old))  # 2e-3 where rounded
    moved = compare(plan, te.compile(plan, devices).compile())
    assert moved.equal, str(moved)  # by the bytes that move where nothing is rounded
    assert any(op.kernel == "round_operand" for op in front[0].graph.operations)
    te.save(front, tmp_path / "front.json")
    loaded = te.load(tmp_path / "front.json")
    assert isinstance(loaded, te.Front)
    assert loaded[0].costs == front[0].costs


def test_nothing_else_reads_what_is_rounded() -> None:
    fn, args = mlp.example()
    graph = te.trace(fn, *args).graph
    found = rounded(graph, READS)
    assert [op.kernel for op in unrounded(found, READS).operations] == [
        op.kernel for op in graph.operations
    ]
    with pytest.raises(PlanError, match="rounds no operand so"):
        unrounded(found, {})
    made = next(op.outputs[0] for op in found.operations if op.kernel == "round_operand")
    with pytest.raises(PlanError, match="for contractions only"):
        unrounded(replace(found, outputs=(made,)), READS)


def test_what_only_moves_a_value_moves_it_rounded() -> None:
    def fn(x: jax.Array, places: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.tanh(x)[places]  # more rows than there were
        some = jnp.sin(x)[:4]  # fewer, that are one slice
        few = jnp.cos(x)[places[:4]]  # fewer, from anywhere
        return jnp.concatenate([rows, rows[:, ::-1]], 1) @ w, some @ few.T

    args = jnp.ones((8, 16)), jnp.zeros((64,), int), jnp.ones((32, 4))
    graph = te.trace(fn, *args).graph
    found = rounded(graph, READS)
    of = {op.outputs[0]: op for op in found.operations}
    roundings = [op for op in found.operations if op.kernel == "round_operand"]
    assert [of[op.inputs[0]].kernel if op.inputs[0] in of else "" for op in roundings] == [
        "sin",
        "tanh",
        "",
        "gather",
    ]
    moved = [op for op in found.operations if op.kernel in ("rev", "concatenate")]
    moved += [op for op in found.operations if op.inputs == (roundings[0].outputs[0],)]
    assert {found.values[op.outputs[0]].dtype for op in moved} == {"bfloat16"}
    back, own = unrounded(found, READS), repeat_cheap(graph)
    assert back.values[: len(own.values)] == own.values
    assert [(o.kernel, o.inputs, o.outputs) for o in back.operations] == [
        (o.kernel, o.inputs, o.outputs) for o in own.operations
    ]


def test_what_something_else_reads_too_is_moved_as_it_is() -> None:
    def fn(x: jax.Array, places: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = jnp.sin(x)[places]
        return rows @ x.T, jnp.cos(rows)

    found = rounded(te.trace(fn, jnp.ones((8, 8)), jnp.zeros((64,), int)).graph, READS)
    (rows,) = (op for op in found.operations if op.kernel == "gather")
    assert found.values[rows.outputs[0]].dtype == "float32"


def test_a_view_that_something_else_reads_too_is_rounded_before_for_contractions() -> None:
    """As XLA makes it for each of them: of an exchange before the view it has two, one rounded."""

    def fn(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        turned = jnp.sin(x).T
        return turned @ x, jnp.cos(turned)

    found = rounded(te.trace(fn, jnp.ones((8, 8))).graph, READS)
    turned = [op for op in found.operations if op.kernel == "transpose"]
    assert sorted(found.values[op.outputs[0]].dtype for op in turned) == ["bfloat16", "float32"]


def of_loops(graph: BlockGraph) -> list[tuple[list[str], list[str]]]:
    """The dtypes of what enters and leaves every scan."""
    return [
        ([graph.values[v].dtype for v in op.inputs], [graph.values[v].dtype for v in op.outputs])
        for op in graph.operations
        if op.kernel == "scan"
    ]


def test_what_rounds_of_a_scan_read_rounded_enters_and_leaves_it_so() -> None:
    """As XLA's compiler for TPUs has it: `stacked`, of which each round multiplies a slice, and
    `both`, which it multiplies whole, are rounded before the loop; so is what a second loop
    multiplies of what the first one stacks. Carries keep their dtype, as does what is added."""
    half, full = "bfloat16", "float32"

    def fn(x: jax.Array, both: jax.Array, stacked: jax.Array, added: jax.Array) -> jax.Array:
        def first(c: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
            made = jnp.tanh(c @ w) @ both + added
            return made, (jnp.sin(made), jnp.cos(made))

        def second(c: jax.Array, y: jax.Array) -> tuple[jax.Array, None]:
            return jnp.cos(c) @ y.T, None

        last, (multiplied, summed) = jax.lax.scan(first, x, stacked)
        return jax.lax.scan(second, last, multiplied)[0] + summed.sum(0)

    graph = te.trace(
        fn, jnp.ones((8, 8)), jnp.ones((8, 8)), jnp.ones((3, 8, 8)), jnp.ones((8, 8))
    ).graph
    found = rounded(graph, READS)
    (ins, outs), (later, end) = of_loops(found)
    names = {v: n for v, n in zip(graph.inputs, "x both stacked added".split(), strict=True)}
    loop = next(op for op in graph.operations if op.kernel == "scan")
    given = {names[v]: dtype for v, dtype in zip(loop.inputs, ins, strict=True)}
    assert given == {"x": full, "both": half, "stacked": half, "added": full}
    assert sorted(outs) == [half, full, full]
    assert (later, end) == ([full, half], [full])
    assert set(contractions(found)) == {(half, half, full)}
    assert [found.values[v] for v in found.outputs] == [graph.values[v] for v in graph.outputs]
    back = unrounded(found, READS)
    assert back.values[: len(graph.values)] == graph.values
    assert of_loops(back) == of_loops(graph)
    assert [(o.kernel, o.inputs, o.outputs) for o in back.operations] == [
        (o.kernel, o.inputs, o.outputs) for o in graph.operations
    ]


@pytest.mark.slow
def test_a_plan_with_rounded_stacks_gives_the_numbers_of_the_program() -> None:
    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        def loss(w: jax.Array) -> jax.Array:
            return jnp.sum(jax.lax.scan(lambda c, u: (jnp.tanh(c @ u), None), x, w)[0] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    args = jnp.linspace(-1, 1, 4 * 32 * 32).reshape(4, 32, 32) / 6, jnp.ones((64, 32)) / 3
    program = te.trace(step, *args)
    front = te.optimize(program, "v5e:2x4", settings=Settings(work=0.3, recompute=0, forms=0))
    plan = front[0]
    assert any("bfloat16" in ins for ins, _ in of_loops(plan.graph))
    wanted, got = jax.jit(step)(*args), te.compile(plan, jax.devices("cpu"))(*args)
    np.testing.assert_allclose(got - args[0], wanted - args[0], rtol=1e-3, atol=1e-6)


def test_what_rounds_of_a_while_loop_multiply_enters_it_rounded() -> None:
    """As XLA's compiler for TPUs has it: `w`, which every round multiplies, is rounded before the
    loop; not `added`, nor `both`, which is added, too, nor what the loop carries or asks for."""

    def fn(x: jax.Array, w: jax.Array, added: jax.Array, both: jax.Array) -> jax.Array:
        def goes_on(c: jax.Array) -> jax.Array:
            return (c @ w).sum() < 1e3

        def step(c: jax.Array) -> jax.Array:
            return jnp.tanh(c @ w) @ both + both + added

        return jax.lax.while_loop(goes_on, step, x)

    graph = te.trace(fn, *[jnp.ones((8, 8))] * 4).graph
    found = rounded(graph, READS)
    loop = next(op for op in found.operations if op.kernel == "while")
    n, m = loop.params["cond_nconsts"], loop.params["body_nconsts"]
    assert (n, m) == (1, 3)
    half, full = "bfloat16", "float32"
    dtypes = [found.values[v].dtype for v in loop.inputs]
    assert dtypes == [full, half, full, full, full]
    assert [loop.regions[1].values[v].dtype for v in loop.regions[1].inputs] == dtypes[1:]
    assert [op.inputs for op in found.operations if op.kernel == "round_operand"] == [
        (graph.inputs[1],)
    ]
    back = unrounded(found, READS)
    assert back.values[: len(graph.values)] == graph.values
    assert [[op.kernel for op in r.operations] for o in back.operations for r in o.regions] == [
        [op.kernel for op in r.operations] for o in graph.operations for r in o.regions
    ]


def test_what_is_sent_after_it_was_moved_is_told_of_platforms_that_round_nothing() -> None:
    """A CPU sends the float32 columns of what a TPU sends as bfloat16."""

    def columns(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w[:, :16])

    args = np.ones((64, 64), np.float32), np.ones((64, 64), np.float32) / 64
    pins = {"[0]": ("x", None), "[1]": ("x", None), "result": ("x", None)}
    settings = Settings(work=0.2, front=False, workers=1)
    plan = te.optimize(te.trace(columns, *args), "v5e:4", pins=pins, settings=settings).best()
    assert any("bf16" in c.value for c in plan.collectives)
    run = te.compile(plan, jax.devices()[:4])
    moved = compare(plan, run.compile())
    assert moved.equal, f"\n{moved}"
    np.testing.assert_allclose(run(*args), columns(*args), rtol=1e-5)
