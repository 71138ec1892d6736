"""What single operations are promised to take on an H100, beside what they took there.

The seconds were measured on one H100 80GB HBM3 (JAX 0.11.2, by the clock, calls one after another;
benchmarks/README.md, "One H100").
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.costs import kernel_seconds
from tapestry_egg.machine.split_products import split_scratch
from tapestry_egg.machine.tables.gemm import Convolved, Gemm
from tapestry_egg.machine.tables.kernel_rates import convolution_rate
from tapestry_egg.machine.target import Target, load_target
from tapestry_egg.metakernels.signatures.signature import evaluate
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.one_device import program_seconds

F32, BF16, I32, I8, C64 = jnp.float32, jnp.bfloat16, jnp.int32, jnp.int8, jnp.complex64
FP8 = jnp.float8_e4m3fn


def array(*shape: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def promised(function: Callable[..., Any], *types: Any, target: str = "h100:1") -> float:
    """Seconds of the quickest plan of the operations that are written, as they were measured."""
    books = ["sharding", "collectives"]
    plan = te.optimize(te.trace(function, *types), target=target, books=books).best("seconds")
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
    settings = te.Settings(work=0.1, forms=0, recompute=0)
    program = te.trace(five(branches), p, x)
    plan = te.optimize(program, f"h100:{devices}", settings=settings).best("seconds")
    once = promised(five(lambda p, x: jnp.sort(x)), p, x, target=f"h100:{devices}")
    assert plan.costs.seconds == pytest.approx(once, rel=0.1)  # (1 + 2 + 0) / 3 of them
    table = plan.costs_by("kernel")
    assert sum(row.seconds for row in table.parts) == pytest.approx(plan.costs.seconds)
    counts = [row.count for row in table.parts if "sort" in row.name]
    assert counts == [pytest.approx(5 / 3)] * 3


# Convolutions at the rates that were measured of as many channels.


CHANNELS_LAST = ("NHWC", "HWIO", "NHWC")


def convolution(
    dtype: str, batch: int, size: int, read: int, made: int, window: int, stride: int = 1
) -> tuple[Callable[..., jax.Array], jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """`batch` square images of `size`, and the shapes of its two arguments."""

    def apply(x: jax.Array, w: jax.Array) -> jax.Array:
        strides = (stride, stride)
        return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=CHANNELS_LAST)

    image = jax.ShapeDtypeStruct((batch, size, size, read), dtype)
    return apply, image, jax.ShapeDtypeStruct((window, window, read, made), dtype)


@pytest.mark.parametrize(
    ("arguments", "measured"),
    [
        (("bfloat16", 334, 56, 64, 128, 3, 2), 184e-6),
        (("float32", 167, 56, 64, 128, 3, 2), 182e-6),
        (("bfloat16", 64, 224, 3, 64, 7, 2), 492e-6),
        (("bfloat16", 334, 56, 32, 128, 3), 182e-6),
        (("float32", 167, 56, 32, 128, 3), 167e-6),
    ],
)
def test_convolutions_that_no_table_has_take_what_they_took(
    arguments: tuple[str, int, int, int, int, int, int], measured: float
) -> None:
    """On one H100, JAX 0.11.2. Where a stride of 2 has nothing to pad on one side, XLA pads the
    image by a kernel of its own: more than half of the time of the first two."""
    f, *types = convolution(*arguments)
    planned = program_seconds(te.trace(f, *types).graph, load_target("h100:1"))
    assert planned == pytest.approx(measured, rel=0.2)


def test_few_channels_are_slow() -> None:
    """The tables' products have 256 columns at least; one of 8 would take a twentieth of this."""
    f, *types = convolution("bfloat16", 1024, 56, 8, 8, 3)
    planned = program_seconds(te.trace(f, *types).graph, load_target("h100:1"))
    assert planned == pytest.approx(346e-6, rel=0.05)  # measured


def test_rates_are_of_the_channels_of_a_device() -> None:
    channels = np.array([64.0, 8.0, 64.0])
    rates = convolution_rate(Convolved(channels * 0, channels, channels * 0), "bfloat16", "h100")
    assert rates is not None
    assert rates[0] == rates[2] > 10 * rates[1]
    one = convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "h100")
    assert one == rates[1]
    assert convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "a100") is None
    assert convolution_rate(Convolved(channels * 0, channels, channels), "bfloat16", "v5e") is None


def test_a_gradient_of_a_strided_convolution_multiplies_as_much_as_that() -> None:
    """Nothing is multiplied between the elements of what is dilated."""
    f, x, w = convolution("float32", 4, 16, 8, 8, 4, 2)

    def gradient(w: jax.Array, g: jax.Array) -> jax.Array:
        (found,) = jax.linear_transpose(lambda x: f(x, w), x)(g)
        return found

    def flops(graph: te.Program) -> float:
        (s,) = (i.signature for i in flatten(graph.graph, {}).instances if i.signature.contracts)
        assert s.gemm is not None
        assert s.convolved(s.extents) is not None
        return evaluate(s.flops, s.extents)

    forward = flops(te.trace(f, x, w))
    assert forward == 2.0 * 4 * 8 * 8 * 8 * 8 * 16
    assert flops(te.trace(gradient, w, jax.eval_shape(f, x, w))) == forward


def test_plans_take_on_each_device_what_its_channels_take() -> None:
    """The search has the certificate's seconds, which finds windows and channels itself."""
    f, *types = convolution("bfloat16", 64, 56, 8, 8, 3)
    settings = te.Settings(work=0.1, recompute=0, forms=0, workers=1)
    front = te.optimize(te.trace(f, *types), "h100:8", settings=settings)
    (part,) = [p for p in front.best().costs_by("kernel").parts if "conv_general_dilated" in p.name]
    rate = convolution_rate(Convolved(0.0, 8.0, 0.0), "bfloat16", "h100")
    assert rate is not None
    launch = load_target("h100:8").launch_seconds
    assert part.seconds == pytest.approx(2.0 * 8 * 56 * 56 * 8 * 8 * 9 / rate + launch, rel=0.05)


# Products whose sum XLA's compiler for GPUs splits, against what it chose.


#: Batch, m, n, k, dtype, and into how many parts jaxlib 0.10.2 splits k, compiling for an H100
#: ahead of time (the shapes before and after its pass splitk-rewriter).
CHOSEN = [
    (1, 1024, 256, 128, "float32", 1),
    (8, 512, 176, 768, "bfloat16", 1),
    (2, 768, 1024, 4096, "float32", 1),
    (1, 4096, 512, 16384, "float32", 1),
    (1, 2048, 128, 352, "bfloat16", 2),
    (1, 768, 2048, 8192, "bfloat16", 2),
    (2, 128, 4096, 8192, "float32", 2),
    (1, 512, 16, 352, "float32", 4),
    (1, 4096, 64, 1024, "float32", 4),
    (2, 256, 1024, 16384, "float32", 4),
    (1, 320, 256, 1408, "float32", 8),
    (8, 320, 64, 16384, "bfloat16", 8),
    (1, 512, 176, 3072, "float32", 16),
    (2, 128, 64, 4096, "bfloat16", 32),
    (1, 64, 64, 8192, "float32", 64),
    (1, 16, 64, 16384, "bfloat16", 64),
]


def scratch(target: str, *rows: tuple[int, int, int, int, str, int]) -> list[float]:
    costs = load_target(target).split_k
    assert costs is not None
    found = []
    for b, m, n, k, dtype, _ in rows:
        sizes = (np.array(float(x)) for x in (b, m, n, k))
        found.append(float(split_scratch(Gemm(*sizes, dtype, dtype, dtype), costs)))
    return found


def test_parts_are_those_that_the_compiler_makes() -> None:
    """Parts are stored in float32."""
    wanted = [parts * b * m * n * 4.0 * (parts > 1) for b, m, n, _, _, parts in CHOSEN]
    assert scratch("h100:8", *CHOSEN) == wanted


def test_many_products_at_once_are_as_each_alone() -> None:
    costs = load_target("h100:8").split_k
    rows = [r for r in CHOSEN if r[4] == "float32"]
    sizes = np.array([r[:4] for r in rows], dtype=float).T
    dtypes = ("float32",) * 3
    assert costs is not None
    assert split_scratch(Gemm(*sizes, *dtypes), costs).tolist() == scratch("h100:8", *rows)


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_integers_are_not_split(dtype: str) -> None:
    assert scratch("h100:8", (1, 64, 64, 8192, dtype, 1)) == [0.0]


@pytest.mark.parametrize("target", ["v5e:2x4", "cpu:8"])
def test_other_compilers_split_nothing(target: str) -> None:
    assert load_target(target).split_k is None


# What products of matrices keep up within a device's power.


def seconds(target: Target, m: int, n: int, k: int) -> float:
    gemm = Gemm(1.0, float(m), float(n), float(k), "bfloat16", "bfloat16", "bfloat16")
    return float(kernel_seconds(2.0 * m * n * k, 0.0, "bfloat16", target, True, gemm))


@pytest.mark.parametrize("name", ["h100", "h200", "p5"])
def test_products_again_and_again_take_what_the_power_lets_them(name: str) -> None:
    """One H100 drew its 700 W while products of 8192 took 1.50 to 1.55 ms each, those of 16384 x
    4096 x 16384 took 3.10 ms; what fills the cores less runs as fast as in the tables."""
    target = load_target(f"{name}:1")
    table = replace(target, sustained=())
    assert seconds(table, 8192, 8192, 8192) < 1.42e-3
    assert 1.5e-3 < seconds(target, 8192, 8192, 8192) < 1.55e-3
    assert seconds(target, 16384, 16384, 4096) == pytest.approx(3.10e-3, rel=0.01)
    assert seconds(target, 512, 512, 512) == seconds(table, 512, 512, 512)
