"""Copies of what loops carry from round to round, against those of XLA's modules for H100."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.traffic import Traffic
from tests.schedule.test_lifetimes import h100s, scheduled

SIZE, ROUNDS = 1024, 8
W = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
STACK = jax.ShapeDtypeStruct((ROUNDS, SIZE, SIZE), jnp.float32)

Body = Callable[..., Any]


#: Per program: a round, of two carries `h`, a slice `x` and an array `b` that does not change; the
#: copies of arrays that are counted in it, and those that XLA makes.
ROUND: dict[str, tuple[Body, int, int]] = {
    "both go by elements": (lambda h, x, b: (jnp.tanh(h[0]), h[1] * h[0]), 0, 0),
    "one stays": (lambda h, x, b: (h[0], jnp.tanh(h[0] + h[1])), 0, 0),
    "one stays, seen as a vector": (
        lambda h, x, b: (h[0].reshape(-1).reshape(SIZE, SIZE), jnp.tanh(h[0] + h[1])),
        0,
        0,
    ),
    "one turns": (lambda h, x, b: (h[0].T, jnp.tanh(h[0] + h[1])), 1, 1),
    "one is what the other was": (lambda h, x, b: (h[1], h[1] * 2), 1, 1),
    "one is what the other was, turned": (lambda h, x, b: (h[1].T, h[1] * 2), 1, 1),
    "one is what does not change": (lambda h, x, b: (b, jnp.tanh(h[0] + h[1])), 1, 1),
    "one is the slice": (lambda h, x, b: (x, jnp.tanh(h[0] + h[1])), 1, 1),
    # XLA keeps a third array while two change places, which is not counted.
    "they change places": (lambda h, x, b: (h[1], h[0]), 2, 3),
    "an inner loop makes the next": (
        lambda h, x, b: (lax.fori_loop(0, 3, lambda _, a: jnp.tanh(a), h[0]), jnp.sin(h[1])),
        0,
        0,
    ),
}


def program(name: str) -> Callable[..., Any]:
    body = ROUND[name][0]

    def looped(a: jax.Array, c: jax.Array, b: jax.Array, xs: jax.Array) -> Any:
        return lax.scan(lambda h, x: (body(h, x, b), None), (a, c), xs)[0]

    return looped


@pytest.mark.parametrize("name", ROUND)
def test_what_enters_a_round_and_leaves_it_elsewhere_is_copied(name: str) -> None:
    plan = scheduled(program(name), W, W, W, STACK)
    traffic, arrays = Traffic(plan, load_target("h100:1")), 0.0
    for unit in plan.units:
        if plan.program.instances[unit.root].port == "carry":
            own = traffic.of(unit)
            assert own.launches == (ROUNDS if any(own.reads) else 0.0)
            shares = zip(own.reads, unit.reads, strict=True)
            arrays += sum(x for x, (*_, v) in shares if plan.program.types[v].shape)
    assert arrays == 2 * ROUNDS * ROUND[name][1]


@pytest.mark.parametrize("name", ROUND)
def test_xla_for_h100_copies_as_often(name: str) -> None:
    counted, made = ROUND[name][1:]
    assert counted <= made == len(copies_in_bodies(name))


@cache
def copies_in_bodies(name: str) -> tuple[str, ...]:
    """The copies of whole arrays in the bodies of loops."""
    where = jax.sharding.SingleDeviceSharding(h100s()[0])
    given = [jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=where) for t in (W, W, W, STACK)]
    text = jax.jit(program(name)).lower(*given).compile().as_text()
    copy = rf"%\S+ = f32\[(?:1,)?{SIZE},{SIZE}\]\S* copy\(.*"
    return tuple(re.findall(copy, text[: text.index("\nENTRY")]))


def filled(step: Callable[..., Any], first: Any = 0.0, xs: Any = None) -> jax.Array:
    """What an inner loop of four rounds stacks."""
    stack: jax.Array = lax.scan(step, first, xs, length=4)[1]
    return stack


LAYERS = jax.ShapeDtypeStruct((4, SIZE, SIZE), jnp.float32)

#: Rounds in which an inner loop fills the next state of `c`; how often XLA and we copy it: that
#: loop would write over what it still reads.
FILLED: dict[str, tuple[Callable[..., Any], int]] = {
    "of itself, slice by slice": (lambda c, d: filled(lambda a, s: (a + 1, s * 2 + a), xs=c), 1),
    "of products with itself": (lambda c, d: filled(lambda a, s: (a @ s, a), c[0], c), 1),
    "of a slice that stays": (lambda c, d: filled(lambda a, s: (a + 1, c[0] * a)), 1),
    "of another": (lambda c, d: filled(lambda a, s: (a + 1, s * 2 + a), xs=d), 0),
    "of its sum": (
        lambda c, d: filled(lambda a, s: (a + 1, jnp.full((SIZE, SIZE), a)), c.sum()),
        0,
    ),
    "of sums of its slices": (
        lambda c, d: filled(lambda a, s: (a, jnp.full((SIZE, SIZE), s)), xs=c.sum((1, 2))),
        0,
    ),
}


def refilled(name: str) -> Callable[..., Any]:
    step = FILLED[name][0]

    def looped(c: jax.Array, d: jax.Array) -> Any:
        return lax.scan(lambda h, _: ((step(*h), h[1] * 2), None), (c, d), length=ROUNDS)[0]

    return looped


@pytest.mark.parametrize("name", FILLED)
def test_a_state_that_an_inner_loop_fills_is_copied_where_that_loop_reads_it(name: str) -> None:
    plan = scheduled(refilled(name), LAYERS, LAYERS)
    traffic = Traffic(plan, load_target("h100:1"))
    shares = [
        x
        for unit in plan.units
        for x, (*_, v) in zip(traffic.of(unit).reads, unit.reads, strict=True)
        if plan.program.instances[unit.root].port == "carry"
        and plan.program.types[v].shape == LAYERS.shape
    ]
    assert sum(shares) == 2 * ROUNDS * FILLED[name][1]


@pytest.mark.parametrize("name", FILLED)
def test_xla_for_h100_copies_that_state_as_often(name: str) -> None:
    where = jax.sharding.SingleDeviceSharding(h100s()[0])
    given = jax.ShapeDtypeStruct(LAYERS.shape, LAYERS.dtype, sharding=where)
    text = jax.jit(refilled(name)).lower(given, given).compile().as_text()
    copies = re.findall(rf"f32\[4,{SIZE},{SIZE}\]\S* copy\(", text[: text.index("\nENTRY")])
    assert len(copies) == FILLED[name][1]
