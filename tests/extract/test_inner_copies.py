"""Copies inside kernels: one collective for all operands of a sum, and of what is smaller than
what is read for it and made of it; planned as compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tapestry_egg as te
from tapestry_egg.errors import ExtractError
from tapestry_egg.extract.certify.certificate import ground_of
from tapestry_egg.extract.certify.recount import Walk
from tapestry_egg.extract.choices import inner_copies
from tapestry_egg.extract.choices.inner_copies import InnerCopies
from tapestry_egg.extract.front.notes import note
from tapestry_egg.graph.ids import FlatId
from tapestry_egg.graph.layout import Layout, MeshShape
from tapestry_egg.plans.plan import Change
from tapestry_egg.rules.language.book import load_books
from tapestry_egg.runtime import compare, compile
from tapestry_egg.schedule.flatten import FlatProgram
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.units import Unit, two_kernels
from tapestry_egg.shard.encode import encode
from tapestry_egg.shard.strategies import saturate
from tests.extract.test_front import RULES, scheduled, traced

ROWS, DEEP = 1024, 2048
MESH = [MeshShape(("x",), (8,))]


def wave(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.sin(x @ w + y @ v)


def layer(x: jax.Array, w: jax.Array, y: jax.Array, v: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.relu(x @ w + y @ v + b)


def cell(h: jax.Array, u: jax.Array, x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
    """A step of a recurrent network."""
    return jnp.tanh(b + h @ u + x @ w)


def shapes(biased: bool) -> list[tuple[int, ...]]:
    return [(ROWS, DEEP), (DEEP, ROWS)] * 2 + [(ROWS,)] * biased


@cache
def front(function: Callable[..., jax.Array], biased: bool) -> te.Front:
    """Both products cut along what they sum over."""
    cut = [(None, "x"), ("x", None)]
    program = te.trace(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes(biased)))
    pins = {f"[{k}]": cut[k % 2] for k in range(4)}
    settings = te.Settings(work=0.5, merge=False, recompute=0, forms=0)
    return te.optimize(program, "h100:8", mesh_shapes=MESH, pins=pins, settings=settings)


@pytest.mark.slow
@pytest.mark.parametrize(("function", "biased"), [(wave, False), (layer, True), (cell, True)])
def test_one_reduce_scatter_combines_a_sum_of_products(
    function: Callable[..., jax.Array], biased: bool
) -> None:
    plan = front(function, biased)[0]
    moved = [(c.kind, c.wire_bytes * c.count) for c in plan.collectives]
    assert moved == [("reduce_scatter", ROWS * ROWS * 4 * 7 / 8)]
    rng = np.random.default_rng(0)
    given = [rng.normal(size=s).astype(np.float32) / 32 for s in shapes(biased)]
    run = compile(plan)
    np.testing.assert_allclose(np.asarray(run(*given)), function(*given), 1e-4, 1e-5)
    compared = compare(plan, run.compile())
    assert compared.equal
    # On CPUs nothing splits a product, for which the plan has memory; the rest is what XLA takes.
    scratch = sum(p.bytes for p in plan.peak().parts if p.kind == "scratch")
    assert plan.costs.peak_bytes - scratch <= 1.02 * compared.compiled_peak_bytes


def quantized(x: jax.Array, w: jax.Array) -> jax.Array:
    small = jnp.round(jnp.clip(x * 16.0, -127.0, 127.0)).astype(jnp.int8)
    return (small.astype(jnp.float32) / 16.0) @ w


def masked(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.where(x > 0.5, 1.0, -1.0) @ w


def rounded(x: jax.Array, w: jax.Array) -> jax.Array:
    return x.astype(jnp.bfloat16).astype(jnp.float32) @ w


@pytest.mark.slow
@pytest.mark.parametrize(("function", "size"), [(quantized, 1), (masked, 1), (rounded, 2)])
def test_what_is_gathered_is_what_a_kernel_makes_in_fewer_bytes(
    function: Callable[..., jax.Array], size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not the four bytes for every element that it reads, and makes of that."""

    def found() -> te.Front:
        given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes(False)[:2]]
        pins = {"[0]": (None, "x"), "[1]": (None, "x")}
        settings = te.Settings(merge=False, forms=0, recompute=0, workers=1)
        program = te.trace(function, *given)
        return te.optimize(program, "h100:8", mesh_shapes=MESH, pins=pins, settings=settings)

    plan = found().best("seconds")
    moved = [(c.kind, c.wire_bytes * c.count) for c in plan.collectives]
    assert moved == [("all_gather", ROWS * DEEP * size * 7 / 8)]
    rng = np.random.default_rng(0)
    given = [rng.normal(size=s).astype(np.float32) / 32 for s in shapes(False)[:2]]
    run = compile(plan)
    np.testing.assert_allclose(np.asarray(run(*given)), function(*given), 1e-4, 1e-4)
    compared = compare(plan, run.compile())
    assert compared.equal
    assert compared.compiled_peak_bytes <= 1.02 * plan.costs.peak_bytes
    monkeypatch.setattr(InnerCopies, "_may_be_sent", lambda self, i: False)
    frozen = found().best("seconds")
    assert frozen.costs.wire_bytes > 1.9 * plan.costs.wire_bytes
    assert frozen.costs.seconds > 1.1 * plan.costs.seconds


def three_first(*given: jax.Array) -> jax.Array:
    x, w, y, v, z, u = given
    return jnp.sin(x @ w + y @ v + z @ u) * jnp.cos(x @ v + y @ w)


def three_last(*given: jax.Array) -> jax.Array:
    x, w, y, v, z, u = given
    two = jnp.cos(x @ v + y @ w)
    return two * jnp.sin(x @ w + y @ v + z @ u)


@pytest.mark.slow
@pytest.mark.parametrize("function", [three_first, three_last])
def test_of_two_sums_in_a_kernel_the_one_is_combined_that_saves_more(
    function: Callable[..., jax.Array],
) -> None:
    """Of three products; those of the other are combined each alone, which is told: most of such
    values are of a program that makes two products as one, and slices it."""
    cut = [(None, "x"), ("x", None)]
    given = [jax.ShapeDtypeStruct(s, jnp.float32) for s in [(ROWS, DEEP), (DEEP, ROWS)] * 3]
    found = te.optimize(
        te.trace(function, *given),
        "h100:8",
        mesh_shapes=MESH,
        pins={f"[{k}]": cut[k % 2] for k in range(6)},
        settings=te.Settings(merge=False, work=0.5, recompute=0, forms=0, workers=1),
    )
    moved = [(c.kind, c.wire_bytes * c.count) for c in found[0].collectives]
    assert moved == [("reduce_scatter", ROWS * ROWS * 4 * 7 / 8)] * 3
    assert note("kernel-collectives", 8) in found.notes


@pytest.mark.slow
def test_without_inner_copies_every_operand_is_combined(monkeypatch: pytest.MonkeyPatch) -> None:
    free = front(wave, False)[0]
    monkeypatch.setattr(InnerCopies, "of", lambda self, u: ())
    frozen = front.__wrapped__(wave, False)[0]
    assert frozen.costs.wire_bytes == 2 * free.costs.wire_bytes
    assert frozen.costs.seconds > 1.1 * free.costs.seconds
    # What the plan keeps of it is enough to be certified: a kernel in two parts, one sum between.
    walk = Walk(free, ground_of(free))
    walk.certificate()
    ((_, two),) = walk.in_two.items()
    assert two.move.combines and not two.move.need.partial
    told = sum(row.seconds for key in ("kernel", "collective") for row in free.costs_by(key))
    assert told == pytest.approx(free.costs.seconds)


def test_a_copy_inside_a_kernel_that_sends_nothing_is_refused() -> None:
    """The certificate knows by itself what may be copied inside a kernel: a slice is part of it."""
    plan = front(wave, False)[0]
    ground, body = ground_of(plan), plan.body
    (v,) = [v for v, have, _ in body.copies if have.partial]
    (add,) = [k for k, op in enumerate(body.graph.operations) if v in op.outputs]
    whole, cut = Layout(((), ())), Layout(((0,), ()))
    strategies = list(body.strategies)
    made = strategies[add]
    strategies[add] = replace(made, needs=(whole,) * len(made.needs), gives=(whole,))
    steps = {(v, whole, cut): (Change("slice", (0,), 0),)}
    other = replace(plan, body=replace(body, strategies=tuple(strategies), copies=steps))
    with pytest.raises(ExtractError, match="copied inside a kernel"):
        Walk(other, ground).certificate()


def test_sums_of_what_every_reader_computes_again_are_counted() -> None:
    def read_twice(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        h = jnp.sin(x @ w + x @ v)
        return h * 2.0, jnp.exp(h).sum(1)

    plan_schedule = scheduled(traced(read_twice, ((64, 64),) * 3, {}))
    within = fusion(plan_schedule).within
    found = saturate(encode(plan_schedule.program, MeshShape(("x",), (4,))), load_books(RULES))
    sums = InnerCopies(plan_schedule, found, {})
    assert sum(within) == sums.others == 1
    assert sums.of(within.index(True)) == ()


@pytest.mark.parametrize("products", [0, 1, 2])
def test_a_long_kernel_is_run_as_two_only_where_two_reads_may_be_partial(
    products: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To try it at every member takes as long as the square of their number."""

    def long(x: jax.Array, w: jax.Array, v: jax.Array) -> jax.Array:
        y = x @ w if products else x
        z = x @ v if products == 2 else v
        for _ in range(100):
            y = jnp.sin(y + z)
        return y

    tried: list[int] = []

    def two(program: FlatProgram, unit: Unit, value: FlatId) -> tuple[Unit, Unit] | None:
        tried.append(value)
        return two_kernels(program, unit, value)

    monkeypatch.setattr(inner_copies, "two_kernels", two)
    plan = scheduled(traced(long, ((64, 64),) * 3, {}))
    found = saturate(encode(plan.program, MeshShape(("x",), (4,))), load_books(RULES))
    sums = InnerCopies(plan, found, {})
    assert any([sums.of(u) for u in range(len(plan.units))]) is bool(tried) is (products == 2)


def turned(x: jax.Array, w: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    a = x @ w
    return jnp.sin(a + (x @ v).T), a


#: A sum of two partial operands, and whether it takes the place of one of them.
SUMS: dict[str, tuple[Callable[..., tuple[jax.Array, ...]], bool]] = {
    "read by nothing else": (lambda x, w, v: (jnp.sin(x @ w + x @ v),), True),
    "one read later": (lambda x, w, v: (jnp.sin((a := x @ w) + x @ v), a), True),
    "both read later": (lambda x, w, v: (jnp.sin((a := x @ w) + (b := x @ v)), a, b), False),
    "one turned": (lambda x, w, v: (jnp.sin(x @ w + (x @ v).T),), False),
    "one turned, the other read later": (turned, False),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_takes_the_place_of_what_nothing_reads_any_more(name: str) -> None:
    function, over = SUMS[name]
    plan = scheduled(traced(function, ((64, 64),) * 3, {}))
    found = saturate(encode(plan.program, MeshShape(("x",), (4,))), load_books(RULES))
    sums = InnerCopies(plan, found, {})
    (one,) = (s for u in range(len(plan.units)) for s in sums.of(u))
    assert one.over is over
