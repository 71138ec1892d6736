"""Loops as lowering spells them for GPUs: what is turned, sliced and stacked, and when."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.runtime.lower.lower import lower
from tests.runtime.lowered import equations, numbers, same


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
