"""What single operations are promised to take on an H100, beside what they took there.

The seconds were measured on one H100 80GB HBM3 (JAX 0.11.2, by the clock, calls one after another;
benchmarks/README.md, "One H100").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.machine.costs import kernel_seconds
from tapestry_egg.machine.tables.gemm import Gemm
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.flatten import flatten

F32, BF16, I32, I8, C64 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.complex64
FP8 = jnp.float8_e4m3fn


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def promised(function: Callable[..., Any], *types: Any, target: str = "h100:1") -> float:
    """Seconds of the quickest plan."""
    plan = te.optimize(te.trace(function, *types), target=target).best("seconds")
    return float(plan.costs.seconds)


def solved(a: Any, b: Any) -> Any:
    return jax.lax.linalg.triangular_solve(a, b, left_side=True, lower=True)


def pooled(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME").sum()


def averaged(x: Any) -> Any:
    return jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 7, 7, 1), (1, 1, 1, 1), "SAME")


def depthwise(x: Any, w: Any) -> Any:
    names = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(
        x, w, (1,), "SAME", dimension_numbers=names, feature_group_count=512
    )


def highest(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, precision="highest")


# What, its arguments, microseconds measured, and how far the promise may be from them.
DECOMPOSITIONS = [
    (jax.lax.linalg.cholesky, [array(256, 256)], 86.5),
    (jax.lax.linalg.cholesky, [array(4096, 4096)], 1710),
    (jax.lax.linalg.cholesky, [array(512, 64, 64)], 148),
    (lambda x: jnp.linalg.qr(x)[0], [array(1024, 1024)], 4589),
    (lambda x: jnp.linalg.qr(x)[0], [array(512, 64, 64)], 2474),
    (jnp.linalg.eigh, [array(512, 512)], 4922),
    (jnp.linalg.eigh, [array(512, 32, 32)], 267),
    (jnp.linalg.svd, [array(512, 512)], 18879),
    (lambda x: jnp.linalg.svd(x, compute_uv=False), [array(512, 32, 32)], 549),
    (lambda x: jax.lax.linalg.lu(x)[0], [array(1024, 1024)], 2067),
    (lambda x: jax.lax.linalg.lu(x)[0], [array(512, 64, 64)], 163),
    (solved, [array(4096, 4096), array(4096, 4096)], 2877),
    (solved, [array(4096, 4096), array(4096, 1)], 321),
    (solved, [array(1024, 1024), array(1024, 64)], 237),
    (jnp.linalg.solve, [array(1024, 1024), array(1024, 64)], 2544),
    (jnp.linalg.inv, [array(1024, 1024)], 2575),
]
PRODUCTS = [
    (highest, [array(4096, 4096)] * 2, 2717),
    (jnp.matmul, [array(2048, 2048, dtype=C64)] * 2, 305),
    (lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), [array(16, 512, 12, 64)] * 2, 137),
    (
        lambda x, y: jax.lax.dot(x, y, preferred_element_type=I32),
        [array(4096, 4096, dtype=I8)] * 2,
        234,
    ),
    (
        lambda x, y: jax.lax.dot(x, y, preferred_element_type=BF16),
        [array(4096, 4096, dtype=FP8)] * 2,
        223,
    ),
]
SORTS = [
    (jnp.sort, [array(8192, 8192)], 5525),
    (lambda x: jnp.sort(x, 0), [array(8192, 8192)], 11588),
    (jnp.sort, [array(1 << 24)], 688),
    (jnp.sort, [array(1 << 24, dtype=BF16)], 314),
    (jnp.sort, [array(1 << 24, dtype=I32)], 400),
    (jnp.argsort, [array(1 << 24)], 990),
    (jnp.argsort, [array(4096, 4096)], 1154),
    (lambda x: jax.lax.top_k(x, 50), [array(64, 50304)], 388),
]
SCATTERED = [
    (lambda x, i: x[i], [array(1 << 24), array(1 << 24, dtype=I32)], 395),
    (lambda x, i: x[i], [array(8192, 8192), array(8192, dtype=I32)], 158),
    (lambda x, i: x[:, i], [array(8192, 8192), array(8192, dtype=I32)], 133),
    (
        lambda x, i: jax.ops.segment_sum(x, i, 10000),
        [array(1000000, 64), array(1000000, dtype=I32)],
        146,
    ),
    (
        lambda x, i: jnp.zeros(1 << 20).at[i].add(x),
        [array(1 << 24), array(1 << 24, dtype=I32)],
        219,
    ),
    (
        lambda x, i: jnp.zeros((50304, 768), BF16).at[i].add(x),
        [array(16384, 768, dtype=BF16), array(16384, dtype=I32)],
        174,
    ),
    (lambda i: jnp.bincount(i, length=1000), [array(1 << 24, dtype=I32)], 1476),
]
OTHERS = [
    (jax.grad(pooled), [array(64, 128, 128, 64)], 602),
    (averaged, [array(64, 64, 64, 64)], 211),
    (depthwise, [array(16, 2048, 512), array(4, 1, 512)], 625),
    (jnp.fft.fft2, [array(16, 1024, 1024, dtype=C64)], 208),
    (jnp.fft.fft, [array(8192, 4099, dtype=C64)], 2356),
    (jax.scipy.special.gammaln, [array(8192, 8192)], 475),
    (jax.scipy.special.digamma, [array(8192, 8192)], 617),
    (lambda x: jax.lax.cumlogsumexp(x, 1), [array(4096, 4096)], 565),
    (lambda x: x.var(1), [array(8192, 8192)], 92),
    (lambda x: (x + 1, x * 2), [array(8192, 8192)], 281),
    (
        lambda p, x: jax.lax.cond(p > 0, jnp.sin, jnp.cos, x),
        [array(dtype=I32), array(8192, 8192)],
        185,
    ),
]


@pytest.mark.parametrize(
    ("function", "types", "microseconds"),
    [*DECOMPOSITIONS, *PRODUCTS, *SORTS, *SCATTERED, *OTHERS],
)
def test_promises_are_near_what_was_measured(
    function: Callable[..., Any], types: list[Any], microseconds: float
) -> None:
    assert promised(function, *types) == pytest.approx(microseconds * 1e-6, rel=0.36)


def test_decompositions_between_and_below_the_sizes_measured_go_by_their_columns() -> None:
    """Times of single matrices rise with the columns, and no size is quicker than a smaller one."""
    found = [promised(jnp.linalg.eigh, array(n, n)) for n in (32, 64, 128, 300, 512, 700, 1024)]
    assert found == sorted(found)
    assert 1.8 < found[3] / found[2] < 3  # 300 columns beside 128
    halves = [promised(jax.lax.linalg.cholesky, array(n, n)) for n in (64, 128)]
    assert halves[1] / halves[0] == pytest.approx(2.0, rel=0.2)


@pytest.mark.parametrize("target", ["a100:1", "b200:1", "v5e:1", "h100:1"])
def test_decompositions_that_no_table_has_wait_from_column_to_column(target: str) -> None:
    """A matrix in double precision, or on another device: at least a third of a microsecond for
    every column of each of its steps."""
    x = array(512, 512) if target != "h100:1" else array(512, 512, dtype=jnp.complex64)
    assert promised(lambda x: jax.lax.linalg.lu(x)[0], x, target=target) > 512 * 5 * 0.33e-6


def test_many_matrices_are_decomposed_side_by_side_where_jaxlib_has_them_so() -> None:
    """LU of square matrices runs side by side, other shapes one after the other."""
    square = promised(lambda x: jax.lax.linalg.lu(x)[0], array(512, 64, 64))
    others = promised(lambda x: jax.lax.linalg.lu(x)[0], array(512, 64, 65))
    assert others > 50 * square


@pytest.mark.parametrize(
    ("target", "high", "highest"),
    [("h100:1", 1.0, 7.2), ("v5e:1", 3.0, 6.0), ("cpu:1", 1.0, 1.0)],
)
def test_precisions_cost_what_a_device_makes_of_them(
    target: str, high: float, highest: float
) -> None:
    """An H100 computes high in TF32, as the default, and highest in float32; TPUs take three and
    six passes in bfloat16; CPUs know one precision."""
    machine = load_target(target)

    def seconds(precision: str) -> float:
        n = 4096.0
        gemm = Gemm(1.0, n, n, n, "float32", "float32", "float32", precision=precision)
        return float(kernel_seconds(2.0 * n**3, 0.0, gemm.dtype, machine, True, gemm))

    assert seconds("high") / seconds("") == pytest.approx(high, rel=0.05)
    assert seconds("highest") / seconds("") == pytest.approx(highest, rel=0.05)


def test_the_precision_of_a_whole_program_counts() -> None:
    x = array(4096, 4096)
    with jax.default_matmul_precision("highest"):
        every = promised(jnp.matmul, x, x)
    assert every == promised(highest, x, x) > 5 * promised(jnp.matmul, x, x)


def test_radix_sorts_are_those_that_xla_has_cub_do() -> None:
    """Of one line more than 22000 keys of 32 bits, of 53 lines or more those of more than 8192, of
    89 to 132 those of more than 4096; not along another dim than the minor one."""

    def form(function: Callable[..., Any], *shape: int) -> float:
        program = flatten(te.trace(function, array(*shape)).graph, {})
        (found,) = [x.signature.measured for x in program.instances if x.signature.measured]
        return found[0]

    assert [form(jnp.sort, n) for n in (22000, 22001)] == [0, 1]
    assert [form(jnp.sort, 64, n) for n in (8192, 8193)] == [0, 3]
    assert [form(jnp.sort, lines, 4097) for lines in (88, 89, 132, 133)] == [0, 3, 3, 0]
    assert form(lambda x: jnp.sort(x, 0), 50304, 256) == 0
    turned = promised(lambda x: jnp.sort(x, 0), array(50304, 256))
    assert turned > 2 * promised(jnp.sort, array(256, 50304))


def test_elements_that_are_read_here_and_there_take_lines_of_memory() -> None:
    """The wider what lies together, the less a byte of it takes, until it is a line of 64 bytes."""
    seconds = []
    for width in (1, 4, 16, 64):
        x = array((1 << 26) // width, width)
        seconds.append(promised(lambda x, i: x[i], x, array((1 << 24) // width, dtype=I32)))
    assert seconds[0] > 2 * seconds[1] > 2 * seconds[2]
    assert seconds[2] == pytest.approx(seconds[3], rel=0.15)


def test_adds_to_few_places_wait_for_one_another() -> None:
    counts = array(1 << 24, dtype=I32)
    found = [promised(lambda i, n=n: jnp.bincount(i, length=n), counts) for n in (100, 1000, 10**6)]
    assert found[0] == pytest.approx(10 * found[1], rel=0.1)
    assert found[2] < found[1] / 4


@pytest.mark.parametrize("devices", [1, 8])
def test_of_branches_one_runs_and_each_as_often_as_another(devices: int) -> None:
    """The mean of three branches, of which one does nothing, in a loop that runs five times; what
    the table of costs adds up to."""
    x = array(4096, 4096)

    def five(of: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda p, x: jax.lax.scan(lambda c, _: (of(p, c), None), x, length=5)[0]

    def branches(p: Any, x: Any) -> Any:
        # Sorted: no compiler computes both and selects.
        other = [lambda x: jnp.sort(x), lambda x: jnp.sort(jnp.sort(-x)), lambda x: x]
        return jax.lax.switch(p, other, x)

    p = array(dtype=I32)
    plan = te.optimize(te.trace(five(branches), p, x), target=f"h100:{devices}").best("seconds")
    once = promised(five(lambda p, x: jnp.sort(x)), p, x, target=f"h100:{devices}")
    assert plan.costs.seconds == pytest.approx(once, rel=0.1)  # (1 + 2 + 0) / 3 of them
    table = plan.costs_by("kernel")
    assert sum(row.seconds for row in table.parts) == pytest.approx(plan.costs.seconds)
    counts = [row.count for row in table.parts if "sort" in row.name]
    assert counts == [pytest.approx(5 / 3)] * 3
