"""Loops as lowering spells them for GPUs: what is turned, sliced and stacked, and when."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback

import tapestry_egg as te
from tapestry_egg.graph.layout import MeshShape
from tapestry_egg.pipeline import Settings
from tapestry_egg.runtime import compare, compile
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.runtime.measure.hlo_text import parse
from tests.plans.plans import random_plan
from tests.runtime.lowered import MESH, equations, numbers, same


@pytest.mark.parametrize(
    ("body", "late"),
    [
        (lambda a, b, w: (a @ w, a @ b), True),  # the old a is read when the new one is there
        (lambda a, b, w: (a @ w, b @ w), False),
        (lambda a, b, w: (b, a @ b), False),  # what is handed over is copied anyway
    ],
)
def test_carries_are_written_when_all_are_there_if_one_is_read_late(
    body: Callable[..., Any], late: bool
) -> None:
    """Else XLA copies the old one for its late reader, and the next one as well."""

    def fn(x: Any, w: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return body(*c, w), None

        return lax.scan(step, (x, w), None, length=3)[0]

    arguments = (numbers(64, 64), numbers(64, 64, seed=1) / 8)
    for platform, wanted in (("cuda", late), ("cpu", False)):
        local = _looped(fn, arguments, platform)
        (loop,) = [
            e
            for e in jax.make_jaxpr(local)(*arguments).jaxpr.eqns
            if e.primitive.name in ("scan", "while")
        ]
        inner = loop.params["jaxpr"].jaxpr
        barriers = [e for e in inner.eqns if e.primitive.name == "optimization_barrier"]
        last = set(barriers[-1].outvars) if barriers else set()
        assert (sum(v in last for v in inner.outvars) == 2) == wanted
        for got, want in zip(jax.jit(local)(*arguments), jax.jit(fn)(*arguments), strict=True):
            same(got, want, 1e-3)


def test_what_is_cheap_is_made_again_for_a_second_product() -> None:
    """Else XLA makes it once, and holds it from the first product to the second."""

    def fn(x: Any, places: Any) -> Any:
        mask = jax.nn.one_hot(places, 64)
        sums = mask.T @ x
        return mask @ (sums @ sums)

    arguments = numbers(128, 64), np.arange(128) % 64
    found = _looped(fn, arguments, "cuda"), _looped(fn, arguments, "cpu")
    texts = [str(jax.make_jaxpr(f)(*arguments)) for f in found]
    lines = [[x for x in t.splitlines() if "optimization_barrier" in x] for t in texts]
    assert [any("i32[128]" in x for x in some) for some in lines] == [True, False]
    same(jax.jit(found[0])(*arguments)[0], jax.jit(fn)(*arguments), 1e-3)


def _looped(fn: Callable[..., Any], arguments: Any, platform: str) -> Callable[..., Any]:
    """The same of a program with loops, by a plan for one device."""
    front = te.optimize(
        te.trace(fn, *arguments),
        "h100:1",
        settings=te.Settings(work=0.1, recompute=0),
        books=["sharding", "collectives"],
    )
    return lower(front.best("seconds"), platform=platform)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_takes_slices_of_what_is_not_transposed(reverse: bool) -> None:
    """Else a transposed copy of all of it is in memory while the loop runs."""

    def fn(x: Any, w: Any) -> Any:
        def step(c: Any, given: Any) -> Any:
            a, b = given
            return jnp.tanh(c + a @ w + b), c

        blocks = x.reshape(16, 8, 32, 4).transpose(1, 0, 3, 2)
        return lax.scan(step, blocks[0], (blocks, blocks + 1.0), reverse=reverse)

    arguments = (numbers(128, 128), numbers(32, 32, seed=1))
    looped = _looped(fn, arguments, "cuda")
    turned = [
        e.outvars[0].aval.shape
        for e in equations(jax.make_jaxpr(looped)(*arguments).jaxpr)
        if e.primitive.name == "transpose"
    ]
    assert turned.count((16, 4, 32)) == 1  # a slice, inside the loop
    for got, wanted in zip(jax.jit(looped)(*arguments), jax.jit(fn)(*arguments), strict=True):
        same(got, wanted)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_loop_stacks_is_stacked_when_it_is_made(reverse: bool) -> None:
    """Else the slices of all stacks are in memory at the end of a round, beside the stacks."""

    def fn(x: Any, w: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            a = c @ w
            b = jnp.sin(a) @ w
            return jnp.tanh(b + row[0]), (a, c, row[0, :2], b, a.T)

        return lax.scan(step, x[0], x, reverse=reverse)

    arguments = (numbers(3, 64, 64), numbers(64, 64, seed=1))
    looped = _looped(fn, arguments, "cuda")
    jaxpr = jax.make_jaxpr(looped)(*arguments).jaxpr
    names = [e.primitive.name for e in equations(jaxpr)]
    products = [k for k, n in enumerate(names) if n == "dot_general"]
    writes = [k for k, n in enumerate(names) if n == "dynamic_update_slice"]
    assert len(writes) == 4  # two numbers are not worth it
    # What was carried in and the first product, before the second begins.
    assert sum(k < products[1] for k in writes) >= 2
    barriers = [k for k, n in enumerate(names) if n == "optimization_barrier"]
    assert any(writes[1] < k < products[1] for k in barriers)
    assert "iota" not in names  # a place read from an array costs a kernel, a counted one a copy
    got, wanted = jax.jit(looped)(*arguments), jax.tree.leaves(jax.jit(fn)(*arguments))
    for a, b in zip(got, wanted, strict=True):
        same(a, b)
    plain = jax.make_jaxpr(_looped(fn, arguments, "cpu"))(*arguments).jaxpr
    assert "dynamic_update_slice" not in [e.primitive.name for e in equations(plain)]


def test_stacks_that_are_alike_are_filled_one_by_one() -> None:
    """Of one array of zeros XLA makes the others by copying it, and reads as much as it writes."""

    def fn(x: Any, w: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            a = c @ w
            b = jnp.sin(a) @ w
            return jnp.tanh(b + row[0]), (a, b, jnp.cos(b))

        return lax.scan(step, x[0], x)

    arguments = (numbers(5, 64, 64), numbers(64, 64, seed=1))
    jaxpr = jax.make_jaxpr(_looped(fn, arguments, "cuda"))(*arguments).jaxpr
    maker = {v: e for e in equations(jaxpr) for v in e.outvars}
    fills = [
        maker[e.invars[0]]
        for e in equations(jaxpr)
        if e.primitive.name == "broadcast_in_dim" and e.outvars[0].aval.shape == (5, 64, 64)
    ]
    assert [e.primitive.name for e in fills] == ["optimization_barrier"] * 3
    # Barriers around the same are one to XLA, and so are arrays of the same number.
    assert len({tuple(map(str, e.invars)) for e in fills}) == 3


@pytest.mark.parametrize("length", [0, 3])
def test_a_loop_of_no_rounds_stacks_nothing(length: int) -> None:
    """Slices of some size are put into their stack as soon as they are there, if there are any."""
    x, w = numbers(3, 64, 64), numbers(64, 64, seed=1)

    def fn(x: Any, w: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            made = c @ w
            return jnp.tanh(made + row[0]), made

        return lax.scan(step, x[0], x[:length])

    found, wanted = jax.jit(_looped(fn, (x, w), "cuda"))(x, w), jax.tree.leaves(jax.jit(fn)(x, w))
    for got, want in zip(found, wanted, strict=True):
        same(got, want, 1e-5)


# Stacks that a loop renews: numbers as of the whole function, one array, nothing filled.


LAYERS, ROWS, SIZE = 3, 6, 64
STACK, X = numbers(LAYERS, ROWS, SIZE), numbers(2, SIZE, seed=1)


def renewing(place: Any, reverse: bool = False) -> Any:
    """A loop that writes two rows of every slice, and reads what is there then."""

    def fn(stack: jax.Array, x: jax.Array) -> Any:
        def step(c: jax.Array, old: jax.Array) -> Any:
            new = lax.dynamic_update_slice_p.bind(old, c, place, np.zeros((), place.dtype))
            return jnp.tanh(c + new.sum(0)), (new, c[0])

        return lax.scan(step, x, stack, reverse=reverse)

    return fn


def _plan(fn: Any, *arguments: Any) -> Any:
    settings = te.Settings(work=0.1, recompute=0)
    return te.optimize(te.trace(fn, *arguments), "h100:1", settings=settings).best("seconds")


PLACES = [*(np.int32(p) for p in (-3, 0, 4, 5, 99)), np.uint8(200)]


@pytest.mark.parametrize(
    ("place", "reverse"),
    [
        # Both ways at the last place there is; before, after and within it one way in a short run.
        pytest.param(p, back, marks=[] if p == 4 or back == (k % 2 == 0) else pytest.mark.slow)
        for k, p in enumerate(PLACES)
        for back in (False, True)
    ],
)
def test_a_part_is_written_within_its_slice(place: Any, reverse: bool) -> None:
    """Wherever it is to be: a slice's update never reaches into the next slice."""
    fn = renewing(place, reverse)
    plan, wanted = _plan(fn, STACK, X), jax.tree.leaves(jax.jit(fn)(STACK, X))
    for platform in ("cuda", "cpu", "tpu"):
        got = jax.jit(lower(plan, platform=platform))(STACK, X)
        for a, b in zip(got, wanted, strict=True):
            same(a, b)


def test_the_stack_is_carried_and_no_other_filled() -> None:
    """Else another of its size is filled with zeros, and every slice copied into it."""
    plan = _plan(renewing(np.int32(1)), STACK, X)
    jaxpr = jax.make_jaxpr(lower(plan, platform="cuda"))(STACK, X).jaxpr
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    stacks = [v for v in loop.invars if v.aval.shape == STACK.shape]
    assert stacks == [jaxpr.invars[0]]
    sliced = loop.invars[loop.params["num_consts"] + loop.params["num_carry"] :]
    assert stacks[0] not in sliced
    body = loop.params["jaxpr"].jaxpr.eqns
    written = [e.invars[1].aval.shape for e in body if e.primitive.name == "dynamic_update_slice"]
    assert (1, *X.shape) in written and (1, ROWS, SIZE) not in written


def test_stacks_are_left_to_xla_for_tpus() -> None:
    """It would copy a stack that is carried, and hold 4 MiB more than 48 or 29 of a decoder."""
    plan = _plan(renewing(np.int32(1)), STACK, X)
    jaxpr = jax.make_jaxpr(lower(plan, platform="tpu"))(STACK, X).jaxpr
    (loop,) = [e for e in jaxpr.eqns if e.primitive.name == "scan"]
    sliced = loop.invars[loop.params["num_consts"] + loop.params["num_carry"] :]
    assert jaxpr.invars[0] in sliced


@pytest.mark.parametrize("seed", range(4))
def test_random_plans_of_a_renewed_stack_give_the_original_numbers(seed: int) -> None:
    """Also where a dim is cut in which a part is written, or the stack leaves otherwise cut."""
    stack, x = numbers(LAYERS, 8, 16), numbers(2, 16, seed=1)
    fn = renewing(np.int32(5))
    program = te.trace(fn, stack, x)
    plan = random_plan(program.graph, MESH, random.Random(seed))
    same(compile(replace(plan, program=program))(stack, x), jax.jit(fn)(stack, x))


# What a loop gathers in every round though it is the same in all is gathered inside the loop.


Array = Any


def twice(y: Array, w: Array, v: Array) -> Array:
    return jnp.tanh(jnp.tanh(y @ w) @ v)


def in_while(w: Array, v: Array, x: Array) -> Array:
    return lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x))[1]


def in_while_beside_nothing(w: Array, v: Array, x: Array) -> Any:
    """The least of what is carried has no elements."""
    begin = (0, x, jnp.zeros(0))
    return lax.while_loop(
        lambda s: s[0] < 5, lambda s: (s[0] + 1, twice(s[1], w, v), s[2] * 2), begin
    )[1:]


def in_scan_beside_nothing(w: Array, v: Array, x: Array) -> Any:
    begin = (x, jnp.zeros(0))
    return lax.scan(lambda s, _: ((twice(s[0], w, v), s[1] * 2), None), begin, None, length=5)[0]


def in_while_of_sums(w: Array, v: Array, x: Array) -> Array:
    """The bound is computed: what XLA makes of it is not known when the loop is planned."""
    bound = lax.add(jnp.int32(3), lax.mul(jnp.int32(2), jnp.int32(1)))
    return lax.while_loop(lambda s: s[0] < bound, lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x))[
        1
    ]


def in_while_until(w: Array, v: Array, x: Array) -> Array:
    """How often it runs is known to nobody."""
    return lax.while_loop(
        lambda s: (s[0] < 5) & (s[1][0, 0] < 9.0), lambda s: (s[0] + 1, twice(s[1], w, v)), (0, x)
    )[1]


@pytest.mark.slow
def test_what_a_condition_that_calls_sends_is_sent_once_a_round_and_inside() -> None:
    asked = []

    def goes_on(z: Any, i: Any) -> Any:
        asked.append((float(z), int(i)))
        return np.bool_(i < 3)

    def fn(w: Array, x: Array) -> Array:
        def more(s: Any) -> Any:
            z = jnp.tanh(s[1] @ w).sum()
            return io_callback(goes_on, jax.ShapeDtypeStruct((), bool), z, s[0], ordered=True)

        return lax.while_loop(more, lambda s: (s[0] + 1, jnp.tanh(s[1])), (0, x))[1]

    arguments = (0.06 * numbers(256, 256), numbers(512, 256))
    front = te.optimize(
        te.trace(fn, *arguments),
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={"[0]": ("x", None), "[1]": ("x", None)},
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("peak_bytes")
    assert [c.kind for c in plan.collectives].count("all_gather") == 1
    run = te.compile(plan, jax.devices()[:8])
    compiled = run.lower().compile()
    module = parse(compiled.as_text())
    entry = module.computations[module.entry]
    assert not any(i.opcode.startswith("all-") for i in entry.instructions)
    comparison = compare(plan, compiled)
    assert comparison.equal, f"\n{comparison}"
    same(run(*arguments), jax.jit(fn)(*arguments), 1e-3)
    assert [i for _, i in asked] == [0, 1, 2, 3] * 2
    ours, plain = ([z for z, _ in half] for half in (asked[:4], asked[4:]))
    np.testing.assert_allclose(ours, plain, rtol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fn",
    [in_while, in_while_beside_nothing, in_scan_beside_nothing, in_while_of_sums, in_while_until],
)
def test_what_a_loop_gathers_in_every_round_is_gathered_inside_it(fn: Callable[..., Any]) -> None:
    arguments = (0.06 * numbers(256, 256), 0.06 * numbers(256, 256, seed=1), numbers(512, 256))
    front = te.optimize(
        te.trace(fn, *arguments),
        "cpu:8",
        mesh_shapes=[MeshShape(("x",), (8,))],
        pins={f"[{i}]": ("x", None) for i in range(3)},
        settings=Settings(work=1.0, recompute=0, forms=0),
    )
    plan = front.best("peak_bytes")
    gathers = [
        c for c in plan.collectives if c.kind == "all_gather" and c.reader.startswith("dot_general")
    ]
    assert len(gathers) == 2
    run = te.compile(plan, jax.devices()[:8])
    compiled = run.lower().compile()
    module = parse(compiled.as_text())
    inside = {
        name: sum(i.opcode == "all-gather" for i in computation.instructions)
        for name, computation in module.computations.items()
    }
    if fn is not in_while_until:  # nothing that a loop counts by is tied to what it gathers
        assert 'known_trip_count":{"n":"5"}' in compiled.as_text()
    # The one element that a condition reads comes from the device that has it.
    assert inside[module.entry] == 0 and sum(inside.values()) == 2
    comparison = compare(plan, compiled)
    assert comparison.equal, f"\n{comparison}"
    same(run(*arguments), jax.jit(fn)(*arguments), 1e-3)
