"""Random programs around one product that is large beside its operands.

What is drawn reads the product along rows and columns, by numbers and by data, in views, sums,
scans and gradients; most of it is no program that anybody would write. All numbers are float64
unless drawn narrower, so that sums in another order differ by rounding alone.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import assume
from jax import lax

from tapestry_egg.graph.blockgraph import BlockGraph, verify_graph
from tapestry_egg.reference.executor import execute
from tapestry_egg.rewrite.rows.padded import Region, may_grow, padded
from tapestry_egg.tracing.trace import trace

Array = Any
Program = Callable[..., Any]

ROWS, INNER, COLUMNS = 32, 2, 24
#: Rows of a small table that rows are added to.
TABLE = 6


class Draws:
    """Decisions of one program, taken once: a program is traced more than once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def choice(self, options: Sequence[Any]) -> Any:
        return options[self.rng.randrange(len(options))]

    def coin(self, of: int = 2) -> bool:
        return self.rng.randrange(of) == 0

    def ints(self, shape: Sequence[int], below: int) -> Array:
        n = int(np.prod(shape))
        return np.array([self.rng.randrange(below) for _ in range(n)], np.int32).reshape(shape)


Step = Callable[[list[Array]], Array]


def elementwise(d: Draws) -> Step:
    f = d.choice(
        [
            jnp.tanh,
            jnp.sin,
            lambda h: jnp.exp(-jnp.abs(h)),
            jnp.square,
            lambda h: jnp.where(h > 0, h, 0.5 * h),
            lambda h: h.astype(jnp.bfloat16).astype(h.dtype),
            lambda h: jnp.clip(h, -1, 1),
            lambda h: jnp.floor(h) % 3,
            lambda h: jnp.log1p(jnp.abs(h)),
            lambda h: (h > 0.3).astype(jnp.int64),  # functions of int32 are float32
            lambda h: lax.stop_gradient(h) * h,
            lambda h: lax.optimization_barrier(h) + 1,
            lambda h: jnp.where(h > 1.5, jnp.inf, h),
            lambda h: jnp.full(h.shape, 2.0) - h,
            jax.checkpoint(lambda h: jnp.sin(h) * h),
        ]
    )
    return lambda pool: f(pool[-1])


def combined(d: Draws) -> Step:
    at = d.rng.randrange(1 << 30)
    f = d.choice([jnp.add, jnp.multiply, jnp.maximum, jnp.subtract, jnp.minimum])

    def step(pool: list[Array]) -> Array:
        h = pool[-1]
        fit = [p for p in pool if _broadcasts(p.shape, h.shape)]
        return f(h, fit[at % len(fit)])

    return step


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    try:
        return np.broadcast_shapes(a, b) == b
    except ValueError:
        return False


def along(d: Draws) -> Step:
    """Something along one dim."""
    axis, keep = d.choice([-1, -2, -1, 0]), d.coin()
    f = d.choice(
        [
            lambda h, a: h.sum(a, keepdims=keep),
            lambda h, a: h.sum(a, keepdims=keep),
            lambda h, a: h.max(a, keepdims=keep),
            lambda h, a: h.mean(a, keepdims=keep),
            lambda h, a: h.argmax(a),
            lambda h, a: h.argmin(a, keepdims=keep),
            lambda h, a: jax.nn.softmax(h, a),
            lambda h, a: jax.nn.log_softmax(h, a),
            lambda h, a: jax.nn.logsumexp(h, a, keepdims=keep),
            lambda h, a: jnp.cumsum(h, a),
            lambda h, a: lax.cummax(h, a % h.ndim),
            lambda h, a: jnp.sort(h, a),
            lambda h, a: jnp.argsort(h, a),
            lambda h, a: jnp.flip(h, a),
            lambda h, a: jnp.roll(h, 3, a),
            lambda h, a: jnp.pad(h, [(2, 1) if k == a % h.ndim else (0, 0) for k in range(h.ndim)]),
            lambda h, a: jnp.concatenate([h, h * 2], a),
            lambda h, a: lax.slice_in_dim(h, 1, h.shape[a], 2, a),
            lambda h, a: lax.slice_in_dim(h, 0, h.shape[a] - 1, 1, a),
            lambda h, a: jnp.take_along_axis(h, h.argmax(a, keepdims=True), a),
            lambda h, a: lax.broadcasted_iota(jnp.int32, h.shape, a % h.ndim) * h,
            lambda h, a: jnp.where(jnp.arange(h.shape[a])[:, None] > 3, jnp.moveaxis(h, a, 0), 0),
            lambda h, a: lax.dynamic_slice_in_dim(h, h.argmax() % 3, h.shape[a] // 2, a),
            lambda h, a: lax.dynamic_update_slice_in_dim(
                h, lax.slice_in_dim(h, 0, 2, 1, a), h.argmax() % 3, a
            ),
            lambda h, a: jnp.diff(h, axis=a),
            lambda h, a: lax.reduce_window(
                h, -jnp.inf, lax.max, _window(h, a, 3), (1,) * h.ndim, "SAME"
            ),
            lambda h, a: lax.reduce_window(
                h, 0.0, lax.add, _window(h, a, 2), _window(h, a, 2), "VALID"
            ),
            lambda h, a: (h != 0).any(a),
        ]
    )
    return lambda pool: f(pool[-1], axis) if pool[-1].ndim >= 2 else f(pool[-1], -1)


def _window(h: Array, axis: int, n: int) -> tuple[int, ...]:
    return tuple(n if k == axis % h.ndim else 1 for k in range(h.ndim))


def viewed(d: Draws) -> Step:
    f = d.choice(
        [
            lambda h: jnp.swapaxes(h, -1, -2),
            lambda h: h.reshape(*h.shape[:-1], h.shape[-1] // 2, 2) if h.shape[-1] % 2 == 0 else h,
            lambda h: h.reshape(-1, h.shape[-1]),
            lambda h: h.reshape(h.shape[0] // 2, 2, *h.shape[1:]) if h.shape[0] % 2 == 0 else h,
            lambda h: h.reshape(2, h.shape[0] // 2, *h.shape[1:]) if h.shape[0] % 2 == 0 else h,
            lambda h: h[None],
            lambda h: jnp.broadcast_to(h[..., None], (*h.shape, 3)).sum(-1),
            lambda h: jnp.stack([h, h + 1], -1)[..., 1],
            lambda h: jnp.tile(h, (1,) * (h.ndim - 1) + (2,)),
            lambda h: jnp.repeat(h, 2, 0),
            lambda h: jnp.squeeze(h[:, None], 1),
        ]
    )
    return lambda pool: f(pool[-1]) if pool[-1].ndim >= 2 else pool[-1]


def indexed(d: Draws) -> Step:
    """Reads and writes at places that are data."""
    axis, seed = d.choice([0, -1]), d.rng.randrange(1 << 30)
    many = d.choice([3, None])

    def places(h: Array, below: int, shape: tuple[int, ...]) -> Array:
        return jnp.asarray(np.random.default_rng(seed).integers(0, below, shape), jnp.int32)

    def at_rows(h: Array) -> Array:
        return places(h, h.shape[axis], (many or h.shape[axis],))

    def one_each(h: Array) -> Array:
        return places(h, h.shape[-1], h.shape[:-1])

    def table(h: Array) -> Array:
        return jnp.asarray(
            np.random.default_rng(seed).integers(-3, 4, (TABLE, *h.shape[1:])), h.dtype
        )

    def into(h: Array) -> Array:
        return places(h, TABLE, h.shape[:1])

    f = d.choice(
        [
            lambda h: jnp.take(h, at_rows(h), axis=axis),
            lambda h: jnp.take(h, at_rows(h), axis=axis, mode="clip"),
            lambda h: jnp.take(h, at_rows(h) + 3, axis=axis, mode="fill", fill_value=7),
            lambda h: jnp.take_along_axis(h, one_each(h)[..., None], -1),
            lambda h: jnp.take_along_axis(h, places(h, h.shape[0], h.shape), 0),
            lambda h: h[(*jnp.indices(h.shape[:-1]), one_each(h))],
            lambda h: h.at[(*jnp.indices(h.shape[:-1]), one_each(h))].add(2),
            lambda h: h[(*jnp.indices(h.shape[:-1])[:, ::-1], one_each(h))],
            lambda h: h[jnp.arange(h.shape[0]), ..., into(h)],
            lambda h: h[jnp.arange(h.shape[0] // 2), ..., into(h)[::2]],
            lambda h: jax.nn.one_hot(one_each(h), h.shape[-1], dtype=h.dtype) * h,
            lambda h: table(h)[into(h)] * h,
            lambda h: table(h).at[into(h)].add(h),
            lambda h: table(h).at[into(h)].add(-h, mode="drop"),
            lambda h: table(h).at[into(h)].max(h),
            lambda h: table(h).at[into(h)].mul(h),
            lambda h: jnp.zeros((TABLE, *h.shape[1:]), h.dtype).at[into(h)].add(h),
            lambda h: jax.ops.segment_sum(h, into(h), TABLE),
            lambda h: h.at[at_rows(h) % h.shape[0]].add(1),
            lambda h: h.at[..., at_rows(h) % h.shape[-1]].multiply(2),
            lambda h: h.at[..., 0].set(0),
            lambda h: h.at[1].set(0),
            lambda h: h[..., 1],
            lambda h: h[2],
        ]
    )
    return lambda pool: f(pool[-1]) if pool[-1].ndim >= 2 else pool[-1]


def products(d: Draws) -> Step:
    f = d.choice(
        [
            lambda h, x, w: jnp.einsum("...nm,km->...nk", h, w) if _ends(h, w.shape[1]) else h,
            lambda h, x, w: jnp.einsum("...nm,...nk->...mk", h, x) if _rows(h, x) else h,
            lambda h, x, w: h @ jnp.swapaxes(h, -1, -2),
            lambda h, x, w: jnp.swapaxes(h, -1, -2) @ h,
            lambda h, x, w: jnp.einsum("...nm,...nm->...n", h, jnp.sin(h)),
            lambda h, x, w: jnp.einsum("...nm,...nm->...m", h, jnp.sin(h)),
            lambda h, x, w: lax.conv_general_dilated(
                h.reshape(-1, 1, h.shape[-1]), jnp.ones((1, 1, 3), h.dtype), (1,), "SAME"
            ),
            lambda h, x, w: (
                lax.conv_general_dilated(
                    h.reshape(1, -1, h.shape[-1]).swapaxes(0, 2),
                    jnp.ones((1, 1, 3), h.dtype),
                    (2,),
                    "SAME",
                )
                if h.ndim == 2 and h.shape[0] == 1
                else h
            ),
        ]
    )

    def step(pool: list[Array]) -> Array:
        h = pool[-1]
        if h.ndim < 2 or not jnp.issubdtype(h.dtype, jnp.floating):
            return h
        return f(h, pool[0], pool[1])

    return step


def _ends(h: Array, n: int) -> bool:
    return bool(h.shape[-1] == n)


def _rows(h: Array, x: Array) -> bool:
    return bool(h.shape[:-1] == x.shape[:-1])


def looped(d: Draws) -> Step:
    """Loops, and random numbers."""
    seed = d.rng.randrange(1 << 30)
    f = d.choice(
        [
            lambda h: lax.scan(lambda c, r: (c * 0.5 + r, c), h[0], h)[1],
            lambda h: lax.map(lambda r: r - r.max(), h),
            lambda h: lax.fori_loop(0, 3, lambda i, x: x * 0.5, h),
            lambda h: lax.cond(h.sum() > 0, lambda x: x + 1, lambda x: x, h),
            lambda h: jnp.where(jax.random.bernoulli(jax.random.key(seed), 0.5, h.shape), h, 0),
            lambda h: (
                h
                * jax.vmap(lambda k: jax.random.uniform(k, h.shape[1:]))(
                    jax.random.split(jax.random.key(seed), h.shape[0])
                ).astype(h.dtype)
            ),
        ]
    )
    return lambda pool: f(pool[-1]) if pool[-1].ndim >= 2 else pool[-1]


def older(d: Draws) -> Step:
    """Go on with something that was made before: a second reader."""
    at = d.rng.randrange(1 << 30)
    return lambda pool: pool[2 + at % (len(pool) - 2)]


STEPS = (
    *(elementwise,) * 6,
    *(combined,) * 4,
    *(along,) * 6,
    *(viewed,) * 2,
    *(indexed,) * 4,
    *(products,) * 3,
    *(looped,) * 1,
    *(older,) * 3,
)


def program(rng: random.Random, dtype: Any = np.float64) -> tuple[Program, tuple[Array, Array]]:
    """A function of x [.., rows, inner] and w [inner, columns], and numbers for it."""
    d = Draws(rng)
    batched, turned = d.coin(4), d.coin(4)
    steps = [d.choice(STEPS)(d) for _ in range(rng.randint(1, 7))]
    ends = [d.choice(["sum", "sum0", "sum1", "rows", "all"]) for _ in range(rng.choice([1, 1, 2]))]
    differentiated = d.coin()

    def made(x: Array, w: Array) -> list[Array]:
        h = x @ w
        if turned and not batched:
            h = (w.T @ x.T).T
        pool = [x, w, h]
        for step in steps:
            pool.append(step(pool))
        return [_ended(end, h) for end, h in zip(ends, reversed(pool), strict=False)]

    def total(x: Array, w: Array) -> Array:
        parts = [o.astype(x.dtype) for o in made(x, w)]
        return sum(jnp.where(jnp.isfinite(p), p, 0).sum() for p in parts)

    shape = (2, ROWS // 2, INNER) if batched else (ROWS, INNER)
    x = d.ints(shape, 5) * 0.25 - 0.5
    w = d.ints((INNER, COLUMNS), 9) * 0.25 - 1.0
    function = jax.grad(total, (0, 1)) if differentiated else made
    return function, (np.asarray(x, dtype), np.asarray(w, dtype))


def _ended(how: str, h: Array) -> Array:
    if how == "sum" or h.ndim == 0:
        return h.sum()
    if how == "sum0":
        return h.sum(0)
    if how == "sum1":
        return h.sum(-1)
    return h.reshape(-1)[:5] if how == "rows" else h


@contextmanager
def traced(seed: int) -> Iterator[tuple[BlockGraph, Sequence[Array]]]:
    """The graph of a random program, and numbers for it, with 64 bits while it is looked at."""
    with jax.enable_x64(True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        function, inputs = program(random.Random(seed))
        try:
            graph = trace(function, *inputs).graph
        except (IndexError, TypeError, ValueError, NotImplementedError):  # it was no program
            assume(False)
        yield graph, inputs


def numbers(graph: BlockGraph, inputs: Sequence[Array]) -> list[Array]:
    """What the reference executor gives."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [np.asarray(x) for x in execute(graph, list(inputs))]


def agree(
    made: BlockGraph, inputs: Sequence[Array], wanted: Sequence[Array], tolerance: float = 1e-9
) -> None:
    """A graph is sound, and gives these results, beside the greatest number of each."""
    verify_graph(made)
    for got, want in zip(numbers(made, inputs), wanted, strict=True):
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        finite = np.isfinite(want.astype(np.float64))
        scale = np.abs(want[finite].astype(np.float64)).max(initial=1.0)
        np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def padded_along(graph: BlockGraph, number: int, index: int, extent: int) -> BlockGraph | None:
    """The program with an index dim of one of its operations padded to an extent, and whatever
    reads and makes its rows; None where that operation cannot run on more of them."""
    op = graph.operations[number]
    if not may_grow(graph, op):
        return None
    region = Region(graph)
    return padded(region) if region.grown(number, index, extent) else None
