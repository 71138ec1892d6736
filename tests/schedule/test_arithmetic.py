"""Kernels take no less time than the arithmetic of all that runs in them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.plans.plan import Plan
from tapestry_egg.runtime.emitted import emitted
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.schedule.traffic import Traffic
from tests.schedule.test_lifetimes import h100s, made_by, scheduled

N = 16384
POINTS = jax.ShapeDtypeStruct((N, 3), jnp.float32)
MASSES = jax.ShapeDtypeStruct((N,), jnp.float32)
H100 = load_target("h100:1")
RATE = H100.rate("float32", False)


def distances(p: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(-jnp.sum((p[None] - p[:, None]) ** 2, -1)), 1)


def products(p: jax.Array, m: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(p @ p.T), 1)


def softmax(p: jax.Array, m: jax.Array) -> jax.Array:
    return jax.nn.softmax(p @ p.T, -1) @ m


def summed(x: jax.Array) -> tuple[jax.Array, ...]:
    """Of one array, by two kernels; few flops of each element."""
    y = x * 2.0 + 1.0
    return jnp.sort(y + 1.0), jnp.max(y)


def repeated(times: int) -> Callable[..., Any]:
    """Four sums of one array, each of functions that are applied to it so many times."""

    def sums(x: jax.Array) -> list[jax.Array]:
        found = []
        for f in (jnp.tanh, jnp.sin, jnp.cos, jnp.exp):
            y = x
            for _ in range(times):
                y = f(y)
            found.append(y.sum())
        return found

    return sums


def fastest(fn: Callable[..., Any], target: str) -> Plan:
    program = te.trace(fn, POINTS, MASSES)
    return te.optimize(program, target, settings=te.Settings(front=False)).best("seconds")


@pytest.mark.parametrize("target", ["h100:1", "h100:8"])
@pytest.mark.parametrize("fn", [distances, products, softmax])
def test_sums_over_pairs_take_as_long_as_their_arithmetic(
    fn: Callable[..., Any], target: str
) -> None:
    """No pair is stored, and little is read: the flops of every device are what takes long."""
    plan = fastest(fn, target)
    assert plan.costs.peak_bytes < 4 * N * N / 8  # the pairs of one of eight devices
    once = plan.costs.flops / RATE
    assert once < plan.costs.seconds
    # Two kernels at most make the products of a softmax, and launches take little on one device.
    assert plan.costs.seconds < 1.6 * once or target != "h100:1"


@pytest.mark.parametrize("sums", [1, 2])
def test_what_two_kernels_compute_counts_for_each(sums: int) -> None:
    """The sum of each row is a kernel, and what that is taken off is summed by another one."""

    def fn(p: jax.Array, m: jax.Array) -> jax.Array:
        pairs = jnp.sum(p[:, None] * p, -1)
        found = jnp.sum(pairs, 1)
        return found if sums == 1 else jnp.sum(jnp.abs(pairs - found[:, None]), 1)

    plan = scheduled(fn, POINTS, MASSES)
    u, _ = made_by(plan, "reduce_sum")
    times = Traffic(plan, H100).exposed(plan.units[u], H100)
    assert times == pytest.approx(sums, rel=0.1)


def test_arithmetic_that_memory_hides_takes_nothing() -> None:
    plan = scheduled(summed, jax.ShapeDtypeStruct((1 << 24,), jnp.float32))
    traffic = Traffic(plan, H100)
    assert any(traffic.of(unit).within for unit in plan.units)
    assert not any(traffic.exposed(unit, H100) for unit in plan.units)


@pytest.mark.parametrize("times", [1, 20])
def test_sums_in_one_kernel_take_as_long_as_the_arithmetic_of_all(times: int) -> None:
    x = jax.ShapeDtypeStruct((1 << 24,), jnp.float32)
    program = te.trace(repeated(times), x)
    costs = te.optimize(program, "h100:1", settings=te.Settings(front=False)).best("seconds").costs
    memory = 4 * x.size / H100.hbm_bytes_per_second
    least = max(memory, costs.flops / RATE)
    assert least < costs.seconds < least + 10e-6  # and what launches take


def test_lowering_keeps_what_pairs_are_summed_to_out_of_memory() -> None:
    """XLA would make one kernel of a softmax, which reads its rows from memory."""
    plan = fastest(softmax, "h100:1")
    told = [
        str(jax.make_jaxpr(lower(plan, platform=platform))(POINTS, MASSES))
        for platform in ("cuda", "cpu")
    ]
    (greatest,) = re.findall(r"(\w+):\S+ = reduce_max", told[0])
    assert re.search(rf"optimization_barrier {greatest}\b", told[0])
    assert "optimization_barrier" not in told[1]


def test_xla_for_h100_does_so() -> None:
    plan = fastest(softmax, "h100:1")
    compiled = hlo_stats(te.compile(plan, h100s()[:1]).compile())
    assert compiled.peak_bytes < 4 * N * N / 8


def test_no_barrier_stores_what_kernels_compute_again() -> None:
    """Costs that rounds of a loop compute again, and what reads its result."""

    def transport(p: jax.Array, m: jax.Array) -> jax.Array:
        costs = jnp.sum((p[:, None] - p[None]) ** 2, -1)

        def step(f: jax.Array, _: None) -> tuple[jax.Array, None]:
            return -jax.nn.logsumexp(f[None] - costs, 1), None

        f, _ = jax.lax.scan(step, m, None, length=4)
        return jnp.sum(jnp.exp(f[:, None] + m[None] - costs) * costs)

    plan = fastest(transport, "h100:1")
    text = str(jax.make_jaxpr(lower(plan, platform="cuda"))(POINTS, MASSES))
    behind = re.findall(r"(.*) = optimization_barrier", text)
    assert behind and not any(f"[{N},{N}" in line for line in behind)


def test_barriers_wait_by_what_is_stored() -> None:
    """A product that reads what it computes, `tanh(x)`, and a gradient that is stored."""

    def step(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
        def loss(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
            return jnp.sum(jnp.tanh(x @ w + jnp.tanh(x) @ v.T) ** 2)

        found, (gx, gw, gv) = jax.value_and_grad(loss, (0, 1, 2))(x, w, v)
        return found, gx, w - gw - gv.T, v - gv

    wide, square = (jax.ShapeDtypeStruct((n, 256), jnp.float32) for n in (512, 256))
    settings = te.Settings(forms=0, work=0.1)
    whole = 0
    for plan in te.optimize(te.trace(step, wide, square, square), "h100:8", settings=settings):
        text = str(emitted(plan))
        for tanh in re.findall(r"(\w+):f32\[512,256\] = tanh a\n", text):
            whole += 1
            assert not re.search(rf" = optimization_barrier.*\b{tanh}\b", text)
    assert whole
