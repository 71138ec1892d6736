"""Small random programs: steps drawn by a seed, each of earlier values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from tapestry_egg.graph.blockgraph import BlockGraph
from tapestry_egg.schedule.flatten import feedback_pairs
from tapestry_egg.schedule.schedules import Schedule, scheduled
from tapestry_egg.tracing.constants import prepare
from tapestry_egg.tracing.trace import trace

SHAPES = ((512, 1024), (1024, 1024), (2048, 512))

#: One argument, or two of one shape.
ONE: tuple[Callable[[jax.Array], jax.Array], ...] = (
    jnp.tanh,
    lambda x: jax.lax.cumsum(x, 0),
    lambda x: jax.lax.cumsum(x, 1),
    lambda x: jax.lax.cummax(x, 0),
    lambda x: jax.lax.cummax(x, 1),
    lambda x: jnp.sum(x, 0),
    lambda x: x @ x.T,
)
TWO: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
    lambda x, y: x + y,
    lambda x, y: jnp.sin(x + y),
    lambda x, y: x * y,
)


Drawn = tuple[Callable[..., list[jax.Array]], list[tuple[int, int]]]


def drawn(seed: int) -> Drawn:
    """A program of one input and two or three steps, each of earlier values, and its shape."""
    rng = random.Random(seed)
    shape, count = rng.choice(SHAPES), rng.choice((2, 3, 3))
    steps = [(rng.random(), rng.random(), rng.random(), rng.random()) for _ in range(count)]

    def program(x: jax.Array) -> list[jax.Array]:
        values, read = [x], set()
        for which, first, second, kind in steps:
            whole = [k for k, v in enumerate(values) if v.ndim == 2]
            a = whole[-1 - int(first * min(2, len(whole)))]
            same = [k for k in whole if values[k].shape == values[a].shape and k != a]
            read.add(a)
            if same and kind < 0.4:
                b = same[int(second * len(same))]
                read.add(b)
                values.append(TWO[int(which * len(TWO))](values[a], values[b]))
            else:
                values.append(ONE[int(which * len(ONE))](values[a]))
        return [v for k, v in enumerate(values) if k and k not in read]

    return program, [shape]


def products(seed: int) -> Drawn:
    """A program of one to three square inputs and two or three steps: products, sums of them,
    operands that several read, chains that are fused; and its shapes."""
    rng = random.Random(seed)
    n, inputs, count = (
        rng.choice((512, 1024, 2048)),
        rng.choice((1, 2, 2, 3)),
        rng.choice((2, 2, 3)),
    )
    steps = [(rng.random(), rng.random(), rng.random()) for _ in range(count)]
    ways: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
        lambda x, y: jnp.tanh(x),
        lambda x, y: x @ y,
        lambda x, y: x @ y,
        lambda x, y: x + y,
        lambda x, y: jnp.sin(x - y),
    )

    def program(*arguments: jax.Array) -> list[jax.Array]:
        values, read = list(arguments), set()
        for which, first, second in steps:
            kind, last = int(which * len(ways)), len(values) - 1
            a = last if first < 0.6 else int((first - 0.6) / 0.4 * (last + 1))
            b = int(second * len(values))
            read |= {a, b} if kind else {a}
            values.append(ways[kind](values[a], values[b]))
        return [v for k, v in enumerate(values) if k >= inputs and k not in read]

    return program, [(n, n)] * inputs


def mixed(seed: int) -> Drawn:
    """A program of one to three square inputs and three to six steps: products, chains that are
    fused, second readers, sums of rows or columns and what they are subtracted from, sums along
    rows or columns, sums of two products; and its shapes."""
    rng = random.Random(seed)
    n, inputs, count = rng.choice((512, 1024, 2048)), rng.choice((1, 2, 3)), rng.randint(3, 6)
    steps = [(rng.random(), rng.random(), rng.random(), rng.random()) for _ in range(count)]
    ways: tuple[Callable[[jax.Array, jax.Array, jax.Array], jax.Array], ...] = (
        lambda x, y, z: jnp.tanh(x),
        lambda x, y, z: x.T,
        lambda x, y, z: x - jnp.sum(x, 0),
        lambda x, y, z: jnp.exp(x - jnp.max(x, 1, keepdims=True)),
        lambda x, y, z: jax.lax.cumsum(x, 0),
        lambda x, y, z: jax.lax.cumsum(x, 1),
        lambda x, y, z: x @ y,
        lambda x, y, z: x @ y,
        lambda x, y, z: x + y,
        lambda x, y, z: jnp.sin(x - y),
        lambda x, y, z: jnp.tanh(x @ y + z),
        lambda x, y, z: jnp.sin(x @ y + y @ z),
    )

    def program(*arguments: jax.Array) -> list[jax.Array]:
        values, read = list(arguments), set()
        for which, *at in steps:
            kind, last = int(which * len(ways)), len(values) - 1
            a = last if at[0] < 0.6 else int((at[0] - 0.6) / 0.4 * (last + 1))
            b, c = (int(x * len(values)) for x in at[1:])
            read |= {a} if kind < 6 else {a, b, c} if kind > 9 else {a, b}
            values.append(ways[kind](values[a], values[b], values[c]))
        return [v for k, v in enumerate(values) if k >= inputs and k not in read]

    return program, [(n, n)] * inputs


def graph_of(seed: int, draw: Callable[[int], Drawn]) -> BlockGraph:
    """A random program."""
    program, shapes = draw(seed)
    return trace(program, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).graph


def schedule_of(seed: int, draw: Callable[[int], Drawn] = drawn) -> Schedule:
    """The units of a random program."""
    graph = prepare(graph_of(seed, draw))
    return scheduled(graph, feedback_pairs(graph))


def algebra(seed: int) -> Drawn:
    """A program of which rules make others: chains of products, sums of products that share an
    operand, factors and sums of rows of products; and its shapes."""
    rng = random.Random(seed)
    m, k, n, p = (rng.choice((6, 256, 1024, 4096)) for _ in range(4))
    first, second = ((m, k), (k, n)), ((m, k), (k, n), (n, p))
    kinds: tuple[tuple[Callable[..., list[jax.Array]], Sequence[tuple[int, int]]], ...] = (
        (lambda a, b, c: [(a @ b) @ c], second),
        (lambda a, b, c: [a @ (b @ c)], second),
        (lambda a, b, c: [jnp.tanh((a @ b) @ c)], second),
        (lambda a, b, c: [(a @ b) @ c, jnp.sum(b, 0)], second),
        (lambda a, b, c: [(a @ b) @ c, jnp.tanh(b @ c)], second),
        (lambda a, b, c: [a @ b + c @ b], (*first, (m, k))),
        (lambda a, b, c: [a @ b + a @ c], (*first, (k, n))),
        (lambda a, b, c: [jnp.sin(a @ b + c @ b)], (*first, (m, k))),
        (lambda a, b, c: [a @ b + c @ b, jnp.tanh(a @ b)], (*first, (m, k))),
        (lambda a, b, c: [a @ b, a @ c], (*first, (k, n))),
        (lambda a, b, c: [jnp.tanh(a @ b) * (a @ c)], (*first, (k, n))),
        (lambda a, b: [jnp.sum(a @ b, 0)], first),
        (lambda a, b: [jnp.sum(a @ b, 1), jnp.tanh(b)], first),
        (lambda a, b: [(a * 3.0) @ b], first),
        (lambda a, b: [(a @ b) * 3.0 + a @ b], first),
        (lambda a, b: [(a @ b).T, jnp.tanh(a)], first),
        (lambda a, b: [jnp.sum((a @ b) * 2.0, 0), jnp.max(a, 0)], first),
    )
    program, shapes = rng.choice(kinds)
    return program, list(shapes)


def narrow(seed: int) -> Drawn:
    """A program of one or two square inputs and three to five steps, as steps of training are: of
    products and what is read late of them, masks and roundings to fewer bytes among it; and its
    shapes."""
    rng = random.Random(seed)
    n, inputs, count = rng.choice((512, 1024, 2048)), rng.choice((1, 1, 2)), rng.choice((3, 4, 5))
    steps = [(rng.random(), rng.random(), rng.random()) for _ in range(count)]
    plain = jnp.float32

    def masked(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(x, y.astype(plain), 0.0) if x.dtype == bool else x * y

    ways: tuple[Callable[[jax.Array, jax.Array], jax.Array], ...] = (
        lambda x, y: x.astype(plain) > 0.0,
        lambda x, y: x.astype(jnp.bfloat16),
        lambda x, y: jnp.tanh(x.astype(plain)),
        lambda x, y: x.astype(plain) @ y.astype(plain),
        lambda x, y: x.astype(plain) @ y.astype(plain),
        lambda x, y: jnp.cumsum(x.astype(plain), 0),
        masked,
        masked,
        lambda x, y: x.astype(plain) + jnp.sin(y.astype(plain)),
    )

    def program(*arguments: jax.Array) -> list[jax.Array]:
        values, read = list(arguments), set()
        for which, first, second in steps:
            kind, last = int(which * len(ways)), len(values) - 1
            a = last if first < 0.5 else int((first - 0.5) / 0.5 * (last + 1))
            b = int(second * len(values))
            read |= {a} if kind in (0, 1, 2, 5) else {a, b}
            values.append(ways[kind](values[a], values[b]))
        return [v for k, v in enumerate(values) if k >= inputs and k not in read]

    return program, [(n, n)] * inputs
