"""Stacks that a loop renews: numbers as of the whole function, one array, nothing filled."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.runtime import compile
from tapestry_egg.runtime.lower.lower import lower
from tests.plans.plans import random_plan
from tests.runtime.lowered import MESH, numbers, same

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
