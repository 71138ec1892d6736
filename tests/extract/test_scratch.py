"""What kernels take for themselves: in the search's account of memory and in the certificate's."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.extract.certify.ground import Ground
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.front.merge import rounded_first
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.target import load_target
from tapestry_egg.metakernels.registry import signature_of
from tapestry_egg.plans.plan import Kept, Plan
from tapestry_egg.plans.planned import planned_collectives
from tapestry_egg.rewrite.operand_rounding import rounded
from tapestry_egg.runtime import hlo_stats
from tapestry_egg.schedule.of_plans import plan_schedule
from tests.metakernels.contractions import is_contraction, is_product
from tests.plans.plans import plan_by_hand
from tests.schedule.test_lifetimes import h100s


def holds_on_h100(plan: te.Plan) -> None:
    """XLA for one H100 holds what a plan promises."""
    compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


@pytest.mark.slow
def test_parts_of_a_long_sum_are_in_memory_while_it_is_made() -> None:
    """A weight gradient of 64 × 64 over 65536 rows: its parts are larger than it is."""

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        return w - x.T @ x

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (65536, 64))]
    program = te.trace(step, *args)
    front = te.optimize(program, "h100:8", settings=te.Settings(work=0.5, forms=0, recompute=0))
    for plan in front:  # each has been counted again by the certificate
        found = plan.peak()
        scratch = [p for p in found.parts if p.kind == "scratch"]
        if scratch:
            parts = scratch[0].bytes / (64 * 64 * 4)
            assert parts > 1 and parts == int(parts)
            assert found.running == "dot_general"
            assert plan.costs.peak_bytes >= scratch[0].bytes + 64 * 64 * 4
            return
    raise AssertionError("no plan splits the sum")


@pytest.mark.parametrize("name, wanted", [("product", True), ("window", False), ("ragged", True)])
def test_products_are_told_from_windows(name: str, wanted: bool) -> None:
    function, shapes = {
        "product": (lambda x, y: jnp.einsum("bmk,bkn->bmn", x, y), ((2, 3, 4), (2, 4, 5))),
        "window": (
            lambda x, k: jax.lax.conv(x, k, (1, 1), "VALID"),
            ((2, 3, 8, 8), (4, 3, 3, 3)),
        ),
        "ragged": (
            lambda x, y: jax.lax.ragged_dot(x, y, jnp.array([3, 4])),
            ((7, 4), (2, 4, 5)),
        ),
    }[name]
    graph = te.trace(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph
    made = [
        signature_of(op, *(tuple(graph.values[v] for v in vs) for vs in (op.inputs, op.outputs)))
        for op in graph.operations
    ]
    (signature,) = [s for s in made if s is not None and is_contraction(s)]
    assert (signature.is_product, is_product(signature)) == (wanted, wanted)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_in_blocks_has_them_in_memory(dtype: str) -> None:
    """Of 8192 rows, each with 8192 keys for two heads, 512 of one head have room for scores of 4
    bytes; in 16 bits attention is cuDNN's. The certificate, which the front went through, and the
    search agree.
    """

    def grads(*given: jax.Array) -> tuple[jax.Array, ...]:
        def loss(*given: jax.Array) -> jax.Array:
            out = jax.nn.dot_product_attention(*given, is_causal=True, implementation="xla")
            return jnp.sum(jnp.square(out.astype(jnp.float32)))

        return jax.grad(loss, (0, 1, 2))(*given)

    rows, heads, width = 8192, 2, 32
    x = jax.ShapeDtypeStruct((1, rows, heads, width), dtype)
    front = te.optimize(te.trace(grads, x, x, x), "h100:1", settings=te.Settings(work=1))
    plan = front.best("peak_bytes")
    assert "flash_attention_backward" in [op.kernel for op in plan.graph.operations]
    peak = plan.peak()
    found = sum(p.bytes for p in peak.parts if p.kind == "scratch")
    if dtype == "bfloat16":
        assert found == 0
    else:
        assert peak.running == "flash_attention_backward"
        assert found == 3 * (16 << 20) + 4 * 4 * rows * heads * width


SHAPES = ((512, 512), (512, 64), (64, 512))


def product(c: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return (a * jnp.max(jnp.sort(c, axis=1))) @ b


def rounds(c: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda c, _: (product(c, a, b), None), c, None, length=3)[0]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [product, rounds])
def test_what_is_sent_into_the_place_of_an_old_value_stands_beside_it_first(fn: Any) -> None:
    """A product that devices sum is eight times what is left of it in the place of a new state, or
    of a round's next value."""
    program = te.trace(
        fn, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in SHAPES), donate_argnums=0
    )
    front = te.optimize(
        program,
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={"[0]": ("x", None), "[1]": (None, "x"), "[2]": ("x", None), "result": ("x", None)},
        settings=te.Settings(work=1.0, recompute=0, forms=0),
    )
    for plan in front:
        compiled = hlo_stats(te.compile(plan, jax.devices()[:8]).lower().compile())
        assert compiled.peak_bytes <= 1.1 * plan.costs.peak_bytes, plan.name


def test_parts_of_a_sum_are_added_up_when_what_they_are_made_of_is_gone() -> None:
    """So its result is not in memory beside that; nor is it as compiled for H100."""
    rows, width = 4096, 512

    def step(w: jax.Array, x: jax.Array) -> jax.Array:
        wide = jnp.sin(x) * x
        return w - wide.T @ wide

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((width, width), (rows, width))]
    program = te.trace(step, *args, donate_argnums=0)
    (plan,) = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    held = {p.kind: p.bytes for p in plan.peak().parts}
    assert plan.costs.peak_bytes == 4 * (width * width + 2 * rows * width) + held["scratch"]
    holds_on_h100(plan)


@pytest.mark.parametrize(
    ("vector", "rows", "columns", "stored"),
    [
        ("rows", 4096, 512, 1),
        ("columns", 4096, 512, 0),
        ("rows", 4096, 4096, 0),
        ("rows", 256, 512, 0),
        ("rows", 512, 512, 1),
        ("rows", 8192, 512, 0),
    ],
)
def test_a_vector_s_products_are_stored_before_few_columns_are_added_up(
    vector: str, rows: int, columns: int, stored: int
) -> None:
    """Rows are added up as they are made, and so are few rows of columns, and many columns. The
    search counts so, and the certificate."""
    shapes = {"rows": (1, rows), "columns": (columns, 1)}

    def f(x: jax.Array, v: jax.Array) -> jax.Array:
        return v @ x if vector == "rows" else x @ v

    args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, columns), shapes[vector])]
    (plan,) = te.optimize(te.trace(f, *args), "h100:1", settings=te.Settings(forms=0, work=0.1))
    matrix = 4 * rows * columns
    assert [p.bytes for p in plan.peak().parts if p.kind == "scratch"] == [matrix] * stored
    assert plan.costs.peak_bytes == pytest.approx((1 + stored) * matrix, rel=0.01)
    holds_on_h100(plan)


def test_gradients_of_attention_hold_fewer_blocks_where_products_compute_what_follows() -> None:
    """In the certificate, too, which each front has gone through."""

    def grads(q: jax.Array) -> jax.Array:
        def loss(q: jax.Array) -> jax.Array:
            return jnp.sum(jax.nn.dot_product_attention(q, q, q, is_causal=True) ** 2)

        return jax.grad(loss)(q)

    program = te.trace(grads, jax.ShapeDtypeStruct((8, 64, 4, 8), jnp.float32))
    mesh = [MeshShape(("x",), (8,))]
    scratch = []
    for target in ("v5e:2x4", "h100:8"):
        front = te.optimize(program, target, mesh_shapes=mesh, settings=te.Settings(work=0.1))
        parts = front[0].peak().parts
        scratch.append(sum(p.bytes for p in parts if p.kind == "scratch"))
    assert scratch[1] - scratch[0] == 4 * 4 * 64 * 64  # a block less, of one sequence


# What is sent for a rounding alone is rounded before it is sent, where a plan loses nothing.


MESH = MeshShape(("x",), (8,))
CUT, WHOLE = Layout(((0,), ())), Layout.replicated(2)


def gathered(
    fn: Callable[..., jax.Array], outputs: tuple[Layout, ...], kept: bool = False
) -> tuple[Plan, Ground]:
    """A plan that gathers the rows of f32[2048, 256] before all that it computes; once, if they
    are `kept`."""
    x, w = jnp.ones((2048, 256)), jnp.ones((256, 256))
    graph = rounded(te.trace(fn, x, w).graph, {"float32": "bfloat16"})
    last = {0: Kept(WHOLE, len(graph.operations))} if kept else {}
    plan = plan_by_hand(graph, MESH, {}, (CUT, WHOLE), outputs, last)
    ground = Ground(plan_schedule(plan.body, {}), load_target("v5e:2x4"))
    costs = Walk(plan, ground).certificate().costs
    return replace(plan, costs=costs, collectives=planned_collectives(plan)), ground


@pytest.mark.parametrize(
    "fn", [lambda x, w: x @ w, lambda x, w: jnp.tanh(x @ w) + x @ jnp.cos(w)], ids=["one", "two"]
)
def test_rows_are_rounded_and_then_gathered_once(fn: Callable[..., jax.Array]) -> None:
    plan, ground = gathered(fn, (WHOLE,))
    (before,) = plan.collectives
    found = rounded_first(plan, ground)
    (after,) = found.collectives
    assert before.payload_bytes == 2048 * 256 * 4
    assert (after.kind, after.payload_bytes) == ("all_gather", 2048 * 256 * 2)
    assert found.costs.seconds < plan.costs.seconds
    assert found.costs.peak_bytes <= plan.costs.peak_bytes
    assert found.costs == Walk(found, ground).certificate().costs


def test_what_something_else_reads_too_is_sent_as_it_is() -> None:
    plan, ground = gathered(lambda x, w: (x @ w, jnp.sin(x)), (WHOLE, WHOLE), kept=True)
    assert len(plan.collectives) == 1
    assert rounded_first(plan, ground).collectives == plan.collectives


def test_no_plan_takes_less_than_is_proven() -> None:
    plan, ground = gathered(lambda x, w: x @ w, (WHOLE,))
    proven = replace(plan, bound=plan.costs.seconds)
    assert rounded_first(proven, ground) is proven


# States that become what others were are copied there, beside what is still to be read.


QUICK = te.Settings(work=0.1, forms=0, recompute=0, workers=1, merge=False)
SQUARE = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)

#: A step, how many of its arguments there are, the donated ones, and how many arrays it holds.
STEPS: dict[str, tuple[Any, int, tuple[int, ...], int]] = {
    "two change places": (lambda a, b: (b, a), 2, (0, 1), 3),
    "three change places": (lambda a, b, c: (b, c, a), 3, (0, 1, 2), 4),
    "two of three do": (lambda a, b, c: (b, a, c), 3, (0, 1, 2), 4),
    "two pairs do, one array serves both": (lambda a, b, c, d: (b, a, d, c), 4, (0, 1, 2, 3), 5),
    "one of two is renewed": (lambda a, b: (b + 1, a), 2, (0, 1), 3),
    "both are renewed": (lambda a, b: (b + 1, a + 1), 2, (0, 1), 3),
    "what is read is overwritten last": (lambda a, b, x: (b, x + a), 3, (0, 1), 4),
    "what is read no more, at once": (lambda a, b, x: (x * 2, a), 3, (0, 1), 3),
    "the step before": (lambda w, p, g: (w - 0.1 * g, w), 3, (0, 1), 3),
    "a turned one in the place of another": (lambda a, b: (b.T, a.T), 2, (0, 1), 4),
    "it leaves, and an argument takes its place": (lambda a, b: (b, a), 2, (1,), 3),
    "each stays": (lambda a, b: (a, b), 2, (0, 1), 2),
}


@pytest.mark.parametrize("target", ["cpu:1", "h100:1", "v5e:1"])
@pytest.mark.parametrize("name", STEPS)
def test_states_are_copied_to_each_other_s_places(target: str, name: str) -> None:
    """As XLA for H100 has it, where that is installed."""
    fn, count, donated, arrays = STEPS[name]
    program = te.trace(fn, *[SQUARE] * count, donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a plan of which the certificate says something else
        plan = te.optimize(program, target, settings=QUICK).best("peak_bytes")
    assert plan.costs.peak_bytes == pytest.approx(arrays * SQUARE.size * 4, rel=0.01)
    if target == "h100:1":
        from tapestry_egg.runtime.measure.hlo import hlo_stats

        compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
        assert compiled.peak_bytes == pytest.approx(plan.costs.peak_bytes, rel=0.01)


@pytest.mark.parametrize("target", ["h100:4", pytest.param("v5e:2x2", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", STEPS)
def test_search_and_certificate_agree_on_several_devices(target: str, name: str) -> None:
    fn, count, donated, _ = STEPS[name]
    program = te.trace(fn, *[SQUARE] * count, donate_argnums=donated)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert te.optimize(program, target, settings=QUICK)
