"""Which values exist once: those compared with the greatest of themselves, and behind barriers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.rewrite.recomputation.checkpoints import Flow
from tapestry_egg.schedule.flatten import flatten
from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.own_arrays import self_compared
from tapestry_egg.schedule.schedules import scheduled

X, Y = (jax.ShapeDtypeStruct((64, 128), "float32"),) * 2


def found_in(f: Callable[..., Any], *arguments: Any) -> list[str]:
    """The operations that make what has to exist once."""
    program = flatten(te.trace(f, *(arguments or (X, Y))).graph, {})
    once = self_compared(program)
    return [x.signature.kernel for x in program.instances if once.intersection(x.outputs)]


def masked(x: jax.Array, y: jax.Array) -> jax.Array:
    v = x * y
    return v == jnp.where(y > 0, v, -jnp.inf).max(0)


def wide(x: jax.Array, y: jax.Array) -> jax.Array:
    v = (x * y).astype("bfloat16")
    return v.astype("float32") >= v.max().astype("float32")


SEVERAL: dict[str, tuple[Callable[..., Any], list[str]]] = {
    "gradient": (jax.grad(lambda x, y: jnp.max(x * y + x, 1).sum()), ["add"]),
    "of all": (lambda x, y: x + y > 0.5 * (x * y).max(), []),  # of another, and of a product
    "turned": (lambda x, y: (x - y).T == jnp.min(x - y, 1)[None], ["sub"]),
    "k-th": (lambda x, y: x * y >= lax.top_k(x * y, 4)[0][:, -1:], ["mul"]),
    "sorted": (lambda x, y: x * y < jnp.sort(x * y, 1)[:, 3:4], ["mul"]),
    "running": (lambda x, y: x / y == lax.cummax(x / y, 1), ["div"]),
    "masked": (masked, ["mul"]),
    "wide": (wide, ["convert_element_type"]),
    "given": (lambda x, y: x == x.max(), []),  # is in memory
    "whole numbers": (lambda x, y: (v := (x * y).astype("int32")) == v.max(), []),
    "mean": (lambda x, y: x * y > (x * y).mean(), []),
    "itself": (lambda x, y: x * y == x * y, []),
    "softmax": (lambda x, y: jax.nn.softmax(x * y, 1), []),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_what_is_compared_with_the_greatest_of_itself_is_found(name: str) -> None:
    f, kernels = SEVERAL[name]
    assert found_in(f) == kernels


OWN = """
middle_one:
  index: "[$rows, 1]"
  inputs: {x: {shape: "[$rows, $n]", ipf: "[1, 0] :> [1, $n]"}}
  out: {dtype: $x.dtype}
  elements: ELEMENTS
"""


@pytest.mark.parametrize("elements, kernels", [("selected", ["mul"]), ("computed", [])])
def test_kernels_of_ones_own_say_that_they_select(
    elements: str, kernels: list[str], tmp_path: Path
) -> None:
    (file := tmp_path / "own.yaml").write_text(OWN.replace("ELEMENTS", elements))
    x, y = te.tensor("x", (64, 128)), te.tensor("y", (64, 128))
    v = te.kernel("mul")(x, y)
    middle = te.kernel("middle_one", str(file))(v)
    program = flatten(te.program(te.kernel("ge")(v, middle), name="f").graph, {})
    once = self_compared(program)
    found = [x.signature.kernel for x in program.instances if once.intersection(x.outputs)]
    assert found == kernels


def test_it_is_stored_and_computed_once() -> None:
    f = jax.grad(lambda x, y: jnp.max(x * y + x, 1).sum())
    plan = scheduled(te.trace(f, X, Y).graph, {})
    (u,) = (
        u
        for u, unit in enumerate(plan.units)
        if self_compared(plan.program).intersection(unit.outputs)
    )
    assert len(plan.readers[plan.units[u].outputs[0]]) == 2
    for epilogues in (False, True):
        assert not fusion(plan, epilogues).within[u]
    flow = Flow(plan)
    assert not flow.repeatable(u) and flow.repeatable(u + 1)


@pytest.mark.parametrize("barred", [False, True])
def test_what_a_barrier_reads_is_stored(barred: bool) -> None:
    """A kernel's only reader does not take it in, nor do several each for itself."""

    def chain(x: jax.Array, y: jax.Array) -> jax.Array:
        v = jnp.sin(x) * y
        return jnp.cos(lax.optimization_barrier(v) if barred else v)

    def twice(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        v = x * y
        v = lax.optimization_barrier(v) if barred else v
        return jnp.cos(v), v.sum(1)

    plan = scheduled(te.trace(chain, X, Y).graph, {})
    kernels = [
        [plan.program.instances[i].signature.kernel for i in unit.members]
        for unit in plan.units
        if not plan.program.instances[unit.root].port
    ]
    apart = [["sin", "mul"], ["optimization_barrier", "cos"]]
    assert kernels == (apart if barred else [["sin", "mul", "cos"]])
    plan = scheduled(te.trace(twice, X, Y).graph, {})
    for epilogues in (False, True):
        assert any(fusion(plan, epilogues).within) is not barred
