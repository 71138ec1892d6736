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
from tapestry_egg.pipeline.passes import in_pairs
from tapestry_egg.schedule.flatten import feedback_pairs

N = 256
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
GPU = load_target("h100:8")

Round = Callable[[Any], Any]

#: A round, and how many arrays it carries.
ROUNDS: dict[str, tuple[Round, int]] = {
    "product": (lambda u: (jnp.tanh(u @ u),), 1),
    "reversed": (lambda u: (u[::-1] * 2,), 1),
    "transposed": (lambda u: (jnp.sin(u.T) + 1,), 1),
    "elementwise": (lambda u: (jnp.sin(u) + 1,), 1),
    "updated": (lambda u: (u.at[3].set(2.0),), 1),
    # A wave equation: the state before becomes the one before that.
    "two in turn": (lambda u, v: (v, 2 * v - u + v[::-1]), 2),
    "two in turn, read elsewhere": (lambda u, v: (v, u[::-1] * v[::-1]), 2),
    "three in turn": (lambda u, v, w: (v, w, u + w[::-1]), 3),
}


def looped(one: Round, length: int = 6, unroll: int = 1) -> Round:
    return lambda *s: lax.scan(lambda s, _: (one(*s), None), s, None, length, unroll=unroll)[0]


def unrolls(fn: Callable[..., Any], *types: jax.ShapeDtypeStruct) -> list[int]:
    """How many rounds at a time each loop of a program runs on a GPU."""
    program = te.trace(fn, *types, donate_argnums=tuple(range(len(types)))).graph
    graph = in_pairs(program, feedback_pairs(program), GPU)
    return [op.params["unroll"] for op in graph.operations if op.kernel == "scan"]


def copies(one: Round, carries: int, unroll: int) -> int:
    """How many copies of carried arrays there are in the loop that XLA compiles for CPU."""
    jitted = jax.jit(looped(one, unroll=unroll), donate_argnums=tuple(range(carries)))
    text = jitted.lower(*[SQUARE] * carries).compile().as_text()
    return sum(f"f32[{N},{N}]" in x and " copy(" in x for x in text.splitlines())


@pytest.mark.parametrize("name", ROUNDS)
def test_rounds_are_paired_where_xla_then_copies_nothing(name: str) -> None:
    one, carries = ROUNDS[name]
    (unroll,) = unrolls(looped(one), *[SQUARE] * carries)
    alone, paired = (copies(one, carries, n) for n in (1, 2))
    assert (unroll == 2) == (alone > 0 and paired == 0), (alone, paired)


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

    fn = looped(lambda u: (heat(u),), length)
    program = te.trace(fn, SQUARE, donate_argnums=0)
    pins = {"[0]": ("x", None)}
    settings = te.Settings(work=0.3, merge=False)
    plan = te.optimize(program, "h100:8", pins=pins, settings=settings)[0]
    assert [op.params["unroll"] for op in plan.graph.operations if op.kernel == "scan"] == [2]
    u = np.random.default_rng(0).normal(size=(N, N))
    wanted = u
    for _ in range(length):
        p = np.pad(wanted, 1)
        near = p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2]
        wanted = wanted + 0.1 * (near - 4 * wanted)
    found = te.compile(plan, jax.devices()[:8])(jnp.asarray(u, jnp.float32))
    np.testing.assert_allclose(found[0], wanted, atol=1e-5)
