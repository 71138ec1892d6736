"""Decoding with a cache of keys and values: the Llama-style decoder, one token at a time.

The cache has room for `length` positions. A step writes the new token's keys and values at
`position`, attends to what is written so far, and gives the cache back; callers donate it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import llama
from .llama import Params, rms_norm

Cache = dict[str, jax.Array]


def empty(params: Params, batch: int, length: int) -> Cache:
    """Return a cache with nothing in it: keys and values `[layer, batch, length, group, width]`."""
    layers, _, groups, width = params["layers"]["wk"].shape
    shape = layers, batch, length, groups, width
    return {
        "keys": jnp.zeros(shape),
        "values": jnp.zeros(shape),
        "position": jnp.zeros((), jnp.int32),
    }


def rotary(x: jax.Array, position: jax.Array) -> jax.Array:
    """Rotate `[batch, heads, head_width]`, all at one position."""
    half = x.shape[-1] // 2
    angle = position * 10000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(
    p: Params, x: jax.Array, keys: jax.Array, values: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Attention of one token `[batch, width]` to the cache, which it joins first."""
    q = rotary(jnp.einsum("bd,dhk->bhk", x, p["wq"]), position)
    k = rotary(jnp.einsum("bd,dgk->bgk", x, p["wk"]), position)
    v = jnp.einsum("bd,dgk->bgk", x, p["wv"])
    keys = lax.dynamic_update_slice_in_dim(keys, k[:, None], position, axis=1)
    values = lax.dynamic_update_slice_in_dim(values, v[:, None], position, axis=1)
    batch, heads, width = q.shape
    groups = keys.shape[2]
    q = q.reshape(batch, groups, heads // groups, width)
    scores = jnp.einsum("bgrk,btgk->bgrt", q, keys) / width**0.5
    written = jnp.arange(keys.shape[1]) <= position
    weights = jax.nn.softmax(jnp.where(written, scores, -1e30), axis=-1)
    out = jnp.einsum("bgrt,btgk->bgrk", weights, values).reshape(batch, heads, width)
    return jnp.einsum("bhk,hkd->bd", out, p["wo"]), keys, values


def forward(params: Params, cache: Cache, tokens: jax.Array) -> tuple[jax.Array, Cache]:
    """Take one token of every sequence, `[batch]`; return logits and the cache with it."""
    position = cache["position"]

    def block(x: jax.Array, layer: tuple[Params, jax.Array, jax.Array]) -> Any:
        p, keys, values = layer
        y, keys, values = attention(p, rms_norm(p["attention_norm"], x), keys, values, position)
        x = x + y
        h = rms_norm(p["mlp_norm"], x)
        x = x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
        return x, (keys, values)

    layers = params["layers"], cache["keys"], cache["values"]
    x, (keys, values) = lax.scan(block, params["embedding"][tokens], layers)
    logits = rms_norm(params["norm"], x) @ params["head"]
    return logits, {"keys": keys, "values": values, "position": position + 1}


def generate(params: Params, cache: Cache, prompt: jax.Array) -> tuple[Cache, jax.Array]:
    """Read a prompt `[batch, time]`, then write as many tokens again, the likeliest each time."""

    def read(cache: Cache, tokens: jax.Array) -> tuple[Cache, jax.Array]:
        logits, cache = forward(params, cache, tokens)
        return cache, jnp.argmax(logits, axis=-1)

    def write(state: tuple[Cache, jax.Array], _: None) -> Any:
        cache, guess = read(*state)
        return (cache, guess), state[1]

    cache, guesses = lax.scan(read, cache, prompt.T)
    (cache, _), written = lax.scan(write, (cache, guesses[-1]), length=prompt.shape[1])
    return cache, written.T


def example(
    batch: int = 8, prompt: int = 4, **sizes: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return `generate` and arguments: parameters, an empty cache, `i32[batch, prompt]`."""
    rng = np.random.default_rng(0)
    params = llama.init(rng, **sizes)
    vocabulary = params["embedding"].shape[0]
    tokens = jnp.asarray(rng.integers(0, vocabulary, (batch, prompt)), jnp.int32)
    return generate, (params, empty(params, batch, 2 * prompt), tokens)


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters, an empty cache, `i32[batch]`."""
    _, (params, cache, prompt) = example()
    return params, cache, prompt[:, 0]
