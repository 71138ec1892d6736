"""Copies of what loops carry from round to round, against those of XLA's modules for H100."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tapestry_egg as te
from tapestry_egg.machine.target import load_target
from tapestry_egg.pipeline.passes import in_pairs
from tapestry_egg.runtime.measure.hlo import hlo_stats
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.lying import renewed
from tapestry_egg.schedule.traffic import Traffic
from tests.schedule.test_lifetimes import h100s, most_held, scheduled

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


# Loops that run two rounds at a time, where one round would end in a copy of what is carried.
# XLA's own modules, compiled for CPU, say where a round ends in a copy, and that two at a time
# end in none.


N = 256
SQUARE = jax.ShapeDtypeStruct((N, N), jnp.float32)
GPU = load_target("h100:8")

Round = Callable[[Any], Any]

#: A round, and how many arrays it carries.
PAIRED: dict[str, tuple[Round, int]] = {
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


@pytest.mark.parametrize("name", PAIRED)
def test_rounds_are_paired_where_xla_then_copies_nothing(name: str) -> None:
    one, carries = PAIRED[name]
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


# Slices of stacks that are no arrays: stacks that loops renew, and slices cut out where they are
# read; against numbers worked out by hand, the certificate's account and XLA for H100.


SIDE, SLICES = 256, 4
X = jax.ShapeDtypeStruct((SIDE, SIDE), jnp.float32)
LAYERED = jax.ShapeDtypeStruct((SLICES, SIDE, SIDE), jnp.float32)
HEADS = jax.ShapeDtypeStruct((SLICES, 8, SIDE, 4, SIDE // 4), jnp.float32)
QUERIES = jax.ShapeDtypeStruct((8, 4, 2, SIDE // 4), jnp.float32)
BYTES = 4 * SIDE * SIDE


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
    "a loop over layers": (over_layers(write_and_multiply), SLICES + 4, 2 * SLICES + 4),
    "in a loop over tokens": (tokens(write_and_multiply), SLICES + 4, 2 * SLICES + 4),
    "what was there is read later": (
        over_layers(write_and_multiply, lambda x, old, new: (x + old[0], new)),
        2 * SLICES + 4,
        2 * SLICES + 4,
    ),
}


@pytest.mark.parametrize("donated", [True, False])
@pytest.mark.parametrize("name", RENEWED)
def test_a_stack_that_is_renewed_is_in_the_old_one_s_place(name: str, donated: bool) -> None:
    f, over, beside = RENEWED[name]
    of = scheduled(f, LAYERED, X, donate=(0,) if donated else ())
    assert renewed(of) and not renewed(of, epilogues=True)
    assert most_held(of) == pytest.approx((over if donated else beside) * BYTES, rel=0.01)


def test_tpus_fill_another_stack() -> None:
    f, over, beside = RENEWED["a loop over layers"]
    of = scheduled(f, LAYERED, X, donate=(0,))
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

    assert not renewed(scheduled(loop, LAYERED, X, donate=(0,)))


def test_what_is_written_and_leaves_twice_is_one_stack_and_renewed() -> None:
    def loop(stack: jax.Array, x: jax.Array) -> Any:
        def layer(x: jax.Array, old: jax.Array) -> Any:
            new = lax.dynamic_update_slice(old, x[:1], (3, 0))
            return x, (new, new)

        return lax.scan(layer, x, stack)

    assert len(renewed(scheduled(loop, LAYERED, X, donate=(0,)))) == 1
    stack, x = jnp.ones((2, 8, 8)), jnp.full((8, 8), 2.0)
    plan = te.optimize(
        te.trace(loop, stack, x), "cpu:1", settings=te.Settings(work=0.1, forms=0)
    ).best()
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

    assert not renewed(scheduled(loop, LAYERED, X, donate=(0,)))


def test_rows_are_written_into_a_renewed_stack_and_no_slices() -> None:
    of = scheduled(tokens(write_and_multiply), LAYERED, X, donate=(0,))
    traffic, programs = Traffic(of, load_target("h100:1")), of.program.instances
    ports = {p: [u for u in of.units if programs[u.root].port == p] for p in ("stack", "carry")}
    (stack,) = ports["stack"]
    assert traffic.of(stack).writes == (0.0,) and traffic.of(stack).launches == SLICES
    carries = [u for u in ports["carry"] if of.program.types[u.outputs[0]].shape == LAYERED.shape]
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


def from_zeros(x: jax.Array, old: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What is written into is made with it."""
    read = jnp.einsum("bgrk,btgk->bgrt", x, old)
    made = jnp.einsum("bgrt,btgk->bgrk", read, old)
    return made, lax.dynamic_update_slice(jnp.zeros_like(old), x[:, None, :, 0], (0, 3, 0, 0))


LAYER = jax.ShapeDtypeStruct(HEADS.shape[1:], jnp.float32)

#: Per program for H100: its arguments.
COMPILED: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "a loop over layers": (over_layers(write_and_multiply), (LAYERED, X)),
    "in a loop over tokens": (tokens(write_and_multiply), (LAYERED, X)),
    "turned for its products": (tokens(attend), (HEADS, QUERIES)),
    "not turned for vectors": (tokens(weigh), (HEADS, QUERIES)),
    "written into zeros": (
        lambda old, x: lax.scan(
            lambda s, _: (from_zeros(s[1], s[0])[::-1], None), (old, x), None, 4
        )[0],
        (LAYER, QUERIES),
    ),
    "joined where they are read": (
        lambda stack, x: lax.scan(
            lambda x, ab: (jnp.tanh(x @ jnp.concatenate(ab, 1))[:, :SIDE], None),
            x,
            (stack, stack + 1),
        )[0],
        (LAYERED, X),
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
    room = slices * arguments[0].size * arguments[0].dtype.itemsize / SLICES
    assert abs(front[0].costs.peak_bytes - compiled.peak_bytes) <= 1.02 * room
