"""What kernels of products compute of their results, so that these are never stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tapestry_egg.schedule.inlining import fusion
from tapestry_egg.schedule.lifetimes import lifetimes
from tests.schedule.test_lifetimes import X, made_by, scheduled

Program = Callable[[jax.Array, jax.Array], Any]


def rounded(a: jax.Array) -> jax.Array:
    return a.astype(jnp.bfloat16)


def twice(a: jax.Array, w: jax.Array) -> Any:
    """Two products of it, which leave as they are."""
    return a @ w.astype(a.dtype), w.T.astype(a.dtype) @ a


def entropy(logits: jax.Array) -> jax.Array:
    picked = jnp.take_along_axis(logits, jnp.zeros((len(logits), 1), int), axis=1)
    return (jax.nn.logsumexp(logits, axis=1) - picked[:, 0]).sum()


#: A program whose first product is x @ w, and whether its kernel computes what is made of it.
PRODUCTS: dict[str, tuple[Program, bool]] = {
    "of one array": (lambda x, w: jnp.tanh(x @ w), True),
    "and its sum": (lambda x, w: (jnp.exp(a := x @ w), a.sum(0)), True),
    "that leaves": (lambda x, w: (x @ w, jnp.tanh(x @ w)), False),
    "that another product reads": (lambda x, w: ((x @ w) @ w, jnp.tanh(x @ w)), False),
    "read after its sum": (lambda x, w: (a := x @ w) / jnp.exp(a).sum(0), False),
    "read after the next product": (lambda x, w: jnp.tanh(x @ w) * jnp.sort(w @ x), False),
    "read by a sort": (lambda x, w: jnp.sort(x @ w), False),
    "that is cut in two": (lambda x, w: jnp.split(x @ w, 2), False),
    "of which a part is read": (lambda x, w: (x @ w)[1:], False),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_what_one_kernel_makes_of_a_product_is_made_in_it(name: str) -> None:
    fn, inside = PRODUCTS[name]
    plan = scheduled(fn, X, X)
    u, v = made_by(plan, "dot_general")
    assert fusion(plan, epilogues=True).within[u] is inside
    assert not fusion(plan).within[u]
    assert lifetimes(plan, epilogues=True).free[v] is inside


def test_a_convolution_computes_what_is_made_of_it() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        numbers = ("NWC", "WIO", "NWC")
        made = lax.conv_general_dilated(x[None], w[None], (1,), "SAME", dimension_numbers=numbers)
        return jnp.tanh(made)

    plan = scheduled(fn, X, X)
    u, _ = made_by(plan, "conv_general_dilated")
    assert fusion(plan, epilogues=True).within[u]
    assert not fusion(plan).within[u]


def test_what_is_made_of_a_product_is_written_over_no_operand_of_it() -> None:
    plan = scheduled(lambda x, w, c: jnp.tanh(x @ w) + c, X, X, X)
    u, product = made_by(plan, "add")[0], made_by(plan, "dot_general")[0]
    factors = {v for _, _, v in plan.units[product].reads}
    (added,) = {v for _, _, v in plan.units[u].reads} - {*plan.units[product].outputs}
    assert factors and added not in factors
    assert fusion(plan, epilogues=True).aligned[u] == {added}


#: A program that rounds something: whether products that read it round it themselves.
ROUNDED: dict[str, tuple[Program, bool]] = {
    "of a product, for two": (lambda x, w: twice(rounded(x @ w), w), False),
    "of one that is held": (lambda x, w: (twice(rounded(a := x @ w), w), a), True),
    "of one that is held, and a number": (
        lambda x, w: (twice(rounded((a := x @ w) * w.sum()), w), a),
        True,
    ),
    "of an argument, for two": (lambda x, w: twice(rounded(x), w), False),
    "of an argument, for one": (lambda x, w: rounded(x) @ w.astype(jnp.bfloat16), True),
    "of a product, for one": (lambda x, w: rounded(x @ w) @ w.astype(jnp.bfloat16), False),
    "of two arrays, for one": (lambda x, w: rounded(x * w) @ w.astype(jnp.bfloat16), True),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_products_compute_what_is_held_anyway_or_read_once(name: str) -> None:
    fn, inside = ROUNDED[name]
    plan = scheduled(fn, X, X)
    types = plan.program.types
    made = [
        u
        for u, unit in enumerate(plan.units)
        if unit.outputs and types[unit.outputs[0]].dtype == "bfloat16"
        if plan.program.instances[unit.root].signature.fusion == "loop"
    ]
    assert fusion(plan, epilogues=True).within[made[0]] is inside


def test_windows_read_what_is_stored() -> None:
    def fn(x: jax.Array) -> Any:
        y = jnp.tanh(x)
        return [lax.reduce_window(y, -jnp.inf, lax.max, (n, 1), (1, 1), "VALID") for n in (2, 3)]

    plan = scheduled(fn, X)
    u, _ = made_by(plan, "tanh")
    assert not fusion(plan, epilogues=True).within[u]
    assert fusion(plan).within[u]


def test_the_gradient_of_what_is_picked_from_each_row_is_computed_element_by_element() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return w.T @ jax.grad(entropy)(x @ w)

    plan = scheduled(fn, X, X)
    u, v = made_by(plan, "scatter-add")
    assert plan.program.types[v].shape == X.shape
    assert fusion(plan, epilogues=True).within[u]
    assert not fusion(plan).within[u]


#: Programs that take elements of what the exponential of x makes to other places.
MOVED: dict[str, Callable[[jax.Array], Any]] = {
    "parts": lambda y: (y[::2] - y[1::2], y.sum()),
    "rows": lambda y: (y[:3] * 2, y[5:].sum()),
    "a row at a place": lambda y: (lax.dynamic_index_in_dim(y, y.shape[0] // 2), y.sum()),
    "padded": lambda y: (jnp.pad(y, ((1, 0), (0, 0))) * 2, y.sum()),
    "holes": lambda y: (lax.pad(y, 0.0, ((0, 1, 1), (0, 0, 0))) * 2, y.sum()),
    "joined": lambda y: (jnp.concatenate([y, y], 1) * 2, y.sum()),
    "reversed": lambda y: (y[::-1] * 2, y.sum()),
    "parts of a view": lambda y: (y.reshape(-1)[1:] * 2, y.sum()),
}


@pytest.mark.parametrize("name", MOVED)
def test_what_is_moved_elsewhere_is_stored(name: str) -> None:
    plan = scheduled(lambda x: MOVED[name](jnp.exp(x)), X)
    u, v = made_by(plan, "exp")
    assert not fusion(plan, epilogues=True).within[u]
    assert not lifetimes(plan, epilogues=True).free[v]
    assert fusion(plan).within[u]


def test_of_what_is_moved_what_that_is_computed_from_is_not() -> None:
    """The difference is cut into parts; the exponential is read whole to compute it."""

    def fn(x: jax.Array, y: jax.Array) -> Any:
        e = jnp.exp(x)
        apart = e - y
        return apart[::2] * apart[1::2], e.sum(0)

    plan = scheduled(fn, X, X)
    assert fusion(plan, epilogues=True).within[made_by(plan, "exp")[0]]


def test_what_has_holes_is_stored() -> None:
    plan = scheduled(lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))).sum(0), X)
    u, v = made_by(plan, "pad")
    assert not fusion(plan, epilogues=True).within[u]
    assert lifetimes(plan).free[v] and not lifetimes(plan, epilogues=True).free[v]
