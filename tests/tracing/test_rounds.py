"""A `while` that counts its rounds is a `scan` of as many, whatever it counts by."""

from __future__ import annotations

from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te

Array = Any


def lengths(function: Any, *arguments: Any) -> list[int | None]:
    """Of the loops of a program, None for those that are no scans."""
    graph = te.trace(function, *arguments).graph
    loops = [op for op in graph.operations if op.regions]
    return [int(op.params["length"]) if op.kernel == "scan" else None for op in loops]


@pytest.mark.slow
def test_rounds_are_those_that_the_loop_takes() -> None:
    """Every comparison, from either side, up and down, beside the ends of the integers."""
    words = ("lt", "le", "gt", "ge", "ne"), (-3, 4, 126), (-2, 1, 3), (-4, 5, 127)
    known = 0
    for word, start, step, end, turned in product(*words, (False, True)):
        compare = getattr(lax, word)
        begin, by, to = np.int8(start), np.int8(step), np.int8(end)

        def counted(x: Array, given: Any = (compare, begin, by, to, turned)) -> Array:
            compare, begin, by, to, turned = given
            return lax.while_loop(
                lambda c: compare(to, c[0]) if turned else compare(c[0], to),
                lambda c: (c[0] + by, c[1] + 1),
                (begin, x),
            )[1]

        (found,) = lengths(counted, np.int32(0))
        value, rounds, operator = start, 0, {"ne": np.not_equal}.get(word) or NUMPY[word]
        while (operator(end, value) if turned else operator(value, end)) and -128 <= value < 128:
            value, rounds = value + step, rounds + 1
        if -128 <= value < 128:
            known += 1
            assert found == rounds, (word, start, step, end, turned)
        else:
            assert found is None, (word, start, step, end, turned)
    assert known > 130


NUMPY = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def test_bounds_and_steps_may_be_handed_in() -> None:
    def bound(x: Array) -> Array:
        return lax.fori_loop(jnp.int32(2), jnp.int32(9), lambda i, c: c + i, x)

    def carried(x: Array) -> Array:
        begin = (jnp.int32(6), jnp.int32(0), x)
        return lax.while_loop(lambda c: c[1] < c[0], lambda c: (c[0], c[1] + 2, c[2] + 1), begin)[2]

    for function, rounds in ((bound, 7), (carried, 3)):
        assert lengths(function, np.int32(0)) == [rounds]
        assert te.trace(function, np.int32(0))(np.int32(5)) == jax.jit(function)(np.int32(5))


def test_what_no_counter_tells_stays_a_while() -> None:
    def by_value(x: Array) -> Array:
        return lax.while_loop(lambda c: c < 9.0, lambda c: c * 2.0, x)

    def by_argument(n: Array) -> Array:
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] + 2), (0, n))[1]

    def by_two(x: Array) -> Array:
        def goes_on(c: Any) -> Array:
            return (c[0] < 9) & (c[1] < 50)

        return lax.while_loop(goes_on, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

    def by_turns(x: Array) -> Array:
        return lax.while_loop(lambda c: c[0] < 9, lambda c: (c[1] + 1, c[0] + 1), (0, x))[1]

    def bound_moves(x: Array) -> Array:
        begin = (jnp.int32(0), jnp.int32(3), x)
        return lax.while_loop(
            lambda c: c[0] < c[1], lambda c: (c[0] + 2, c[1] + 1, c[2] + 1), begin
        )[2]

    def step_grows(x: Array) -> Array:
        begin = (jnp.int32(0), jnp.int32(1), x)
        return lax.while_loop(
            lambda c: c[0] < 9, lambda c: (c[0] + c[1], c[1] * 2, c[2] + 1), begin
        )[2]

    for function in (by_argument, by_two, by_turns, bound_moves, step_grows):
        assert lengths(function, np.int32(1)) == [None]
    assert lengths(by_value, np.float32(1.0)) == [None]


@pytest.mark.parametrize("ordered", [False, True])
def test_a_loop_that_calls_into_python_counts_its_rounds_too(ordered: bool) -> None:
    seen: list[int] = []

    def told(x: Array) -> Array:
        def body(c: Any) -> Any:
            jax.debug.callback(lambda i: seen.append(int(i)), c[0], ordered=ordered)
            return c[0] + 1, jnp.tanh(c[1])

        return lax.while_loop(lambda c: c[0] < 4, body, (0, x))[1]

    program = te.trace(told, X := np.ones(8, np.float32))
    assert [op.kernel for op in program.graph.operations] == ["scan"]
    np.testing.assert_allclose(program(X), told(X), rtol=1e-6)
    jax.effects_barrier()
    assert sorted(seen) == [0, 0, 1, 1, 2, 2, 3, 3]
