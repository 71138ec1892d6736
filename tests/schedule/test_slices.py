"""Slices of stacks that are no arrays: stacks that loops renew, and slices cut out where they are
read; against numbers worked out by hand, the certificate's account and XLA for H100."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.schedule.lying import renewed
from tapestry_egg.schedule.traffic import Traffic
from tests.schedule.test_lifetimes import h100s, most_held, scheduled

N, LAYERS = 256, 4
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
STACK = jax.ShapeDtypeStruct((LAYERS, N, N), jnp.float32)
HEADS = jax.ShapeDtypeStruct((LAYERS, 8, N, 4, N // 4), jnp.float32)
QUERIES = jax.ShapeDtypeStruct((8, 4, 2, N // 4), jnp.float32)
BYTES = 4 * N * N


def write_and_multiply(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A row is written into a layer's slice, of which a product is taken."""
    new = lax.dynamic_update_slice(old, x[:1], (3, 0))
    return x @ new, new


def over_layers(
    body: Callable[..., Any], after: Callable[..., Any] = lambda x, old, new: (x, new)
) -> Callable[..., Any]:
    def loop(stack: jax.Array, x: jax.Array) -> Any:
        x, new = lax.scan(body, x, stack)
        return tuple(reversed(after(x, stack, new)))

    return loop


def tokens(body: Callable[..., Any]) -> Callable[..., Any]:
    """A loop over tokens of loops over layers."""

    def loop(stack: jax.Array, x: jax.Array) -> Any:
        def token(state: Any, _: None) -> Any:
            new, x = over_layers(body)(*state)
            return (new, x), None

        return lax.scan(token, (stack, x), length=3)[0]

    return loop


#: Per program: arrays of a layer's size that a step holds where the stack is donated, and where it
#: is not.
RENEWED: dict[str, tuple[Callable[..., Any], int, int]] = {
    # The stack, what the loop begins with and carries, what it makes next, and a slice.
    "a loop over layers": (over_layers(write_and_multiply), LAYERS + 4, 2 * LAYERS + 4),
    "in a loop over tokens": (tokens(write_and_multiply), LAYERS + 4, 2 * LAYERS + 4),
    "what was there is read later": (
        over_layers(write_and_multiply, lambda x, old, new: (x + old[0], new)),
        2 * LAYERS + 4,
        2 * LAYERS + 4,
    ),
}


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("name", RENEWED)
def test_a_stack_that_is_renewed_is_in_the_old_one_s_place(name: str, donated: bool) -> None:
    f, over, beside = RENEWED[name]
    of = scheduled(f, STACK, X, donate=(0,) if donated else ())
    assert renewed(of) and not renewed(of, epilogues=True)
    assert most_held(of) == pytest.approx((over if donated else beside) * BYTES, rel=0.01)


def test_tpus_fill_another_stack() -> None:
    f, over, beside = RENEWED["a loop over layers"]
    of = scheduled(f, STACK, X, donate=(0,))
    assert over * BYTES < beside * BYTES <= most_held(of, epilogues=True)


#: Rounds that write a part of a slice, but keep or read what was there.
KEPT: dict[str, Callable[..., Any]] = {
    "the old slice is read": lambda x, old: (
        x @ old,
        lax.dynamic_update_slice(old, x[:1], (3, 0)),
    ),
    "it is what is written": lambda x, old: (x @ x, lax.dynamic_update_slice(x, old[:1], (0, 0))),
}


@pytest.mark.parametrize("name", KEPT)
def test_a_slice_that_is_read_or_leaves_is_kept(name: str) -> None:
    def loop(stack: jax.Array, x: jax.Array) -> Any:
        return lax.scan(KEPT[name], x, stack)

    assert not renewed(scheduled(loop, STACK, X, donate=(0,)))


def test_what_is_written_and_leaves_twice_is_one_stack_and_renewed() -> None:
    def loop(stack: jax.Array, x: jax.Array) -> Any:
        def layer(x: jax.Array, old: jax.Array) -> Any:
            new = lax.dynamic_update_slice(old, x[:1], (3, 0))
            return x, (new, new)

        return lax.scan(layer, x, stack)

    assert len(renewed(scheduled(loop, STACK, X, donate=(0,)))) == 1
    stack, x = jnp.ones((2, 8, 8)), jnp.full((8, 8), 2.0)
    plan = te.optimize(te.trace(loop, stack, x), "cpu:1", settings=te.Settings(work=0.2)).best()
    for got, want in zip(
        jax.tree.leaves(te.compile(plan, jax.devices()[:1])(stack, x)),
        jax.tree.leaves(loop(stack, x)),
        strict=True,
    ):
        assert (got == want).all()


def test_a_stack_that_a_round_reads_otherwise_is_not_written_over() -> None:
    def loop(stack: jax.Array, x: jax.Array) -> Any:
        def body(x: jax.Array, old: jax.Array) -> Any:
            y, new = write_and_multiply(x, old)
            return y @ stack[0], new

        return lax.scan(body, x, stack)

    assert not renewed(scheduled(loop, STACK, X, donate=(0,)))


def test_rows_are_written_into_a_renewed_stack_and_no_slices() -> None:
    of = scheduled(tokens(write_and_multiply), STACK, X, donate=(0,))
    traffic, programs = Traffic(of, load_target("h100:1")), of.program.instances
    ports = {p: [u for u in of.units if programs[u.root].port == p] for p in ("stack", "carry")}
    (stack,) = ports["stack"]
    assert traffic.of(stack).writes == (0.0,) and traffic.of(stack).launches == LAYERS
    carries = [u for u in ports["carry"] if of.program.types[u.outputs[0]].shape == STACK.shape]
    assert carries and not any(any(traffic.of(u).reads) for u in carries)


def attend(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention to a layer's cache, whose dims batch, time, head, feature are no product's."""
    new = lax.dynamic_update_slice(old, x[:, None, :, 0], (0, 3, 0, 0))
    scores = jnp.einsum("bgrk,btgk->bgrt", x, new)
    return jnp.einsum("bgrt,btgk->bgrk", scores, new), new


def weigh(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The same of one query for each head: products by vectors, which go element by element."""
    new = lax.dynamic_update_slice(old, x[:, None, :, 0], (0, 3, 0, 0))
    scores = jnp.einsum("bgk,btgk->bgt", x[:, :, 0], new)
    return jnp.einsum("bgt,btgk->bgk", scores, new)[:, :, None] + x, new


#: Per program for H100: its arguments.
COMPILED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a loop over layers": (over_layers(write_and_multiply), (STACK, X)),
    "in a loop over tokens": (tokens(write_and_multiply), (STACK, X)),
    "turned for its products": (tokens(attend), (HEADS, QUERIES)),
    "not turned for vectors": (tokens(weigh), (HEADS, QUERIES)),
    "joined where they are read": (
        lambda stack, x: lax.scan(
            lambda x, ab: (jnp.tanh(x @ jnp.concatenate(ab, 1))[:, :N], None), x, (stack, stack + 1)
        )[0],
        (STACK, X),
    ),
}


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("name", COMPILED)
def test_xla_for_h100_holds_what_is_promised_of_slices(name: str, donated: bool) -> None:
    f, arguments = COMPILED[name]
    devices = h100s()[:1]
    program = te.trace(f, *arguments, donate_argnums=(0,) if donated else ())
    front = te.optimize(program, "h100:1", settings=te.Settings(forms=0, work=0.1))
    compiled = hlo_stats(te.compile(front[0], devices).compile())
    # Products may read a slice in its stack. What is turned back for a result has a place from the
    # start, in which no slice lies.
    slices = 2 if name == "turned for its products" and not donated else 1
    room = slices * arguments[0].size * arguments[0].dtype.itemsize / LAYERS
    assert abs(front[0].costs.peak_bytes - compiled.peak_bytes) <= 1.02 * room
