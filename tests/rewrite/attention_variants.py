"""Attention spelled at random: as people do, nearly so, and not at all.

Scales, masks, biases, normalisations and what becomes of the probabilities are drawn, right and
wrong ones alike. Whoever recognises such a program must give its numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = Any

BATCH, HEADS, WIDTH = 2, 2, 4
FILLS = (-np.inf, -1e30, -1e9, float(np.finfo(np.float32).min), -1e4, -10.0, 0.0, 1.0)


def _mask(rng: random.Random, rows: int, keys: int) -> Callable[[], Array] | None:
    """Flags [.., rows, keys] of a mask, or None."""
    at = jnp.arange(rows)[:, None] - jnp.arange(keys)[None, :]
    offset = rng.choice([-2, -1, 0, 0, 0, 1, 3])
    lengths = jnp.asarray([rng.choice([0, 3, keys]) for _ in range(BATCH)])
    ids = jnp.arange(max(rows, keys)) // rng.choice([2, 3, 5])
    parity = rng.choice([2, 3])
    return rng.choice(
        [
            None,
            None,
            lambda: jnp.tril(jnp.ones((rows, keys), bool)),
            lambda: at + offset >= 0,
            lambda: jnp.tril(jnp.ones((rows, keys), bool), offset),
            lambda: jnp.triu(jnp.ones((rows, keys), bool), offset),
            lambda: (at >= 0) & (at < 3),
            lambda: (at >= offset) & (at < 5),
            lambda: (jnp.arange(keys)[None, :] < lengths[:, None])[:, None, None, :],
            lambda: ids[:rows, None] == ids[None, :keys],
            lambda: (at % parity) == 0,
            lambda: (at >= 0) & (ids[:rows, None] == ids[None, :keys]),
        ]
    )


def _masked(rng: random.Random, mask: Callable[[], Array] | None) -> Callable[[Array], Array]:
    if mask is None:
        return lambda s: s
    fill, other = rng.choice(FILLS), rng.choice(FILLS)
    return rng.choice(
        [
            lambda s: jnp.where(mask(), s, fill),
            lambda s: jnp.where(mask(), s, -1e30),
            lambda s: jnp.where(mask(), s, -jnp.inf),
            lambda s: jnp.where(~mask(), fill, s),
            lambda s: s + jnp.where(mask(), 0.0, fill).astype(s.dtype),
            lambda s: s + jnp.where(mask(), 0.0, -1e9).astype(s.dtype),
            lambda s: s - 1e30 * (1.0 - mask().astype(s.dtype)),
            lambda s: jnp.where(mask(), s, fill) * 0.5,
            lambda s: jnp.where(mask(), s * 2, s),
            lambda s: jnp.where(mask(), jnp.where(mask()[..., ::-1], s, other), fill),
            lambda s: jnp.where(mask(), s, fill) + 0.25,
        ]
    )


def _normalised(rng: random.Random, mask: Callable[[], Array] | None) -> Callable[[Array], Array]:
    def by_hand(s: Array, top: bool = True, more: float = 0.0, stopped: bool = True) -> Array:
        m = s.max(-1, keepdims=True) if top else 0.0
        e = jnp.exp(s - (lax.stop_gradient(m) if stopped else m))
        return e / (e.sum(-1, keepdims=True) + more)

    def after(s: Array) -> Array:
        e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
        e = e if mask is None else jnp.where(mask(), e, 0.0)
        return e / e.sum(-1, keepdims=True)

    def part(s: Array) -> Array:
        e = jnp.exp(s - lax.stop_gradient(s.max(-1, keepdims=True)))
        return e / e[..., 1:].sum(-1, keepdims=True)

    return rng.choice(
        [
            *(jax.nn.softmax,) * 12,
            by_hand,
            lambda s: by_hand(s, False),
            lambda s: by_hand(s, stopped=False),
            lambda s: by_hand(s, more=1.0),
            lambda s: by_hand(s, more=1e-3),
            after,
            part,
            lambda s: jax.nn.softmax(s, -2),
            lambda s: jax.nn.softmax(s, 1),
            lambda s: jax.nn.softmax(s, (-1, -2)),
            lambda s: jnp.exp(jax.nn.log_softmax(s)),
            lambda s: jnp.exp(s - jax.nn.logsumexp(s, -1, keepdims=True)),
            lambda s: jax.nn.softmax(s, where=None if mask is None else mask()),
            lambda s: (
                jnp.exp(2.0 * (s - s.max(-1, keepdims=True)))
                / jnp.exp(s - s.max(-1, keepdims=True)).sum(-1, keepdims=True)
            ),
        ]
    )


def _used(rng: random.Random, mask: Callable[[], Array] | None) -> Callable[[Array], Array]:
    """What becomes of probabilities before they meet the values."""
    kept = np.array([rng.random() < 0.8 for _ in range(64)])

    def dropped(p: Array) -> Array:
        flags = jnp.asarray(np.resize(kept, p.shape))
        return jnp.where(flags, p / 0.8, 0.0)

    def random_drop(p: Array) -> Array:
        return p * jax.random.bernoulli(jax.random.key(3), 0.8, p.shape) / 0.8

    plain = [lambda p: p] * 16
    return rng.choice(
        [
            *plain,
            lambda p: p * 1.004,
            lambda p: p * 0.5,
            lambda p: -p,
            dropped,
            random_drop,
            lambda p: p * p,
            lambda p: p + 1e-3,
            lambda p: p if mask is None else jnp.where(mask(), p, 0.0),
            lambda p: p * jnp.arange(1.0, 1.0 + p.shape[-1], dtype=p.dtype),
            lambda p: p * jnp.arange(1.0, 1.0 + p.shape[-2], dtype=p.dtype)[:, None],
            lambda p: p - lax.stop_gradient(p) * 0.5,
            lambda p: p / p.sum(-2, keepdims=True),
            lambda p: jnp.flip(p, -1),
            lambda p: lax.stop_gradient(p),
        ]
    )


def variant(rng: random.Random) -> tuple[Callable[..., Any], tuple[Array, Array, Array]]:
    """A function of q [batch, rows, heads, width], k and v [batch, keys, heads or fewer, width],
    and numbers for it."""
    rows, groups = rng.choice([6, 8]), rng.choice([HEADS, HEADS, 1])
    keys = rng.choice([rows, rows, rows, rows - 2, rows + 3])
    mask = _mask(rng, rows, keys)
    masked, normalised, used = _masked(rng, mask), _normalised(rng, mask), _used(rng, mask)
    before, after = rng.choice([1.0, 0.5, 1.003]), rng.choice([1.0, 0.5, -0.5, 0.997])
    scaled = rng.choice(
        [lambda s: s * after, lambda s: s / 2.0, lambda s: s, lambda s: s, jnp.tanh]
    )
    bias = rng.choice([None] * 6 + ["heads", "keys", "rows", "all", "one"])
    late = rng.random() < 0.2
    how = rng.choice(["heads last"] * 5 + ["heads first", "rows of keys", "weights twice"])
    second = rng.choice([None] * 8 + ["p", "s", "column"])
    mode = rng.choice(["forward", "gradient", "gradient", "remat", "scan"])
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    dims = {"heads": (HEADS, 1, 1), "keys": (keys,), "rows": (rows, 1)}
    dims |= {"all": (HEADS, rows, keys), "one": (1, 1, 1)}
    added = None if bias is None else np.float32(numbers.normal(size=dims[bias]))

    def attention(q: Array, k: Array, v: Array) -> Any:
        if groups != HEADS:
            k, v = (jnp.repeat(x, HEADS // groups, 2) for x in (k, v))
        if how == "heads first":
            q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
            s = (q * before) @ jnp.swapaxes(k, -1, -2)
        else:
            s = jnp.einsum("bqhd,bkhd->bhqk", q * before, k)
        raw = s
        if late:
            s = masked(s)
        s = scaled(s)
        if added is not None:
            s = s + added
        if not late:
            s = masked(s)
        p = used(normalised(s))
        if how == "heads first":
            out = (p @ v).transpose(0, 2, 1, 3)
        elif how == "rows of keys" and rows == keys:
            out = jnp.einsum("bhqk,bqhd->bkhd", p, v)
        elif how == "weights twice" and rows == keys:
            out = jnp.einsum("bhqk,bkhd->bqhd", p @ p, v)
        else:
            out = jnp.einsum("bhqk,bkhd->bqhd", p, v)
        if second == "p":
            return out + p.sum() * 0.1
        if second == "column":
            return out * p[:, :1, :1, 0, None]
        return out + raw.max() * 0.1 if second == "s" else out

    def loss(q: Array, k: Array, v: Array) -> Array:
        inner = jax.checkpoint(attention) if mode == "remat" else attention
        return jnp.sum(jnp.sin(inner(q, k, v)))

    def layers(q: Array, k: Array, v: Array) -> Array:
        def layer(x: Array, c: Array) -> tuple[Array, None]:
            return x + attention(x * c, k * c, v)[:, :rows], None

        return jnp.sum(jnp.sin(lax.scan(layer, q, jnp.array([0.5, 0.75], q.dtype))[0]))

    function: Callable[..., Any] = attention
    if mode in ("gradient", "remat"):
        function = jax.grad(loss, (0, 1, 2))
    if mode == "scan" and rows == keys:
        function = jax.grad(layers, (0, 1, 2))
    shapes = [(BATCH, n, h, WIDTH) for n, h in ((rows, HEADS), (keys, groups), (keys, groups))]
    q, k, v = (np.float32(numbers.normal(size=s)) for s in shapes)
    return function, (q, k, v)
