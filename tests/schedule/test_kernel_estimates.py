"""What takes longer to compute in each of its readers than to store is stored."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.machine.compiler_choices import FusionCosts
from tapestry_egg.machine.target import load_target
from tapestry_egg.runtime.lower.lower import LocalBody, lower
from tapestry_egg.schedule.inlining import KernelEstimate, fusion
from tests.schedule.test_lifetimes import h100s, made_by, scheduled

X = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
H100 = load_target("h100:1").fusing
#: A flop takes as long as a byte of memory, and a launch as long as a thousand.
EVEN = FusionCosts(1, 1, 1e9, 2, 1e9)


def curved(x: jax.Array, times: int) -> jax.Array:
    """So many exponentials of an array, one after another."""
    for _ in range(times):
        x = jnp.exp(-x)
    return x


def three_sums(x: jax.Array, times: int) -> Any:
    y = curved(x, times)
    return y.sum(1), y.max(1), y.prod(1)


@pytest.mark.parametrize(("times", "within"), [(1, True), (6, False)])
def test_what_is_long_to_compute_is_stored_for_several_readers(times: int, within: bool) -> None:
    """Stored, an array is read and written, then read thrice, 20 bytes of each element; computed
    in each reader, thrice the time of 4 bytes, or of the exponentials, about 4 bytes each."""
    plan = scheduled(lambda x: three_sums(x, times), X)
    u, _ = made_by(plan, "exp")
    assert fusion(plan, costs=H100).within[u] is within


def test_what_is_small_is_computed_again_whatever_it_takes() -> None:
    """A launch takes longer."""
    plan = scheduled(lambda x: three_sums(x, 6), jax.ShapeDtypeStruct((64, 64), jnp.float32))
    u, _ = made_by(plan, "exp")
    assert fusion(plan, costs=H100).within[u]


@pytest.mark.parametrize("between", [True, False])
def test_behind_a_kernel_it_is_computed_anew_anyway(between: bool) -> None:
    """Of two readers with a product between them each has a copy of its own."""

    def f(x: jax.Array, w: jax.Array) -> Any:
        y = curved(x, 6)
        first = y.sum(0)
        other = w * first
        if between:
            other = other @ w
        return (y * other).max(0), first

    plan = scheduled(f, X, X)
    u, _ = made_by(plan, "exp")
    assert fusion(plan, costs=H100).within[u] is between


def test_places_that_are_the_same_are_read_once() -> None:
    """A kernel that reads v and, at the same places, what is made of v; another one there, too."""
    v, w = FlatId(0), FlatId(1)
    reader = KernelEstimate(10.0, {v: {None: 1.0}, w: {None: 1.0}})
    made = reader.with_inside(w, KernelEstimate(5.0, {v: {None: 1.0}}))
    assert made == KernelEstimate(15.0, {v: {None: 1.0}})
    parts = KernelEstimate(10.0, {v: {None: 1.0}, w: {w: 0.5}})
    made = parts.with_inside(w, KernelEstimate(5.0, {v: {None: 1.0}}))
    assert made == KernelEstimate(12.5, {v: {None: 1.0, w: 0.5}})
    assert made.bytes_taken([4000, 4000], 96, EVEN) == 4096


def test_what_is_read_at_other_places_adds_up() -> None:
    """Two slices of w, each made of a quarter of x, of which the kernel reads an eighth itself."""
    w, x = FlatId(1), FlatId(2)
    reader = KernelEstimate(10.0, {w: {None: 1.0, w: 1.0}, x: {x: 0.125}})
    made = reader.with_inside(w, KernelEstimate(5.0, {x: {x: 0.25}}))
    assert made == KernelEstimate(20.0, {x: {x: 0.625}})
    assert made.bytes_taken([0, 0, 8000], 96, EVEN) == 5096


def test_a_kernel_takes_as_long_as_what_it_computes_or_moves() -> None:
    v = FlatId(0)
    assert EVEN.bytes_per_flop == 1.0 and EVEN.launch_bytes == 1000.0
    assert KernelEstimate(10.0, {v: {None: 1.0}}).bytes_taken([40], 20, EVEN) == 60.0
    assert KernelEstimate(90.0, {v: {None: 1.0}}).bytes_taken([40], 20, EVEN) == 90.0


@pytest.mark.parametrize(
    ("target", "times", "within"),
    [("h100", 1, True), ("b200", 1, False), ("h100", 3, False), ("mi355x", 3, True)],
)
def test_each_device_has_its_own_figures(target: str, times: int, within: bool) -> None:
    """Memory moves 3.9 bytes in the time of an exponential on an H100, 7.9 on a B200 and 1.7 on an
    MI355X; stored, an array takes 20 bytes of each element."""
    plan = scheduled(lambda x: three_sums(x, times), X)
    u, _ = made_by(plan, "exp")
    assert fusion(plan, costs=load_target(f"{target}:1").fusing).within[u] is within


def test_where_nothing_is_known_of_a_compiler_computing_again_is_free() -> None:
    plan = scheduled(lambda x: three_sums(x, 12), X)
    u, _ = made_by(plan, "exp")
    assert load_target("cpu:1").fusing is None
    assert fusion(plan).within[u]


@pytest.mark.parametrize(
    ("target", "times", "kept"), [("h100", 1, False), ("h100", 12, True), ("b200", 1, True)]
)
def test_lowering_has_in_memory_what_the_plan_has(target: str, times: int, kept: bool) -> None:
    program = te.trace(lambda x: three_sums(x, times), X)
    front = te.optimize(program, f"{target}:1", settings=te.Settings(forms=0, work=0.1))
    local = lower(front[0], platform="cuda")
    assert isinstance(local, LocalBody)
    made = [op.outputs[0] for op in local.body.graph.operations if op.kernel == "exp"]
    assert (made[-1] in local.stored) is kept


@pytest.mark.parametrize("times", [1, 12])
def test_xla_for_h100_stores_what_is_long_to_compute(times: int) -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices, wide = h100s()[:1], jax.ShapeDtypeStruct((65536, 256), jnp.float32)
    program = te.trace(lambda x: three_sums(x, times), wide)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01)


@pytest.mark.parametrize("rounds, heads, width", [(1024, 4, 32), (256, 16, 64)])
def test_xla_for_h100_stores_levels_of_a_prefix_whose_states_are_widened(
    rounds: int, heads: int, width: int
) -> None:
    """States of linear attention are products of what rounds are given, which is small: computing
    them anew at every level moves nothing, and takes longer than to store some levels."""
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, gate: jax.Array) -> jax.Array:
        def join(a: Any, b: Any) -> Any:
            return b[0] * a[0], b[0] * a[1] + b[1]

        given = gate[..., None, None], k[..., :, None] * v[..., None, :]
        return jnp.einsum("thd,thde->the", q, jax.lax.associative_scan(join, given)[1])

    devices, rows = h100s()[:1], jax.ShapeDtypeStruct((rounds, heads, width), jnp.float32)
    gates = jax.ShapeDtypeStruct((rounds, heads), jnp.float32)
    program = te.trace(attend, rows, rows, rows, gates)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.2)


def near(reduce: Any, few: int, axis: int) -> Any:
    """Of all pairs of points the differences, reduced over the few dims of a point, which come
    first or last; then a sum along one of both."""

    def f(x: jax.Array, y: jax.Array) -> jax.Array:
        apart = x[:, None] - y[None] if axis else x[:, :, None] - y[:, None]
        return jnp.exp(-reduce(apart * apart, axis=-axis)).sum(1)

    return f, *(of_points(n, few, axis) for n in (4096, 8192))


def of_points(many: int, few: int, axis: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((many, few) if axis else (few, many), jnp.float32)


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("few", [2, 3, 8, 15, 16, 33])
@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, jnp.prod])
def test_what_reads_the_reduction_of_few_elements_makes_it(
    reduce: Any, few: int, axis: int
) -> None:
    plan = scheduled(*near(reduce, few, axis))
    u, _ = made_by(plan, f"reduce_{reduce.__name__}")
    assert fusion(plan, costs=H100).within[u] is (few < 16)


def test_the_reduction_of_few_elements_is_stored_for_what_reads_arrays() -> None:
    def f(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(x * x, axis=-1) @ w

    plan = scheduled(
        f,
        jax.ShapeDtypeStruct((64, 64, 3), jnp.float32),
        jax.ShapeDtypeStruct((64, 64), jnp.float32),
    )
    u, _ = made_by(plan, "reduce_sum")
    assert not fusion(plan, costs=H100).within[u]


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("few", [3, 8, 16])
def test_xla_for_h100_reduces_few_elements_where_they_are_read(few: int, axis: int) -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices = h100s()[:1]
    front = te.optimize(
        te.trace(*near(jnp.sum, few, axis)), "h100:1", settings=te.Settings(forms=0, work=0.1)
    )
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    assert front[0].costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01, abs=1 << 20)


#: Functions of a distance, and whether a few readers of one compute it each.
DEAR: dict[str, tuple[Any, bool]] = {
    "power": (lambda r: r**-1.5, True),
    "exponential": (lambda r: jnp.exp(-r), True),
    "root": (lambda r: 1.0 / (r * jnp.sqrt(r)), True),
    "hyperbolic": (jnp.tanh, True),
    "sine": (jnp.sin, True),
    "logarithm": (jnp.log, True),
    "quotient": (lambda r: 1.0 / r, False),
}


def pulling(of: Any, n: int = 4096) -> Any:
    """Forces between all pairs of points, which are a function of their distance, repeated along
    the three dims of a point, times what is between them."""

    def f(x: jax.Array) -> jax.Array:
        apart = x[None] - x[:, None]
        return jnp.sum(apart * of(jnp.sum(apart * apart, -1) + 0.01)[..., None], 1)

    return f, jax.ShapeDtypeStruct((n, 3), jnp.float32)


@pytest.mark.parametrize("name", DEAR)
def test_what_is_long_to_compute_is_not_computed_for_each_of_a_few(name: str) -> None:
    of, stored = DEAR[name]
    plan = scheduled(*pulling(of))
    u, _ = made_by(plan, "reduce_sum")
    assert fusion(plan, costs=H100).within[u] is not stored


@pytest.mark.parametrize("name", DEAR)
def test_xla_for_h100_stores_what_is_long_to_compute_and_repeated(name: str) -> None:
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    devices, brief = h100s()[:1], te.Settings(front=False, work=0.1)
    (plan, *_) = te.optimize(te.trace(*pulling(DEAR[name][0])), "h100:1", settings=brief)
    compiled = hlo_stats(te.compile(plan, devices).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.01, abs=1 << 20)


BOTH = jax.ShapeDtypeStruct((2048, 3), jnp.float32)
LARGE = jax.ShapeDtypeStruct((1024, 1024, 8), jnp.float32)


def both_ways(s: jax.Array) -> tuple[jax.Array, jax.Array]:
    return s.sum(0), s.sum(1)


#: Reductions of few elements that are stored: of large arrays, of what no sum is; and what is long
#: to compute and read by sums of rows and of columns.
STORED: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "of a large array": (lambda x: jnp.tanh(x.sum(-1)).sum(0), (LARGE,)),
    "means of a large array": (
        lambda x: jnp.tanh(x.mean((2, 4))).sum(0),
        (jax.ShapeDtypeStruct((64, 32, 2, 32, 2, 64), jnp.float32),),
    ),
    "places": (lambda x: (jnp.argmax(jnp.sin(x), -1) * 2).sum(0), (LARGE,)),
    "of one's own": (
        lambda x: jnp.tanh(
            lax.reduce(x, jnp.float32(0), lambda a, b: a + b - a * b * 0.5, (2,))
        ).sum(0),
        (LARGE,),
    ),
    "read both ways": (
        lambda x, y: both_ways(jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1))),
        (BOTH, BOTH),
    ),
    "a product read both ways": (lambda x, y: both_ways(jnp.exp(x @ y.T)), (BOTH, BOTH)),
    "a softmax of a product": (lambda x, y: jax.nn.softmax(x @ y.T, 1).sum(0), (BOTH, BOTH)),
}


@pytest.mark.parametrize("name", STORED)
def test_xla_for_h100_stores_other_reductions_of_few_elements(name: str) -> None:
    """Those of places take XLA some scratch besides."""
    fn, types = STORED[name]
    brief = te.Settings(front=False, work=0.1)
    plan, *_ = te.optimize(te.trace(fn, *types), "h100:1", settings=brief)
    from tapestry_egg.runtime.measure.hlo import hlo_stats

    compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
    assert plan.costs.peak_bytes == pytest.approx(compiled.peak_bytes, rel=0.12)
