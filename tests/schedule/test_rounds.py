"""Loops that run two rounds at a time, where one round would end in a copy of what is carried.

XLA's own modules, compiled for CPU, say where a round ends in a copy, and that two at a time end in
none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.rounds import in_pairs

N = 256
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
GPU = load_target("h100:8")

Round = Callable[[Any], Any]

ROUNDS: dict[str, Round] = {
    "product": lambda u: jnp.tanh(u @ u),
    "reversed": lambda u: u[::-1] * 2,
    "transposed": lambda u: jnp.sin(u.T) + 1,
    "elementwise": lambda u: jnp.sin(u) + 1,
    "updated": lambda u: u.at[3].set(2.0),
}


def looped(one: Round, length: int = 6, unroll: int = 1) -> Round:
    return lambda u: lax.scan(lambda u, _: (one(u), None), u, None, length, unroll=unroll)[0]


def unrolls(fn: Callable[..., Any], *types: jax.ShapeDtypeStruct) -> list[int]:
    """How many rounds at a time each loop of a program runs on a GPU."""
    program = te.trace(fn, *types, donate_argnums=tuple(range(len(types)))).graph
    graph = in_pairs(program, feedback_pairs(program), GPU)
    return [op.params["unroll"] for op in graph.operations if op.kernel == "scan"]


def copies(one: Round, unroll: int) -> int:
    """How many copies of the carried array there are in the loop that XLA compiles for CPU."""
    compiled = jax.jit(looped(one, unroll=unroll), donate_argnums=0).lower(SQUARE).compile()
    return sum(f"f32[{N},{N}]" in x and " copy(" in x for x in compiled.as_text().splitlines())


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_are_paired_where_xla_copies_what_one_makes(name: str) -> None:
    one = ROUNDS[name]
    (unroll,) = unrolls(looped(one), SQUARE)
    assert (unroll == 2) == (copies(one, 1) > 0)
    assert copies(one, unroll) == 0


def test_two_carries_that_change_places_take_turns() -> None:
    """A wave equation: the state before becomes the one before that."""

    def wave(u: jax.Array, v: jax.Array) -> Any:
        return lax.fori_loop(0, 9, lambda _, s: (s[1], 2 * s[1] - s[0] + s[1][::-1]), (u, v))

    assert unrolls(wave, SQUARE, SQUARE) == [2]


def test_what_a_round_reads_late_keeps_its_array() -> None:
    """The old value may be read when the new one is there: the copy stays."""

    def both(u: jax.Array, v: jax.Array) -> Any:
        return lax.fori_loop(0, 9, lambda _, s: (s[0] @ s[0], s[0] @ s[1]), (u, v))

    program = te.trace(both, SQUARE, SQUARE).graph
    assert unrolls(both, SQUARE, SQUARE) == [2]  # for the second, that reads both
    assert in_pairs(program, feedback_pairs(program), load_target("v5e:2x4")) is program


def test_loops_with_stacks_run_round_by_round() -> None:
    def path(u: jax.Array) -> Any:
        return lax.scan(lambda u, _: ((u @ u) / N, u[0]), u, None, 6)

    assert unrolls(path, SQUARE) == [1]


@pytest.mark.slow
@pytest.mark.parametrize("length", [2, 7])
def test_a_stencil_in_pairs_of_rounds_computes_the_same(length: int) -> None:
    def heat(u: jax.Array) -> jax.Array:
        p = jnp.pad(u, 1)
        return u + 0.1 * (p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u)

    fn = looped(heat, length)
    program = te.trace(fn, SQUARE, donate_argnums=0)
    pins = {"[0]": ("x", None)}
    settings = te.Settings(work=1.0, merge=False)
    plan = te.optimize(program, "h100:8", pins=pins, settings=settings)[0]
    assert [op.params["unroll"] for op in plan.graph.operations if op.kernel == "scan"] == [2]
    u = np.random.default_rng(0).normal(size=(N, N))
    wanted = u
    for _ in range(length):
        p = np.pad(wanted, 1)
        near = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        wanted = wanted + 0.1 * (near - 4 * wanted)
    found = te.compile(plan, jax.devices()[:8])(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
