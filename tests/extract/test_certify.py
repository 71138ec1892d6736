"""What the certificate refuses of one operation: layouts that do not follow from its cuts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.extract.certify.cost_parts import cost_parts
from tapestry_egg.extract.certify.legality import Illegal, check_strategy
from tapestry_egg.graph.blockgraph import TensorType
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.machine.costs import collective_seconds, turning_seconds
from tapestry_egg.metakernels.signatures.signature import IndexDim, OperationSignature
from tapestry_egg.plans.plan import Strategy
from tapestry_egg.zspace import Projection
from tests.schedule.test_lifetimes import h100s

MESH = MeshShape(("x",), (2,))
ROWS, VECTOR = TensorType((4, 8), "float32"), TensorType((4,), "float32")
#: Sums of rows, each begun at a starting value.
SUMS = OperationSignature(
    "sums",
    (IndexDim("m", 4, "map"), IndexDim("k", 8, "reduce", "sum")),
    (Projection(((1, 0), (0, 1)), (0, 0), (1, 1)), Projection(((1, 0),), (0,), (1,))),
    (Projection(((1, 0),), (0,), (1,)),),
    (ROWS, VECTOR),
    (VECTOR,),
    initial=(1,),
)
WHOLE, CUT = Layout(((),)), Layout(((0,),))


def partial(monoid: str) -> Layout:
    return Layout(((),), (0,), monoid)


def check(cuts: tuple[tuple[int, ...], ...], rows: Layout, start: Layout, out: Layout) -> None:
    check_strategy(SUMS, Strategy(cuts, (rows, start), (out,)), MESH)


def test_what_follows_from_the_cuts_is_legal() -> None:
    check(((), ()), Layout(((), ())), WHOLE, WHOLE)
    check(((0,), ()), Layout(((0,), ())), CUT, CUT)
    check(((), (0,)), Layout(((), (0,))), partial("sum"), partial("sum"))


@pytest.mark.parametrize(
    ("start", "out", "said"),
    [
        (partial("max"), partial("sum"), "starting value is partial under another monoid"),
        (WHOLE, partial("sum"), "operands"),
        (partial("sum"), partial("max"), "outputs are partial"),
        (partial("sum"), WHOLE, "outputs are partial"),
    ],
)
def test_partial_sums_begin_and_end_under_their_own_monoid(
    start: Layout, out: Layout, said: str
) -> None:
    with pytest.raises(Illegal, match=said):
        check(((), (0,)), Layout(((), (0,))), start, out)


@pytest.mark.parametrize(
    ("rows", "start", "out", "said"),
    [
        (Layout(((), ())), WHOLE, WHOLE, "output 0: devices do not make the blocks"),
        (Layout(((), (0,))), CUT, CUT, "operand 0: devices read outside"),
    ],
)
def test_devices_make_their_blocks_and_read_what_they_have(
    rows: Layout, start: Layout, out: Layout, said: str
) -> None:
    with pytest.raises(Illegal, match=said):
        check(((0,), ()), rows, start, out)


# What a conditional is certified to send: what the dearest of its branches does.


X, W = (jax.ShapeDtypeStruct((64, 64), jnp.float32),) * 2
PREDICATE = jax.ShapeDtypeStruct((), bool)
PINS = {"[1]": (None, "x"), "[2]": ("x", None), "result": (None, None)}
EIGHT = MeshShape(("x",), (8,))


def product(x: Any, w: Any) -> Any:
    return x @ w  # sums over devices of a whole matrix


def total(x: Any, w: Any) -> Any:
    return jnp.zeros_like(x) + jnp.sum(x, 1, keepdims=True)  # and of one number for each row


def sent(f: Callable[[Any, Any, Any], Any]) -> float:
    settings = te.Settings(work=0.1, recompute=0, forms=0)
    program = te.trace(f, PREDICATE, X, W)
    front = te.optimize(program, "cpu:8", mesh_shapes=[EIGHT], pins=PINS, settings=settings)
    plan = front.best("wire_bytes")
    assert sum(c.wire_bytes * c.count for c in plan.collectives) == plan.costs.wire_bytes
    return plan.costs.wire_bytes


@pytest.mark.slow
def test_a_conditional_sends_what_its_dearest_branch_does() -> None:
    """Whichever of them is written first."""
    alone = [sent(lambda p, x, w, of=of: of(x, w)) for of in (product, total)]
    assert alone[0] > alone[1] > 0
    for first, second in ((product, total), (total, product)):
        either = sent(lambda p, x, w, a=first, b=second: jax.lax.cond(p, a, b, x, w))
        assert either == pytest.approx(alone[0])


# The certificate counts what a kernel overwrites, and what lies turned, as the search does.


QUICK = te.Settings(work=0.2, forms=0, recompute=0, workers=1, merge=False)


@pytest.mark.parametrize(("axis", "arrays"), [(0, 3), (1, 4)])
def test_a_kernel_that_reduces_its_result_by_rows_overwrites_nothing(
    axis: int, arrays: int
) -> None:
    """Of columns, which another kernel reduces, it may; a plan of which the certificate says
    something else than the search is left out, with a warning."""
    n = 1024

    def f(x: Any, w: Any, v: Any) -> Any:
        y = (x @ w) * x
        return y.sum(axis), y @ v

    square = jax.ShapeDtypeStruct((n, n), jnp.float32)
    program = te.trace(f, square, square, jax.ShapeDtypeStruct((n, 8), jnp.float32))
    whole = {f"[{k}]": (None, None) for k in range(3)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front = te.optimize(
            program, "h100:2", mesh_shapes=[MeshShape(("x",), (2,))], pins=whole, settings=QUICK
        )
    least = min(p.costs.peak_bytes for p in front)
    assert least == pytest.approx(arrays * 4 * n * n, rel=0.02)


def test_what_is_written_into_on_the_way_is_no_array_to_write_over() -> None:
    """Of an operand that is made in the kernel that updates it there is no array."""
    n = 1024

    def f(x: Any, i: Any) -> Any:
        return ((x - 1.0).T.at[i].add(1.0).T,)

    square, rows = jax.ShapeDtypeStruct((n, n), jnp.float32), jax.ShapeDtypeStruct((8,), jnp.int32)
    mesh = MeshShape(("x",), (2,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front = te.optimize(te.trace(f, square, rows), "h100:2", mesh_shapes=[mesh], settings=QUICK)
    assert min(p.costs.peak_bytes for p in front) <= 2.1 * 4 * n * n


def convolved(x: Any, k: Any) -> Any:
    """Twice along its second dim, whose elements lie along no lanes in between."""
    dims = ("NHWC", "HWIO", "NHWC")
    for _ in range(2):
        x = lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)
    return x


def activated(x: Any, w: Any) -> Any:
    """A product of which only its own kernel reads."""
    return jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ("fn", "shapes", "arrays"),
    [
        (convolved, [(8, 128, 16, 4), (3, 3, 4, 4)], 17),
        (activated, [(1024, 1024), (1024, 1024)], 3),
    ],
)
def test_what_tpus_hold_of_windows_and_products_is_certified(
    fn: Any, shapes: list[tuple[int, ...]], arrays: int
) -> None:
    """At least so many times what the first argument takes: what enters, and what stands between
    or leaves. Every device does all."""
    program = te.trace(fn, *[jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes])
    whole = {"[0]": (None,) * len(shapes[0]), "[1]": (None,) * len(shapes[1])}
    pins = whole | {"result": whole["[0]"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front = te.optimize(
            program, "v5e:2", mesh_shapes=[MeshShape(("x",), (2,))], pins=pins, settings=QUICK
        )
    most = max(p.costs.peak_bytes for p in front) / (4 * prod(shapes[0]))
    assert arrays <= most < 1.5 * arrays


def test_a_sum_scattered_along_channels_is_turned_before() -> None:
    cut = (None, None, None, "x")

    def f(x: Any, k: Any) -> Any:
        dims = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, k, (1, 1), "SAME", dimension_numbers=dims)

    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((16, 32, 32, 64), (3, 3, 64, 64))]
    pins = {"[0]": cut, "[1]": (None, None, "x", None), "result": cut}
    mesh = MeshShape(("x",), (8,))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        front = te.optimize(
            te.trace(f, *given), "h100:8", mesh_shapes=[mesh], pins=pins, settings=QUICK
        )
    target, block = te.load_target("h100:8"), 4.0 * 16 * 32 * 32 * 64
    alone = float(collective_seconds("reduce_scatter", block, (0,), mesh, target))
    scattered = [
        (plan, part)
        for plan in front
        for part in cost_parts(plan)
        if part.kind == "collective" and "reduce_scatter" in part.name
    ]
    assert scattered
    for _, part in scattered:
        assert part.seconds == pytest.approx(alone + turning_seconds(block, target))


@pytest.mark.parametrize("target", ["cpu:1", "h100:1", "v5e:1"])
@pytest.mark.parametrize(
    ("fn", "arrays"),
    [
        (lambda s: s.T, 2),  # compilers turn it into another array and copy that back
        (lambda s: s.T.T, 1),
        (lambda s: s + 1, 1),
        (lambda s: s, 1),
    ],
)
def test_a_state_that_is_turned_stands_beside_what_it_was(
    target: str, fn: Any, arrays: int
) -> None:
    square = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    program = te.trace(fn, square, donate_argnums=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = te.optimize(program, target, settings=QUICK).best("peak_bytes")
    assert plan.costs.peak_bytes == pytest.approx(arrays * 4 * 1024**2, rel=0.01)
    if target == "h100:1":
        compiled = te.compile(plan, h100s()[:1]).compile().memory_analysis()
        held = compiled.argument_size_in_bytes + compiled.temp_size_in_bytes
        assert plan.costs.peak_bytes == pytest.approx(held, rel=0.01)
