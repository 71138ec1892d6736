"""A vision transformer: patches by reshaping, a class token, fused query-key-value kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Dense = dict[str, jax.Array]
Params = dict[str, Any]
PATCH = 4
HEADS = 4


def init(
    rng: np.random.Generator, size: int = 16, width: int = 32, layers: int = 2, classes: int = 8
) -> Params:
    """Return fresh parameters for square images of `size` pixels and three channels."""
    patches = (size // PATCH) ** 2

    def normal(*shape: int, scale: float = 0.02) -> jax.Array:
        return jnp.asarray(scale * rng.normal(size=shape), jnp.float32)

    def kernel(inputs: int, outputs: int) -> jax.Array:
        return normal(inputs, outputs, scale=inputs**-0.5)

    def norm() -> Dense:
        return {"scale": jnp.ones(width), "bias": jnp.zeros(width)}

    return {
        "patch": {"kernel": kernel(3 * PATCH * PATCH, width), "bias": jnp.zeros(width)},
        "token": normal(1, 1, width),
        "position": normal(patches + 1, width),
        "blocks": [
            {
                "norm1": norm(),
                "qkv": kernel(width, 3 * width),
                "out": kernel(width, width),
                "norm2": norm(),
                "up": {"kernel": kernel(width, 4 * width), "bias": jnp.zeros(4 * width)},
                "down": {"kernel": kernel(4 * width, width), "bias": jnp.zeros(width)},
            }
            for _ in range(layers)
        ],
        "norm": norm(),
        "head": {"kernel": kernel(width, classes), "bias": jnp.zeros(classes)},
    }


def dense(p: Dense, x: jax.Array) -> jax.Array:
    """Apply a kernel and a bias over the last dim."""
    return x @ p["kernel"] + p["bias"]


def layernorm(p: Dense, x: jax.Array) -> jax.Array:
    """Normalise over the last dim, then scale and shift."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    var = jnp.var(x, axis=-1, keepdims=True)
    return (x - mean) / jnp.sqrt(var + 1e-6) * p["scale"] + p["bias"]


def patches(images: jax.Array) -> jax.Array:
    """Cut `[batch, size, size, 3]` into `[batch, patch, pixel values]`."""
    batch, size, _, channels = images.shape
    n = size // PATCH
    x = images.reshape(batch, n, PATCH, n, PATCH, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(batch, n * n, PATCH * PATCH * channels)


def attention(p: Params, x: jax.Array) -> jax.Array:
    """Multi-head self-attention over `[batch, token, width]`, all tokens seeing all."""
    batch, tokens, width = x.shape
    q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)

    def split_heads(y: jax.Array) -> jax.Array:
        return y.reshape(batch, tokens, HEADS, width // HEADS).transpose(0, 2, 1, 3)

    q, k, v = split_heads(q), split_heads(k), split_heads(v)
    scores = q @ k.transpose(0, 1, 3, 2) / (width // HEADS) ** 0.5
    y = jax.nn.softmax(scores, axis=-1) @ v
    out: jax.Array = p["out"]
    return y.transpose(0, 2, 1, 3).reshape(batch, tokens, width) @ out


def forward(params: Params, images: jax.Array) -> jax.Array:
    """Map images `[batch, size, size, 3]` to logits `[batch, classes]`."""
    x = dense(params["patch"], patches(images))
    token = jnp.broadcast_to(params["token"], (x.shape[0], 1, x.shape[2]))
    x = jnp.concatenate([token, x], axis=1) + params["position"]
    for p in params["blocks"]:
        x = x + attention(p, layernorm(p["norm1"], x))
        x = x + dense(p["down"], jax.nn.gelu(dense(p["up"], layernorm(p["norm2"], x))))
    return dense(params["head"], layernorm(params["norm"], x[:, 0]))


def loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross-entropy against integer labels."""
    logits = forward(params, images)
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.mean(log_probabilities[jnp.arange(labels.shape[0]), labels])


def step(
    params: Params, images: jax.Array, labels: jax.Array, learning_rate: float = 0.02
) -> tuple[Params, jax.Array]:
    """Take one step of gradient descent; return the new parameters and the loss before."""
    value, grads = jax.value_and_grad(loss)(params, images, labels)
    return jax.tree.map(lambda p, g: p - learning_rate * g, params, grads), value


def example(
    batch: int = 16, size: int = 16, width: int = 32, layers: int = 2
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Return the train step and arguments: parameters, images `[batch, size, size, 3]`, labels."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 8, batch).astype(np.int32)
    images = rng.normal(size=(batch, size, size, 3)) + labels[:, None, None, None] / 8
    params = init(rng, size, width, layers)
    return step, (params, jnp.asarray(images, jnp.float32), jnp.asarray(labels))


def forward_args() -> tuple[Any, ...]:
    """Return arguments of `forward`: parameters and images."""
    return example()[1][:2]
