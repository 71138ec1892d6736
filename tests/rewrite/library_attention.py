"""Attention as libraries of layers spell it, with weights given and dropout off."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

Array = Any
BATCH, ROWS, HEADS, FEATURES = 2, 48, 4, 16


def _causal(rows: int) -> Array:
    return jnp.tril(jnp.ones((rows, rows), bool))


def linen(mask: bool, **given: Any) -> Callable[[Array], Array]:
    layer = nn.MultiHeadDotProductAttention(HEADS, deterministic=True, **given)
    like = jnp.zeros((BATCH, ROWS, FEATURES))
    weights = jax.eval_shape(layer.init, jax.random.key(0), like)
    weights = _drawn(weights)
    flags = _causal(ROWS)[None, None] if mask else None
    return lambda x: layer.apply(weights, x, mask=flags)


def of_nnx(mask: bool) -> Callable[[Array], Array]:
    layer = nnx.MultiHeadAttention(
        HEADS, FEATURES, decode=False, deterministic=True, rngs=nnx.Rngs(0)
    )
    flags = _causal(ROWS)[None, None] if mask else None
    return lambda x: layer(x, mask=flags)


def equinox(mask: bool) -> Callable[[Array], Array]:
    layer = eqx.nn.MultiheadAttention(HEADS, FEATURES, key=jax.random.key(0))
    flags = _causal(ROWS) if mask else None
    return jax.vmap(lambda x: layer(x, x, x, mask=flags))


def _drawn(shapes: Any) -> Any:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda s: jnp.asarray(rng.normal(size=s.shape) / 4, s.dtype), shapes)


def with_segments(x: Array) -> Array:
    """`jax.nn` with a mask of segments and a bias together."""
    q = x.reshape(BATCH, ROWS, HEADS, -1)
    ids = jnp.arange(ROWS) // 7
    distance = (jnp.arange(ROWS)[None, :] - jnp.arange(ROWS)[:, None]).astype(x.dtype)
    out = jax.nn.dot_product_attention(
        q, jnp.sin(q), jnp.cos(q), distance[None, None], (ids[:, None] == ids)[None, None]
    )
    return out.reshape(x.shape)


def capped(x: Array) -> Array:
    """Scores under a soft cap."""
    q = x.reshape(BATCH, ROWS, HEADS, -1)
    s = 30.0 * jnp.tanh(jnp.einsum("bqhd,bkhd->bhqk", q, jnp.sin(q)) / 30.0)
    s = jnp.where(_causal(ROWS), s, -1e30)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(s), jnp.cos(q)).reshape(x.shape)


def dropped(x: Array) -> Array:
    """Probabilities of which a fifth is dropped."""
    q = x.reshape(BATCH, ROWS, HEADS, -1)
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, jnp.sin(q)))
    kept = jax.random.bernoulli(jax.random.key(1), 0.8, p.shape)
    p = jnp.where(kept, p / 0.8, 0)
    return jnp.einsum("bhqk,bkhd->bqhd", p, jnp.cos(q)).reshape(x.shape)


#: Name -> (what makes the layer, whether it is recognised).
LAYERS: Mapping[str, tuple[Callable[[], Callable[[Array], Array]], bool]] = {
    "linen": (lambda: linen(False), True),
    "linen causal": (lambda: linen(True), True),
    "linen causal, bfloat16": (lambda: linen(True, dtype=jnp.bfloat16), True),
    "nnx": (lambda: of_nnx(False), True),
    "nnx causal": (lambda: of_nnx(True), True),
    "equinox": (lambda: equinox(False), True),
    "equinox causal": (lambda: equinox(True), True),
    "mask and bias": (lambda: with_segments, False),
    "soft cap": (lambda: capped, False),
    "dropout": (lambda: dropped, False),
}


def modes(layer: Callable[[Array], Array]) -> Mapping[str, Callable[[Array], Array]]:
    """The layer alone, its gradient, and gradients of a scan over two of it, kept and remade."""

    def loss(x: Array) -> Array:
        return jnp.sum(jnp.sin(layer(x).astype(jnp.float32)))

    def layers(x: Array, remade: bool) -> Array:
        def step(x: Array, c: Array) -> tuple[Array, None]:
            return x + layer(jnp.tanh(x * c)).astype(x.dtype), None

        body = jax.checkpoint(step) if remade else step
        return jnp.sum(jnp.sin(jax.lax.scan(body, x, jnp.array([0.5, 0.75], x.dtype))[0]))

    return {
        "forward": layer,
        "gradient": jax.grad(loss),
        "remat": jax.grad(jax.checkpoint(loss)),
        "scan": jax.grad(lambda x: layers(x, False)),
        "scan remat": jax.grad(lambda x: layers(x, True)),
    }
