"""A Llama-style decoder: RMS norm, rotary positions, grouped-query attention, SwiGLU.

The layers' parameters are stacked and the layers run in `lax.scan`, with or without
rematerialisation, as large JAX code bases do to compile one layer instead of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Params = dict[str, Any]


def init(
    rng: np.random.Generator,
    layers: int = 2,
    width: int = 32,
    heads: int = 8,
    groups: int = 2,
    hidden: int = 96,
    vocabulary: int = 64,
) -> Params:
    """Return fresh parameters; `groups` key and value heads are shared by all query heads."""
    k = width // heads

    def normal(*shape: int, fan_in: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape) / fan_in**0.5, jnp.float32)

    return {
        "embedding": normal(vocabulary, width, fan_in=width),
        "layers": {
            "attention_norm": jnp.ones((layers, width)),
            "wq": normal(layers, width, heads, k, fan_in=width),
            "wk": normal(layers, width, groups, k, fan_in=width),
            "wv": normal(layers, width, groups, k, fan_in=width),
            "wo": normal(layers, heads, k, width, fan_in=width),
            "mlp_norm": jnp.ones((layers, width)),
            "gate": normal(layers, width, hidden, fan_in=width),
            "up": normal(layers, width, hidden, fan_in=width),
            "down": normal(layers, hidden, width, fan_in=hidden),
        },
        "norm": jnp.ones(width),
        "head": normal(width, vocabulary, fan_in=width),
    }


def rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Divide by the root mean square over the last dim, then scale."""
    return x * lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + 1e-5) * scale


def rotary(x: jax.Array) -> jax.Array:
    """Rotate pairs of `[batch, sequence, heads, head_width]` by angles that grow with position."""
    half = x.shape[-1] // 2
    frequency = 10000.0 ** (-jnp.arange(half) / half)
    angle = jnp.arange(x.shape[1])[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(p: Params, x: jax.Array) -> jax.Array:
    """Causal self-attention in which several query heads share one key and value head."""
    batch, sequence, _ = x.shape
    q = rotary(jnp.einsum("bsd,dhk->bshk", x, p["wq"]))
    k = rotary(jnp.einsum("bsd,dgk->bsgk", x, p["wk"]))
    v = jnp.einsum("bsd,dgk->bsgk", x, p["wv"])
    heads, groups, width = q.shape[2], k.shape[2], q.shape[3]
    q = q.reshape(batch, sequence, groups, heads // groups, width)
    scores = jnp.einsum("bqgrk,btgk->bgrqt", q, k) / width**0.5
    causal = jnp.arange(sequence)[:, None] >= jnp.arange(sequence)[None, :]
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
    out = jnp.einsum("bgrqt,btgk->bqgrk", weights, v)
    return jnp.einsum("bshk,hkd->bsd", out.reshape(batch, sequence, heads, width), p["wo"])


def block(x: jax.Array, p: Params) -> tuple[jax.Array, None]:
    """One layer, in the form that `lax.scan` wants: the carry first, nothing stacked."""
    x = x + attention(p, rms_norm(p["attention_norm"], x))
    h = rms_norm(p["mlp_norm"], x)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], None


def forward(params: Params, tokens: jax.Array, remat: bool = False) -> jax.Array:
    """Map tokens `[batch, sequence]` to logits `[batch, sequence, vocabulary]`."""
    body = jax.checkpoint(block) if remat else block
    x, _ = lax.scan(body, params["embedding"][tokens], params["layers"])
    return rms_norm(params["norm"], x) @ params["head"]


def loss(params: Params, tokens: jax.Array, targets: jax.Array, remat: bool = False) -> jax.Array:
    """Mean cross-entropy, in nats per token, of predicting `targets` from `tokens`."""
    logits = forward(params, tokens, remat)
    picked = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked)


def train_step(remat: bool) -> Callable[..., tuple[Params, jax.Array]]:
    """Return the gradient descent step, with every layer rematerialised in the backward or not."""

    def step(params: Params, tokens: jax.Array, targets: jax.Array) -> tuple[Params, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, tokens, targets, remat)
        return jax.tree.map(lambda p, g: p - 0.05 * g, params, grads), value

    return step


def example(
    remat: bool = False, batch: int = 8, sequence: int = 16, vocabulary: int = 64, **sizes: int
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters and two `i32[batch, sequence]`."""
    rng = np.random.default_rng(0)
    start = rng.integers(0, vocabulary, (batch, 1))
    text = ((start + np.arange(sequence + 1)) % vocabulary).astype(np.int32)
    params = init(rng, vocabulary=vocabulary, **sizes)
    return train_step(remat), (params, jnp.asarray(text[:, :-1]), jnp.asarray(text[:, 1:]))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and `i32[batch, sequence]`."""
    return example()[1][:2]
