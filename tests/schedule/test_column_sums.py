"""A sum along columns reads no more arrays at once than its kernel has registers for."""

from __future__ import annotations

import re
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.runtime.lower.lower import lower
from tapestry_egg.schedule.inlining import fusion
from tests.schedule.test_lifetimes import made_by, scheduled
from tests.schedule.test_traffic import moved

X = jax.ShapeDtypeStruct((2048, 1024), jnp.float32)
H100 = load_target("h100:1")
FEW, MANY = 16, 17


def product(xs: tuple[jax.Array, ...]) -> jax.Array:
    return reduce(jnp.multiply, xs)


def made_and_columns(*xs: jax.Array) -> Any:
    made = product(xs)
    return made, made.sum(0)


def made_and_rows(*xs: jax.Array) -> Any:
    made = product(xs)
    return made, made.sum(1)


def two_sums(*xs: jax.Array) -> Any:
    """Of what either of the two would compute for itself, as it reads half of that anyway."""
    made, half = product(xs), xs[:8]
    return (made * reduce(jnp.add, half)).sum(0), (made * reduce(jnp.maximum, half)).sum(0)


def both(*xs: jax.Array) -> Any:
    made = product(xs)
    return made, made.sum(0), made.sum(1)


@pytest.mark.parametrize(
    ("f", "count", "arrays"),
    [
        (made_and_columns, FEW, FEW + 1),
        (made_and_columns, MANY, MANY + 2),
        (made_and_rows, MANY, MANY + 1),
        (both, MANY, MANY + 2),
    ],
)
def test_what_reads_many_arrays_adds_up_no_columns(f: Any, count: int, arrays: int) -> None:
    """Each array is read, what is made is written, and read by a sum that is made apart."""
    assert moved(f, (X,) * count) == pytest.approx(arrays * 4 * X.size, rel=0.02)


@pytest.mark.parametrize(("count", "within"), [(FEW, True), (MANY, False)])
def test_what_many_arrays_are_multiplied_to_is_stored_for_sums_of_columns(
    count: int, within: bool
) -> None:
    """Of some KiB, which all kernels else compute for themselves."""
    small = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    plan = scheduled(two_sums, *(small,) * count)
    u, _ = made_by(plan, "mul")
    assert fusion(plan, costs=H100.fusing).within[u] is within
    assert fusion(plan).within[u]


@pytest.mark.parametrize(("count", "apart"), [(FEW, False), (MANY, True)])
@pytest.mark.parametrize("f", [made_and_columns, both, made_and_rows])
def test_lowering_has_xla_read_it(f: Any, count: int, apart: bool) -> None:
    """The sum of columns reads behind a barrier; that of rows does not, and what leaves."""
    program = te.trace(f, *(X,) * count)
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    plan = front[0]
    local = jax.jit(lower(plan, platform="cuda"))
    text = str(jax.make_jaxpr(local)(*(X,) * count))
    behind = set(re.findall(r"(\w+):\S+ = optimization_barrier", text))
    for axis, operand in re.findall(r"= reduce_sum\[\s*axes=\((\d),\).*?\] (\w+)", text, re.S):
        assert (operand in behind) is (apart and axis == "0")
